"""The error of the weights that a scheme stores, and how much of the update they contain.

The error of a stored matrix is ‖Q(W) - W‖² / ‖W‖², W being the full-precision matrix of the same variant.

AWQ does not store Q(W). It multiplies each column of W by a scale and divides the layer before by it, a norm's weights
or the rows of the linear before, so that the model stays the same but for rounding. Its matrices are measured in W's
own space. Where a norm feeds the linear, columns are divided by the norm's ratio, full precision over stored. Where a
linear feeds it (o_proj, down_proj), the scale is not stored: column j is divided by its projection on the true one,
<Q_j, W_j> / <W_j, W_j>, and so are rows of the linears that were divided (v_proj, up_proj). In a test with known scales
of wide spread their error comes out within 6 % of the true one, that of the others within 0.1 %. A checkpoint with the
norms of its full-precision variant was not scaled, and is measured as stored. SpinQuant's rotations are undone, and
its norms, which are ones, divided out.

Codes are compared as stored, code minus zero point. Under AWQ each checkpoint has scales and clipping of its own
search, so its code-flip rate includes what that search moved: it says how different the files are, not how far training
went.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas
import torch
from torch import Tensor

from qrl import checkpoint
from qrl.diagnose import movement, sweep, weights
from qrl.errors import BadInput
from qrl.formats import rotation, rtn, stored

FED_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("self_attn", ("input_layernorm",))),
    **dict.fromkeys(("gate_proj", "up_proj"), ("mlp", ("pre_feedforward_layernorm", "post_attention_layernorm"))),
}
DIVIDED = ("v_proj", "up_proj")  # linears with rows that AWQ divides, for the linear that they feed
PACKED = ("quant_method", "format", "load_in_8bit", "bnb_4bit_quant_type", "bits", "group_size")  # define a code
SAME = 1e-2  # norms that differ by less were rounded, not scaled
OF_UPDATE = ("code_flip_rate", "update_survival", "update_cosine", "update_projection", "change_norm")


def measure(
    full: Mapping[str, Path],
    quantized: Mapping[str, Path],
    scheme: str,
    progress: Callable[[int], object] = lambda n: None,
) -> pandas.DataFrame:
    """Measure the error of every matrix that a scheme stores, and what it keeps of the update.

    Args:
        full: full-precision checkpoint folder by variant; base first.
        quantized: the same variants' checkpoints under the scheme; one may be missing.
        scheme: its name, for the rows.
        progress: called with 1 after each matrix.

    Returns:
        A row per variant and matrix: scheme, variant, tensor, layer, projection, numel, energy, relative_mse, snr_db,
        max_error; with both variants, the trained one's rows also have code_flip_rate and what is stored of the update
        (see `movement`).

    Raises:
        BadInput: a checkpoint is in full precision or an unknown packing, the two are packed differently, or their
            matrices are not those of `full`.
    """
    variants = [variant for variant in full if variant in quantized]
    wanted = _wanted(full, quantized, variants)
    pairs = {variant: _Pair(full[variant], quantized[variant], wanted) for variant in variants}
    rows = []
    for name in wanted:
        # In a function of its own, so that one matrix is freed before the next, as large, is read.
        rows += [{"scheme": scheme} | row for row in _compared(name, pairs)]
        progress(1)
    return pandas.DataFrame(rows)


def _compared(name: str, pairs: Mapping[str, _Pair]) -> list[dict]:
    rows, codes, true, values = [], [], [], []
    for variant, pair in pairs.items():
        (_, coded), (_, original) = next(pair.packed), next(pair.originals)
        if coded.values.shape != original.shape:
            shapes = ("×".join(map(str, matrix.shape)) for matrix in (coded.values, original))
            raise BadInput(
                f"{name} of {pair.quantized} stands for {next(shapes)} weights, but {pair.full} has {next(shapes)}: "
                "give checkpoints made from this model."
            )
        value = pair.unscaled(name, coded.values, original)
        error = _error(value, original)
        if not math.isfinite(error["max_error"]):
            broken = (matrix.numel() - int(matrix.isfinite().sum()) for matrix in (value, original))
            raise BadInput(
                f"{name} of {pair.quantized} stands for {next(broken):,} values that are NaN or infinite, {pair.full} "
                f"holds {next(broken):,}: quantize an intact model again."
            )
        rows.append({"variant": variant, **weights.place(name), **error})
        codes.append(coded)
        true.append(original)
        values.append(value)
    if len(rows) == 2:
        if len({(coded.codes.shape, coded.codes.dtype) for coded in codes}) == 2:
            raise _two_packings([pair.quantized for pair in pairs.values()], name)
        change = movement.Change(flips=_flips(*codes))
        for old, new, *parts in zip(*map(_blocks, (*true, *values)), strict=True):
            change.add(old, new, tuple(parts), 0)
        moved = change.result()
        rows[-1] |= {key: moved[key] for key in OF_UPDATE}
    return rows


def totals(frame: pandas.DataFrame, variant: str) -> dict[str, float]:
    """Summarize one scheme's rows of one variant: relative_mse of all weights together, and `movement.totals`."""
    rows = frame[frame["variant"] == variant]
    total = {"relative_mse": float((rows["relative_mse"] * rows["energy"]).sum() / rows["energy"].sum())}
    updated = "change_norm" in rows and rows["change_norm"].notna().all()
    return total | (movement.totals(rows) if updated else {})


