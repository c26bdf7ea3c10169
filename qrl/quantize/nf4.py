"""NF4 with double quantization, as bitsandbytes stores it: no calibration, every linear but the output head."""

from __future__ import annotations

from pathlib import Path

from qrl.errors import BadInput


def quantize(source: Path, out: Path, *, device: str, seed: int) -> None:
    """Write `source` in NF4 to `out`: config.json and safetensors.

    The model is saved before any forward pass: on a CPU with AVX512-BF16 the first one repacks the codes in place, and what
    is saved after it is silently wrong.

    Raises:
        BadInput: no linear of the model can be quantized.

    Source: Dettmers et al., QLoRA (arXiv 2305.14314), sections 3 and 4.
    """
    import torch
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.manual_seed(seed)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=settings,
        dtype=torch.bfloat16,
        device_map=device,
        trust_remote_code=False,
        use_safetensors=True,
    )
    if not any(isinstance(module, Linear4bit) for module in model.modules()):
        raise BadInput(f"{source} has no linear layer that bitsandbytes quantizes: expected a transformer language model.")
    model.save_pretrained(out)
