"""Storing weights in few bits: one file a scheme family, one verb, `run`.

What a quantized folder is otherwise stays as it was: tokenizer, chat template and generation settings are the source's own.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qrl import checkpoint, names
from qrl.engine import pretrained
from qrl.errors import BadInput
from qrl.quantize import calibration as texts
from qrl.quantize import settings as choices
from qrl.quantize.settings import Settings
from qrl.recipe import Quantize


@dataclass(frozen=True)
class Quantized:
    """A quantized checkpoint, and what it costs."""

    path: Path
    settings: Settings
    bytes: int  # of weight files on disk
    bits_per_weight: float  # stored for the quantized matrices alone, their scales and zero points included
    bits_per_parameter: float  # stored for the whole checkpoint, embeddings and norms included
    seconds: float  # loading and saving included, measuring the error not
    calibration_digest: str | None  # sha256 of the texts, in order; None: the scheme looks at none
    layer_errors: tuple[float, ...]  # see `error.between`, the first decoder layer first; empty without a probe

    @property
    def scheme(self) -> str:
        """How the weights are stored."""
        return self.settings.scheme


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
) -> Quantized:
    """Quantize a full-precision checkpoint into a new folder.

    Args:
        scheme: one of `names.QUANTIZED_SCHEMES`; "awq" needs the environment of projects/awq, the others the core one.
        source: a checkpoint folder in full precision.
        out: a folder that does not exist yet, or is empty.
        settings: from `settings.of`; default: those of a recipe that says nothing.
        calibration: chat-rendered texts, end token included, for the schemes of `settings.CALIBRATED`; others look at none.
        probe: texts to measure each layer's error on; `error.ROWS` of them are looked at.
        device: "cpu" or "cuda".
        stage: called with what begins: "storing", "measuring".

    Raises:
        BadInput: unknown scheme, a source that cannot be quantized or holds NaN, or texts that are missing or too long; before
            anything is stored.
        QrlError: the environment cannot run the scheme, or the staged copy is not the same model.
    """
    settings = settings or choices.of(scheme, Quantize(), 0)
    found = checkpoint.check(source)
    if found.quantization:
        raise BadInput(f"{source} is already quantized ({found.quantization}): quantize the full-precision checkpoint.")
    check_fit(source, settings)
    if out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty: name a new folder for the quantized checkpoint.")
    looks = scheme in choices.CALIBRATED
    rows = texts.rows(token_ids(source, calibration), settings.max_tokens) if looks else []
    probed = token_ids(source, probe)
    check_finite(source)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    stage("storing")
    try:
        errors = _store(source, out, settings, rows, probed, device)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # nothing is left half-written
        raise
    carry(source, out)
    seconds = time.perf_counter() - started
    if probed and scheme != names.AWQ:  # which measures its own, in its own environment
        from qrl.quantize import error

        stage("measuring")
        errors = error.measure(source, out, probed, device)
    per_weight, per_parameter = stored_bits(source, out)
    return Quantized(
        path=out,
        settings=settings,
        bytes=checkpoint.check(out).bytes,
        bits_per_weight=per_weight,
        bits_per_parameter=per_parameter,
        seconds=seconds,
        calibration_digest=texts.digest(calibration) if looks else None,
        layer_errors=errors,
    )


def check_fit(source: Path, settings: Settings) -> None:
    """Refuses a checkpoint that the scheme does not fit, by its configuration alone.

    Raises:
        BadInput: a mixture of experts, a state-space model, matrices that are in no linear and would stay as they are in a
            checkpoint that is called quantized, or a layer that the scheme's groups do not divide; by name.
    """
    from qrl.formats.fakequant import linears

    config = checkpoint.config(source)
    if settings.scheme == names.AWQ:  # in an environment whose transformers is older
        from qrl.quantize import staging

        config = staging.rewrite(config)
    model = pretrained.skeleton(config)
    if settings.scheme in names.ROUNDED:
        linears.check_fit(model, settings.scheme.removeprefix(names.ROUNDED_PREFIX))
        return
    linears.check_architecture(model, transposed=settings.scheme in names.BITSANDBYTES)
    if settings.scheme in (*choices.GROUPED, *choices.FIXED_GROUP):
        from qrl.quantize import widths

        widths.check(model, settings.group_size, outputs=choices.AWQ_WORD if settings.scheme == names.AWQ else 1)


def check_finite(source: Path) -> None:
    """Refuses weights that are not all numbers: some schemes store them as they are, others fail, or hide them in a scale.

    Raises:
        BadInput: it names the first such tensor.
    """
    for name, tensor in checkpoint.tensors(source):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise BadInput(
                f"{source} holds NaN or infinity in {name}, which every scheme would pass on: give weights that are all numbers."
            )


def _store(source: Path, out: Path, settings: Settings, rows: list, probe: list, device: str) -> tuple[float, ...]:
    """Writes the weights; each family in a file of its own, imported where it is used."""
    if settings.scheme in names.BITSANDBYTES:
        from qrl.quantize import bnb

        bnb.quantize(source, out, scheme=settings.scheme, device=device, seed=settings.seed)
    elif settings.scheme == names.AWQ:
        from qrl.quantize import awq

        return awq.quantize(source, out, settings=settings, rows=rows, probe=probe, device=device)
    elif settings.scheme in names.ROUNDED:
        from qrl.quantize import rounded

        rounded.quantize(source, out, settings=settings, rows=rows)
    else:
        from qrl.quantize import compressed

        compressed.quantize(source, out, settings=settings, rows=rows, device=device)
    return ()


def token_ids(source: Path, given: Sequence[str]) -> list[list[int]]:
    """Texts as the checkpoint's tokenizer reads them, special tokens as they stand there."""
    if not given:
        return []
    from qrl.quantize import staging

    tokenizer = staging.tokenizer(source)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in given]


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
    bits = 8 * sum(
        entry.bytes for name, entry in after.items() if not name.endswith(".bias") and _module(name) in modules
    )
    weights = sum(before[name].numel for name in quantized)
    parameters = sum(entry.numel for entry in before.values())
    return bits / weights if weights else 0.0, 8 * sum(entry.bytes for entry in after.values()) / parameters


def _kept(entry: checkpoint.Entry, stored: checkpoint.Entry | None) -> bool:
    return stored is not None and stored.shape == entry.shape and stored.dtype in checkpoint.header.FLOATS


def _module(name: str) -> str:
    """The module that a tensor belongs to: `a.b` for a.b.qweight and for a.b.weight.quant_state.bitsandbytes__nf4."""
    module, found, _ = name.partition(".weight.")
    return module if found else name.rpartition(".")[0]
