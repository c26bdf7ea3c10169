"""The schemes of llm-compressor, stored as compressed-tensors: what vLLM reads, and transformers with compressed-tensors.

Schemes that round weights alone need no forward pass. AWQ, GPTQ and the activations' range of NVFP4 look at calibration
texts; on a CPU that pass runs in float32 (bfloat16 took ten times as long where the CPU has no units for it), and the
result is stored in the source's own dtype.
Source: GPTQ: Frantar et al. (arXiv 2210.17323). AWQ: Lin et al. (arXiv 2306.00978). NVFP4, MXFP4: the formats' presets in
compressed-tensors, which `projects/vllm` runs.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, names
from qrl.engine import pretrained
from qrl.errors import QrlError
from qrl.quantize.settings import CALIBRATED, GROUPED, Settings
from qrl.quantize.widths import HEAD

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BATCH = 16  # calibration rows in one forward pass
_PRESETS = {
    names.FP8: "FP8_DYNAMIC",
    names.NVFP4: "NVFP4",
    names.NVFP4A16: "NVFP4A16",
    names.MXFP4A16: "MXFP4A16",
    names.W8A8: "W8A8",
}


def quantize(source: Path, out: Path, *, settings: Settings, rows: Sequence[Sequence[int]], device: str) -> None:
    """Write `source` under one of `names.COMPRESSED` to `out`: config.json and safetensors.

    Args:
        source: a full-precision checkpoint folder.
        out: an existing, empty folder.
        settings: of the scheme.
        rows: N rows of L token ids; none for a scheme that looks at none.
        device: "cpu" or "cuda"; llm-compressor takes a GPU wherever there is one.

    Raises:
        QrlError: llm-compressor is not installed here.
    """
    oneshot = quiet_oneshot()
    import torch

    torch.manual_seed(settings.seed)
    on_cpu = settings.scheme in CALIBRATED and device == "cpu"
    model, stored = _load(source, in_float32=on_cpu)
    with _without_accelerator(), contextlib.redirect_stderr(io.StringIO()):  # dozens of bars
        oneshot(model=model, recipe=_recipe(settings), dataset=batches(rows))
        if on_cpu and settings.scheme == names.NVFP4:
            ranges = _activation_ranges(model)
            model, _ = _load(source, in_float32=False)  # scales from weights as they are stored, the same as NVFP4A16's
            oneshot(model=model, recipe=_recipe(settings), dataset=batches(rows[:1]))
            model.load_state_dict(ranges, strict=False)
        _cast(model, stored)
        model.save_pretrained(out, save_compressed=True)
    (out / "recipe.yaml").unlink(missing_ok=True)  # llm-compressor's own record; ours holds more


def quiet_oneshot():
    """llm-compressor's `oneshot`, its log turned off.

    Raises:
        QrlError: it is not installed here.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where its log goes; its own switch for that breaks its GPTQ
            from llmcompressor import oneshot
            from loguru import logger
    except ImportError as error:
        raise QrlError(
            f"llm-compressor cannot be imported here ({error}): run under `mlflow run . -e quantize … --env-manager uv`, whose "
            "environment has it, or choose nf4 or int8."
        ) from None
    logger.disable("llmcompressor")
    logger.disable("compressed_tensors")
    return oneshot


def _load(source: Path, *, in_float32: bool) -> tuple[PreTrainedModel, torch.dtype]:
    """The model, and the dtype to store what is not quantized in: the source's own, bfloat16 for float32 masters."""
    import torch

    stored = {"float16": torch.float16}.get(checkpoint.main_dtype(checkpoint.entries(source)), torch.bfloat16)
    model = pretrained.load(source, dtype=torch.float32 if in_float32 else stored)
    return model.eval(), stored


def _recipe(settings: Settings) -> list:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    if settings.scheme in GROUPED:
        weights = QuantizationArgs(
            num_bits=settings.bits or 8,  # W8A16 says its own
            type="int",
            strategy="group",
            group_size=settings.group_size,
            symmetric=settings.symmetric,
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    else:
        scheme = preset_name_to_scheme(_PRESETS[settings.scheme], ["Linear"])
    chosen = {"config_groups": {"group_0": scheme}, "ignore": [HEAD]}
    if settings.scheme == names.GPTQ:
        return [GPTQModifier(**chosen)]
    before = [AWQModifier()] if settings.scheme == names.AWQ_CT else []
    return [*before, QuantizationModifier(**chosen)]


def _activation_ranges(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name.endswith("input_global_scale")}


def batches(rows: Sequence[Sequence[int]]):
    """A loader of calibration rows, `BATCH` at once; None where there are none.

    Args:
        rows: N rows of L token ids.
    """
    if not rows:
        return None
    import torch

    samples = [
        {"input_ids": torch.tensor(row), "attention_mask": torch.ones(len(row), dtype=torch.long)} for row in rows
    ]
    return torch.utils.data.DataLoader(samples, batch_size=BATCH)


@contextlib.contextmanager
def _without_accelerator() -> Iterator[None]:
    """Lets llm-compressor's cache work where there is no accelerator to pin memory for; AWQ dies of it otherwise."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        yield
        return
    pin = IntermediatesCache.__dict__["_pin_intermediate"]
    IntermediatesCache._pin_intermediate = classmethod(lambda cls, value: None)
    try:
        yield
    finally:
        IntermediatesCache._pin_intermediate = pin


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Everything to the dtype of the checkpoint, but the scale of a whole tensor, which NVFP4 defines in float32."""
    import torch

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype is torch.float32 and not name.endswith("global_scale"):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
