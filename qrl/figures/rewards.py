"""Training curves."""

from pathlib import Path

import numpy as np
import pandas as pd

from qrl.figures.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SKY, canvas, finish
from qrl.stats import LEVEL, quantile, signed

# column → its name in the figure's title, and in its panel's
MEASURES = {
    "reward": ("Training reward", "mean reward"),
    "loss": ("Divergence from the teacher", "divergence from the teacher (nats per token)"),
}
OF_STEPS = "Each step has questions of its own; what training gained is measured on held-out ones."
HEALTH = {  # column → name of its panel
    "reward_std": "standard deviation of rewards",
    "frac_reward_zero_std": "groups with equal rewards (share)",
    "entropy": "entropy (nats per token)",
    "kl": "KL to the reference (nats per token)",
}


def training(history: pd.DataFrame, path: Path, measure: str = "reward", probes: pd.DataFrame | None = None) -> None:
    """Draw training curves: reward, held-out accuracy where it was probed, and below them the health of the run.

    Args:
        history: `step`, the measure, and optionally `reward_std`, `frac_reward_zero_std`, `entropy`, `kl`; missing and
            all-NaN columns are left out.
        path: the PNG to write.
        measure: what training optimizes: `reward`, or a distillation's `loss`.
        probes: `step`, `accuracy`, its 95 % interval `low` and `high`, and `n`; a row per probe.

    Raises:
        ValueError: the history has no step, or no value of the measure.
    """
    titles = panel_titles(history, measure)
    if "step" not in history or measure not in titles:
        raise ValueError(f"The history has columns {list(history)}, but needs 'step' and a '{measure}' with values.")
    has_probes = probes is not None and len(probes) > 0
    lower_panels = len(titles) - 1 + has_probes
    figure, grid = canvas(7.4, 2.2 + 1.5 * lower_panels + 1.2, rows=1 + lower_panels, heights=[2, *[1] * lower_panels])
    panels = list(np.atleast_1d(grid))
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)

    curve_panels = panels
    if has_probes:  # between the reward and the health of the run
        _draw_probes(panels[1], probes)
        curve_panels = [panels[0], *panels[2:]]
    for axes, column, colour in zip(curve_panels, titles, (BLUE, SKY, PURPLE, GREEN, ORANGE), strict=False):
        _draw_curve(axes, history, column, colour)
        _set_title(axes, titles[column])

    note = OF_STEPS
    window = _window(history, measure)
    if window > 1:
        note = f"Faint: each logged step; bold: running mean over {window} steps. {note}"
    finish(figure, reward_finding(history, measure), note, path)


def _draw_curve(axes, history: pd.DataFrame, column: str, colour: str) -> None:
    logged, running_mean = smoothed(history, column)
    marker = "o-" if len(logged) <= 40 else "-"
    axes.plot(logged["step"], logged[column], marker, color=colour, lw=1, ms=3.5, alpha=0.4)
    axes.plot(logged["step"], running_mean, color=colour, lw=2.4)


def _draw_probes(axes, probes: pd.DataFrame) -> None:
    reach = [probes["accuracy"] - probes["low"], probes["high"] - probes["accuracy"]]
    axes.errorbar(probes["step"], probes["accuracy"], yerr=reach, fmt="o-", color=RED, lw=1.6, ms=4, capsize=3)
    _set_title(axes, f"held-out accuracy (n = {probes['n'].iloc[0]:,} probe questions; bars: 95 %)")


def panel_titles(history: pd.DataFrame, measure: str) -> dict[str, str]:
    """Return the columns that have values, and the titles of their panels."""
    titles = {measure: MEASURES[measure][1]} | HEALTH
    return {column: title for column, title in titles.items() if column in history and history[column].notna().any()}


def smoothed(history: pd.DataFrame, column: str) -> tuple[pd.DataFrame, pd.Series]:
    """Return the steps that have a value, and its running mean over a tenth of the run."""
    logged = history[["step", column]].dropna()
    return logged, logged[column].rolling(_window(history, column), center=True, min_periods=1).mean()


def _window(history: pd.DataFrame, column: str) -> int:
    """Return the steps of a running mean: an odd number, about a tenth of those with a value."""
    return 2 * (int(history[column].notna().sum()) // 20) + 1


def _set_title(axes, title: str) -> None:
    axes.set_title(title, loc="left", size=10, color=INK, pad=4)
    axes.margins(x=0.02, y=0.15)


def reward_finding(history: pd.DataFrame, measure: str = "reward") -> str:
    """Return the change from the first to the second half of the run, with Welch's 95 % interval over steps."""
    curve = history.dropna(subset=[measure]).sort_values("step")[measure].to_numpy(dtype=float)
    name = MEASURES[measure][0]
    steps = int(history["step"].max())
    n = len(curve) // 2  # of each half; of an odd number of steps, the middle one is in neither
    if n < 3:
        return f"{name} over {steps} steps: too few for an interval"

    first = curve[:n]
    second = curve[len(curve) - n :]
    change = second.mean() - first.mean()
    variances = [first.var(ddof=1) / n, second.var(ddof=1) / n]
    stderr = sum(variances) ** 0.5
    degrees_of_freedom = n - 1
    if stderr:
        degrees_of_freedom = stderr**4 / sum(variance**2 / (n - 1) for variance in variances)
    reach = quantile((1 + LEVEL) / 2, degrees_of_freedom) * stderr

    if change - reach > 0:
        verb = "rises"
    elif change + reach < 0:
        verb = "falls"
    else:
        verb = "does not change significantly"
    interval = f"{signed(change)} [{signed(change - reach)}, {signed(change + reach)}]"
    return f"{name} {verb}: {interval} from the first half of {steps} steps to the second"
