"""What the schemes of a study really store: its error, and how much of the update is in it.

The error of a stored matrix is ‖Q(W) - W‖² / ‖W‖², W being the full-precision matrix of the same variant.

AWQ does not store Q(W). It multiplies the columns of W by a scale each and divides what comes before by it, a norm's weights or the
rows of the linear before, so that the model stays the same but for rounding. What it stores is measured in W's own space: columns are
divided by the norm's ratio, full-precision over stored, where a norm feeds the linear. Where a linear feeds it (o_proj, down_proj), the
scale is nowhere to be read: column j is divided by its projection on the true one, <Q_j, W_j> / <W_j, W_j>, and rows of the linears that
were divided (v_proj, up_proj) likewise. In a test with known scales of wide spread the error of these comes out within 6 % of the true
one, that of the others within 0.1 %. A checkpoint whose norms are those of its variant was not scaled, and is taken as it is.

Codes are compared as stored, code less zero point. Under AWQ each checkpoint has searched scales and clipping of its own, so its
code-flip rate counts what that search moved, too: it says how different the files are, not how far training went.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.diagnose import movement, weights
from qrl.errors import BadInput
from qrl.formats import rtn, stored

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

FED_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("self_attn", ("input_layernorm",))),
    **dict.fromkeys(("gate_proj", "up_proj"), ("mlp", ("pre_feedforward_layernorm", "post_attention_layernorm"))),
}
DIVIDED = ("v_proj", "up_proj")  # linears whose rows AWQ divides, for the one that they feed
BLOCK = 1 << 20  # weights looked at together
PACKED = (
    "quant_method",
    "format",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "bits",
    "group_size",
)  # settings that say what a code is
SAME = 1e-2  # norms that differ by less were rounded, not scaled


def measure(
    full: Mapping[str, Path],
    quantized: Mapping[str, Path],
    scheme: str,
    progress: Callable[[int], object] = lambda n: None,
) -> pandas.DataFrame:
    """Error of every matrix that a scheme stores, and what it keeps of the update.

    Args:
        full: full-precision checkpoint folder by variant; base first.
        quantized: the same variants' checkpoints under the scheme; one may be missing.
        scheme: its name, for the rows.
        progress: called with 1 after each matrix.

    Returns:
        A row per variant and matrix: scheme, variant, tensor, layer, projection, numel, relative_mse, snr_db, max_error; and on the
        trained variant's rows code_flip_rate and what is stored of the update (see `movement`), if both variants are there.

    Raises:
        BadInput: full precision where a quantized checkpoint is expected, an unknown packing, two packings under one name, or
            another model's matrices.
    """
    import pandas

    variants = [variant for variant in full if variant in quantized]
    wanted = _wanted(full, quantized, variants)
    scaled = {variant: _Scaling(full[variant], quantized[variant]) for variant in variants}
    sources = {variant: stored.matrices(quantized[variant], wanted) for variant in variants}
    originals = {variant: checkpoint.tensors(full[variant], wanted) for variant in variants}
    rows = []
    for name in wanted:
        rows += [{"scheme": scheme} | row for row in _compared(name, sources, originals, scaled, (full, quantized))]
        progress(1)
    return pandas.DataFrame(rows)


def _compared(
    name: str, sources: Mapping, originals: Mapping, scaled: Mapping, places: tuple[Mapping, Mapping]
) -> list[dict]:
    """A matrix's rows, a variant each. What it reads lies in memory no longer than this takes: the next one is as large."""
    found = {variant: next(source)[1] for variant, source in sources.items()}
    true = {variant: next(original)[1] for variant, original in originals.items()}
    rows, values = [], {}
    for variant, each in found.items():
        _check_shape(name, each.values, true[variant], [place[variant] for place in places])
        values[variant] = scaled[variant].undone(name, each.values, true[variant])
        error = _error(values[variant], true[variant])
        if not math.isfinite(error["max_error"]):
            broken = (each.numel() - int(each.isfinite().sum()) for each in (values[variant], true[variant]))
            raise BadInput(
                f"{name} of {places[1][variant]} stands for {next(broken):,} values that are NaN or infinite, {places[0][variant]} holds {next(broken):,}: "
                "quantize a whole model again."
            )
        rows.append({"variant": variant, **weights.place(name), **error})
    if len(rows) == 2:
        if len({(each.codes.shape, each.codes.dtype) for each in found.values()}) == 2:
            raise _two_packings(places[1], name)
        change, flips = movement.Change(), _flips(*found.values())
        for first, *parts in zip(
            count(), *(_blocks(each) for each in (*true.values(), *values.values())), strict=False
        ):
            change.add(*parts[:2], tuple(parts[2:]), 0 if first else flips)
        moved = change.result()
        rows[-1] |= {
            key: moved[key]
            for key in ("code_flip_rate", "update_survival", "update_cosine", "update_projection", "change_norm")
        }
    return rows


def _check_shape(name: str, values: Tensor, original: Tensor, places: list[Path]) -> None:
    if values.shape != original.shape:
        shapes = ("×".join(map(str, each.shape)) for each in (values, original))
        raise BadInput(
            f"{name} of {places[1]} stands for {next(shapes)} weights, but {places[0]} has {next(shapes)}: give checkpoints made of the model itself."
        )


