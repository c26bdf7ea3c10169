"""Question 6: which measures of weights and behaviour go with grpo's loss; exploratory."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from contrasts import FULL, GRPO

MEASURES = ("relative_mse", "code_flip_rate", "update_survival", "update_cosine")  # per cell of grpo, over matrices
BEHAVIOUR = ("kl", "top1_agreement")  # per cell of grpo, on held-out solutions
DRAWS = 2000
HEAD = ("measure", "Spearman's correlation with the loss", "cells", "schemes", "trainings")


@dataclass(frozen=True)
class Correlation:
    """Spearman's correlation of a measure with the loss, over cells."""

    measure: str
    rho: float
    low: float
    high: float
    cells: int
    schemes: int
    trainings: int  # sizes × seeds

    def __str__(self) -> str:
        ends = "" if np.isnan(self.low) else f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.rho:+.2f}{ends}".replace("-", "−")


def points(frame: pd.DataFrame, weights: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each scheme of each training of grpo: its loss and its measures.

    Args:
        frame: answers, a row each.
        weights: from `tables.measures`.
    """
    trained = frame[frame["variant"].astype(str) == GRPO]
    accuracy = trained.groupby(["size", "seed", "scheme"], observed=True)["correct"].mean()
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
    full, kept = (
        [accuracy.get((size, seed, FULL if whole else scheme), np.nan) for size, seed, scheme in measured.index]
        for whole in (True, False)
    )
    return measured.assign(loss=np.array(full) - np.array(kept)).dropna(subset=["loss"])


def _mean(rows: pd.DataFrame, measure: str) -> float:
    """Return a measure's mean over matrices by their weights."""
    return float(np.average(rows[measure], weights=rows["numel"]))


def correlations(cells: pd.DataFrame, most: float = np.inf, draws: int = DRAWS) -> list[Correlation]:
    """Return each measure's correlation with the loss, the strongest first.

    The interval is a percentile bootstrap that draws trainings and schemes, since the cells of a training are not
    independent, nor are those of a scheme.

    Args:
        cells: from `points`.
        most: only cells that lose less than this.
        draws: of the bootstrap.

    Source: Spearman's rho; rows and columns drawn alike: Owen, Annals of Applied Statistics 1 (2007) 386.
    """
    found, random = [], np.random.default_rng(0)
    cells = cells[cells["loss"] < most]
    for measure in cells.columns.drop("loss"):
        known = cells[[measure, "loss"]].dropna()
        values = known.to_numpy()
        training = known.index.droplevel("scheme").factorize()[0]
        scheme = known.index.get_level_values("scheme").factorize()[0]
        if len(known) < 3 or np.isnan(rho := _spearman(values)):
            continue
        counts = training.max() + 1, scheme.max() + 1
        drawn = []
        for _ in range(draws if min(counts) > 1 else 0):
            often = [np.bincount(random.integers(count, size=count), minlength=count) for count in counts]
            drawn.append(_spearman(values.repeat(often[0][training] * often[1][scheme], axis=0)))
        low, high = np.nanpercentile(drawn, [2.5, 97.5]) if drawn else (np.nan, np.nan)
        found.append(Correlation(measure, rho, float(low), float(high), len(known), int(counts[1]), int(counts[0])))
    return sorted(found, key=lambda each: -abs(each.rho))


def _spearman(values: np.ndarray) -> float:
    """Return the correlation of two columns; nan if one is constant."""
    from scipy.stats import ConstantInputWarning, spearmanr

    if len(values) < 3:
        return float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        return float(spearmanr(values).statistic)


def body(found: Sequence[Correlation]) -> list[list[str]]:
    """Return the rows of a table."""
    return [[each.measure, str(each), *map(str, (each.cells, each.schemes, each.trainings))] for each in found]
