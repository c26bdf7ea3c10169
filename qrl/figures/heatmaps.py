"""Layer × projection: where quantization errs, which codes changed, and how training moved the error."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from qrl.figures.canvas import FAINT, INK, finish, wrapped
from qrl.figures.weights import bits, error_column, in_order
from qrl.names import BASE

# Both are safe for the colour-blind and readable by lightness alone; PuOr is white at 0.
SIZES, DIFFERENCES = "cividis", "PuOr_r"
SIGN = " (above 0: smaller after training)"
FEW = 4  # schemes for which a page shows every layer


class Panel(NamedTuple):
    """One map."""

    title: str  # what the colours are, with their unit
    values: pd.DataFrame  # a row per projection, a column per layer
    signed: bool = False  # a difference, 0 in the middle of its colours


def movement(weights: pd.DataFrame, path: str | Path) -> None:
    """Draw what training did, matrix by matrix: relative change, changed codes of the proxy, difference of its errors.

    Args:
        weights: a row per variant and tensor, as `diagnose` writes them, base and one trained variant.
    """
    _draw(movement_panels(weights), movement_finding(weights), movement_note(weights), path)


def schemes(stored: pd.DataFrame, path: str | Path) -> None:
    """Draw each scheme's own error, the codes that changed, and the difference of errors base − trained, as a PNG.

    Args:
        stored: a row per scheme, variant and tensor, as `diagnose.schemes` makes them.
    """
    few = stored["scheme"].nunique() <= FEW
    panels = scheme_panels(stored) if few else _panels(stored, "relative_mse", across=True)
    note = "Errors are ‖Q(W) − W‖² / ‖W‖² of the weights as the checkpoints store them."
    _draw(panels, schemes_finding(stored), note, path, "layer" if few else "projection, mean over layers")


def movement_panels(weights: pd.DataFrame) -> list[Panel]:
    """Return the maps of `movement`."""
    panels = _panels(weights, error_column(weights), f"{bits(weights)}-bit ")
    _, trained = _variants(weights)
    if trained is not None:
        panels.insert(2, Panel("update, ‖ΔW‖ / ‖W‖, %", 100 * grid(trained, "relative_change")))
    return panels


def scheme_panels(stored: pd.DataFrame) -> list[Panel]:
    """Return the maps of `schemes` where there are few: layer × projection, for each scheme."""
    by_scheme = stored.groupby("scheme", sort=False)
    return [panel for scheme, rows in by_scheme for panel in _panels(rows, "relative_mse", f"{scheme}: ")]


def _panels(rows: pd.DataFrame, error: str, prefix: str = "", across: bool = False) -> list[Panel]:
    """Return maps of the first variant's error, of its difference, and of the codes that changed.

    With `across` they are scheme × projection, means over layers, the error's logarithm; else layer × projection.
    """
    base, trained = _variants(rows)
    first, table = base if len(base) else trained, _across if across else grid
    own, title = table(first, error), f"{prefix}error of {first['variant'].iloc[0]}"
    panels = [Panel(f"{title}, log10", np.log10(own)) if across else Panel(f"{title}, %", 100 * own)]
    if trained is not None and len(base):
        change = 100 * (1 - table(trained, error) / table(base, error))
        panels += [
            Panel(f"{prefix}error, {BASE} − {trained['variant'].iloc[0]}, % of {BASE}'s{SIGN}", change, signed=True),
            Panel(f"{prefix}codes that changed, %", 100 * table(trained, "code_flip_rate")),
        ]
    return panels


def _across(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    look = {"values": column, "aggfunc": "mean", "dropna": False, "sort": False}
    table = rows.pivot_table(index="scheme", columns="projection", **look)
    return table[in_order(table.columns)]


def grid(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return one variant's column as projection × layer; matrices outside of layers, such as a head, are left out."""
    inside = rows[rows["layer"] >= 0]
    table = inside.pivot_table(index="projection", columns="layer", values=column, aggfunc="mean", dropna=False)
    return table.reindex(in_order(table.index))


