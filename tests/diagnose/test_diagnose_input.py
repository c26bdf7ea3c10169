"""Input that `diagnose` cannot use: one sentence for each, which names what is wrong and where."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrl import recipe
from qrl.diagnose import weights
from qrl.errors import BadInput
from qrl.steps import diagnose as step

UP = "model.layers.0.mlp.up_proj.weight"


def changed(source: Path, folder: Path, edit=lambda tensors: None, **config) -> Path:
    """Return a copy of a checkpoint with `edit` applied to its tensors and these keys in its config."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def eight_bits(source: Path, folder: Path, scale: float = 1.0) -> Path:
    """Make a checkpoint in bitsandbytes' INT8, by its definition."""

    def store(tensors):
        for name in [name for name in tensors if "_proj.weight" in name]:
            weight = tensors[name].float()
            largest = weight.abs().amax(1)
            tensors[name] = (weight / largest[:, None] * 127).round().to(torch.int8)
            tensors[name.replace("weight", "SCB")] = largest * scale

    return changed(source, folder, store, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})


def cut(folder: Path) -> Path:
    """Cut the folder's weight file to half its length."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return folder


def refused(base, trained, out, quantized=None) -> str:
    with pytest.raises(BadInput) as raised:
        step.diagnose(recipe.load("tiny"), str(base), str(trained), quantized=quantized, out=str(out))
    sentence = str(raised.value)
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


def test_another_shape_or_layer_is_listed(tiny_checkpoint, tmp_path):
    def narrower(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:100].clone()

    def shorter(tensors):
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    sentence = refused(tiny_checkpoint, changed(tiny_checkpoint, tmp_path / "narrow", narrower), tmp_path / "out")
    assert "the same architecture: model.norm.weight (256 and 100) differ" in sentence
    missing = sum("layers.1." in name for name in load_file(tiny_checkpoint / "model.safetensors"))
    sentence = refused(tiny_checkpoint, changed(tiny_checkpoint, tmp_path / "short", shorter), tmp_path / "out")
    assert "says num_hidden_layers = 2, but its weights have 1" in sentence
    sentence = refused(
        tiny_checkpoint, changed(tiny_checkpoint, tmp_path / "one", shorter, num_hidden_layers=1), tmp_path / "out"
    )
    assert (
        "model.layers.1.input_layernorm.weight (256 and missing)" in sentence
        and f"and {missing - 3} more differ" in sentence
    )


@pytest.mark.parametrize("name", [UP, "model.layers.1.input_layernorm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_named_and_counted(tiny_checkpoint, tmp_path, value, name):
    def spoil(tensors):
        tensors[name].view(-1)[:3] = value

    broken = changed(tiny_checkpoint, tmp_path / "broken", spoil)
    sentence = refused(tiny_checkpoint, broken, tmp_path / "out")
    assert f"{name} of {broken} holds 3 values that are NaN or infinite" in sentence


def test_broken_scales_of_a_quantized_checkpoint_are_named_and_counted(tiny_checkpoint, tmp_path):
    broken = eight_bits(tiny_checkpoint, tmp_path / "int8", float("nan"))
    sentence = refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={broken}")
    assert (
        f"model.layers.0.mlp.down_proj.weight of {broken} stands for {256 * 512:,} values that are NaN or infinite"
        in sentence
    )


def test_a_quantized_checkpoint_is_no_full_precision_one_nor_the_other_way_round(tiny_checkpoint, tmp_path):
    packed = eight_bits(tiny_checkpoint, tmp_path / "int8")
    assert "is quantized (bitsandbytes), but a full-precision checkpoint was expected" in refused(
        tiny_checkpoint, packed, tmp_path / "out"
    )
    assert "is a full-precision checkpoint, but a quantized one was expected" in refused(
        tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={tiny_checkpoint}"
    )


def test_truncated_files_are_named(tiny_checkpoint, tmp_path):
    assert "model.safetensors is truncated" in refused(
        tiny_checkpoint, cut(changed(tiny_checkpoint, tmp_path / "cut")), tmp_path / "out"
    )
    packed = cut(eight_bits(tiny_checkpoint, tmp_path / "int8"))
    assert "model.safetensors is truncated" in refused(
        tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={packed}"
    )


def test_an_unknown_packing_is_named_with_those_that_are_known(tiny_checkpoint, tmp_path):
    strange = changed(tiny_checkpoint, tmp_path / "strange", quantization_config={"quant_method": "aqlm"})
    sentence = refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={strange}")
    assert "a packing that is not known here (aqlm): expected bitsandbytes" in sentence


def test_another_models_quantized_weights_are_refused(tiny_checkpoint, tmp_path):
    def widen(tensors):
        tensors[UP] = torch.zeros(600, 256, dtype=torch.bfloat16)

    other = eight_bits(changed(tiny_checkpoint, tmp_path / "wide", widen), tmp_path / "int8")
    sentence = refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={other}")
    assert f"{UP} of {other} stands for 600×256 weights, but {tiny_checkpoint} has 512×256" in sentence


def test_two_packings_under_one_name_are_refused(tiny_checkpoint, tmp_path):
    """Their codes would be compared with each other."""
    rows = eight_bits(tiny_checkpoint, tmp_path / "int8")
    cells = f"base:int8={rows},grpo:int8={{}}"
    other = changed(
        rows,
        tmp_path / "other",
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    )
    sentence = refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", cells.format(other))
    assert f"{rows} and {other} are packed differently (load_in_8bit differs)" in sentence
    assert list((tmp_path / "out").glob("schemes*")) == []


def test_a_checkpoint_without_a_matrix_is_refused(tiny_checkpoint, tmp_path):
    def vectors_only(tensors):
        for name in [name for name in tensors if tensors[name].ndim == 2]:
            del tensors[name]

    bare = changed(tiny_checkpoint, tmp_path / "bare", vectors_only)
    assert f"{bare} holds no matrix of floating-point weights" in refused(bare, bare, tmp_path / "out")


def test_a_quantization_config_must_be_an_object(tiny_checkpoint, tmp_path):
    strange = changed(tiny_checkpoint, tmp_path / "strange", quantization_config="nf4")
    assert "has a quantization_config that is not an object" in refused(tiny_checkpoint, strange, tmp_path / "out")


def test_a_place_that_cannot_be_written_is_named(tiny_checkpoint, tmp_path):
    table, figures = tmp_path / "a" / "weights.parquet", tmp_path / "b" / "figures"
    table.mkdir(parents=True)
    figures.parent.mkdir()
    figures.touch()
    for taken in (table, figures):
        assert f"cannot be written to {taken.parent} (" in refused(tiny_checkpoint, tiny_checkpoint, taken.parent)


@pytest.mark.process
def test_zeros_have_no_error_and_do_not_count(tiny_checkpoint, tmp_path, recwarn):
    """A matrix of zeros does not change the means over the others; a model of zeros only is still drawn."""

    def silent(tensors):
        tensors[UP].zero_()

    def dead(tensors):
        for tensor in tensors.values():
            tensor.zero_()

    some, none = changed(tiny_checkpoint, tmp_path / "some", silent), changed(tiny_checkpoint, tmp_path / "none", dead)
    frame = weights.measure(some, "base")
    zeros = frame.set_index("tensor").loc[UP]
    assert math.isnan(zeros["kurtosis"]) and math.copysign(1, zeros["max_abs"]) == 1
    rest = frame[frame["tensor"] != UP]
    for key in ("kurtosis", "w4_relative_mse"):
        assert weights.summary(frame)[key] == pytest.approx(weights.summary(rest)[key], rel=1e-12)
    step.diagnose(recipe.load("tiny"), str(none), str(none), quantized=None, out=str(tmp_path / "out"))
    assert (tmp_path / "out" / "figures" / "weights.html").is_file() and not [
        each for each in recwarn if each.category is RuntimeWarning
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["figures", "weights.parquet"]


@pytest.mark.process
def test_weights_need_no_tokenizer_but_texts_do(tiny_checkpoint, tmp_path):
    bare, packed = changed(tiny_checkpoint, tmp_path / "bare"), eight_bits(tiny_checkpoint, tmp_path / "int8")
    for folder in (bare, packed):
        for file in folder.glob("*token*"):
            file.unlink()
    out = tmp_path / "out"
    step.diagnose(recipe.load("tiny"), str(bare), str(bare), quantized=f"base:int8={packed}", out=str(out))
    assert {path.name for path in out.iterdir()} == {"figures", "weights.parquet", "schemes.parquet"}
    with pytest.raises(BadInput, match=f"{bare} has no tokenizer"):
        step.diagnose(
            recipe.load("tiny", {"diagnose.behaviour": "2"}), str(bare), str(bare), quantized=None, out=str(out)
        )


def test_codes_without_scales_are_refused_not_left_out(tiny_checkpoint, tmp_path):
    def forget(tensors):
        del tensors[UP.replace("weight", "SCB")]

    rows = eight_bits(tiny_checkpoint, tmp_path / "int8")
    bare = changed(rows, tmp_path / "bare", forget)
    assert f"{bare} holds {UP} in I8 without the scales" in refused(
        tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={bare}"
    )


def test_nvfp4_without_its_global_scale_is_refused(tiny_checkpoint, tmp_path):
    def pack(tensors):
        for name in [name for name in tensors if "_proj.weight" in name]:
            outputs, inputs = tensors.pop(name).shape
            tensors[f"{name}_packed"] = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
            tensors[f"{name}_scale"] = torch.ones(outputs, inputs // 16).to(torch.float8_e4m3fn)

    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }
    bare = changed(tiny_checkpoint, tmp_path / "bare", pack, quantization_config=config)
    sentence = refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:nvfp4={bare}")
    assert "cannot be unpacked (there is no 'weight_global_scale')" in sentence
