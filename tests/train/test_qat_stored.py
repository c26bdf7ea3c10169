"""A trained model as a compressed-tensors checkpoint: bit for bit the same weights and answers in transformers."""

import shutil

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from qrl import checkpoint, names, quantize, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import stored as matrices
from qrl.formats.fakequant import linears
from qrl.quantize import compressed
from qrl.quantize import settings as choices
from qrl.recipe import Quantize, Train
from qrl.train.qat import linear, prepare
from qrl.train.rollout import sync

pytestmark = pytest.mark.process

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
TEXTS = ["Tom has 3 apples and buys 4 more.", "How many does he have? #### 7"]
BITS = {
    "int8": 8,
    "int8-attention": 8,
    "int4": 4,
    "nvfp4-a16": 4,
    "nvfp4-a4": 4,
    "fp8": 8,
    "fp8-static": 8,
    "int8-a8-static": 8,
    "mxfp4": 4,
    "int3": 3,
    "int2": 2,
}


@pytest.fixture(scope="module")
def masters(tiny_checkpoint, tmp_path_factory):
    """Return a float32 checkpoint with weights that bfloat16 cannot hold exactly, as after training."""
    folder = tmp_path_factory.mktemp("masters") / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    shutil.copytree(tiny_checkpoint, folder)
    model.save_pretrained(folder)
    return folder


TOKENS = {"strategy": "token", "dynamic": True, "symmetric": True}
FILES = {
    "int4-tensor": {"weights": {"num_bits": 4, "type": "int", "strategy": "tensor"}},
    "int4-channel": {"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}},
    "int4-group": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}},
    "int8-group": {"weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}},
    "int8-tensor": {"weights": {"num_bits": 8, "type": "int", "strategy": "tensor"}},
    "int8-token": {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int"} | TOKENS,
    },
    "int8-tensor-static": {
        "weights": {"num_bits": 8, "type": "int", "strategy": "tensor"},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
    },
    "fp8-tensor": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    "fp8-block": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 32]},
        "input_activations": {"num_bits": 8, "type": "float"} | TOKENS,
    },
}


def store(source, out, name):
    own = str(name).endswith(".yaml")
    scheme = names.RTN_FILE if own else f"{names.ROUNDED_PREFIX}{name}"
    recipe = Quantize(calibration_samples=2, calibration_max_tokens=64, format=str(name) if own else None)
    settings = choices.settings_of(scheme, recipe, 0)
    return quantize.run(
        scheme, source, out, settings=settings, calibration=TEXTS if scheme in choices.CALIBRATED else ()
    )


def in_training(masters, name):
    model = AutoModelForCausalLM.from_pretrained(masters, dtype=torch.float32)
    linear.attach(model, name)
    return model


@pytest.mark.parametrize("name", names.FORMATS)
def test_stored_weights_and_answers_are_bit_equal_to_the_trained_ones(name, masters, tmp_path):
    trained, source = in_training(masters, name), tmp_path / "masters"
    shutil.copytree(masters, source)
    if linears.needs_calibration(name):
        linears.write_activation_scales(source, prepare.calibrate(trained, [BATCH]))
    store(source, tmp_path / "out", name)

    written = checkpoint.check(tmp_path / "out")
    assert written.quantization == names.STORED_AS[f"rtn-{name}"] == "compressed-tensors"
    loaded, _ = hf.load(tmp_path / "out", "cpu", torch.float32)  # as a cell is evaluated
    stored, wanted = dict(loaded.named_parameters()), dict(sync.named_weights(trained))
    for key, value in wanted.items():
        assert torch.equal(stored[key], value), key
    with torch.no_grad():
        assert torch.equal(loaded(**BATCH).logits, trained(**BATCH).logits)

    entries = checkpoint.entries(tmp_path / "out")
    assert entries["model.embed_tokens.weight"].dtype == "F32" and "lm_head.weight_packed" not in entries
    covered = {path for path, module in trained.named_modules() if isinstance(module, linear.QATLinear)}
    codes = sum(
        entry.bytes
        for key, entry in entries.items()
        if key.rpartition(".")[0] in covered and key.endswith(("weight", "weight_packed"))
    )
    assert codes * 8 == BITS[name] * sum(trained.get_submodule(path).weight.numel() for path in covered)


@pytest.mark.parametrize("case", FILES)
def test_a_format_of_a_file_is_stored_bit_equal_to_what_training_computes(case, masters, tmp_path):
    file = tmp_path / f"{case}.yaml"
    file.write_text(yaml.safe_dump(FILES[case]))
    trained, source = in_training(masters, str(file)), tmp_path / "masters"
    shutil.copytree(masters, source)
    if linears.needs_calibration(str(file)):
        linears.write_activation_scales(source, prepare.calibrate(trained, [BATCH]))
    store(source, tmp_path / "out", str(file))
    loaded, _ = hf.load(tmp_path / "out", "cpu", torch.float32)
    stored = dict(loaded.named_parameters())
    for key, value in sync.named_weights(trained):
        assert torch.equal(stored[key], value), key
    with torch.no_grad():
        assert torch.equal(loaded(**BATCH).logits, trained(**BATCH).logits)
    (group,) = checkpoint.config(tmp_path / "out")["quantization_config"]["config_groups"].values()
    assert group["weights"]["strategy"] == FILES[case]["weights"]["strategy"]
    decoded = dict(matrices.matrices(tmp_path / "out", matrices.names(tmp_path / "out")))
    assert len(decoded) == 2 * 7
    for key, part in decoded.items():
        assert torch.equal(part.values, stored[key]), key


