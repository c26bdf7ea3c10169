"""The cells of the sweep, and what README.md's questions ask of them, as numbers with intervals.

A cell is a size's variant under a scheme. All sizes answer the same questions under a seed, so what is asked of several
sizes is one contrast of cells: paired by question, over seeds (random) and questions.
"""

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np
import pandas as pd

from qrl import names
from qrl.compare.outcomes import Answered
from qrl.compare.sizes import slope
from qrl.stats import Estimate, holm_by_key

GRPO, BASE, FULL = names.GRPO, names.BASE, names.FULL
CONTROLS = (names.SFT, "pretrained")
PRIMARY, MARGIN = "gptq", 0.02
CLIFF = ("w8a16", "gptq", names.GPTQ_INT3, names.GPTQ_INT2)  # 8, 4, 3, 2 bits
CLIFF_LOSS = 0.05
PLANNED = (  # schemes of the families that are corrected together
    *("nf4", "awq-ct", "gptq", "w8a16", "int8", "fp8", "nvfp4a16", "nvfp4", "gptq-int3", "gptq-int2"),
    *("rtn-int4", "rtn-int3", "rtn-int2"),
)
METHODS = (
    "qlora:full",
    "qat-int4:rtn-int4",
    "qad-int4:rtn-int4",
    "distilled:full",
    "grpo-fp8:gptq",
)  # beside grpo under gptq, rtn-int4
PARAMETERS = {"m3": 2.5e6, "m10": 8e6, "m25": 24e6, "m200": 200e6}
MEASURES = ("relative_mse", "code_flip_rate", "update_survival", "update_cosine")  # per cell of grpo, over matrices
BEHAVIOUR = ("kl", "top1_agreement")  # per cell of grpo, on held-out solutions
Cell = tuple[str, str, str]  # size, variant, scheme
Weights = dict[Cell, float]


class Answers:
    """All cells of a sweep."""

    def __init__(self, frame: pd.DataFrame) -> None:
        """Align rows of size, seed, variant, scheme, question and correct; leave out cells that lack a seed."""
        frame, self.partial = _whole(frame)
        keys = frame[["size", "variant", "scheme"]].astype(str).drop_duplicates()
        self.cells: set[Cell] = set(keys.itertuples(index=False, name=None))
        self.sizes = sorted(frame["size"].astype(str).unique(), key=PARAMETERS.__getitem__)
        labels = frame["size"].astype(str) + " " + frame["variant"].astype(str) + " " + frame["scheme"].astype(str)
        rows = frame.assign(variant=labels, scheme=FULL)
        first = rows[labels == _label((self.sizes[0], BASE, FULL))].assign(variant=BASE)  # a table has one base
        self.evidence = Answered(pd.concat([first, rows], ignore_index=True)).outcomes

    def contrast(self, weights: Weights) -> Estimate | None:
        """Return a weighted sum of accuracies; None if a cell was not evaluated."""
        if not weights or not set(weights) <= self.cells:
            return None
        return self.evidence.contrast({(_label(cell), FULL): weight for cell, weight in weights.items()})

    def schemes(self) -> list[str]:
        """Return the schemes of grpo, in the order of CLIFF and then by name."""
        held = {scheme for _, variant, scheme in self.cells if variant == GRPO} - {FULL}
        return sorted(
            held, key=lambda scheme: (scheme not in CLIFF, CLIFF.index(scheme) if scheme in CLIFF else 0, scheme)
        )


