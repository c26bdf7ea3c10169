"""A model trained with quantized weights as a checkpoint of the compressed-tensors format, which transformers and vLLM load.

llm-compressor computes every scale anew from the masters and packs the codes; only the scales of activations, which no
weight tells, are those of the training.
"""

from __future__ import annotations

from pathlib import Path

from qrl import checkpoint
from qrl.errors import BadInput
from qrl.formats import fake
from qrl.train import qat


def write(masters: Path, out: Path, name: str, activation_scales: dict[str, float] | None = None) -> None:
    """Stores masters in a format's codes.

    Args:
        masters: full-precision checkpoint folder, as the training left it; codes are computed in its own dtype.
        out: folder to make; it appears whole, by rename.
        name: the format that they were trained in.
        activation_scales: linear's name → global scale of its inputs; NVFP4 W4A4 needs them.

    Raises:
        BadInput: llm-compressor is not installed, or the scales are missing.
    """
    oneshot, modifier = _library()
    import torch
    from transformers import AutoModelForCausalLM

    found = checkpoint.check(masters)
    if found.quantization:
        raise BadInput(
            f"{masters} is quantized already ({found.quantization}): give the trained full-precision masters."
        )
    if qat.needs_calibration(name) and not activation_scales:
        raise BadInput(
            f"{name} quantizes activations with calibrated scales, and none were given: expected {qat.SCALES_FILE} of the training."
        )
    model = AutoModelForCausalLM.from_pretrained(masters, dtype=getattr(torch, found.dtype), use_safetensors=True)
    covered = qat.covered(model, name)
    scheme = fake.scheme(name).model_copy(update={"targets": list(covered)})
    recipe = modifier(config_groups={"group_0": scheme}, ignore=[])
    oneshot(model=model, recipe=recipe, pipeline="datafree")
    for path, scale in (activation_scales or {}).items():
        model.get_submodule(path).input_global_scale.data.fill_(scale)
    save(model, masters, out)


def save(model, masters: Path, out: Path) -> None:
    """Writes a compressed model with the masters' own tokenizer files, by rename."""
    import shutil

    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, save_compressed=True)
    for name in (*checkpoint.TOKENIZER_FILES, "generation_config.json"):
        (partial / name).unlink(missing_ok=True)
        if (masters / name).is_file():
            shutil.copy2(masters / name, partial / name)
    partial.rename(out)


def _library():
    try:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier
    except ImportError:
        raise BadInput(
            "Writing a compressed-tensors checkpoint needs llmcompressor, which is not installed here: run the step in an "
            "environment that has it, or set train.qat=none."
        ) from None
    return oneshot, QuantizationModifier
