"""Every plot. A title states what was found; colours are Okabe and Ito's, told apart by the colour-blind; n is on the page.

matplotlib is loaded on first use, without pyplot and so without a display or global state. PNGs appear whole or not at all.
"""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qrl.names import BASE, FP16
from qrl.stats import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from qrl.compare import Comparison

INK, FAINT, GRID = "#222222", "#6b6b6b", "#e4e4e4"
GREY, BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#7f7f7f", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
VARIANTS = (GREY, BLUE, ORANGE, GREEN, PURPLE)  # base is grey, the first trained variant blue
VERDICTS = {"survives": GREEN, "lost": RED, "inconclusive": ORANGE}
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}
KINDS = (("attention", r"attn"), ("mlp", r"mlp"), ("other", r""))


def matrix(comparison: Comparison, path: str | Path) -> None:
    """Accuracy of every cell, variants beside each other under each scheme, with 95 % intervals and n.

    Args:
        comparison: of `qrl.compare`.
        path: the PNG to write.
    """
    figure, axes = _figure(6.4 + 0.9 * max(0, len(comparison.schemes) - 3), 4.4)
    spread = 0.24 if len(comparison.variants) == 2 else 0.78 / len(comparison.variants)
    for i, variant in enumerate(comparison.variants):
        offset = (i - (len(comparison.variants) - 1) / 2) * spread
        cells = [comparison.cells[variant, scheme] for scheme in comparison.schemes]
        x = np.arange(len(cells)) + offset
        y = np.array([cell.estimate for cell in cells])
        errors = [[cell.estimate - cell.low for cell in cells], [cell.high - cell.estimate for cell in cells]]
        colour = VARIANTS[i % len(VARIANTS)]
        axes.errorbar(x, y, yerr=errors, fmt="o", ms=8, lw=2, capsize=4, color=colour, label=variant, zorder=3)
        if len(comparison.variants) == 2:  # beside the point, away from the other one
            place = {"xytext": (-9 if i == 0 else 9, 0), "ha": "right" if i == 0 else "left", "va": "center"}
        else:
            place = {"xytext": (0, 4), "ha": "center", "va": "bottom"}
        for px, cell in zip(x, cells, strict=True):
            at = cell.estimate if len(comparison.variants) == 2 else cell.high
            axes.annotate(f"{cell.estimate:.3f}", (px, at), textcoords="offset points", color=colour, size=9, bbox=LABEL, **place)
    axes.set_xticks(range(len(comparison.schemes)), comparison.schemes, size=12)
    axes.set_xlim(-0.6, len(comparison.schemes) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylabel("accuracy")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(comparison.variants), frameon=False, borderaxespad=0.2)
    gain = comparison.row(FP16)
    found = _gain_found(gain.variant, gain.delta)
    note = f"n = {comparison.n} questions per cell, {'the same for all' if comparison.paired else 'counted per cell'}; bars are 95 % intervals of each cell (Wilson)"
    note += ".\nDifferences are paired, so their intervals are mostly narrower than these bars suggest." if comparison.paired else "."
    _finish(figure, axes, found, note, path)