def _whole(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the answers of the cells that were evaluated under all seeds, and the names of the others."""
    cell = ["size", "variant", "scheme"]
    partial = frame.groupby(cell, observed=True)["seed"].transform("nunique") < frame["seed"].nunique()
    return frame[~partial], sorted(map(" ".join, frame.loc[partial, cell].astype(str).drop_duplicates().to_numpy()))


def _label(cell: Cell) -> str:
    return " ".join(cell)


def loss(size: str, variant: str, scheme: str, weight: float = 1.0) -> Weights:
    """Return what quantization costs a variant: full precision minus the scheme."""
    return {(size, variant, FULL): weight, (size, variant, scheme): -weight}


def excess(sizes: Sequence[str], scheme: str, other: str) -> Weights:
    """Return loss(grpo) − loss(other) under a scheme, averaged over sizes."""
    each = 1 / len(sizes)
    return {
        k: w for size in sizes for k, w in (loss(size, GRPO, scheme, each) | loss(size, other, scheme, -each)).items()
    }


def answer(value: Estimate) -> str:
    """Say what the design counts as an answer."""
    said = []
    if value.low > 0 or value.high < 0:
        said.append(f"RL makes these models quantize {'less' if value.low > 0 else 'more'} cleanly")
    if value.low > -MARGIN and value.high < MARGIN:
        said.append(f"RL changes it by less than {MARGIN}")
    return "; ".join(said) or "inconclusive: these questions cannot tell"


def relative_excess(answers: Answers, sizes: Sequence[str], scheme: str, other: str) -> Estimate | None:
    """Return the share of its accuracy that a scheme costs grpo, minus the share that it costs another, over sizes.

    Accuracies that differ leave different amounts to lose. The interval is that of the shares' linear terms.

    Source: the delta method, e.g. Casella and Berger, Statistical Inference, section 5.5.4.
    """
    total, weights = 0.0, {}
    for size, (variant, sign) in itertools.product(sizes, ((GRPO, 1), (other, -1))):
        full, kept = (answers.contrast({(size, variant, q): 1.0}) for q in (FULL, scheme))
        if not (full and kept and full.estimate):
            return None
        each, share = sign / len(sizes), kept.estimate / full.estimate
        total += each * (1 - share)
        weights |= {(size, variant, FULL): each * share / full.estimate, (size, variant, scheme): -each / full.estimate}
    value = answers.contrast(weights)
    return value and value.scaled(1.0, total)


def missing(answers: Answers) -> list[str]:
    """Return the sizes of the design that were not run."""
    return [size for size in PARAMETERS if size not in answers.sizes]


class Tested(NamedTuple):
    """A member of a family of tests."""

    value: Estimate
    p: float  # corrected by Holm's procedure, in which tests that were not made count too


def family(planned: Iterable, found: dict) -> dict:
    """Return the estimates that were found, with p-values corrected over all that were planned."""
    holm = holm_by_key(dict.fromkeys(planned, 1.0) | {key: value.p_two_sided for key, value in found.items()})
    return {key: Tested(value, holm[key]) for key, value in found.items()}


def against(answers: Answers, other: str) -> dict[str, Estimate]:
    """Return loss(grpo) − loss(other), averaged over the sizes, by scheme."""
    values = {scheme: answers.contrast(excess(answers.sizes, scheme, other)) for scheme in answers.schemes()}
    return {scheme: value for scheme, value in values.items() if value}


CONTROL_TESTS = list(itertools.product(CONTROLS, PLANNED))


def controls(answers: Answers) -> dict[tuple[str, str], Tested]:
    """Question 2, by control and scheme."""
    found = {(c, scheme): value for c in CONTROLS for scheme, value in against(answers, c).items()}
    return family(CONTROL_TESTS, found)


class Cliff(NamedTuple):
    """The losses of one size's variant by width, in the order of CLIFF."""

    losses: list[Estimate]
    first: str  # scheme whose loss is above CLIFF_LOSS; "" if none is


def cliffs(answers: Answers) -> dict[tuple[str, str], Cliff]:
    """Question 3, by size and variant."""
    found = {}
    for key in itertools.product(answers.sizes, (BASE, names.SFT, GRPO)):
        losses = [answers.contrast(loss(*key, scheme)) for scheme in CLIFF]
        if all(losses):
            over = (scheme for scheme, value in zip(CLIFF, losses, strict=True) if value.low > CLIFF_LOSS)
            found[key] = Cliff(losses, next(over, ""))
    return found


def growth(answers: Answers) -> dict[str, Tested]:
    """Question 4: the slope of grpo's loss per decade of parameters, by scheme."""
    found, slopes = {}, slope([PARAMETERS[size] for size in answers.sizes])
    for scheme in answers.schemes():
        weights: Weights = {}
        for place, weight in slopes.items():
            weights |= loss(answers.sizes[place], GRPO, scheme, weight)
        if value := answers.contrast(weights):
            found[scheme] = value
    return family(PLANNED, found)


class Compared(NamedTuple):
    """A method beside another cell of grpo's."""

    method: str
    other: str
    sizes: list[str]
    value: Estimate  # accuracy of the method minus the other's, mean over the sizes


def methods(answers: Answers) -> list[Compared]:
    """Question 5: which method keeps the gain in four bits; exploratory."""
    found = []
    for method, scheme in itertools.product(METHODS, (PRIMARY, "rtn-int4")):
        variant, _, own = method.partition(":")
        having = [size for size in answers.sizes if (size, variant, own) in answers.cells]
        each = 1 / max(1, len(having))
        weights = {(size, variant, own): each for size in having} | {(size, GRPO, scheme): -each for size in having}
        if value := answers.contrast(weights):
            found.append(Compared(method, f"{GRPO}:{scheme}", having, value))
    return found


@dataclass(frozen=True)
class Rank:
    """Spearman's correlation of a measure with the loss, over cells."""

    measure: str
    rho: float
    low: float
    high: float
    cells: int
    units: int  # sizes × seeds, which are resampled

    def __str__(self) -> str:
        return f"{self.rho:+.2f} [{self.low:+.2f}, {self.high:+.2f}]".replace("-", "−")


def predictors(frame: pd.DataFrame, weights: pd.DataFrame, most: float = np.inf, draws: int = 2000) -> list[Rank]:
    """Question 6: what predicts grpo's loss, the best first, over cells that lose no more than `most`; exploratory.

    A point is a scheme of one size and seed. The interval is a percentile bootstrap over sizes × seeds: schemes of
    one training are not independent.

    Source: Spearman's rho; Efron and Tibshirani, An Introduction to the Bootstrap, section 13.3.
    """
    from scipy.stats import spearmanr

    trained = frame[frame["variant"].astype(str) == GRPO]
    accuracy = trained.groupby(["size", "seed", "scheme"], observed=True)["correct"].mean()
    stored = weights[(weights["table"] == "schemes") & (weights["variant"] == GRPO)]
    measured = stored.groupby(["size", "seed", "scheme"])[[m for m in MEASURES if m in stored]].mean()
    spoken = weights[(weights["table"] == "behaviour") & (weights["variant"] == GRPO)]
    if len(spoken := spoken[spoken["scheme"].isin(set(stored["scheme"]))]):
        measured = measured.join(spoken.groupby(["size", "seed", "scheme"])[list(BEHAVIOUR)].mean())
    points = measured.assign(
        loss=[
            accuracy.get((size, seed, FULL), np.nan) - accuracy.get((size, seed, scheme), np.nan)
            for size, seed, scheme in measured.index
        ]
    ).dropna(subset=["loss"])
    points = points[points["loss"] <= most]
    units = sorted({(size, seed) for size, seed, _ in points.index})
    by_unit = [points[[(size, seed) == unit for size, seed, _ in points.index]] for unit in units]
    ranks, random = [], np.random.default_rng(0)
    for measure in measured.columns:
        known = [part[[measure, "loss"]].dropna().to_numpy() for part in by_unit]
        rho = spearmanr(np.concatenate(known)).statistic
        drawn = []
        for _ in range(draws if len(units) > 1 else 0):
            part = np.concatenate([known[place] for place in random.integers(len(units), size=len(units))])
            drawn.append(spearmanr(part).statistic)
        low, high = np.nanpercentile(drawn, [2.5, 97.5]) if drawn else (np.nan, np.nan)
        ranks.append(Rank(measure, float(rho), float(low), float(high), sum(map(len, known)), len(units)))
    return sorted(ranks, key=lambda rank: -abs(rank.rho))
