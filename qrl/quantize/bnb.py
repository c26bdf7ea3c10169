"""bitsandbytes' two formats, no calibration, every linear but the output head: NF4 with double quantization, and LLM.int8().

INT8's weights are what is stored here, a byte each with a scale a row. Where its kernels run (a GPU), LLM.int8() rounds
activations to eight bits as well, outliers apart; transformers' engine on a CPU unpacks the weights and does not.
"""

from __future__ import annotations

from pathlib import Path

from qrl import names
from qrl.engine import pretrained
from qrl.errors import BadInput

OUTLIER = 6.0  # activations above this stay in 16 bits: bitsandbytes' own default


def quantize(source: Path, out: Path, *, scheme: str, device: str, seed: int) -> None:
    """Write `source` in NF4 or INT8 to `out`: config.json and safetensors.

    The model is saved before any forward pass: on a CPU with AVX512-BF16 the first one repacks the codes in place, and what
    is saved after it is silently wrong.

    Raises:
        BadInput: no linear of the model can be quantized.

    Source: NF4: Dettmers et al., QLoRA (arXiv 2305.14314), sections 3 and 4. INT8: Dettmers et al., LLM.int8() (arXiv 2208.07339).
    """
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt
    from transformers import BitsAndBytesConfig

    torch.manual_seed(seed)
    if scheme == names.NF4:
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    else:
        settings = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIER)
    model = pretrained.load(source, quantization_config=settings, dtype=torch.bfloat16, device_map=device)
    if not any(isinstance(module, Linear4bit | Linear8bitLt) for module in model.modules()):
        raise BadInput(
            f"{source} has no linear layer that bitsandbytes quantizes: expected a transformer language model."
        )
    model.save_pretrained(out)