class _Pair:
    """One variant's two checkpoints, their matrices in the order wanted, and how the quantized ones are scaled."""

    def __init__(self, full: Path, quantized: Path, wanted: list[str]) -> None:
        self.full, self.quantized = full, quantized
        self.packed, self.originals = stored.matrices(quantized, wanted), checkpoint.tensors(full, wanted)
        entries, kept = checkpoint.entries(full), checkpoint.entries(quantized)
        norms = [name for name, entry in entries.items() if len(entry.shape) == 1 and "norm" in name and name in kept]
        both = zip(checkpoint.tensors(full, norms), checkpoint.tensors(quantized, norms), strict=True)
        self.ratios = {name: (old.float() / new.float()).where(new.float() != 0, 1.0) for (name, old), (_, new) in both}
        self.rotations = rotation.of(checkpoint.config(quantized)["quantization_config"])
        self.scaled = any(((ratio - 1).abs() > SAME).any() for ratio in self.ratios.values())

    def unscaled(self, name: str, values: Tensor, original: Tensor) -> Tensor:
        """Return the stored matrix (O, I) in the space of the original; `values` is overwritten."""
        values = rotation.undone(values, self.rotations, name.removesuffix(".weight"))
        if not self.scaled:
            return values
        block, _, projection = name.removesuffix(".weight").rpartition(".")
        parent, norms = FED_BY.get(projection, ("", ()))
        layer = block.removesuffix(f".{parent}")
        ratio = next((self.ratios[norm] for kind in norms if (norm := f"{layer}.{kind}.weight") in self.ratios), None)
        if ratio is not None:
            values /= ratio
        if self.rotations:
            return values
        if ratio is None:
            values /= _fit(values, original, 0)
        if projection in DIVIDED:
            values /= _fit(values, original, 1)[:, None]
        return values


def _fit(values: Tensor, original: Tensor, dim: int) -> Tensor:
    """Return each column's (dim 0) or row's (dim 1) projection on the original one; 1 where that is zero."""
    pairs = zip(_blocks(values), map(torch.Tensor.float, _blocks(original)), strict=True)
    sums = [torch.stack([(value * true).sum(dim), true.square().sum(dim)]) for value, true in pairs]  # (2, I) or (2, R)
    along, energy = torch.stack(sums).sum(0) if dim == 0 else torch.cat(sums, 1)
    factor = along / energy
    return factor.where(factor.isfinite() & (factor > 0), 1.0)


def _blocks(matrix: Tensor) -> Sequence[Tensor]:
    """Return blocks of rows, so small that what is computed of one needs little memory."""
    return matrix.split(max(1, sweep.BLOCK["cpu"] // matrix.shape[1]))


def _error(values: Tensor, original: Tensor) -> dict[str, float]:
    squared, energy, largest = 0.0, 0.0, 0.0
    for value, true in zip(_blocks(values), _blocks(original), strict=True):
        off = (value - true.float()).double()
        squared += off.square().sum().item()
        energy += true.double().square().sum().item()
        largest = max(off.abs().max().item(), largest)  # in this order NaN stays
    relative = squared / energy if energy else math.nan
    errors = {"relative_mse": relative, "snr_db": rtn.snr_db(relative), "max_error": largest}
    return {"numel": original.numel(), "energy": energy} | errors


def _flips(before: stored.Stored, after: stored.Stored) -> int:
    """Return how many codes differ; packed ones are compared by the bits of each weight, the lowest first in a row."""
    old, new = (coded.codes.contiguous().view(torch.uint8) for coded in (before, after))
    different = old ^ new
    bits = 8 * old.numel() // before.values.numel()
    if bits in (4, 8):
        parts = [different] if bits == 8 else [different & 15, different >> 4]
        return sum(int(part.count_nonzero()) for part in parts)
    inputs, places, flips = before.values.shape[1], torch.arange(8, dtype=torch.uint8), 0
    for rows in different.split(max(1, sweep.BLOCK["cpu"] // (8 * different.shape[1]))):
        single = (rows.unsqueeze(-1) >> places & 1).flatten(1)[:, : inputs * bits]  # the rest fills the last word
        flips += int(single.unflatten(1, (inputs, bits)).any(-1).sum())
    return flips


def _wanted(full: Mapping[str, Path], quantized: Mapping[str, Path], variants: list[str]) -> list[str]:
    """Return the quantized matrices, after a check that all variants and their full-precision checkpoints have them."""
    listed = {variant: stored.names(quantized[variant]) for variant in variants}
    for variant, names in listed.items():
        known = checkpoint.entries(full[variant])
        if strange := sorted(set(names) - set(known)) or sorted(set(names) ^ set(listed[variants[0]])):
            raise BadInput(
                f"{quantized[variant]} stores {strange[0]}, which {full[variant]} or the other variant does not: "
                "give checkpoints made from this model."
            )
    settings = [checkpoint.config(quantized[variant])["quantization_config"] for variant in variants]
    for key in PACKED:
        if settings[0].get(key) != settings[-1].get(key):
            raise _two_packings([quantized[variant] for variant in variants], key)
    return listed[variants[0]]


def _two_packings(quantized: list[Path], where: str) -> BadInput:
    folders = " and ".join(map(str, quantized))
    return BadInput(
        f"{folders} are packed differently ({where} differs), but were given as one scheme: "
        "give different packings under different scheme names."
    )