UNFIT = {
    "no scheme": ("weights: {num_bits: 3.5}", "is no format to train in"),
    "no mapping": ("[1]", "holds a list, but a mapping"),
    "no YAML": ("{", "is no format to train in"),
    "an unknown field": ("weight: {num_bits: 4}", r"\(weight: Extra inputs are not permitted\): expected"),
    "an unknown strategy": ("weights: {strategy: row}", "is no format to train in"),
    "no weights": ("input_activations: {num_bits: 8, strategy: token, dynamic: true}", "it needs weights"),
    "three bits": ("weights: {num_bits: 3, strategy: channel}", "weights are 3 int channel"),
    "zero points": ("weights: {num_bits: 4, strategy: channel, symmetric: false}", "must be symmetric"),
    "another range": ("weights: {num_bits: 8, strategy: tensor, observer: mse}", "observer must be minmax"),
    "half of the linears": ("targets: [re:.*q_proj]\nweights: {num_bits: 8, strategy: tensor}", "leave out targets"),
    "scales of inputs by group": (
        "weights: {num_bits: 8, strategy: tensor}\n"
        "input_activations: {num_bits: 8, strategy: group, group_size: 32, dynamic: true}",
        "input_activations are 8 int group",
    ),
    "inputs scaled by their own largest value": (
        "weights: {num_bits: 8, strategy: tensor}\ninput_activations: {num_bits: 8, strategy: tensor, dynamic: true}",
        "need dynamic: false",
    ),
    "a float grid of its own": ("weights: {num_bits: 4, type: float, strategy: group, group_size: 64}", "as NVFP4"),
    "groups that do not divide": ("weights: {num_bits: 4, strategy: group, group_size: 48}", "groups of 48"),
    "blocks of an odd side": (
        "weights: {num_bits: 8, type: float, strategy: block, block_structure: [96, 128]}",
        "sides of a block must divide 128",
    ),
    "a book": ("#" * (2 << 20), "larger than"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_format_that_training_cannot_compute_is_refused_before_any_weight_is_loaded(case, masters, tmp_path):
    text, sentence = UNFIT[case]
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=sentence):
        prepare.check(Train(qat=str(file)), masters)


def test_a_format_of_a_file_needs_the_file_and_names_the_variant():
    assert (Train(qat="formats/my-int4.yaml").variant, Train(qat="a.yaml", teacher="b").variant) == (
        "qat-my-int4",
        "qad-a",
    )
    with pytest.raises(BadInput, match=r"set quantize\.format to FILE\.yaml"):
        choices.settings_of(names.RTN_FILE, Quantize(), 0)
    with pytest.raises(BadInput, match=r"There is no file .*none\.yaml: expected a format"):
        prepare.check(Train(qat="none.yaml"), tiny.PATH)


@pytest.mark.parametrize("name", ["int8", "int4", "nvfp4-a16", "fp8", "mxfp4"])
def test_a_cell_in_bf16_has_the_weights_of_a_training_in_bf16(name, masters, tmp_path):
    trained = AutoModelForCausalLM.from_pretrained(masters, dtype=torch.float32)
    linear.attach(trained, name, torch.bfloat16)
    store(masters, tmp_path / "out", name)
    stored = dict(hf.load(tmp_path / "out", "cpu", torch.bfloat16)[0].named_parameters())
    for key, value in sync.named_weights(trained):
        assert torch.equal(stored[key], value.to(torch.bfloat16)), key


def test_it_loads_in_transformers_without_being_told_how(masters, tmp_path):
    store(masters, tmp_path / "out", "int4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(**BATCH).logits, in_training(masters, "int4")(**BATCH).logits)


def test_the_trainings_activation_scales_are_stored_where_llm_compressor_has_the_model_offloaded(
    masters, tmp_path, monkeypatch
):
    """As on a GPU, where reading a module's weights gives a copy: here they are offloaded to disk."""
    from compressed_tensors.offload import dispatch_with_map, remove_dispatch

    def quiet_oneshot(given=compressed.quiet_oneshot):
        def oneshot(model, **settings):
            given()(model=model, **settings)
            remove_dispatch(model)
            places = {
                path: ("cpu", "disk") for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)
            }
            dispatch_with_map(model, places, offload_dir=str(offload), show_progress=False)

        return oneshot

    (offload := tmp_path / "offload").mkdir()
    source = tmp_path / "masters"
    shutil.copytree(masters, source)
    wanted = prepare.calibrate(in_training(masters, "nvfp4-a4"), [BATCH])
    linears.write_activation_scales(source, wanted)
    monkeypatch.setattr(compressed, "quiet_oneshot", quiet_oneshot)
    store(source, tmp_path / "out", "nvfp4-a4")
    end = ".input_global_scale"
    assert {
        key.removesuffix(end): float(value) for key, value in checkpoint.tensors(tmp_path / "out") if key.endswith(end)
    } == wanted


def test_a_model_that_was_never_trained_in_it_is_calibrated_on_texts(tiny_checkpoint, tmp_path):
    store(tiny_checkpoint, tmp_path / "out", "nvfp4-a4")
    scales = [float(value) for key, value in checkpoint.tensors(tmp_path / "out") if key.endswith("input_global_scale")]
    assert len(scales) == 2 * 7 and all(0 < scale < float("inf") for scale in scales)


def test_the_masters_stay_and_what_does_not_fit_is_refused_by_name(masters, tmp_path):
    before = checkpoint.digest(masters)
    store(masters, tmp_path / "out", "int8")
    assert checkpoint.digest(masters) == before
    with pytest.raises(BadInput, match="already quantized"):
        store(tmp_path / "out", tmp_path / "again", "int8")


def test_every_format_that_can_be_trained_in_can_be_stored():
    named = tuple(f"{names.ROUNDED_PREFIX}{name}" for name in names.FORMATS)
    assert (*named, names.RTN_FILE) == names.ROUNDED
