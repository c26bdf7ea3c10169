"""Layer × projection: where quantization errs, which codes changed, and how training moved the error."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from qrl.figures.canvas import FAINT, INK, TICK_CHARACTERS, finish, shortened, wrapped
from qrl.figures.weights import bits, error_column, in_order
from qrl.names import BASE

# Both are safe for the colour-blind and readable by lightness alone; PuOr is white at 0.
SIZES = "cividis"
DIFFERENCES = "PuOr_r"
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
    note = "Errors are ‖Q(W) − W‖² / ‖W‖² of the weights as the checkpoints store them."
    title = schemes_finding(stored)
    if stored["scheme"].nunique() <= FEW:
        _draw(scheme_panels(stored), title, note, path)
    else:
        _draw(_panels_of_many(stored), title, note, path, "projection, mean over layers")


def movement_panels(weights: pd.DataFrame) -> list[Panel]:
    """Return the maps of `movement`."""
    panels = _panels(weights, error_column(weights), f"{bits(weights)}-bit ")
    _, trained = _variants(weights)
    if trained is not None:
        panels.insert(2, Panel("update, ‖ΔW‖ / ‖W‖, %", 100 * grid(trained, "relative_change")))
    return panels


def scheme_panels(stored: pd.DataFrame) -> list[Panel]:
    """Return the maps of `schemes` where there are few: layer × projection, for each scheme."""
    panels = []
    for scheme, rows in stored.groupby("scheme", sort=False):
        panels += _panels(rows, "relative_mse", f"{shortened(str(scheme))}: ")
    return panels


def _panels(rows: pd.DataFrame, error: str, prefix: str = "") -> list[Panel]:
    """Return maps, layer × projection, of the first variant's error, of its difference, and of codes that changed."""
    base, trained = _variants(rows)
    first = base if len(base) else trained
    own_error = Panel(f"{prefix}error of {_label(first)}, %", 100 * grid(first, error))
    return [own_error, *_differences(base, trained, error, prefix, grid)]


def _panels_of_many(stored: pd.DataFrame) -> list[Panel]:
    """Return the same maps of many schemes: scheme × projection, means over layers, the error's logarithm."""
    base, trained = _variants(stored)
    first = base if len(base) else trained
    own_error = Panel(f"error of {_label(first)}, log10", np.log10(_by_scheme(first, "relative_mse")))
    return [own_error, *_differences(base, trained, "relative_mse", "", _by_scheme)]


def _differences(
    base: pd.DataFrame,
    trained: pd.DataFrame | None,
    error: str,
    prefix: str,
    table: Callable[[pd.DataFrame, str], pd.DataFrame],
) -> list[Panel]:
    """Return the maps that compare base with the trained variant; none if one of them is missing."""
    if trained is None or not len(base):
        return []
    change = 100 * (1 - table(trained, error) / table(base, error))
    return [
        Panel(f"{prefix}error, {BASE} − {_label(trained)}, % of {BASE}'s{SIGN}", change, signed=True),
        Panel(f"{prefix}codes that changed, %", 100 * table(trained, "code_flip_rate")),
    ]


def _label(rows: pd.DataFrame) -> str:
    return shortened(rows["variant"].iloc[0])


