"""The cells of the sweep, and contrasts of them: numbers with intervals.

A cell is a size's variant under a scheme. All sizes answer the same questions under a seed, so what is asked of several
sizes is one contrast of cells: paired by question, over seeds (random) and questions.
"""

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import pandas as pd

from qrl import names
from qrl.compare.outcomes import Answered
from qrl.errors import BadInput
from qrl.stats import LEVEL, Estimate, quantile

GRPO, BASE, SFT, FULL = names.GRPO, names.BASE, names.SFT, names.FULL
PRETRAINED = "pretrained"
CONTROLS = (SFT, PRETRAINED)
PRIMARY, MARGIN = "gptq", 0.02
CLIFF = ("w8a16", "gptq", names.GPTQ_INT3, names.GPTQ_INT2)  # 8, 4, 3, 2 bits
PLANNED = (  # schemes of the families that are corrected together, in the tables' order
    *("w8a16", "gptq", "gptq-int3", "gptq-int2", "awq-ct", "fp8", "int8", "nf4", "nvfp4", "nvfp4a16"),
    *("rtn-int4", "rtn-int3", "rtn-int2"),
)
PARAMETERS = {"m3": 2.5e6, "m10": 8e6, "m25": 24e6, "m200": 200e6}  # of the design; other models' are in the export
SEEDS = 4  # of the design
Cell = tuple[str, str, str]  # size, variant, scheme
Weights = dict[Cell, float]


class Answers:
    """All cells that were evaluated under all seeds.

    Attributes:
        frame: their answers, a row each: size, seed, variant, scheme, question, correct.
        partial: names of the other cells.
        parameters: of each size that was asked for, the smallest first.
        sizes: those whose base and grpo have both cells of the primary outcome.
        begun: the other sizes.
    """

    def __init__(self, frame: pd.DataFrame, parameters: Mapping[str, float] = PARAMETERS) -> None:
        """Align answers; raise BadInput if no cell has all seeds, or no base was evaluated in full precision."""
        self.parameters = parameters
        labels = frame[["size", "variant", "scheme"]]
        whole = frame.groupby(list(labels), observed=True)["seed"].transform("nunique") == frame["seed"].nunique()
        self.frame = frame[whole]
        self.partial = sorted(map(" ".join, labels[~whole].astype(str).drop_duplicates().to_numpy()))
        keys = labels[whole].astype(str).drop_duplicates()
        self.cells: set[Cell] = set(keys.itertuples(index=False, name=None))
        needed = list(itertools.product((BASE, GRPO), (FULL, PRIMARY)))
        present = sorted({size for size, *_ in self.cells}, key=parameters.__getitem__)
        self.sizes = [size for size in present if all((size, *cell) in self.cells for cell in needed)]
        self.begun = [size for size in present if size not in self.sizes]
        bases = [size for size in present if (size, BASE, FULL) in self.cells]
        if not bases:
            raise BadInput("No base was evaluated in full precision under all seeds: run.py goes on where it stopped.")
        cells = self.frame["size"].astype(str) + " " + self.frame["variant"].astype(str)
        rows = self.frame.assign(variant=cells + " " + self.frame["scheme"].astype(str), scheme=FULL)
        first = rows[rows["variant"] == _label((bases[0], BASE, FULL))].assign(variant=BASE)  # a table has one base
        self.evidence = Answered(pd.concat([first, rows], ignore_index=True)).outcomes

    @property
    def runs(self) -> int:
        """The number of seeds."""
        return len(self.evidence.runs)

    @property
    def missing(self) -> list[str]:
        """The sizes that were asked for and not run, or not wholly."""
        return [size for size in self.parameters if size not in self.sizes]

    @property
    def designed(self) -> bool:
        """Whether these are the models of README.md's design."""
        return self.parameters is PARAMETERS

    def contrast(self, weights: Weights) -> Estimate | None:
        """Return a weighted sum of accuracies; None if a cell was not evaluated."""
        if not weights or not set(weights) <= self.cells:
            return None
        trained = any(variant not in (BASE, PRETRAINED) for _, variant, _ in weights)  # those are one model each
        return self.evidence.contrast({(_label(cell), FULL): w for cell, w in weights.items()}, vary=trained)

    def schemes(self) -> list[str]:
        """Return the schemes of grpo, in the order of PLANNED."""
        held = {scheme for _, variant, scheme in self.cells if variant == GRPO} - {FULL}
        return [*(scheme for scheme in PLANNED if scheme in held), *sorted(held - set(PLANNED))]


