"""Question 6: which measures of weights and behaviour go with grpo's loss, and with its gain's; exploratory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from contrasts import BASE, FULL, GRPO

MEASURES = ("relative_mse", "code_flip_rate", "update_survival", "update_cosine")  # per cell of grpo, over matrices
BEHAVIOUR = ("kl", "top1_agreement")  # per cell of grpo, on held-out solutions
LOSS, OF_GAIN = "loss", "loss of gain"  # of grpo's accuracy; minus that of the base's
DRAWS = 20_000
FEW = 3  # cells; fewer have no correlation
HEAD = ("measure", "Spearman's correlation", "within a size", "within a scheme", "cells", "schemes", "trainings")


@dataclass(frozen=True)
class Correlation:
    """Spearman's correlation of a measure with an outcome, over cells."""

    measure: str
    rho: float
    low: float
    high: float
    cells: int
    schemes: int
    trainings: int  # sizes × seeds
    by_size: float  # the same within a size, mean over sizes
    by_scheme: float

    def __str__(self) -> str:
        ends = "" if np.isnan(self.low) else f" [{_signed(self.low)}, {_signed(self.high)}]"
        return f"{_signed(self.rho)}{ends}"


def points(frame: pd.DataFrame, weights: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each scheme of each training of grpo: its loss, its gain's, and its measures.

    Args:
        frame: answers, a row each.
        weights: from `tables.measures`.
    """
    own = weights[weights["variant"] == GRPO]
    stored, spoken = (own[own["table"] == table] for table in ("schemes", "behaviour"))
    keys = ["size", "seed", "scheme"]
    measured = pd.DataFrame(
        {
            measure: stored.dropna(subset=[measure]).groupby(keys).apply(_mean, measure, include_groups=False)
            for measure in MEASURES
            if measure in stored and stored[measure].notna().any()
        }
    )
    if len(spoken):
        measured = measured.join(spoken.groupby(keys)[list(BEHAVIOUR)].mean())
    loss, of_base = (_losses(frame, variant, measured.index) for variant in (GRPO, BASE))
    return measured.assign(**{LOSS: loss, OF_GAIN: loss - of_base}).dropna(subset=[LOSS])


def _losses(frame: pd.DataFrame, variant: str, cells: pd.MultiIndex) -> np.ndarray:
    """Return what each scheme of each size and seed costs a variant, nan where it was not evaluated."""
    answered = frame[frame["variant"].astype(str) == variant]
    accuracy = answered.groupby(["size", "seed", "scheme"], observed=True)["correct"].mean()
    full, kept = (
        [accuracy.get((size, seed, FULL if whole else scheme), np.nan) for size, seed, scheme in cells]
        for whole in (True, False)
    )
    return np.array(full) - np.array(kept)


def _mean(rows: pd.DataFrame, measure: str) -> float:
    """Return a measure's mean over matrices by their weights."""
    return float(np.average(rows[measure], weights=rows["numel"]))


def correlations(
    cells: pd.DataFrame, most: float = np.inf, draws: int = DRAWS, outcome: str = LOSS
) -> list[Correlation]:
    """Return each measure's correlation with an outcome, the strongest first.

    The interval is a percentile bootstrap that draws trainings and schemes, since the cells of a training are not
    independent, nor are those of a scheme.

    Args:
        cells: from `points`.
        most: only cells that lose less than this.
        draws: of the bootstrap.
        outcome: LOSS or OF_GAIN.

    Source: Spearman's rho; rows and columns drawn alike: Owen, Annals of Applied Statistics 1 (2007) 386.
    """
    found, random = [], np.random.default_rng(0)
    cells = cells[cells[LOSS] < most]
    for measure in cells.columns.drop([LOSS, OF_GAIN]):
        known = cells[[measure, outcome]].dropna()
        values = known.to_numpy()
        training = known.index.droplevel("scheme").factorize()[0]
        scheme = known.index.get_level_values("scheme").factorize()[0]
        if len(known) < FEW or np.isnan(rho := _spearman(values, np.ones((1, len(values))))[0]):
            continue
        counts, drawn = (training.max() + 1, scheme.max() + 1), np.full(1, np.nan)
        if min(counts) > 1:
            often = [random.multinomial(count, np.full(count, 1 / count), size=draws) for count in counts]
            drawn = _spearman(values, often[0][:, training] * often[1][:, scheme])
        low, high = np.nanpercentile(drawn, [2.5, 97.5]) if not np.isnan(drawn).all() else (np.nan, np.nan)
        within = {key: _within(known, key) for key in ("size", "scheme")}
        numbers = len(known), int(counts[1]), int(counts[0])
        found.append(
            Correlation(measure, float(rho), float(low), float(high), *numbers, within["size"], within["scheme"])
        )
    return sorted(found, key=lambda each: -abs(each.rho))


def _within(known: pd.DataFrame, key: str) -> float:
    """Return the mean of the correlations within the groups of a key; nan if none has one."""
    parts = [part.to_numpy() for _, part in known.groupby(key, observed=True) if len(part) >= FEW]
    each = [rho for part in parts if not np.isnan(rho := _spearman(part, np.ones((1, len(part))))[0])]
    return float(np.mean(each)) if each else float("nan")


def _spearman(values: np.ndarray, often: np.ndarray) -> np.ndarray:
    """Return the correlation of two columns, for each way to repeat the rows; nan if one is constant.

    Args:
        values: (rows, 2).
        often: (draws, rows), how often each row is there.
    """
    total, scores = often.sum(axis=1, keepdims=True), []
    for column in values.T:
        _, place = np.unique(column, return_inverse=True)
        tied = often @ np.eye(place.max() + 1)[place]  # rows of each value
        ranks = (np.cumsum(tied, axis=1) - tied / 2)[:, place]
        scores.append(ranks - (often * ranks).sum(axis=1, keepdims=True) / total)
    cross, *own = ((often * a * b).sum(axis=1) for a, b in ((scores[0], scores[1]), *zip(scores, scores, strict=True)))
    with np.errstate(invalid="ignore", divide="ignore"):
        rho = cross / np.sqrt(own[0] * own[1])
    return np.where(np.minimum(own[0], own[1]) > 1e-9, rho, np.nan)


def body(found: Sequence[Correlation]) -> list[list[str]]:
    """Return the rows of a table."""
    return [
        [each.measure, str(each), _signed(each.by_size), _signed(each.by_scheme)]
        + [str(number) for number in (each.cells, each.schemes, each.trainings)]
        for each in found
    ]


def _signed(value: float) -> str:
    return "" if np.isnan(value) else f"{value:+.2f}".replace("-", "−")
