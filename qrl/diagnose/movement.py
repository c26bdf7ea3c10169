"""How far training moved the weights, and whether a storage in few bits can represent the move.

W is a matrix before training, W' after it, Δ = W' - W its *update*. Q(W) is what a scheme stores of W, as a matrix.
README.md defines the measures. Those of stored updates, from flips to projection, were defined for this project and
have no source. Update survival, ‖Q(W') - Q(W)‖ / ‖Δ‖, can be far above 1, since two roundings add noise as long as a
step of the grid, however small the update; its cosine with Δ separates a stored update from noise of the same length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path

import pandas
import torch
from torch import Tensor

from qrl import checkpoint
from qrl.checkpoint.stream import Rows
from qrl.diagnose import rank, weights
from qrl.diagnose.sweep import BLOCK, Sources, sweep
from qrl.errors import BadInput
from qrl.formats import proxy
from qrl.recipe.sections import Diagnose

# Of sparsity. Source: Mukherjee et al. (arXiv 2505.11711), who found that RL changes only a small part of the weights.
TOLERANCE = 1e-5
RANK_NUMEL = 1 << 26  # the largest update with a measured rank, which limits memory; heads of large models exceed it


@dataclass
class Change:
    """Sums over the rows of a matrix before and after training; those of different rows add up by `merge`."""

    numel: int = 0
    base_squares: float = 0.0  # ‖W‖²
    change_squares: float = 0.0  # ‖Δ‖²
    stored_squares: float = 0.0  # ‖Q(W') - Q(W)‖²
    product: float = 0.0  # <Q(W') - Q(W), Δ>
    unchanged: int = 0  # weights
    small: int = 0  # weights that changed by at most TOLERANCE
    flips: int = 0  # codes that differ
    broken: int = 0  # NaN or infinite, in both together

    def add(self, before: Tensor, after: Tensor, stored: tuple[Tensor, Tensor], flips: int) -> None:
        """Add rows (R, I) of W and W', of Q(W) and Q(W'), and how many of their codes differ."""
        before = before.float()
        after = after.float()
        delta = after - before
        stored_before, stored_after = stored
        stored_delta = stored_after - stored_before

        self.numel += before.numel()
        self.base_squares += _sum_of_squares(before)
        self.change_squares += _sum_of_squares(delta)
        self.stored_squares += _sum_of_squares(stored_delta)
        self.product += torch.sum(delta * stored_delta, dtype=torch.float64).item()
        self.unchanged += int((before == after).sum())
        self.small += int((delta.abs() <= TOLERANCE).sum())
        self.flips += flips
        if not math.isfinite(self.change_squares):  # only then is it worth a look at every weight
            self.broken += sum(values.numel() - int(values.isfinite().sum()) for values in (before, after))

    def merge(self, change: Change) -> None:
        """Add other rows of the same matrix."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(change, field.name))

    def result(self) -> dict[str, float]:
        """Return the measures, NaN where they would divide by zero."""
        change_norm = math.sqrt(self.change_squares)
        lengths = math.sqrt(self.stored_squares) * change_norm
        return {
            "numel": self.numel,
            "change_norm": change_norm,
            "relative_change": math.sqrt(_ratio(self.change_squares, self.base_squares)),
            "unchanged_frac": self.unchanged / self.numel,
            "delta_sparsity": self.small / self.numel,
            "code_flip_rate": self.flips / self.numel,
            "update_survival": math.sqrt(_ratio(self.stored_squares, self.change_squares)),
            "update_cosine": _ratio(self.product, lengths),
            "update_projection": _ratio(self.product, self.change_squares),
        }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def movement(
    base: Path | str,
    trained: Path | str,
    settings: Diagnose = Diagnose(),
    *,
    device: str = "cpu",
    progress: Callable[[int], object] = lambda n: None,
) -> pandas.DataFrame:
    """Measure how far training moved every weight matrix, and what the round-to-nearest proxy stores of that.

    Args:
        base, trained: full-precision checkpoint folders of one architecture.
        settings, device, progress: as in `weights.measure`; each checkpoint has its own scales. Effective ranks take
            longer than all the rest.

    Returns:
        A row per matrix: tensor, layer, projection, and `Change.result`; effective_rank and its stderr.

    Raises:
        BadInput: a checkpoint is quantized, the two differ in tensors or shapes, or a matrix contains NaN or infinity.
    """
    check_same(base, trained)
    trained_sources = dict(weights.matrices(trained, settings.embeddings))
    pairs = []  # each matrix with where it is stored before and after training
    for name, base_sources in weights.matrices(base, settings.embeddings):
        if name in trained_sources:
            pairs.append((name, [*base_sources, *trained_sources[name]]))

    def add(change: Change, _first_row: int, before: Tensor, after: Tensor) -> None:
        encoded_before = proxy.encode(before, settings.bits, settings.group_size)
        encoded_after = proxy.encode(after, settings.bits, settings.group_size)
        width = before.shape[1]
        stored = (proxy.decode(*encoded_before, width), proxy.decode(*encoded_after, width))
        flips = int((encoded_before[0] != encoded_after[0]).sum())
        change.add(before, after, stored, flips)

    rows = []
    for name, change in sweep(pairs, lambda _: Change(), add, device=device):
        weights.check_finite(name, f"{base} and {trained}", change.broken)
        rows.append(weights.tensor_labels(name) | change.result())
        progress(1)
    if settings.effective_rank:
        rows = [row | _effective_rank(sources, device) for row, (_, sources) in zip(rows, pairs, strict=True)]
    return pandas.DataFrame(rows)


