"""Layer × projection: where storage errs, where codes moved, and where training made it better or worse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from qrl.figures.canvas import FAINT, INK, finish, wrapped
from qrl.figures.weights import bits
from qrl.names import BASE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Both are told apart by the colour-blind, and by lightness alone: cividis for sizes, PuOr for signed differences, white at 0.
SIZES, DIFFERENCES = "cividis", "PuOr_r"
SIGN = " (above 0: smaller after training)"
FEW = 4  # schemes whose every layer fits on one page
ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Panel(NamedTuple):
    """One map."""

    title: str  # what the colours are, with their unit
    values: pd.DataFrame  # a row per projection, a column per layer
    signed: bool  # a difference, 0 in the middle of its colours


def movement(weights: pd.DataFrame, path: str | Path) -> None:
    """What training did, matrix by matrix: how far it moved, which of the proxy's codes flipped, what that did to its error.

    Args:
        weights: a row per variant and tensor, as `diagnose` writes them, base and one trained variant.
        path: the PNG to write.
    """
    draw(movement_panels(weights), movement_found(weights), movement_note(weights), path)


def schemes(stored: pd.DataFrame, path: str | Path) -> None:
    """Each scheme's own error, its codes that flipped, and the difference of errors base − trained.

    Args:
        stored: a row per scheme, variant and tensor, as `diagnose.schemes` makes them.
        path: the PNG to write.
    """
    few = stored["scheme"].nunique() <= FEW
    panels = scheme_panels(stored) if few else across_panels(stored)
    draw(
        panels,
        schemes_found(stored),
        "Errors are ‖Q(W) − W‖² / ‖W‖² of the weights that the checkpoints really store.",
        path,
        "layer" if few else "projection, mean over layers",
    )


def movement_panels(weights: pd.DataFrame) -> list[Panel]:
    """The maps of `movement`."""
    base, trained = _variants(weights)
    few = bits(weights)
    found = [Panel(f"{few}-bit error of {BASE}, %", 100 * grid(base, "w4_relative_mse"), False)]
    if trained is not None:
        change = 100 * (1 - grid(trained, "w4_relative_mse") / grid(base, "w4_relative_mse"))
        found += [
            Panel(f"{few}-bit error, {BASE} − {_label(trained)}, % of {BASE}'s{SIGN}", change, True),
            Panel("update, ‖ΔW‖ / ‖W‖, %", 100 * grid(trained, "relative_change"), False),
            Panel(f"{few}-bit codes that flipped, %", 100 * grid(trained, "code_flip_rate"), False),
        ]
    return found


def scheme_panels(stored: pd.DataFrame) -> list[Panel]:
    """The maps of `schemes`."""
    found = []
    for scheme, rows in stored.groupby("scheme", sort=False):
        base, trained = _variants(rows)
        first = base if len(base) else trained
        found.append(Panel(f"{scheme}: error of {_label(first)}, %", 100 * grid(first, "relative_mse"), False))
        if trained is not None and len(base):
            change = 100 * (1 - grid(trained, "relative_mse") / grid(base, "relative_mse"))
            found += [
                Panel(f"{scheme}: error, {BASE} − {_label(trained)}, % of {BASE}'s{SIGN}", change, True),
                Panel(f"{scheme}: codes that flipped, %", 100 * grid(trained, "code_flip_rate"), False),
            ]
    return found


def across_panels(stored: pd.DataFrame) -> list[Panel]:
    """Many schemes at once: scheme × projection, means over layers; errors differ by orders, so theirs is a logarithm."""
    base, trained = _variants(stored)
    first = base if len(base) else trained
    found = [Panel(f"error of {_label(first)}, log10", np.log10(_across(first, "relative_mse")), False)]
    if trained is not None and len(base):
        change = 100 * (1 - _across(trained, "relative_mse") / _across(base, "relative_mse"))
        found += [
            Panel(f"error, {BASE} − {_label(trained)}, % of {BASE}'s{SIGN}", change, True),
            Panel("codes that flipped, %", 100 * _across(trained, "code_flip_rate"), False),
        ]
    return found


def _across(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    table = rows.pivot_table(
        index="scheme", columns="projection", values=column, aggfunc="mean", dropna=False, sort=False
    )
    known = [name for name in ORDER if name in table.columns]
    return table[[*known, *sorted(set(table.columns) - set(known))]]


def grid(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """One variant's column as projection × layer; matrices outside of layers, a head say, are left out."""
    inside = rows[rows["layer"] >= 0]
    table = inside.pivot_table(index="projection", columns="layer", values=column, aggfunc="mean", dropna=False)
    known = [name for name in ORDER if name in table.index]
    return table.reindex([*known, *sorted(set(table.index) - set(known))])