def movement_finding(weights: pd.DataFrame) -> str:
    """Return the finding, as a title."""
    _, trained = _variants(weights)
    width = bits(weights)
    if trained is None:
        return f"How well the layers of {BASE} round to {width} bits"
    share = (trained["code_flip_rate"] * trained["numel"]).sum() / trained["numel"].sum()
    if not share:
        return f"Training changed no {width}-bit code: rounded to {width} bits, the two models are the same"
    inside = trained[trained["layer"] >= 0]
    most = trained.loc[(inside if len(inside) else trained)["code_flip_rate"].idxmax()]
    where = f"{most['projection']} of layer {most['layer']}" if len(inside) else most["projection"]
    most_there = f"most in {where} ({100 * most['code_flip_rate']:.2g} %)"
    return f"Training changed {100 * share:.2g} % of the {width}-bit codes, {most_there}"


def movement_note(weights: pd.DataFrame) -> str:
    """Return what was measured, for below the maps."""
    tensors, numel = weights["tensor"].nunique(), weights.drop_duplicates("tensor")["numel"].sum()
    return f"{tensors} matrices, {numel:,} weights. Rounding is to nearest, in groups along the input."


def schemes_finding(stored: pd.DataFrame) -> str:
    """Return the finding, as a title: the share of each variant's energy that each scheme loses."""
    parts, losses = [], {}
    for scheme, rows in stored.groupby("scheme", sort=False):
        lost = (rows["relative_mse"] * rows["energy"]).groupby(rows["variant"]).sum()
        share = 100 * lost / rows.groupby("variant")["energy"].sum()
        variants = dict.fromkeys(rows["variant"])
        parts.append(f"{scheme} {' and '.join(f'{share[name]:.3g} % ({name})' for name in variants)}")
        losses[scheme] = share.iloc[0]
    if len(parts) > FEW:
        least, most = min(losses, key=losses.get), max(losses, key=losses.get)
        ends = f"{least} loses the least of the weights' energy, {losses[least]:.3g} %, and {most} the most"
        return f"Of {len(parts)} schemes, {ends}, {losses[most]:.3g} %"
    return f"Share of the weights' energy that is lost: {'; '.join(parts)}"


def _draw(panels: list[Panel], title: str, note: str, path: str | Path, across: str = "layer") -> None:
    """Draw maps below each other, each with its own colours."""
    from matplotlib.figure import Figure

    layers = max(panel.values.shape[1] for panel in panels)
    rows = sum(len(panel.values) for panel in panels)
    width = max(7.4, 2.6 + 0.24 * layers)
    top = 0.66 + 0.22 * max(2, len(wrapped(title, width).splitlines()))  # inches; a third line of title needs its own
    height = 0.9 + top + 0.22 * rows + 0.5 * len(panels)
    figure = Figure(figsize=(width, height), facecolor="white")  # placed here: the solver takes a second for six panels
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(panel.values) for panel in panels])[:, 0]
    sides = {"left": 0.75 / width, "right": 1 - 0.1 / width, "top": 1 - top / height, "bottom": 0.85 / height}
    figure.subplots_adjust(**sides, hspace=0.5 * len(panels) / (0.22 * rows))
    for panel, own in zip(panels, axes, strict=True):
        _panel(figure, own, panel)
    axes[-1].set_xlabel(across)
    finish(figure, title, note, path)


def _panel(figure, axes, panel: Panel) -> None:
    values = panel.values.to_numpy(dtype=float)
    reach = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 1.0
    colours = {"cmap": DIFFERENCES, "vmin": -reach or -1, "vmax": reach or 1} if panel.signed else {"cmap": SIZES}
    shown = axes.imshow(values, aspect="auto", interpolation="nearest", **colours)
    axes.set_title(panel.title, loc="left", size=10, color=INK, pad=4)
    axes.set_yticks(range(len(panel.values)), [name.removesuffix("_proj") for name in panel.values.index], size=8.5)
    step = -(-values.shape[1] // 16)
    axes.set_xticks(range(0, values.shape[1], step), panel.values.columns[::step], size=8.5)
    axes.tick_params(colors=INK, length=2)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(shown, ax=axes, pad=0.01, aspect=12)
    bar.ax.tick_params(colors=FAINT, labelsize=8)
    bar.outline.set_visible(False)


def _variants(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Return the rows of base, and those of the first other variant."""
    others = [variant for variant in dict.fromkeys(frame["variant"]) if variant != BASE]
    return frame[frame["variant"] == BASE], frame[frame["variant"] == others[0]] if others else None
