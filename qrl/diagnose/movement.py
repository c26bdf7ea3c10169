"""How far training moved the weights, and whether a storage in few bits can represent the move.

W is a matrix before training, W' after it, Δ = W' - W its *update*. Q(W) is what a scheme stores of W, as a matrix.
README.md defines the measures. Those of stored updates, flips to projection, have no source: they are this project's
own. Update survival, ‖Q(W') - Q(W)‖ / ‖Δ‖, can be far above 1, since two roundings add noise as long as a step of the
grid, however small the update; its cosine with Δ separates a stored update from noise of the same length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
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
from qrl.formats import rtn
from qrl.recipe.sections import Diagnose

# Of sparsity. Source: Mukherjee et al. (arXiv 2505.11711), who found that RL changes only a small part of the weights.
TOLERANCE = 1e-5
RANK_NUMEL = 1 << 26  # the largest update with a measured rank, which limits memory; heads of large models exceed it


@dataclass
class Change:
    """Sums over the rows of a matrix before and after training; those of different rows add up by `merge`."""

    numel: int = 0
    base: float = 0.0  # ‖W‖²
    change: float = 0.0  # ‖Δ‖²
    stored: float = 0.0  # ‖Q(W') - Q(W)‖²
    product: float = 0.0  # <Q(W') - Q(W), Δ>
    same: int = 0
    small: int = 0
    flips: int = 0
    broken: int = 0  # NaN or infinite, in both together

    def add(self, before: Tensor, after: Tensor, stored: tuple[Tensor, Tensor], flips: int) -> None:
        """Add rows (R, I) of W and W', of Q(W) and Q(W'), and how many of their codes differ."""
        old, new = before.float(), after.float()
        delta, moved = new - old, stored[1] - stored[0]
        self.numel += old.numel()
        self.base += _sum_of_squares(old)
        self.change += _sum_of_squares(delta)
        self.stored += _sum_of_squares(moved)
        self.product += torch.sum(delta * moved, dtype=torch.float64).item()
        self.same += int((old == new).sum())
        self.small += int((delta.abs() <= TOLERANCE).sum())
        self.flips += flips
        if not math.isfinite(self.change):
            self.broken += sum(values.numel() - int(values.isfinite().sum()) for values in (old, new))

    def merge(self, other: Change) -> None:
        """Add other rows of the same matrix."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def result(self) -> dict[str, float]:
        """Return the measures, NaN where they would divide by zero."""
        lengths = math.sqrt(self.stored) * math.sqrt(self.change)
        return {
            "numel": self.numel,
            "change_norm": math.sqrt(self.change),
            "relative_change": math.sqrt(self.change / self.base) if self.base else math.nan,
            "unchanged_frac": self.same / self.numel,
            "delta_sparsity": self.small / self.numel,
            "code_flip_rate": self.flips / self.numel,
            "update_survival": math.sqrt(self.stored / self.change) if self.change else math.nan,
            "update_cosine": self.product / lengths if lengths else math.nan,
            "update_projection": self.product / self.change if self.change else math.nan,
        }


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
    after = dict(weights.matrices(trained, settings.embeddings))
    pairs = [(name, [*own, *after[name]]) for name, own in weights.matrices(base, settings.embeddings) if name in after]

    def add(change: Change, _: int, *blocks: Tensor) -> None:
        codes = [rtn.encode(block, settings.bits, settings.group_size) for block in blocks]
        stored = tuple(rtn.decode(*coded, blocks[0].shape[1]) for coded in codes)
        change.add(*blocks, stored, int((codes[0][0] != codes[1][0]).sum()))

    rows = []
    for name, change in sweep(pairs, lambda _: Change(), add, device=device):
        weights.check_finite(name, f"{base} and {trained}", change.broken)
        rows.append(weights.place(name) | change.result())
        progress(1)
    if settings.effective_rank:
        rows = [row | _rank(sources, device) for row, (_, sources) in zip(rows, pairs, strict=True)]
    return pandas.DataFrame(rows)


def check_same(base: Path | str, trained: Path | str) -> None:
    """Raise BadInput if two checkpoints differ in tensors or shapes; the sentence lists the difference."""
    shapes = [{name: entry.shape for name, entry in checkpoint.entries(path).items()} for path in (base, trained)]
    for shape, path in zip(shapes, (base, trained), strict=True):  # a tied head may be stored or not
        if checkpoint.config(path).get("tie_word_embeddings"):
            shape.pop(weights.HEAD, None)
    pairs = {name: [shape.get(name) for shape in shapes] for name in sorted(shapes[0].keys() | shapes[1].keys())}
    differing = [f"{name} ({_shape(old)} and {_shape(new)})" for name, (old, new) in pairs.items() if old != new]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise BadInput(
            f"{base} and {trained} do not have the same architecture: {', '.join(differing[:3])}{more} differ. "
            "Compare a model with its own base."
        )


def totals(moved: pandas.DataFrame) -> dict[str, float]:
    """Summarize the rows of `movement`: shares of weights, and survival, cosine and projection of the whole update.

    Shares count every weight alike; norms are those of all matrices as one long vector.
    """
    share, change = moved["numel"] / moved["numel"].sum(), moved["change_norm"]
    shares = [name for name in ("code_flip_rate", "unchanged_frac", "delta_sparsity") if name in moved]
    stored = (moved["update_survival"] * change).fillna(0)
    product = float((moved["update_cosine"] * stored * change).fillna(0).sum())
    true_length, stored_length = float((change**2).sum()) ** 0.5, float((stored**2).sum()) ** 0.5
    lengths = true_length * stored_length
    total = {name: float((moved[name] * share).sum()) for name in shares}
    return total | {
        "update_survival": stored_length / true_length if true_length else math.nan,
        "update_cosine": product / lengths if lengths else math.nan,
        "update_projection": product / true_length**2 if true_length else math.nan,
    }


def _rank(sources: Sources, device: str) -> dict[str, float]:
    entry = sources[0][1]
    if entry.numel > RANK_NUMEL:
        return {"effective_rank": math.nan, "effective_rank_stderr": math.nan}
    delta, first = torch.empty(entry.shape, dtype=torch.float32, device=device), 0
    with ExitStack() as opened:
        readers = [(opened.enter_context(closing(Rows(folder, device))), stored) for folder, stored in sources]
        # Filled block by block, so that neither matrix is in memory beside it.
        for part in delta.split(max(1, BLOCK["cpu"] // entry.shape[1])):
            before, after = (rows.read(stored, first, first + len(part)).float() for rows, stored in readers)
            torch.sub(after, before, out=part)
            first += len(part)
    return dict(zip(("effective_rank", "effective_rank_stderr"), rank.effective(delta), strict=True))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape))


def _sum_of_squares(values: Tensor) -> float:
    """Return Σ v² in float64 from sums over rows in float32, in a tenth of the time of converting every weight."""
    return torch.linalg.vector_norm(values, dim=-1).double().square().sum().item()
