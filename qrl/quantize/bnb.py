"""bitsandbytes' two formats, for every linear except the output head, without calibration: NF4 and LLM.int8()."""

from pathlib import Path

import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt

from qrl import checkpoint
from qrl.engine import pretrained
from qrl.errors import BadInput
from qrl.formats import layers
from qrl.quantize.fit import HEAD
from qrl.quantize.settings import Settings


def quantize(source: Path, out: Path, *, settings: Settings, rows: list, device: str) -> None:
    """Write `source` in NF4 or INT8 to `out`; arguments as in `_family`, without calibration.

    The model is saved before any forward pass, which on some CPUs repacks the codes in place.

    Raises:
        BadInput: no linear of the model can be quantized.

    Source: NF4: Dettmers et al., QLoRA (arXiv 2305.14314), sections 3 and 4. INT8: Dettmers et al., LLM.int8() (arXiv
    2208.07339).
    """
    quantization = pretrained.bitsandbytes(settings.scheme, torch.bfloat16)
    if settings.layers:
        plan = layers.plan_of(pretrained.skeleton(checkpoint.config(source)), settings.scheme, settings.layers)
        # transformers leaves the head out by itself only where nothing else is named.
        quantization.llm_int8_skip_modules = [HEAD, *layers.skipped_modules(plan)]
    model = pretrained.load(source, quantization_config=quantization, dtype=torch.bfloat16, device_map=device)
    if not any(isinstance(module, Linear4bit | Linear8bitLt) for module in model.modules()):
        raise BadInput(f"{source} has no linear that bitsandbytes packs: expected a transformer language model.")
    model.save_pretrained(out)