def totals(frame: pandas.DataFrame, variant: str) -> dict[str, float]:
    """One scheme's rows of one variant summed up: relative_mse of all weights together, and what `movement.totals` says of updates."""
    rows = frame[frame["variant"] == variant]
    energy = rows["energy"]
    found = {"relative_mse": float((rows["relative_mse"] * energy).sum() / energy.sum())}
    if "change_norm" in rows and rows["change_norm"].notna().all():
        found |= movement.totals(rows)
    return found


class _Scaling:
    """How one checkpoint's matrices were scaled against their full-precision ones."""

    def __init__(self, full: Path, quantized: Path) -> None:
        norms = [name for name, entry in checkpoint.entries(full).items() if len(entry.shape) == 1 and "norm" in name]
        there = checkpoint.entries(quantized)
        norms = [name for name in norms if name in there]
        self.ratios = {}
        for (name, before), (_, after) in zip(
            checkpoint.tensors(full, norms), checkpoint.tensors(quantized, norms), strict=True
        ):
            old, new = before.float(), after.float()
            self.ratios[name] = (old / new).where(new != 0, 1.0)
        self.any = any(((ratio - 1).abs() > SAME).any() for ratio in self.ratios.values())

    def undone(self, name: str, values: Tensor, original: Tensor) -> Tensor:
        """The stored matrix (O, I) in the space of the original; it is written over."""
        if not self.any:
            return values
        block, _, projection = name.removesuffix(".weight").rpartition(".")
        parent, norms = FED_BY.get(projection, ("", ()))
        layer = block.removesuffix(f".{parent}")
        ratio = next((self.ratios[norm] for kind in norms if (norm := f"{layer}.{kind}.weight") in self.ratios), None)
        values /= _fit(values, original, 0) if ratio is None else ratio
        if projection in DIVIDED:
            values /= _fit(values, original, 1)[:, None]
        return values


def _fit(values: Tensor, original: Tensor, dim: int) -> Tensor:
    """How long each column (dim 0) or row (dim 1) of the stored matrix is along the original one; 1 where it is zero."""
    import torch

    pairs = zip(_blocks(values), map(torch.Tensor.float, _blocks(original)), strict=True)
    parts = [
        torch.stack([(value * true).sum(dim), true.square().sum(dim)]) for value, true in pairs
    ]  # (2, I), or (2, R) a block
    along, energy = torch.stack(parts).sum(0) if dim == 0 else torch.cat(parts, 1)
    factor = along / energy
    return factor.where(factor.isfinite() & (factor > 0), 1.0)


def _blocks(matrix: Tensor) -> Sequence[Tensor]:
    """Its rows, so many at a time that what is computed of them stays small beside the matrix."""
    return matrix.split(max(1, BLOCK // matrix.shape[1]))


def _error(values: Tensor, original: Tensor) -> dict[str, float]:
    squared, energy, largest = 0.0, 0.0, 0.0
    for value, true in zip(_blocks(values), _blocks(original), strict=True):
        off = (value - true.float()).double()
        squared += off.square().sum().item()
        energy += true.double().square().sum().item()
        largest = max(off.abs().max().item(), largest)  # in this order NaN stays
    relative = squared / energy if energy else math.nan
    return {
        "numel": original.numel(),
        "energy": energy,
        "relative_mse": relative,
        "snr_db": rtn.snr_db(relative),
        "max_error": largest,
    }


def _flips(before: stored.Stored, after: stored.Stored) -> int:
    """Codes that differ. Packed ones are compared by their four or eight bits, as many to a word as there are weights to it."""
    import torch

    old, new = (each.codes.contiguous().view(torch.uint8).flatten() for each in (before, after))
    bits = 8 * old.numel() // before.values.numel()
    if bits == 8:
        return int((old != new).sum())
    different = old ^ new
    return int(((different & 15) != 0).sum()) + int(((different >> 4) != 0).sum())


def _wanted(full: Mapping[str, Path], quantized: Mapping[str, Path], variants: list[str]) -> list[str]:
    """The quantized matrices, which must be the same in all variants and of their full-precision checkpoints' shapes."""
    listed = {variant: stored.names(quantized[variant]) for variant in variants}
    for variant in variants:
        known = checkpoint.entries(full[variant])
        strange = sorted(set(listed[variant]) - set(known)) or sorted(set(listed[variant]) ^ set(listed[variants[0]]))
        if strange:
            where = f"{full[variant]} or the other variant"
            raise BadInput(
                f"{quantized[variant]} stores {strange[0]}, which {where} does not: give checkpoints made of the model itself."
            )
    settings = [checkpoint.config(quantized[variant])["quantization_config"] for variant in variants]
    for key in PACKED:
        if settings[0].get(key) != settings[-1].get(key):
            raise _two_packings(quantized, key)
    return listed[variants[0]]


def _two_packings(quantized: Mapping[str, Path], where: str) -> BadInput:
    folders = " and ".join(map(str, quantized.values()))
    return BadInput(
        f"{folders} are not stored alike ({where} differs), but are given as one scheme: give both variants under one scheme, other schemes under names of their own."
    )