def _by_scheme(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return one variant's column as scheme × projection, means over layers."""
    table = rows.pivot_table(
        index="scheme", columns="projection", values=column, aggfunc="mean", dropna=False, sort=False
    )
    return table[in_order(table.columns)]


def grid(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return one variant's column as projection × layer; matrices outside of layers, such as a head, are left out."""
    in_layers = rows[rows["layer"] >= 0]
    table = in_layers.pivot_table(index="projection", columns="layer", values=column, aggfunc="mean", dropna=False)
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
    in_layers = trained[trained["layer"] >= 0]
    candidates = in_layers if len(in_layers) else trained
    most_changed = trained.loc[candidates["code_flip_rate"].idxmax()]
    matrix = most_changed["projection"]
    if len(in_layers):
        matrix += f" of layer {most_changed['layer']}"
    maximum = f"most in {matrix} ({100 * most_changed['code_flip_rate']:.2g} %)"
    return f"Training changed {100 * share:.2g} % of the {width}-bit codes, {maximum}"


def movement_note(weights: pd.DataFrame) -> str:
    """Return what was measured, for below the maps."""
    tensors = weights["tensor"].nunique()
    numel = weights.drop_duplicates("tensor")["numel"].sum()
    return f"{tensors} matrices, {numel:,} weights. Rounding is to nearest, in groups along the input."


def schemes_finding(stored: pd.DataFrame) -> str:
    """Return the finding, as a title: the share of each variant's energy that each scheme loses."""
    descriptions = []
    losses = {}  # percent, of the first variant
    for scheme, rows in stored.groupby("scheme", sort=False):
        lost_energy = (rows["relative_mse"] * rows["energy"]).groupby(rows["variant"]).sum()
        percent = 100 * lost_energy / rows.groupby("variant")["energy"].sum()
        by_variant = [f"{percent[variant]:.3g} % ({shortened(variant)})" for variant in dict.fromkeys(rows["variant"])]
        descriptions.append(f"{shortened(str(scheme))} {' and '.join(by_variant)}")
        losses[scheme] = percent.iloc[0]
    if len(descriptions) <= FEW:
        return f"Share of the weights' energy that is lost: {'; '.join(descriptions)}"

    smallest = min(losses, key=losses.get)
    largest = max(losses, key=losses.get)
    return (
        f"Of {len(losses)} schemes, {shortened(smallest)} loses the least of the weights' energy, "
        f"{losses[smallest]:.3g} %, and {shortened(largest)} the most, {losses[largest]:.3g} %"
    )


def _draw(panels: list[Panel], title: str, note: str, path: str | Path, x_label: str = "layer") -> None:
    """Draw maps below each other, each with its own colours."""
    from matplotlib.figure import Figure

    columns = max(panel.values.shape[1] for panel in panels)
    rows = sum(len(panel.values) for panel in panels)

    # Placed by hand, in inches: matplotlib's solver takes a second for six panels.
    width = max(7.4, 2.6 + 0.24 * columns)
    top = 0.66 + 0.22 * max(2, len(wrapped(title, width).splitlines()))  # a third line of title needs its own
    height = 0.9 + top + 0.22 * rows + 0.5 * len(panels)
    figure = Figure(figsize=(width, height), facecolor="white")
    grid_of_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(panel.values) for panel in panels])
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - 0.1 / width,
        top=1 - top / height,
        bottom=0.85 / height,
        hspace=0.5 * len(panels) / (0.22 * rows),
    )

    panel_axes = grid_of_axes[:, 0]
    for panel, axes in zip(panels, panel_axes, strict=True):
        _draw_panel(figure, axes, panel)
    panel_axes[-1].set_xlabel(x_label)
    finish(figure, title, note, path)


def _draw_panel(figure, axes, panel: Panel) -> None:
    values = panel.values.to_numpy(dtype=float)
    colours = {"cmap": SIZES}
    if panel.signed:
        limit = 1.0  # of a map of zeros, or without any number
        if np.isfinite(values).any():
            limit = np.nanmax(np.abs(values)) or limit
        colours = {"cmap": DIFFERENCES, "vmin": -limit, "vmax": limit}
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **colours)
    axes.set_title(panel.title, loc="left", size=10, color=INK, pad=4)
    row_labels = [shortened(name.removesuffix("_proj"), TICK_CHARACTERS) for name in panel.values.index]
    axes.set_yticks(range(len(panel.values)), row_labels, size=8.5)
    step = math.ceil(values.shape[1] / 16)
    axes.set_xticks(range(0, values.shape[1], step), panel.values.columns[::step], size=8.5)
    axes.tick_params(colors=INK, length=2)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=12)
    bar.ax.tick_params(colors=FAINT, labelsize=8)
    bar.outline.set_visible(False)


def _variants(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Return the rows of base, and those of the first other variant."""
    base = frame[frame["variant"] == BASE]
    trained_variants = [variant for variant in dict.fromkeys(frame["variant"]) if variant != BASE]
    if not trained_variants:
        return base, None
    return base, frame[frame["variant"] == trained_variants[0]]