def parameters(frame: pd.DataFrame, cells: pd.DataFrame | None) -> Mapping[str, float]:
    """Return the sizes of the design or, if answers of other models are among these, of all, from `cells.parquet`.

    Raises:
        BadInput: the export does not have a model's number of parameters.
    """
    sizes = sorted(frame["size"].astype(str).unique())
    if set(sizes) <= set(PARAMETERS):
        return PARAMETERS
    known = {} if cells is None or "parameters" not in cells else cells.groupby("size")["parameters"].max().to_dict()
    counts = {size: known.get(size, PARAMETERS.get(size, math.nan)) for size in sizes}
    if absent := [size for size, count in counts.items() if not count > 0]:
        remedy = "run export.py again where the base models are"
        raise BadInput(f"The export does not have the number of parameters of {', '.join(absent)}: {remedy}.")
    return dict(sorted(counts.items(), key=lambda item: item[1]))


def _label(cell: Cell) -> str:
    return " ".join(cell)


def loss(size: str, variant: str, scheme: str, weight: float = 1.0) -> Weights:
    """Return what quantization costs a variant: full precision minus the scheme."""
    return {(size, variant, FULL): weight, (size, variant, scheme): -weight}


def excess(sizes: Sequence[str], scheme: str, other: str, of: str = GRPO) -> Weights:
    """Return loss(of) − loss(other) under a scheme, averaged over sizes."""
    each = 1 / max(1, len(sizes))
    return {
        k: w for size in sizes for k, w in (loss(size, of, scheme, each) | loss(size, other, scheme, -each)).items()
    }


@dataclass(frozen=True)
class Excess:
    """What a scheme costs grpo, minus what it costs another.

    Attributes:
        value: mean over the sizes, whose spread is that of the seeds' means.
        by_size: the same at each size.
        apart: the mean, with the trainings of each size counted apart.
    """

    value: Estimate
    by_size: Mapping[str, Estimate]
    apart: Estimate
    larger: Estimate | None  # the mean over all sizes but the smallest


def against(answers: Answers, other: str) -> dict[str, Excess]:
    """Return the excess of grpo's loss over another's by scheme, of those that every size has."""
    found = {}
    for scheme in answers.schemes():
        if value := answers.contrast(excess(answers.sizes, scheme, other)):
            by_size = {size: answers.contrast(excess([size], scheme, other)) for size in answers.sizes}
            larger = answers.contrast(excess(answers.sizes[1:], scheme, other))
            found[scheme] = Excess(value, by_size, mean_apart(list(by_size.values())), larger)
    return found


def mean_apart(values: Sequence[Estimate]) -> Estimate:
    """Return the mean of estimates from trainings of their own; questions that they share are counted as their own.

    Source: degrees of freedom after Satterthwaite, Biometrics Bulletin 2 (1946) 110.
    """
    variances = [value.stderr**2 for value in values]
    own = [
        variance**2 / (value.runs.count - 1) for value, variance in zip(values, variances, strict=True) if value.runs
    ]
    total, mean = sum(variances), sum(value.estimate for value in values) / len(values)
    df = total**2 / sum(own) if sum(own) else math.inf
    stderr = math.sqrt(total) / len(values)
    reach = -quantile((1 - LEVEL) / 2, df) * stderr
    return Estimate(mean, stderr, mean - reach, mean + reach, values[0].n, df)


def relative_excess(answers: Answers, scheme: str, other: str) -> Estimate | None:
    """Return the share of its accuracy that a scheme costs grpo, minus the share that it costs another, over sizes.

    Accuracies that differ leave different amounts to lose. The interval is that of the shares' linear terms.

    Source: the delta method, e.g. Casella and Berger, Statistical Inference, section 5.5.4.
    """
    total, weights = 0.0, {}
    for size, (variant, sign) in itertools.product(answers.sizes, ((GRPO, 1), (other, -1))):
        full, kept = (answers.contrast({(size, variant, q): 1.0}) for q in (FULL, scheme))
        if not (full and kept and full.estimate):
            return None
        each, share = sign / len(answers.sizes), kept.estimate / full.estimate
        total += each * (1 - share)
        weights[size, variant, FULL] = each * share / full.estimate
        weights[size, variant, scheme] = -each / full.estimate
    value = answers.contrast(weights)
    return value and value.scaled(1.0, total)


def answer(value: Estimate) -> str:
    """Say what the design counts as an answer."""
    within, where = value.low > -MARGIN and value.high < MARGIN, f"In four bits ({PRIMARY})"
    if value.low > 0 or value.high < 0:
        said = f"{where} RL makes these models quantize {'less' if value.low > 0 else 'more'} cleanly"
        return f"{said}, but by less than {MARGIN}" if within else said
    if within:
        return f"{where} RL changes what quantization costs by less than {MARGIN}"
    return f"{where} the result is inconclusive: these questions cannot tell"
