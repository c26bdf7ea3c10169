"""Some linears in few bits and some not, or in several formats: stored, read back, counted and refused, on a CPU."""

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qrl import checkpoint, names, quantize
from qrl.diagnose.schemes import measure as measure_stored
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import kind, layers, plain, stored
from qrl.quantize import settings as choices
from qrl.recipe import Quantize, Recipe, rules
from qrl.tracking import addresses, keys

pytestmark = pytest.mark.process

TEXTS = [f"Tom has {i} apples and buys {i + 2} more. How many does he have?" for i in range(8)]
IDS = torch.arange(5, 45).reshape(2, 20)
INNER_MLP = ("mlp", "-first:2", "-last:2")
EXPECTED = {
    f"model.layers.{block}.mlp.{leaf}.weight" for block in (2, 3) for leaf in ("gate_proj", "up_proj", "down_proj")
}
SCALING = (names.AWQ_CT, names.SPINQUANT)  # change other weights, and undo it elsewhere


@pytest.fixture(scope="module")
def six_blocks(tiny_checkpoint, tmp_path_factory):
    """Return a random model of six blocks in bfloat16."""
    folder = tmp_path_factory.mktemp("six") / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "model.safetensors").unlink()
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 6}
    config = AutoConfig.from_pretrained(tiny_checkpoint, **shape, layer_types=["full_attention"] * 6)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def store(scheme, source, out, **recipe):
    given = Quantize(calibration_samples=8, calibration_max_tokens=64, **recipe)
    settings = choices.settings_of(scheme, given, 0)
    quantize.check_fit(source, settings)
    return quantize.run(scheme, source, out, settings=settings, calibration=TEXTS, probe=TEXTS)


@pytest.mark.parametrize(
    "scheme", [*("nf4", "int8", "rtn-nvfp4-a16", "rtn-nvfp4-a4", "nvfp4", "fp8", "gptq", "awq-ct", "spinquant")]
)
def test_only_the_linears_of_the_plan_are_stored_in_few_bits(scheme, six_blocks, tmp_path):
    result = store(scheme, six_blocks, tmp_path / "some", layers=INNER_MLP)
    assert set(stored.names(result.path)) == EXPECTED
    original = dict(checkpoint.tensors(six_blocks))
    kept = dict(checkpoint.tensors(result.path, [name for name in original if name not in EXPECTED]))
    assert "lm_head.weight" not in EXPECTED and len(kept) == len(original) - len(EXPECTED)
    if scheme not in SCALING:
        assert all(torch.equal(tensor.float(), original[name].float()) for name, tensor in kept.items())
        assert result.layer_errors[:2] == (0.0, 0.0) and result.layer_errors[2] > 0  # nothing moves before block 2

    # Bits are those of the files: as many a quantized weight as without a plan, and more a parameter.
    whole = store(scheme, six_blocks, tmp_path / "all")
    assert result.bits_per_weight == pytest.approx(whole.bits_per_weight, rel=0.05)
    assert whole.bits_per_parameter < result.bits_per_parameter
    assert result.bytes == checkpoint.check(result.path).bytes > whole.bytes
    if scheme not in (*SCALING, names.GPTQ):  # which look at the layers before
        first = dict(stored.matrices(result.path, sorted(EXPECTED)))
        second = dict(stored.matrices(whole.path, sorted(EXPECTED)))
        assert all(torch.equal(first[name].values, second[name].values) for name in EXPECTED)

    # The engine computes with just these values.
    model, _ = hf.load(result.path, "cpu", torch.float32)
    unpacked = plain.load(result.path, torch.float32)
    with torch.inference_mode():
        logits, expected = model(IDS).logits, unpacked(IDS).logits
    if not kind.rounded_activations(checkpoint.config(result.path)["quantization_config"]):
        assert (logits - expected).norm() < 0.01 * expected.norm()
    frame = measure_stored({"base": six_blocks}, {"base": result.path}, scheme)
    assert set(frame["tensor"]) == EXPECTED and (frame["relative_mse"] > 0).all()


@pytest.mark.parametrize("scheme", ["rtn-nvfp4-a16", "gptq", "w8a8"])
def test_formats_by_pattern_are_stored_side_by_side_and_read_back(scheme, six_blocks, tmp_path):
    terms = ("down_proj=fp8", "o_proj=int4", "-first:1", "-last:1")
    result = store(scheme, six_blocks, tmp_path / "mixed", layers=terms, group_size=64)
    config = checkpoint.config(result.path)["quantization_config"]
    assert config["format"] == "mixed-precision"
    formats = {}
    for group in config["config_groups"].values():
        weights = group["weights"]
        for target in group["targets"]:
            formats[target.split(".", 3)[3]] = (weights["num_bits"], weights["type"], weights["strategy"])
            assert target.split(".")[2] in "1234"
    assert formats["mlp.down_proj"] == (8, "float", "channel")
    assert formats["self_attn.o_proj"] == (4, "int", "group")
    assert len(stored.names(result.path)) == 4 * 7
    model, _ = hf.load(result.path, "cpu", torch.float32)
    values = dict(stored.matrices(result.path, stored.names(result.path)))
    for name, matrix in values.items():
        assert torch.equal(model.get_parameter(name).float(), matrix.values), name

    # The same linears have the same values as where their format is alone; GPTQ moves weights by the texts.
    alone = {"rtn-nvfp4-a16": "rtn-fp8", "w8a8": "fp8"}.get(scheme)
    if alone:
        name = "model.layers.2.mlp.down_proj.weight"
        ((_, only),) = stored.matrices(store(alone, six_blocks, tmp_path / "alone").path, [name])
        assert torch.equal(values[name].values, only.values)
    # A cell of the scheme accepts the file, one of another scheme does not.
    weights = checkpoint.check(result.path)
    assert addresses._mismatch(weights, scheme, None) is None
    assert addresses._mismatch(weights, "gptq-int3", None) is not None
    assert len(kind.of(config)) > 1