def check_same(base: Path | str, trained: Path | str) -> None:
    """Raise BadInput if two checkpoints differ in tensors or shapes; the sentence lists the difference."""
    base_shapes = _shapes(base)
    trained_shapes = _shapes(trained)
    differences = []
    for name in sorted(base_shapes.keys() | trained_shapes.keys()):
        base_shape = base_shapes.get(name)
        trained_shape = trained_shapes.get(name)
        if base_shape != trained_shape:
            differences.append(f"{name} ({_shape_text(base_shape)} and {_shape_text(trained_shape)})")
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise BadInput(
            f"{base} and {trained} do not have the same architecture: {', '.join(differences[:3])}{more} differ. "
            "Compare a model with its own base."
        )


def _shapes(path: Path | str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors; without a tied head, which may be stored or not."""
    shapes = {name: entry.shape for name, entry in checkpoint.entries(path).items()}
    if checkpoint.config(path).get("tie_word_embeddings"):
        shapes.pop(weights.HEAD, None)
    return shapes


def totals(moved: pandas.DataFrame) -> dict[str, float]:
    """Summarize the rows of `movement`: shares of weights, and survival, cosine and projection of the whole update.

    Shares count every weight alike; norms are those of all matrices as one long vector.
    """
    size_share = moved["numel"] / moved["numel"].sum()
    columns = [name for name in ("code_flip_rate", "unchanged_frac", "delta_sparsity") if name in moved]
    shares = {name: float((moved[name] * size_share).sum()) for name in columns}

    change_norms = moved["change_norm"]
    stored_norms = (moved["update_survival"] * change_norms).fillna(0)
    true_length = float((change_norms**2).sum()) ** 0.5
    stored_length = float((stored_norms**2).sum()) ** 0.5
    product = float((moved["update_cosine"] * stored_norms * change_norms).fillna(0).sum())
    return shares | {
        "update_survival": _ratio(stored_length, true_length),
        "update_cosine": _ratio(product, true_length * stored_length),
        "update_projection": _ratio(product, true_length**2),
    }


def _effective_rank(sources: Sources, device: str) -> dict[str, float]:
    """Return the effective rank of a matrix's update and its standard error; NaN if the matrix is too large."""
    (base_folder, base_entry), (trained_folder, trained_entry) = sources
    if base_entry.numel > RANK_NUMEL:
        return {"effective_rank": math.nan, "effective_rank_stderr": math.nan}
    delta = torch.empty(base_entry.shape, dtype=torch.float32, device=device)
    with closing(Rows(base_folder, device)) as base_rows, closing(Rows(trained_folder, device)) as trained_rows:
        # Filled block by block, so that neither matrix is in memory besides the update.
        first = 0
        for block in delta.split(max(1, BLOCK["cpu"] // base_entry.shape[1])):
            last = first + len(block)
            before = base_rows.read(base_entry, first, last).float()
            after = trained_rows.read(trained_entry, first, last).float()
            torch.sub(after, before, out=block)
            first = last
    value, stderr = rank.effective(delta)
    return {"effective_rank": value, "effective_rank_stderr": stderr}


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape))


def _sum_of_squares(values: Tensor) -> float:
    """Return Σ v² in float64 from sums over rows in float32, in a tenth of the time of converting every weight."""
    return torch.linalg.vector_norm(values, dim=-1).double().square().sum().item()