def movement_found(weights: pd.DataFrame) -> str:
    """The finding, as a title."""
    _, trained = _variants(weights)
    if trained is None:
        return f"How well the layers of {BASE} round to {bits(weights)} bits"
    flips = (trained["code_flip_rate"] * trained["numel"]).sum() / trained["numel"].sum()
    if not flips:
        return f"Training flipped no {bits(weights)}-bit code: {bits(weights)} bits cannot tell the two models apart"
    inside = trained[trained["layer"] >= 0]
    most = (
        inside.loc[inside["code_flip_rate"].idxmax()]
        if len(inside)
        else trained.loc[trained["code_flip_rate"].idxmax()]
    )
    return f"Training flipped {100 * flips:.2g} % of the {bits(weights)}-bit codes, most in layer {most['layer']}'s {most['projection']}: {100 * most['code_flip_rate']:.2g} %"


def movement_note(weights: pd.DataFrame) -> str:
    """What was measured, below the maps."""
    tensors, numel = weights["tensor"].nunique(), weights.drop_duplicates("tensor")["numel"].sum()
    return f"{tensors} matrices, {numel:,} weights. Rounding: to nearest, in groups along the input."


def schemes_found(stored: pd.DataFrame) -> str:
    """The finding, as a title: the energy that each scheme loses of each variant's weights."""
    parts, losses = [], {}
    for scheme, rows in stored.groupby("scheme", sort=False):
        sums = (rows["relative_mse"] * rows["energy"]).groupby(rows["variant"]).sum() / rows.groupby("variant")[
            "energy"
        ].sum()
        parts.append(
            f"{scheme} loses "
            + " and ".join(f"{100 * sums[name]:.3g} % of {name}'s" for name in dict.fromkeys(rows["variant"]))
        )
        losses[scheme] = 100 * sums.iloc[0]
    if len(parts) > FEW:
        least, most = min(losses, key=losses.get), max(losses, key=losses.get)
        return f"Of {len(parts)} schemes {least} loses least of the weights' energy, {losses[least]:.3g} %, and {most} most, {losses[most]:.3g} %"
    return "; ".join(parts).replace("'s", "'s weights' energy", 1)


def draw(panels: list[Panel], title: str, note: str, path: str | Path, across: str = "layer") -> None:
    """Maps below each other, each with its own colours."""
    from matplotlib.figure import Figure

    layers = max(panel.values.shape[1] for panel in panels)
    rows = sum(len(panel.values) for panel in panels)
    width = max(7.4, 2.6 + 0.24 * layers)
    top = 0.66 + 0.22 * max(
        2, len(wrapped(title, width).splitlines())
    )  # inches above the maps: a third line of title needs its own
    height = 0.9 + top + 0.22 * rows + 0.5 * len(panels)
    figure = Figure(
        figsize=(width, height), facecolor="white"
    )  # laid out by hand: the solver takes a second for six panels
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(panel.values) for panel in panels])[:, 0]
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - 0.1 / width,
        top=1 - top / height,
        bottom=0.85 / height,
        hspace=0.5 * len(panels) / (0.22 * rows),
    )
    for panel, each in zip(panels, axes, strict=True):
        _panel(figure, each, panel)
    axes[-1].set_xlabel(across)
    finish(figure, axes[0], title, note, path)


def _panel(figure: Figure, axes, panel: Panel) -> None:
    values = panel.values.to_numpy(dtype=float)
    reach = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 1.0
    limits = {"vmin": -reach or -1, "vmax": reach or 1} if panel.signed else {}
    shown = axes.imshow(
        values, aspect="auto", cmap=DIFFERENCES if panel.signed else SIZES, interpolation="nearest", **limits
    )
    axes.set_title(panel.title, loc="left", size=10, color=INK, pad=4)
    axes.set_yticks(range(len(panel.values)), [name.removesuffix("_proj") for name in panel.values.index], size=8.5)
    every = -(-values.shape[1] // 16)
    axes.set_xticks(range(0, values.shape[1], every), panel.values.columns[::every], size=8.5)
    axes.tick_params(colors=INK, length=2)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(shown, ax=axes, pad=0.01, aspect=12)
    bar.ax.tick_params(colors=FAINT, labelsize=8)
    bar.outline.set_visible(False)


def _variants(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Rows of base, and those of the first other variant."""
    others = [variant for variant in dict.fromkeys(frame["variant"]) if variant != BASE]
    return frame[frame["variant"] == BASE], frame[frame["variant"] == others[0]] if others else None


def _label(rows: pd.DataFrame) -> str:
    return rows["variant"].iloc[0]