def test_the_whole_way_of_mixed_formats_in_one_network(six_blocks, tmp_path):
    """In full precision at both ends, attention in FP8, MLP in NVFP4: one file, answered by transformers."""
    terms = ("attention=fp8", "-first:2", "-last:2")
    result = store("rtn-nvfp4-a16", six_blocks, tmp_path / "out", layers=terms)
    assert len(stored.names(result.path)) == 14
    assert hf.describe_departure(result.path, "cpu")  # the inputs of attention are rounded in software
    model, tokens = hf.load(result.path, "cpu", torch.float32)
    assert hf.generate(model, tokens, [[5, 6, 7]], max_new_tokens=4, batch_size=1)


def test_layers_are_part_of_digests_and_keys_and_none_leave_them_alone(six_blocks):
    def key(**recipe):
        return keys.quantized(Recipe(quantize=Quantize(**recipe)), "gptq", "digest", "cpu")

    def digest(**recipe):
        settings = choices.settings_of("gptq", Quantize(**recipe), 0).with_groups(128)
        return settings.digest("questions"), settings.covered()

    assert len({key(), key(layers=("mlp",)), key(layers=("-mlp",))}) == 3
    assert len({digest()[0], digest(layers=("mlp",))[0], digest(layers=("attention",))[0]}) == 3
    assert digest(layers=())[1] == digest()[1] and "layers" not in digest()[1]
    in_groups = choices.settings_of("fp8", Quantize(layers=("mlp=int4",)), 0)
    assert in_groups.with_groups(64).covered()["layers_group_size"] == 64


@pytest.mark.parametrize("scheme, words", [("awq", "awq-ct can"), ("rtn-int8-attention", "rtn-int8")])
def test_schemes_that_cannot_leave_linears_out_are_refused(scheme, words):
    with pytest.raises(BadInput, match=words) as caught:
        choices.settings_of(scheme, Quantize(layers=("mlp",)), 0)
    assert caught.value.field == "quantize.layers"
    choices.settings_of(scheme, Quantize(), 0)


@pytest.mark.parametrize("scheme", rules.OF_ONE_FORMAT)
def test_schemes_of_one_format_are_refused_for_several(scheme):
    with pytest.raises(BadInput, match="one for all: choose an rtn"):
        choices.settings_of(scheme, Quantize(layers=("down_proj=fp8",)), 0)
    choices.settings_of(scheme, Quantize(layers=("down_proj",)), 0)


def test_groups_are_checked_for_the_linears_that_have_them(tiny_checkpoint, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    odd = shutil.copytree(tiny_checkpoint, tmp_path / "odd")
    config = Qwen2Config(**{**checkpoint.config(odd), "intermediate_size": 200})
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(odd)
    for scheme in ("w8a16", "rtn-int4", "nvfp4a16"):
        settings = choices.settings_of(scheme, Quantize(), 0)
        with pytest.raises(BadInput, match="down_proj has 200 inputs"):
            quantize.check_fit(odd, settings)
        quantize.check_fit(odd, choices.settings_of(scheme, Quantize(layers=("-down_proj",), group_size=128), 0))
        with pytest.raises(BadInput, match="down_proj has 200 inputs"):
            mixed = Quantize(layers=("down_proj=int4",), group_size=128)
            quantize.check_fit(odd, choices.settings_of(scheme, mixed, 0))


def test_a_pattern_without_a_linear_is_refused_before_anything_is_written(tiny_checkpoint, tmp_path):
    for scheme in ("nf4", "fp8", "gptq", "rtn-int4"):
        settings = choices.settings_of(scheme, Quantize(layers=("experts",)), 0)
        with pytest.raises(BadInput, match="'experts', which matches no linear"):
            quantize.run(scheme, tiny_checkpoint, tmp_path / "out", settings=settings, calibration=TEXTS)
        assert not (tmp_path / "out").exists()


def test_what_was_stored_is_read_from_the_file(six_blocks, tmp_path):
    result = store("rtn-int4", six_blocks, tmp_path / "out", layers=("q_proj", "mlp"))
    plan = layers.stored_plan(checkpoint.config(result.path)["quantization_config"])
    assert len(plan.formats) == 24
    assert layers.split_set(plan) == [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"]
