"""Storing weights in few bits: one file a scheme family, one verb, `run`.

What a quantized folder is otherwise stays as it was: tokenizer, chat template and generation settings are the source's own.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qrl import checkpoint, names
from qrl.errors import BadInput


@dataclass(frozen=True)
class Quantized:
    """A quantized checkpoint, and what it costs."""

    path: Path
    scheme: str
    bytes: int  # of weight files on disk
    bits_per_weight: float  # stored for the quantized matrices alone, their scales and zero points included
    bits_per_parameter: float  # stored for the whole checkpoint, embeddings and norms included
    seconds: float  # loading and saving included
    calibration_digest: str | None  # sha256 of the texts, in order; None: the scheme looks at none


def run(
    scheme: str,
    source: Path,
    out: Path,
    *,
    calibration: Sequence[str] = (),
    group_size: int = 128,
    max_tokens: int = 512,
    seed: int = 0,
    device: str = "cpu",
    reference: Path | None = None,
) -> Quantized:
    """Quantize a full-precision checkpoint into a new folder.

    Args:
        scheme: one of `names.QUANTIZED_SCHEMES`; "awq" needs the environment of projects/awq, "nf4" the core one.
        source: a checkpoint folder in full precision.
        out: a folder that does not exist yet, or is empty.
        calibration: chat-rendered training texts, end token included; awq needs some, nf4 looks at none.
        group_size: input channels that share an AWQ scale.
        max_tokens: the longest calibration text; a longer one is an error, never dropped.
        seed: of everything random.
        device: "cpu" or "cuda".
        reference: for awq, a file of `staging.write_reference`, whose logits the staged copy must reproduce.

    Raises:
        BadInput: unknown scheme, a source that cannot be quantized, or texts that are missing or too long.
        QrlError: the environment cannot run the scheme, or the staged copy is not the same model.
    """
    if scheme not in names.QUANTIZED_SCHEMES:
        raise BadInput(f"There is no scheme '{scheme}' to quantize to: expected one of {', '.join(names.QUANTIZED_SCHEMES)}.")
    found = checkpoint.check(source)
    if found.quantization:
        raise BadInput(f"{source} is already quantized ({found.quantization}): quantize the full-precision checkpoint.")
    if out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty: name a new folder for the quantized checkpoint.")
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if scheme == names.NF4:
        from qrl.quantize import nf4

        nf4.quantize(source, out, device=device, seed=seed)
    else:
        from qrl.quantize import awq

        awq.quantize(
            source, out, texts=calibration, group_size=group_size, max_tokens=max_tokens, seed=seed, device=device,
            reference=reference,
        )  # fmt: skip
    carry(source, out)
    per_weight, per_parameter = stored_bits(source, out)
    return Quantized(
        path=out,
        scheme=scheme,
        bytes=checkpoint.check(out).bytes,
        bits_per_weight=per_weight,
        bits_per_parameter=per_parameter,
        seconds=time.perf_counter() - started,
        calibration_digest=calibration_digest(calibration) if scheme == names.AWQ else None,
    )


def carry(source: Path, out: Path) -> None:
    """Put the source's own tokenizer, chat template and generation settings beside the new weights."""
    for name in ("generation_config.json", *checkpoint.TOKENIZER_FILES):
        (out / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def stored_bits(source: Path, out: Path) -> tuple[float, float]:
    """Bits on disk for each weight that was quantized, and for each parameter of the whole checkpoint.

    A matrix of `source` counts as quantized if `out` does not hold it as floats of the same shape; its bits are those of all
    tensors of its module but the bias: codes, scales, zero points, tables.
    """
    before, after = checkpoint.entries(source), checkpoint.entries(out)
    quantized = {name for name, entry in before.items() if len(entry.shape) == 2 and not _kept(entry, after.get(name))}
    modules = {name.removesuffix(".weight") for name in quantized}
    bits = 8 * sum(entry.bytes for name, entry in after.items() if not name.endswith(".bias") and _module(name) in modules)
    weights = sum(before[name].numel for name in quantized)
    parameters = sum(entry.numel for entry in before.values())
    return bits / weights if weights else 0.0, 8 * sum(entry.bytes for entry in after.values()) / parameters


def calibration_digest(texts: Sequence[str]) -> str:
    """sha256 over the texts in order, each ended by a zero byte."""
    return hashlib.sha256("".join(f"{text}\0" for text in texts).encode()).hexdigest()


def _kept(entry: checkpoint.Entry, stored: checkpoint.Entry | None) -> bool:
    return stored is not None and stored.shape == entry.shape and stored.dtype in checkpoint.header.FLOATS


def _module(name: str) -> str:
    """The module that a tensor belongs to: `a.b` for a.b.qweight and for a.b.weight.quant_state.bitsandbytes__nf4."""
    module, found, _ = name.partition(".weight.")
    return module if found else name.rpartition(".")[0]
