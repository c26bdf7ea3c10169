"""Round-to-nearest in the formats of `train.qat`, stored as compressed-tensors by llm-compressor.

Scales are always computed from the weights in float32, as training computes them from its masters: for a checkpoint
that was trained in the format, the codes equal those of training bit for bit. The scales of NVFP4's activations cannot
be computed from weights; training stores them beside its masters, and they are used if present.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qrl import names
from qrl.engine import pretrained
from qrl.formats.fakequant import linears, rounding
from qrl.quantize import compressed
from qrl.quantize.settings import Settings


def quantize(source: Path, out: Path, *, settings: Settings, rows: Sequence[Sequence[int]], device: str) -> None:
    """Write `source` under one of `names.ROUNDED` to `out`; tensors that are not quantized stay in float32.

    Arguments as in `_family`, errors as in `compressed.compressor`. `rows` calibrate activations where the source has
    no scales for them.
    """
    name = settings.scheme.removeprefix(names.ROUNDED_PREFIX)
    with compressed.compressor(out, device) as oneshot:
        import torch
        from compressed_tensors.offload import update_offload_parameter
        from llmcompressor.modifiers.quantization import QuantizationModifier

        model = pretrained.load(source, dtype=torch.float32).eval()
        scheme = rounding.scheme(name).model_copy(update={"targets": list(linears.covered(model, name))})
        recipe = QuantizationModifier(config_groups={"group_0": scheme}, ignore=[])
        calibrates = linears.needs_calibration(name)
        scales = linears.read_activation_scales(source) if calibrates else None
        data = {"dataset": compressed.batches(rows)} if calibrates and scales is None else {"pipeline": "datafree"}
        oneshot(model=model, recipe=recipe, **data)
        for path, scale in (scales or {}).items():
            linear = model.get_submodule(path)  # offloaded on a GPU, where reading a parameter gives a copy
            update_offload_parameter(linear, "input_global_scale", torch.full_like(linear.input_global_scale, scale))
        model.save_pretrained(out, save_compressed=True)
