"""Quantize a full-precision checkpoint into a new folder: `run`, with one file per family of schemes.

Tokenizer, chat template and generation settings are copied from the source unchanged.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from qrl import checkpoint, names
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import plain, stored
from qrl.quantize import calibration as texts
from qrl.quantize import error, staging, verify
from qrl.quantize import settings as choices
from qrl.quantize.fit import check_finite, check_fit
from qrl.quantize.settings import Settings
from qrl.recipe import Quantize


@dataclass(frozen=True)
class Quantized:
    """A quantized checkpoint and its costs."""

    path: Path
    settings: Settings
    bytes: int  # of weight files on disk
    bits_per_weight: float  # of the quantized matrices alone, their scales and zero points included
    bits_per_parameter: float  # of the whole checkpoint, embeddings and norms included
    seconds: float  # loading and saving included, measuring the error excluded
    calibration_digest: str | None  # sha256 of the texts, in order; None for a scheme without calibration
    layer_errors: tuple[float, ...]  # see `error.Errors`, the first decoder layer first; empty without a probe
    logit_error: float | None  # likewise, of the logits; None without a probe


def run(
    scheme: str,
    source: Path,
    out: Path,
    *,
    settings: Settings | None = None,
    calibration: Sequence[str] = (),
    probe: Sequence[str] = (),
    device: str = "cpu",
    stage: Callable[[str], Any] = lambda name: None,
    progress: Callable[[int], Any] = lambda n: None,
) -> Quantized:
    """Quantize a full-precision checkpoint into a new folder.

    Args:
        scheme: one of `names.QUANTIZED_SCHEMES`; "awq" needs the environment of projects/awq, the others the core one.
        source: a checkpoint folder in full precision.
        out: a folder that does not exist yet, or is empty.
        settings: from `settings.settings_of`; default: those of a recipe without any.
        calibration: chat-rendered texts, end token included, where `Settings.uses_texts`; others ignore them.
        probe: texts to measure each layer's error on; the first `error.ROWS` are used.
        device: "cpu" or "cuda".
        stage: called with the name of each stage as it begins: "storing", "measuring".
        progress: called with the number of calibration texts tokenized since the last call.

    Raises:
        BadInput: the scheme is unknown, the source cannot be quantized or holds NaN, or texts are missing or too long;
            raised before anything is stored.
        QrlError: the environment cannot run the scheme, the staged copy is not the same model, or the stored one has
            another output head.
    """
    import torch

    # Everything that can be wrong with the input, before anything is written.
    settings = (settings or choices.settings_of(scheme, Quantize(), 0)).sized(source)
    quantization = checkpoint.check(source).quantization
    if quantization:
        raise BadInput(f"{source} is already quantized ({quantization}): quantize the full-precision checkpoint.")
    check_fit(source, settings)
    if out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty: name a new folder for the quantized checkpoint.")
    rows: list[list[int]] = []
    if settings.uses_texts:
        rows = texts.rows(token_ids(source, calibration, progress), settings.max_tokens)
    probe_rows = token_ids(source, probe)
    check_finite(source)

    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    stage("storing")
    family = _family(scheme)
    torch.manual_seed(settings.seed)
    try:
        family.quantize(source, out, settings=settings, rows=rows, device=device)
        plain.copy_text_files(source, out)
        stored_checkpoint = verify.check_stored(source, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # never leave half a checkpoint, or another model
        raise
    seconds = time.perf_counter() - start

    errors = None
    if probe_rows:
        stage("measuring")
        measure = family.measure if scheme == names.AWQ else error.measure  # AutoAWQ's environment has no other engine
        errors = measure(source, out, probe_rows, device)
    per_weight, per_parameter = stored_bits(source, out)
    return Quantized(
        path=out,
        settings=settings,
        bytes=stored_checkpoint.bytes,
        bits_per_weight=per_weight,
        bits_per_parameter=per_parameter,
        seconds=seconds,
        calibration_digest=texts.digest(calibration) if settings.uses_texts else None,
        layer_errors=errors.layers if errors else (),
        logit_error=errors.logits if errors else None,
    )


def token_ids(source: Path, texts: Sequence[str], progress: Callable[[int], Any] = lambda n: None) -> list[list[int]]:
    """Return texts as the checkpoint's tokenizer reads them, without adding special tokens."""
    tokenizer = hf.plain_tokenizer(source) if texts else None
    rows: list[list[int]] = []
    for text in texts:
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        progress(1)
    return rows


def stored_bits(source: Path, out: Path) -> tuple[float, float]:
    """Return bits on disk per quantized weight, and per parameter of the whole checkpoint.

    A matrix of `source` counts as quantized if `out` does not hold it as floats of the same shape; its bits are those
    of all tensors of its module except the bias: codes, scales, zero points, tables.
    """
    source_entries = checkpoint.entries(source)
    out_entries = checkpoint.entries(out)
    floats = {(name, entry.shape) for name, entry in out_entries.items() if entry.dtype in checkpoint.header.FLOATS}
    matrices = {name: entry.shape for name, entry in source_entries.items() if len(entry.shape) == 2}
    quantized = {name for name, shape in matrices.items() if (name, shape) not in floats}
    modules = {name.removesuffix(".weight") for name in quantized}

    matrix_bytes = 0
    for name, entry in out_entries.items():
        if stored.module(name) in modules and not name.endswith(".bias"):
            matrix_bytes += entry.bytes
    weights = sum(source_entries[name].numel for name in quantized)
    bits_per_weight = 8 * matrix_bytes / weights if weights else 0.0

    all_bytes = sum(entry.bytes for entry in out_entries.values())
    parameters = sum(entry.numel for entry in source_entries.values())
    return bits_per_weight, 8 * all_bytes / parameters


def _family(scheme: str) -> ModuleType:
    """Return a scheme's module, imported here because each needs libraries of its own.

    Its `quantize(source, out, *, settings, rows, device)` writes config.json and safetensors of a folder that
    `check_fit` accepts to an empty one; rows are N calibration rows of L token ids, none for a scheme without
    calibration.
    """
    if scheme in names.BITSANDBYTES:
        from qrl.quantize import bnb as family
    elif scheme == names.AWQ:
        from qrl.quantize import awq as family
    else:
        from qrl.quantize import compressed as family
    return family
