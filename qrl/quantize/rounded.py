"""Plain rounding to nearest in the formats that `train.qat` trains in, stored as compressed-tensors by llm-compressor.

Every scale is computed anew from the weights, in float32 whatever they are stored in, as a training computes it from its
masters: for a checkpoint that was trained in the format, the codes are those that it was trained with, bit for bit. The
scales of NVFP4's activations, which no weight tells, are the training's own where they lie beside the masters.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from qrl import checkpoint, names
from qrl.engine import pretrained
from qrl.formats.fakequant import linears, values
from qrl.quantize import compressed
from qrl.quantize.settings import Settings


def quantize(source: Path, out: Path, *, settings: Settings, rows: Sequence[Sequence[int]] = ()) -> None:
    """Writes `source` under one of `names.ROUNDED` to `out`: config.json and safetensors, what is not quantized in float32.

    Args:
        source: a full-precision checkpoint folder.
        out: an existing, empty folder.
        settings: of the scheme.
        rows: N rows of L token ids, for a scheme that calibrates activations and a source that was not trained in it.

    Raises:
        BadInput: a model that the format does not fit, by name of the layer.
        QrlError: llm-compressor is not installed here.
    """
    oneshot = compressed.quiet_oneshot()
    import torch
    from compressed_tensors.offload import update_offload_parameter
    from llmcompressor.modifiers.quantization import QuantizationModifier

    name = settings.scheme.removeprefix(names.ROUNDED_PREFIX)
    linears.check_fit(pretrained.skeleton(checkpoint.config(source)), name)
    torch.manual_seed(settings.seed)
    model = pretrained.load(source, dtype=torch.float32).eval()
    covered = linears.covered(model, name)
    scheme = values.scheme(name).model_copy(update={"targets": list(covered)})
    kept = linears.read_activation_scales(source) if linears.needs_calibration(name) else None
    looks = linears.needs_calibration(name) and kept is None
    given = {"dataset": compressed.batches(rows)} if looks else {"pipeline": "datafree"}
    with contextlib.redirect_stderr(io.StringIO()):  # bars that flash
        oneshot(model=model, recipe=QuantizationModifier(config_groups={"group_0": scheme}, ignore=[]), **given)
        for path, scale in (kept or {}).items():
            linear = model.get_submodule(path)  # on a GPU llm-compressor offloads it, and what is read is a copy
            update_offload_parameter(linear, "input_global_scale", torch.full_like(linear.input_global_scale, scale))
        model.save_pretrained(out, save_compressed=True)
    (out / "recipe.yaml").unlink(missing_ok=True)  # llm-compressor's own record; ours holds more