def survival(comparison: Comparison, path: str | Path) -> None:
    """Gain survival of every quantized scheme as a forest plot, with the margin beyond which the gain counts as lost.

    Args:
        comparison: of `qrl.compare`, with at least one quantized scheme.
        path: the PNG to write.
    """
    rows = [row for row in comparison.rows if row.verdict]
    if not rows:
        raise ValueError("There is no quantized scheme, so gain survival is not defined: expected one beside fp16.")
    figure, axes = _figure(7.4, 1.9 + 0.72 * len(rows))
    several = len(comparison.variants) > 2
    reach = max(max(abs(row.gain_survival.low), abs(row.gain_survival.high), row.verdict.margin) for row in rows) * 1.15
    for y, row in enumerate(rows):
        value, colour = row.gain_survival, VERDICTS[row.verdict.verdict]
        axes.fill_betweenx([y - 0.5, y + 0.5], -reach, -row.verdict.margin, color=RED, alpha=0.08, lw=0)
        axes.plot([-row.verdict.margin] * 2, [y - 0.5, y + 0.5], color=RED, lw=1.4, ls=(0, (4, 2)))
        axes.plot([value.low, value.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot([value.lower, value.upper], [y, y], color=colour, lw=6, solid_capstyle="butt")
        axes.plot(value.estimate, y, "o", ms=9, color="white", mec=colour, mew=2.4)
        text = f"{row.verdict.verdict}\n{signed(value.estimate)} [{signed(value.low)}, {signed(value.high)}]"
        axes.annotate(text, (1.02, y), xycoords=("axes fraction", "data"), va="center", color=INK, size=10, annotation_clip=False)
    axes.axvline(0, color=INK, lw=1)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [f"{row.variant} · {row.scheme}" if several else row.scheme for row in rows], size=12)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("gain survival: gain under the scheme minus gain at full precision (accuracy)")
    axes.annotate("−margin", (-rows[0].verdict.margin, -0.5), (-4, 3), textcoords="offset points", ha="right", color=RED, size=9.5)
    pairing = "paired" if comparison.paired else "independent cells"
    note = f"n = {comparison.n} questions, {pairing}. Thin bar: 95 % interval; thick bar: between the one-sided 95 % bounds,\nwhich must clear the margin (dashed): right of it the gain survives, left of it (shaded) it is lost."
    _finish(figure, axes, _survival_found(rows, several), note, path)


def layer_error(weights: pd.DataFrame, path: str | Path) -> None:
    """Relative error of 4-bit rounding per layer, base against the trained variants, and by how much each tensor's moved.

    Args:
        weights: a row per variant and tensor: `variant`, `tensor`, `numel`, `w4_relative_mse` (‖W − Q(W)‖² / ‖W‖²).
        path: the PNG to write.
    """
    frame = weights.assign(place=weights["tensor"].map(_place))
    places = sorted(frame["place"].unique(), key=_order)
    x = {place: i for i, place in enumerate(places)}
    variants = [BASE, *sorted(set(frame["variant"]) - {BASE})]
    figure, panels = _figure(7.4, 3.2 * min(2, len(variants)), rows=min(2, len(variants)))
    above, *below = np.atleast_1d(panels)
    for i, variant in enumerate(variants):
        part = frame[frame["variant"] == variant]
        mean = _weighted(part, part["place"].map(x)).sort_index()
        style = {"lw": 5, "alpha": 0.45, "ms": 10} if variant == BASE else {"lw": 1.8, "ms": 5}
        above.plot(mean.index, mean, "o-", color=VARIANTS[i % len(VARIANTS)], label=variant, **style)
    above.set_ylabel("relative error of 4 bits")
    above.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(variants), borderaxespad=0.2)
    above.margins(y=0.25)
    if below:
        _changes(below[0], frame, variants, x)
    layers = [place for place in places if isinstance(place, int)]
    shown = [place for place in places if isinstance(place, str) or layers.index(place) % -(-len(layers) // 12) == 0]
    for axes in (above, *below):
        axes.set_xticks([x[place] for place in shown], [place if isinstance(place, int) else f"\n{place}" for place in shown])
    axes.set_xlabel("layer")
    note = f"{frame['tensor'].nunique()} tensors of {', '.join(variants)}. Lines: means over a layer, weighted by size{'; dots: single tensors' if below else ''}."
    _finish(figure, above, _error_found(frame, variants), note, path)


def training(history: pd.DataFrame, path: str | Path) -> None:
    """Training curves: reward, and below it the health of the run.

    Args:
        history: `step`, `reward`, and where they were logged `reward_std`, `frac_reward_zero_std`, `entropy`, `kl`;
            columns that are missing or all NaN are left out.
        path: the PNG to write.
    """
    labels = {
        "reward": "mean reward (share right)",
        "reward_std": "standard deviation of rewards",
        "frac_reward_zero_std": "groups without signal (share)",
        "entropy": "entropy (nats a token)",
        "kl": "KL to the reference (nats a token)",
    }
    shown = [column for column in labels if column in history and history[column].notna().any()]
    if "step" not in history or "reward" not in shown:
        raise ValueError(f"The history has the columns {list(history)}, but 'step' and a 'reward' with values were expected.")
    figure, grid = _figure(7.4, 2.2 + 1.5 * (len(shown) - 1) + 1.2, rows=len(shown), heights=[2, *[1] * (len(shown) - 1)])
    panels = np.atleast_1d(grid)
    for axes, column, colour in zip(panels, shown, (BLUE, SKY, PURPLE, GREEN, ORANGE), strict=False):
        part = history[["step", column]].dropna()
        smooth = part[column].rolling(2 * (len(part) // 20) + 1, center=True, min_periods=1).mean()
        axes.plot(part["step"], part[column], "o-" if len(part) <= 40 else "-", color=colour, lw=1, ms=3.5, alpha=0.4)
        axes.plot(part["step"], smooth, color=colour, lw=2.4)
        axes.set_title(labels[column], loc="left", size=10, color=INK, pad=4)
        axes.margins(x=0.02, y=0.15)
        if axes is not panels[-1]:
            axes.tick_params(labelbottom=False)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    _finish(figure, panels[0], _reward_found(history), "Faint: each logged step; bold: running mean over a tenth of the run.", path)


def _changes(axes: Axes, frame: pd.DataFrame, variants: list[str], x: dict[int | str, int]) -> None:
    """Change of each tensor's error against base, in percent, by kind of module."""
    base = frame[frame["variant"] == BASE].set_index("tensor")["w4_relative_mse"]
    trained = frame[frame["variant"].isin(variants[1:])]
    change = 100 * (trained["w4_relative_mse"] / trained["tensor"].map(base) - 1)
    kinds = trained["tensor"].map(_kind)
    for (kind, _), mark, colour, shift in zip(KINDS, "os^", (BLUE, ORANGE, GREY), (-0.12, 0.12, 0), strict=True):
        if (kinds == kind).any():
            places = trained.loc[kinds == kind, "place"].map(x) + shift
            axes.plot(places, change[kinds == kind], mark, color=colour, ms=6, alpha=0.75, mew=0, label=kind)
    axes.axhline(0, color=INK, lw=1)
    axes.set_ylabel("change by training, %")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(KINDS), borderaxespad=0.2)


def _place(tensor: str) -> int | str:
    """Number of the layer that a tensor belongs to, or the first telling part of its name."""
    layer = re.search(r"\.(\d+)\.", tensor)
    return int(layer[1]) if layer else tensor.removeprefix("model.").removesuffix(".weight").replace("embed_tokens", "embed")


def _order(place: int | str) -> tuple[int, str]:
    """Embeddings before the layers, the head and whatever else after them."""
    if isinstance(place, int):
        return place, ""
    return (-1, place) if place == "embed" else (10**9, place)


def _kind(tensor: str) -> str:
    return next(name for name, pattern in KINDS if re.search(pattern, tensor))


def _weighted(frame: pd.DataFrame, by: Any) -> pd.Series:
    """Relative error over groups of tensors, weighted by their numbers of weights."""
    sums = frame.assign(error=frame["w4_relative_mse"] * frame["numel"]).groupby(by)[["error", "numel"]].sum()
    return sums["error"] / sums["numel"]


def _gain_found(variant: str, gain: Any) -> str:
    interval = f"{signed(gain.estimate)} [{signed(gain.low)}, {signed(gain.high)}]"
    if gain.low > 0:
        return f"{variant} gains {interval} at full precision"
    return f"{variant}: no gain shown at full precision, {interval}" if gain.high >= 0 else f"{variant} loses at full precision, {interval}"


def _survival_found(rows: list, several: bool) -> str:
    by_verdict = {verdict: [row.scheme for row in rows if row.verdict.verdict == verdict] for verdict in VERDICTS}
    if several:
        counts = (f"{verdict} in {len(schemes)}" for verdict, schemes in by_verdict.items() if schemes)
        return f"Gain under {len(rows)} variants and schemes: {', '.join(counts)}"
    says = {"survives": "{gain} survives {}", "lost": "{gain} is lost under {}", "inconclusive": "whether {gain} survives {} is inconclusive"}
    parts = [says[verdict].replace("{}", " and ".join(schemes)) for verdict, schemes in by_verdict.items() if schemes]
    found = "; ".join(part.replace("{gain}", "it" if i else "the gain") for i, part in enumerate(parts))
    return found[0].upper() + found[1:]


def _error_found(frame: pd.DataFrame, variants: list[str]) -> str:
    totals = _weighted(frame, frame["variant"])
    if len(variants) == 1:
        return f"4-bit rounding error of {variants[0]}: {totals[variants[0]]:.5f}"
    change = 100 * (totals[variants[1]] / totals[BASE] - 1)
    amount = f"{change:+.2g} %".replace("-", "−")
    verb = "hardly moves" if abs(change) < 1 else ("raises" if change > 0 else "lowers")
    return f"Training {verb} the 4-bit rounding error: {amount} of {totals[BASE]:.4f}"


def _reward_found(history: pd.DataFrame) -> str:
    reward = history.dropna(subset=["reward"]).sort_values("step")["reward"]
    edge = max(1, len(reward) // 10)
    first, last = reward.iloc[:edge].mean(), reward.iloc[-edge:].mean()
    verb = "stays near" if abs(last - first) < 0.005 else ("rises from" if last > first else "falls from")
    numbers = f"{first:.3f}" if verb == "stays near" else f"{first:.3f} to {last:.3f}"
    return f"Training reward {verb} {numbers} in {int(history['step'].max())} steps"


def _figure(width: float, height: float, rows: int = 1, heights: list[float] | None = None) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, 1, sharex=rows > 1, height_ratios=heights)
    for axes in np.atleast_1d(grid):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, length=3)
        axes.grid(color=GRID, lw=0.8)
        axes.set_axisbelow(True)
    return figure, grid


def _finish(figure: Figure, axes: Axes, title: str, note: str, path: str | Path) -> None:
    """Title above, note below, file by rename."""
    title = textwrap.fill(title, width=int(9.1 * figure.get_figwidth()))
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold", color=INK)
    figure.supxlabel(note, x=0.01, ha="left", size=8.5, color=FAINT)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=150)
    os.replace(partial, path)
