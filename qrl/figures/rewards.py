"""Training curves."""

from pathlib import Path

import numpy as np
import pandas as pd

from qrl.figures.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SKY, canvas, finish
from qrl.stats import LEVEL, quantile, signed

# column → its name in the figure's title, and in its panel's
MEASURES = {
    "reward": ("Training reward", "mean reward (share right)"),
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
    labels = shown(history, measure)
    if "step" not in history or measure not in labels:
        raise ValueError(f"The history has columns {list(history)}, but needs 'step' and a '{measure}' with values.")
    probed = probes is not None and len(probes) > 0
    below = len(labels) - 1 + probed
    figure, grid = canvas(7.4, 2.2 + 1.5 * below + 1.2, rows=1 + below, heights=[2, *[1] * below])
    panels = list(np.atleast_1d(grid))
    last = panels[-1]
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    if probed:
        axes, reach = panels.pop(1), [probes["accuracy"] - probes["low"], probes["high"] - probes["accuracy"]]
        axes.errorbar(probes["step"], probes["accuracy"], yerr=reach, fmt="o-", color=RED, lw=1.6, ms=4, capsize=3)
        _label(axes, f"held-out accuracy (n = {probes['n'].iloc[0]:,} probe questions; bars: 95 %)")
    for axes, column, colour in zip(panels, labels, (BLUE, SKY, PURPLE, GREEN, ORANGE), strict=False):
        part, smooth = smoothed(history, column)
        axes.plot(part["step"], part[column], "o-" if len(part) <= 40 else "-", color=colour, lw=1, ms=3.5, alpha=0.4)
        axes.plot(part["step"], smooth, color=colour, lw=2.4)
        _label(axes, labels[column])
    last.set_xlabel("optimizer step")
    last.xaxis.get_major_locator().set_params(integer=True)
    window = _window(history, measure)
    note = f"Faint: each logged step; bold: running mean over {window} steps. " if window > 1 else ""
    note += OF_STEPS
    finish(figure, reward_found(history, measure), note, path)


def shown(history: pd.DataFrame, measure: str) -> dict[str, str]:
    """Return the columns that have values, and the titles of their panels."""
    labels = {measure: MEASURES[measure][1]} | HEALTH
    return {column: label for column, label in labels.items() if column in history and history[column].notna().any()}


def smoothed(history: pd.DataFrame, column: str) -> tuple[pd.DataFrame, pd.Series]:
    """Return the steps that have a value, and its running mean over a tenth of the run."""
    part = history[["step", column]].dropna()
    return part, part[column].rolling(_window(history, column), center=True, min_periods=1).mean()


def _window(history: pd.DataFrame, column: str) -> int:
    return 2 * (int(history[column].notna().sum()) // 20) + 1


def _label(axes, label: str) -> None:
    axes.set_title(label, loc="left", size=10, color=INK, pad=4)
    axes.margins(x=0.02, y=0.15)


def reward_found(history: pd.DataFrame, measure: str = "reward") -> str:
    """Return the change from the first to the second half of the run, with Welch's 95 % interval over steps."""
    curve = history.dropna(subset=[measure]).sort_values("step")[measure].to_numpy(dtype=float)
    what = MEASURES[measure][0]
    steps = int(history["step"].max())
    first, second = curve[: len(curve) // 2], curve[len(curve) - len(curve) // 2 :]
    if len(first) < 3:
        return f"{what} over {steps} steps: too few for an interval"
    parts = [half.var(ddof=1) / len(half) for half in (first, second)]
    change, stderr = second.mean() - first.mean(), sum(parts) ** 0.5
    df = stderr**4 / sum(part**2 / (len(first) - 1) for part in parts) if stderr else len(first) - 1
    reach = quantile((1 + LEVEL) / 2, df) * stderr
    verb = "rises" if change - reach > 0 else "falls" if change + reach < 0 else "does not change significantly"
    interval = f"{signed(change)} [{signed(change - reach)}, {signed(change + reach)}]"
    return f"{what} {verb}: {interval} from the first half of {steps} steps to the second"
