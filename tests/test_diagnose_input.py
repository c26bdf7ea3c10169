"""What `diagnose` is given and cannot use: a sentence each, naming what is wrong and where."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrl import recipe
from qrl.errors import BadInput
from qrl.steps import diagnose as step

UP = "model.layers.0.mlp.up_proj.weight"


def changed(source: Path, folder: Path, edit=lambda tensors: None, **config) -> Path:
    """A copy of a checkpoint with `edit` applied to its tensors and these keys in its config."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def eight_bits(source: Path, folder: Path, scale: float = 1.0) -> Path:
    """A checkpoint in bitsandbytes' INT8, by its definition."""

    def store(tensors):
        for name in [name for name in tensors if "_proj.weight" in name]:
            weight = tensors[name].float()
            largest = weight.abs().amax(1)
            tensors[name] = (weight / largest[:, None] * 127).round().to(torch.int8)
            tensors[name.replace("weight", "SCB")] = largest * scale

    return changed(source, folder, store, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})


def cut(folder: Path) -> Path:
    """The same folder, its weights half as long."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return folder


def refused(base, trained, out, quantized=None) -> str:
    with pytest.raises(BadInput) as raised:
        step.diagnose(recipe.load("tiny"), str(base), str(trained), quantized=quantized, out=str(out))
    said = str(raised.value)
    assert said.endswith(".") and "\n" not in said
    return said


def test_another_shape_or_layer_is_listed(tiny_checkpoint, tmp_path):
    def narrower(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:100].clone()

    def shorter(tensors):
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    said = refused(tiny_checkpoint, changed(tiny_checkpoint, tmp_path / "narrow", narrower), tmp_path / "out")
    assert "are not one architecture: model.norm.weight (256 and 100) differ" in said
    missing = sum("layers.1." in name for name in load_file(tiny_checkpoint / "model.safetensors"))
    said = refused(tiny_checkpoint, changed(tiny_checkpoint, tmp_path / "short", shorter), tmp_path / "out")
    assert "model.layers.1.input_layernorm.weight (256 and missing)" in said and f"and {missing - 3} more differ" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_named_and_counted(tiny_checkpoint, tmp_path, value):
    def spoil(tensors):
        tensors[UP][0, :3] = value

    broken = changed(tiny_checkpoint, tmp_path / "broken", spoil)
    said = refused(tiny_checkpoint, broken, tmp_path / "out")
    assert f"{UP} of {broken} holds 3 values that are NaN or infinite" in said


def test_broken_scales_of_a_quantized_checkpoint_are_named_and_counted(tiny_checkpoint, tmp_path):
    broken = eight_bits(tiny_checkpoint, tmp_path / "int8", float("nan"))
    said = refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={broken}")
    assert f"model.layers.0.mlp.down_proj.weight of {broken} stands for {256 * 512:,} values that are NaN or infinite" in said


def test_a_quantized_checkpoint_is_no_full_precision_one_nor_the_other_way_round(tiny_checkpoint, tmp_path):
    packed = eight_bits(tiny_checkpoint, tmp_path / "int8")
    assert "is stored in bitsandbytes: diagnose reads full-precision weights" in refused(tiny_checkpoint, packed, tmp_path / "out")
    assert "is a full-precision checkpoint, but a quantized one was expected" in refused(
        tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={tiny_checkpoint}"
    )


def test_truncated_files_are_told_by_their_size(tiny_checkpoint, tmp_path):
    assert "model.safetensors is truncated" in refused(tiny_checkpoint, cut(changed(tiny_checkpoint, tmp_path / "cut")), tmp_path / "out")
    packed = cut(eight_bits(tiny_checkpoint, tmp_path / "int8"))
    assert "model.safetensors is truncated" in refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={packed}")


def test_an_unknown_packing_is_named_with_those_that_are_known(tiny_checkpoint, tmp_path):
    strange = changed(tiny_checkpoint, tmp_path / "strange", quantization_config={"quant_method": "aqlm"})
    said = refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={strange}")
    assert "a packing that is not known here (aqlm): expected bitsandbytes" in said


def test_another_models_quantized_weights_are_refused(tiny_checkpoint, tmp_path):
    def widen(tensors):
        tensors[UP] = torch.zeros(600, 256, dtype=torch.bfloat16)

    other = eight_bits(changed(tiny_checkpoint, tmp_path / "wide", widen), tmp_path / "int8")
    said = refused(tiny_checkpoint, tiny_checkpoint, tmp_path / "out", f"base:int8={other}")
    assert f"{UP} of {other} stands for 600×256 weights, but {tiny_checkpoint} has 512×256" in said
