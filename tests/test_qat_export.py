"""A trained model as a compressed-tensors checkpoint: the same weights bit for bit, the same answers, in transformers."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

pytest.importorskip("llmcompressor")

from qrl import checkpoint
from qrl.errors import BadInput
from qrl.formats import fake
from qrl.train import qat, qat_export

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
BITS = {"int8": 8, "int8-attention": 8, "int4": 4, "nvfp4-a16": 4, "nvfp4-a4": 4, "fp8": 8, "mxfp4": 4}


@pytest.fixture(scope="module")
def masters(tiny_checkpoint, tmp_path_factory):
    """A checkpoint in float32 whose weights no longer lie on the grid of bfloat16, as a training leaves them."""
    folder = tmp_path_factory.mktemp("masters") / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    shutil.copytree(tiny_checkpoint, folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", fake.FORMATS)
def test_exported_weights_and_answers_are_bit_equal_to_the_trained_ones(name, masters, tmp_path):
    trained = AutoModelForCausalLM.from_pretrained(masters, dtype=torch.float32)
    qat.attach(trained, name)
    scales = qat.calibrate(trained, [BATCH]) if qat.needs_calibration(name) else None
    qat_export.write(masters, tmp_path / "out", name, scales)

    found = checkpoint.check(tmp_path / "out")
    assert found.quantization == "compressed-tensors"
    unpacking = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, quantization_config=unpacking)
    stored = dict(loaded.named_parameters())
    wanted = dict(qat.folded_parameters(trained))
    for key, value in wanted.items():
        assert torch.equal(stored[key].float(), value), key
    with torch.no_grad():
        assert torch.equal(loaded.float()(**BATCH).logits, trained(**BATCH).logits)

    entries = checkpoint.entries(tmp_path / "out")
    assert entries["model.embed_tokens.weight"].dtype == "F32" and "lm_head.weight_packed" not in entries
    covered = {path for path, module in trained.named_modules() if isinstance(module, qat.QATLinear)}
    codes = sum(
        entry.bytes
        for key, entry in entries.items()
        if key.rpartition(".")[0] in covered and key.endswith(("weight", "weight_packed"))
    )
    assert codes * 8 == BITS[name] * sum(trained.get_submodule(path).weight.numel() for path in covered)


def test_it_loads_in_transformers_without_being_told_how(masters, tmp_path):
    qat_export.write(masters, tmp_path / "out", "int4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(masters, dtype=torch.float32)
    qat.attach(trained, "int4")
    with torch.no_grad():
        assert torch.equal(model(**BATCH).logits, trained(**BATCH).logits)


def test_the_tokenizer_is_the_masters_own_and_the_masters_stay(masters, tmp_path):
    before = checkpoint.digest(masters)
    qat_export.write(masters, tmp_path / "out", "int8")
    assert checkpoint.digest(masters) == before
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (masters / name).read_bytes()


def test_activation_scales_that_are_missing_and_codes_instead_of_masters_are_refused(masters, tmp_path):
    with pytest.raises(BadInput, match="calibrated scales, and none were given"):
        qat_export.write(masters, tmp_path / "out", "nvfp4-a4")
    qat_export.write(masters, tmp_path / "codes", "int8")
    with pytest.raises(BadInput, match="quantized already"):
        qat_export.write(tmp_path / "codes", tmp_path / "out", "int8")
