"""Print all tables of README.md's study from its export, without a GPU.

python tests/benchmarks/answer/real/summary.py EXPORT                 # several exports, by comma, are joined
python tests/benchmarks/answer/real/summary.py EXPORT --out tables.md
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[4]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))  # last: both folders have modules `page` and `run`

import numpy as np
import pandas as pd
import tables
from evidence import (
    BASE,
    FULL,
    GRPO,
    LEAST,
    SEEN,
    SFT,
    Comparison,
    Evidence,
    accuracy_kept,
    compare,
    gain_kept,
    loss,
    of_one_seed,
)

from qrl import names
from qrl import recipe as recipes
from qrl.errors import BadInput
from qrl.stats import Estimate, holm_by_key, signed
from qrl.stats.text import interval, percent_interval, table

PRIMARY, RTN_INT4, LORA = names.NF4, "rtn-int4", "lora"
SCHEMES = (  # of the design, in the tables' order
    *(PRIMARY, names.AWQ_CT, names.GPTQ, RTN_INT4, names.INT8, names.FP8, names.NVFP4A16),
    *(names.GPTQ_INT3, names.GPTQ_INT2),
)
PLANNED, OTHERS = SCHEMES[:3], SCHEMES[3:]  # those of the hypotheses, and the exploratory ones
METHODS = ("qat-int4", "qad-int4")
SAME_RATE = "sft-1e-5"  # SFT at the learning rate of GRPO; the planned SFT has ten times that
MARGIN, RATIO_MARGIN = 0.05, (0.90, 1.11)  # within which a difference counts as none
SIGNIFICANT = 0.05
TREATED = {
    "c100": "calibration set 100",
    "c101": "calibration set 101",
    "g32": "groups of 32",
    "own": "own answers as calibration texts",
}
HF = "hf"  # variant-hf: answered by transformers
KEPT = "-keep-"  # variant-keep-PART: in NF4 but for the part
ORDER = ("pretrained", BASE, SFT, SAME_RATE, GRPO, LORA, *METHODS)
MEASURES = {  # of a cell → its heading
    "layer_error": "error after the last layer",
    "relative_mse": "relative error of weights",
    "code_flip_rate": "codes flipped",
    "update_survival": "update survival",
    "update_cosine": "update cosine",
    "kl": "KL, nats a token",
    "top1_agreement": "same likeliest token",
}
OF_WEIGHTS = {
    "abs_outlier_frac": "outlier fraction",
    "channel_outlier_frac": "channels with outliers",
    "kurtosis": "kurtosis",
    "w4_snr_db": "SNR in INT4, dB",
    "w4_relative_mse": "relative error in INT4",
    "relative_change": "relative change by training",
    "unchanged_frac": "unchanged in bf16",
}
NONE = "not evaluated"


# Families of tests


@dataclass(frozen=True)
class Tested:
    """A comparison and its p-values, corrected by Holm's procedure over its family."""

    value: Comparison
    p_points: float
    p_ratio: float | None


def family(evidence: Evidence, variant: str, other: str, schemes: Sequence[str]) -> dict[str, Tested]:
    """Return the comparisons of a family by scheme: two outcomes each; tests that were not made count as p = 1."""
    found = {scheme: value for scheme in schemes if (value := compare(evidence, variant, other, scheme))}
    p_values = dict.fromkeys(itertools.product(schemes, ("points", "ratio")), 1.0)
    for scheme, value in found.items():
        p_values[scheme, "points"] = value.p_points
        p_values[scheme, "ratio"] = 1.0 if value.p_ratio is None else value.p_ratio
    holm = holm_by_key(p_values)
    return {
        scheme: Tested(value, holm[scheme, "points"], None if value.p_ratio is None else holm[scheme, "ratio"])
        for scheme, value in found.items()
    }


def direction(value: Estimate, p: float | None, neutral: float) -> int:
    """Return 1 or −1 if a value is shown above or below what is neutral, by its interval and Holm's p; else 0."""
    if p is None or p >= SIGNIFICANT:
        return 0
    return int(value.low > neutral) - int(value.high < neutral)


class Outcome(NamedTuple):
    """What the design counts as an answer.

    Attributes:
        points, ratio: 1 or −1 if the variant is shown to quantize more or less cleanly on this scale; else 0.
        within: whether both intervals are within the margins.
    """

    points: int
    ratio: int
    within: bool

    @property
    def both(self) -> int:
        """Return 1 or −1 if both scales show the same; else 0."""
        return self.points if self.points == self.ratio else 0

    @property
    def opposed(self) -> bool:
        """Whether the scales show opposite things."""
        return bool(self.points) and self.points == -self.ratio

    @property
    def open(self) -> bool:
        """Whether nothing is shown, neither a difference nor that there is none."""
        return not (self.points or self.ratio or self.within)


def outcome(tested: Tested) -> Outcome:
    """Return what the intervals and Holm's p-values of a comparison show."""
    value = tested.value
    points = direction(value.points, tested.p_points, 0.0)
    ratio = direction(value.ratio, tested.p_ratio, 1.0)
    within_points = value.points.low > -MARGIN and value.points.high < MARGIN
    within_ratio = value.ratio.low > RATIO_MARGIN[0] and value.ratio.high < RATIO_MARGIN[1]
    return Outcome(points, ratio, not (points or ratio) and within_points and within_ratio)


def answer(tested: Tested) -> str:
    """Return what the design counts as an answer, in words."""
    name, other = tested.value.variant, tested.value.other
    points, ratio, within = outcome(tested)
    words = {1: "more", -1: "less"}
    if points and points == ratio:
        return f"{name} quantizes {words[points]} cleanly than {other}, on both scales"
    if points and ratio:
        size = {1: "larger", -1: "smaller"}
        moved = {1: "fewer", -1: "more"}
        return f"it depends on the scale: {name} loses {moved[points]} points and keeps a {size[ratio]} share"
    if points:
        return f"{name} quantizes {words[points]} cleanly than {other} in points; as a share it is open"
    if ratio:
        return f"{name} quantizes {words[ratio]} cleanly than {other} as a share; in points it is open"
    if within:
        return f"{name} and {other} differ by less than the margin, on both scales"
    return "inconclusive"


class Family(NamedTuple):
    """Tests that are corrected together: two outcomes of a variant beside another one, under each scheme."""

    title: str
    variant: str
    other: str
    schemes: tuple[str, ...]


FAMILIES = (
    Family(f"1. Primary: {PRIMARY}, {GRPO} and {BASE}", GRPO, BASE, (PRIMARY,)),
    Family(f"2. {' and '.join(PLANNED[1:])}, {GRPO} and {BASE}", GRPO, BASE, PLANNED[1:]),
    Family(f"3. RL, or any training? {GRPO} and {SFT}", GRPO, SFT, PLANNED),
    Family(f"Exploratory: other schemes, {GRPO} and {BASE}", GRPO, BASE, OTHERS),
    Family(f"Exploratory: other schemes, {GRPO} and {SFT}", GRPO, SFT, OTHERS),
    Family(f"Exploratory: {SFT} and {BASE}", SFT, BASE, SCHEMES),
    Family(f"Exploratory: at one learning rate, {GRPO} and {SAME_RATE}", GRPO, SAME_RATE, SCHEMES),
    Family(f"Exploratory: at two learning rates, {SFT} and {SAME_RATE}", SFT, SAME_RATE, SCHEMES),
    Family(f"Exploratory: {SAME_RATE} and {BASE}", SAME_RATE, BASE, SCHEMES),
    Family(f"Exploratory: {LORA} and {BASE}", LORA, BASE, SCHEMES),
    Family(f"Exploratory: {LORA} and {GRPO}", LORA, GRPO, SCHEMES),
    Family(f"Exploratory: {LORA} and {SFT}", LORA, SFT, SCHEMES),
)


def families(evidence: Evidence) -> dict[Family, dict[str, Tested]]:
    """Return the tests of every family, by scheme."""
    return {each: family(evidence, each.variant, each.other, each.schemes) for each in FAMILIES}


# Tables


def accuracies(evidence: Evidence, title: str) -> list[str]:
    """Return the accuracy of every cell in the design's schemes."""
    head = ("variant", "seeds", *(FULL, *SCHEMES))
    rows = []
    for variant in _variants(evidence):
        values = [evidence.accuracy((variant, scheme)) for scheme in (FULL, *SCHEMES)]
        seeds = sorted({seed for scheme in (FULL, *SCHEMES) for seed in evidence.seeds.get((variant, scheme), ())})
        rows.append([variant, ", ".join(map(str, seeds)), *map(_rate, values)])
    return _section(f"## {title}: accuracy", head, rows)


def compared(evidence: Evidence, tested: dict[str, Tested], title: str) -> list[str]:
    """Return what each scheme costs a variant and another one, on all scales."""
    if not tested:
        return _section(title, (), [])
    first = next(iter(tested.values())).value
    variant, other = first.variant, first.other
    beside_base = other == BASE
    gains = ("gain", "gain kept") if beside_base else ()
    head = (
        *("scheme", "seeds", *gains, "gain survival, points" if beside_base else "in points", "p (Holm)"),
        *(f"accuracy kept: {other}", f"accuracy kept: {variant}", "ratio", "p (Holm)", "log-odds", "answer"),
    )
    rows = []
    for scheme, each in tested.items():
        value = each.value
        gain = evidence.contrast({(variant, scheme): 1.0, (BASE, scheme): -1.0}) if beside_base else None
        own = [_difference(gain), _percent(gain_kept(evidence, variant, scheme))] if beside_base else []
        kept = [_percent(accuracy_kept(evidence, name, scheme)) for name in (other, variant)]
        rows.append(
            [
                *(scheme, str(len(value.seeds)), *own, interval(value.points), _p(each.p_points)),
                *(*kept, _ratio(value.ratio), _p(each.p_ratio), interval(value.log_odds), answer(each)),
            ]
        )
    return _section(title, head, rows)


def by_seed(evidence: Evidence, comparisons: Iterable[Comparison]) -> list[str]:
    """Return each seed's own outcomes."""
    rows = []
    for found in comparisons:
        for seed in found.seeds:
            points, ratio, log_odds = of_one_seed(evidence, found, seed)
            shown = (signed(points), _number(ratio, "{:.2f}"), _number(log_odds, "{:+.2f}"))
            rows.append([f"{found.variant} and {found.other}", found.scheme, str(seed), *shown])
    head = ("variants", "scheme", "seed", "points", "ratio of accuracy kept", "difference in log-odds")
    return _section("## Seed by seed", head, rows)


def accuracies_by_seed(evidence: Evidence) -> list[str]:
    """Return the accuracy of every cell under each seed."""
    rows = []
    for variant in _variants(evidence):
        for seed in sorted({seed for (name, _), seeds in evidence.seeds.items() if name == variant for seed in seeds}):
            own = [evidence.by_seed((variant, scheme)).get(seed, math.nan) for scheme in (FULL, *SCHEMES)]
            rows.append([variant, str(seed), *(_number(value, "{:.3f}") for value in own)])
    return _section("## Accuracy, seed by seed", ("variant", "seed", FULL, *SCHEMES), rows)


class FourBits(NamedTuple):
    """Accuracy of weights that were trained in four bits, minus that of GRPO's under the same scheme.

    Attributes:
        p: corrected by Holm's procedure.
        below_full: accuracy minus that of GRPO's weights at full precision.
        seeds: how many.
    """

    value: Estimate
    p: float
    below_full: Estimate | None
    seeds: int


def in_four_bits(evidence: Evidence) -> dict[str, FourBits]:
    """Return hypothesis 4, by method."""
    values = {}
    for method in METHODS:
        value = evidence.contrast({(method, RTN_INT4): 1.0, (GRPO, RTN_INT4): -1.0})
        if value:
            values[method] = value
    holm = holm_by_key(dict.fromkeys(METHODS, 1.0) | {method: value.p_two_sided for method, value in values.items()})
    found = {}
    for method, value in values.items():
        below_full = evidence.contrast({(method, RTN_INT4): 1.0, (GRPO, FULL): -1.0})
        seeds = len(evidence.shared([(method, RTN_INT4), (GRPO, RTN_INT4)]))
        found[method] = FourBits(value, holm[method], below_full, seeds)
    return found


def methods(evidence: Evidence) -> list[str]:
    """Return hypothesis 4 as a table: does training in four bits help?"""
    rows = [
        [f"{method}:{RTN_INT4}", str(each.seeds), interval(each.value), _p(each.p), _difference(each.below_full)]
        for method, each in in_four_bits(evidence).items()
    ]
    head = ("accuracy of", "seeds", f"minus {GRPO}:{RTN_INT4}", "p (Holm)", f"minus {GRPO}:{FULL}")
    return _section("## Does training in four bits help?", head, rows)


def calibration(evidence: Evidence) -> list[str]:
    """Return how far calibration sets move a cell, and what other ways to quantize give back."""
    spread = []
    for scheme in SCHEMES:
        variants = [BASE, *(f"{BASE}-{label}" for label in ("c100", "c101"))]
        for seed in evidence.shared((variant, scheme) for variant in variants):
            drawn = [evidence.by_seed((variant, scheme))[seed] for variant in variants]
            shown = [f"{value:.3f}" for value in drawn]
            spread.append([scheme, str(seed), *shown, f"{max(drawn) - min(drawn):.3f}", f"{np.std(drawn, ddof=1):.3f}"])
    head = ("scheme", "seed", "its own set", "set 100", "set 101", "range", "standard deviation")
    lines = _section("## The base under three calibration sets, on the same questions", head, spread)
    rows = []
    for (label, text), scheme in itertools.product(TREATED.items(), SCHEMES):
        changes = {}
        for variant in (BASE, GRPO):
            changes[variant] = evidence.contrast({(f"{variant}-{label}", scheme): 1.0, (variant, scheme): -1.0})
        if any(changes.values()):
            treated = {(f"{name}-{label}", scheme): sign for name, sign in ((GRPO, 1.0), (BASE, -1.0))}
            survival = evidence.contrast(treated | {(GRPO, FULL): -1.0, (BASE, FULL): 1.0})
            rows.append([text, scheme, *(_difference(changes[name]) for name in (BASE, GRPO)), _difference(survival)])
    head = ("instead of the default", "scheme", f"change of {BASE}", f"change of {GRPO}", "gain survival then")
    return lines + _section("## Other ways to quantize", head, rows)


def kept_parts(evidence: Evidence) -> list[str]:
    """Return the parts that stayed in full precision while all others were in NF4."""
    return sorted({variant.partition(KEPT)[2] for variant, _ in evidence.cells if KEPT in variant} - {"none"})


def given_back(evidence: Evidence, variant: str, part: str) -> Estimate | None:
    """Return what a variant's accuracy gains if a part stays in full precision while all others are in NF4."""
    return evidence.contrast({(f"{variant}{KEPT}{part}", FULL): 1.0, (f"{variant}{KEPT}none", FULL): -1.0})


def layers(evidence: Evidence) -> list[str]:
    """Return what a part gives back, and what is still lost, as a table."""
    rows = []
    for label in kept_parts(evidence):
        back = [given_back(evidence, variant, label) for variant in (BASE, GRPO)]
        left = [
            evidence.contrast({(variant, FULL): 1.0, (f"{variant}{KEPT}{label}", FULL): -1.0})
            for variant in (BASE, GRPO)
        ]
        rows.append([label, *map(_difference, back), *map(_difference, left)])
    whole = [evidence.contrast({(name, FULL): 1.0, (f"{name}{KEPT}none", FULL): -1.0}) for name in (BASE, GRPO)]
    if any(whole):
        rows.insert(0, ["nothing", "", "", *map(_difference, whole)])
    head = ("kept in full precision", f"gives {BASE}", f"gives {GRPO}", f"{BASE} still loses", f"{GRPO} still loses")
    return _section("## Which layers (NF4)?", head, rows)


def elsewhere(evidence: Evidence) -> list[str]:
    """Return the accuracy of the same checkpoints by another implementation."""
    rows = []
    for variant, scheme in itertools.product((BASE, GRPO), (FULL, *SCHEMES)):
        other = (f"{variant}-{HF}", scheme)
        if change := evidence.contrast({other: 1.0, (variant, scheme): -1.0}):
            here = evidence.contrast({(variant, scheme): 1.0, other: 0.0})
            rows.append([variant, scheme, _rate(here), _rate(evidence.accuracy(other)), interval(change)])
    head = ("variant", "scheme", "vLLM", "transformers", "difference")
    return _section("## The same checkpoints, loaded by transformers", head, rows)


def knew_before(evidence: Evidence, measures: pd.DataFrame | None) -> list[str]:
    """Return measures beside losses, and their rank correlation over the cells of a variant."""
    if measures is None:
        return _section("## Which measure knew before?", (), [])
    whole = measures[(measures["projection"] == "all") & ~measures["seed"].isin(SEEN)]
    present = [name for name in MEASURES if name in whole and whole[name].notna().any()]
    means = whole.groupby(["variant", "scheme"])[present].mean()
    rows = []
    for scheme, variant in itertools.product(SCHEMES, ORDER):
        cost = evidence.contrast(loss(variant, scheme))
        if cost is None or (variant, scheme) not in means.index:
            continue
        own = means.loc[(variant, scheme)]
        rows.append([scheme, variant, interval(cost), *(_number(own[name], "{:.3g}") for name in present)])
    head = ("scheme", "variant", "loss", *(MEASURES[name] for name in present))
    lines = _section("## Which measure knew before?", head, rows)
    correlations = []
    for variant in ORDER:
        if own := ranks(evidence, measures, variant):
            shown = [_number(own[name].of_means, "{:+.2f}") if name in own else "" for name in present]
            correlations.append([variant, str(max(rank.schemes for rank in own.values())), *shown])
    lines += ["Spearman's correlation with the loss, over schemes; without intervals, exploratory:", ""]
    lines += _lines(("variant", "schemes", *(MEASURES[name] for name in present)), correlations)
    return lines + _of_weights(whole)


class Rank(NamedTuple):
    """Spearman's correlation of a measure with the loss, over the schemes of a variant.

    Attributes:
        of_means: of means over the seeds that have both.
        by_seed: in each seed.
        schemes: how many.
    """

    of_means: float
    by_seed: list[float]
    schemes: int


def measured(measures: pd.DataFrame | None, variant: str, scheme: str, name: str) -> dict[int, float]:
    """Return a measure of a whole cell of sums, by seed."""
    if measures is None or name not in measures:
        return {}
    own = measures[(measures["size"] == "sums") & (measures["projection"] == "all") & ~measures["seed"].isin(SEEN)]
    own = own[(own["variant"] == variant) & (own["scheme"] == scheme)].dropna(subset=[name])
    return own.groupby("seed")[name].mean().to_dict()


def ranks(evidence: Evidence, measures: pd.DataFrame | None, variant: str) -> dict[str, Rank]:
    """Return the correlations of a variant, by measure; of at least three schemes."""
    found = {}
    for name in MEASURES:
        rows = []
        for scheme in SCHEMES:
            values = measured(measures, variant, scheme, name)
            full, kept = (evidence.by_seed((variant, under)) for under in (FULL, scheme))
            for seed in sorted(set(values) & set(full) & set(kept)):
                rows.append({"scheme": scheme, "seed": seed, "loss": full[seed] - kept[seed], name: values[seed]})
        frame = pd.DataFrame(rows, columns=["scheme", "seed", "loss", name])
        means = frame.groupby("scheme")[["loss", name]].mean()
        of_means = correlation(means["loss"], means[name])
        by_seed = [correlation(own["loss"], own[name]) for _, own in frame.groupby("seed")]
        if not math.isnan(of_means):
            found[name] = Rank(of_means, [rank for rank in by_seed if not math.isnan(rank)] or [of_means], len(means))
    return found


def correlation(loss_of: pd.Series, measure: pd.Series) -> float:
    """Return Spearman's correlation; nan where one of both is constant, or known of fewer than three cells."""
    known = measure.notna()
    if known.sum() < 3 or min(loss_of[known].nunique(), measure[known].nunique()) < 2:
        return math.nan
    return float(loss_of[known].corr(measure[known], method="spearman"))


def _of_weights(whole: pd.DataFrame) -> list[str]:
    own = whole[whole["scheme"] == FULL]
    present = [name for name in OF_WEIGHTS if name in own and own[name].notna().any()]
    rows = []
    for variant, measured in own.groupby("variant"):
        seeds = ", ".join(map(str, sorted(measured["seed"].unique())))
        means = measured[present].mean()
        rows.append([str(variant), seeds, *(_number(means[name], "{:.7g}") for name in present)])
    return [
        "Of the weights in full precision, means over seeds; other variants were not measured, and the base was not "
        "trained:",
        "",
        *_lines(("variant", "seeds", *(OF_WEIGHTS[name] for name in present)), rows),
    ]


def unhealthy(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells that break an evaluation's default limits on unfinished and on unreadable answers."""
    limits = recipes.load("tiny").evaluate
    return cells[(cells["truncated"] > limits.max_truncation_rate) | (cells["parsed"] < limits.min_parse_rate)]


def marked(cells: pd.DataFrame | None) -> list[str]:
    """Return the cells that an evaluation's default limits would have refused."""
    if cells is None:
        return []
    bad = unhealthy(cells)
    keys = ["size", "variant", "scheme"]
    rows = [
        [
            *key,
            ", ".join(map(str, sorted(rows["seed"]))),
            f"{rows['truncated'].mean():.3f}",
            f"{rows['parsed'].mean():.3f}",
        ]
        for key, rows in bad.groupby(keys)
    ]
    head = ("task", "variant", "scheme", "seeds", "truncated, mean", "in the required form, mean")
    title = "## Cells beyond the limits of health"
    return _section(title, head, rows) if rows else [title, "", f"None of {len(cells)}.", ""]


def losses(evidence: Evidence, title: str) -> list[str]:
    """Return what each scheme costs each variant."""
    rows = []
    for variant in _variants(evidence):
        own = [evidence.contrast(loss(variant, scheme)) for scheme in SCHEMES]
        if any(own):
            rows.append([variant, *map(_difference, own)])
    return _section(f"## {title}: loss in points", ("variant", *SCHEMES), rows)


def rates(frame: pd.DataFrame) -> list[str]:
    """Return the accuracies among which SFT's learning rate was chosen."""
    own = frame[frame["seed"].isin(SEEN) & frame["variant"].astype(str).str.startswith(f"{SFT}-")]
    rows = [[variant, f"{rows['correct'].mean():.3f}", str(len(rows))] for variant, rows in own.groupby("variant")]
    return _section("## SFT's rates, under a seed that was seen before", ("variant", "accuracy", "n"), rows)


def document(frame: pd.DataFrame, cells: pd.DataFrame | None = None, measures: pd.DataFrame | None = None) -> str:
    """Return all tables as Markdown.

    Args:
        frame: a row per answer, from `tables.answers`.
        cells, measures: from `tables.measures`.

    Raises:
        BadInput: the export has no sums under a seed of the study.
    """
    sums, words = _task(frame, "sums"), _task(frame, "gsm8k")
    evidence = Evidence(sums)
    if not evidence.cells:
        raise BadInput("The export has no sums under a seed of the study (2 or above): run.py makes them.")
    seeds = sorted({seed for own in evidence.seeds.values() for seed in own})
    over = "Brackets: 95 % intervals over seeds and questions. *ratio*: of accuracy kept."
    lines = [f"Sums: seeds {', '.join(map(str, seeds))}. {over}", ""]
    found = families(evidence)
    for each, tested in found.items():
        lines += compared(evidence, tested, f"## {each.title}")
    lines += methods(evidence)
    lines += accuracies(evidence, "Sums") + losses(evidence, "Sums") + accuracies_by_seed(evidence)
    lines += by_seed(evidence, [each.value for tested in found.values() for each in tested.values()])
    lines += calibration(evidence) + layers(evidence) + elsewhere(evidence)
    lines += knew_before(evidence, None if measures is None else measures[measures["size"] == "sums"])
    if len(words):
        other = Evidence(words, one_base=False)
        lines += accuracies(other, "GSM8K") + losses(other, "GSM8K")
    lines += rates(sums) + marked(cells)
    return "\n".join(lines) + "\n"


def _task(frame: pd.DataFrame, task: str) -> pd.DataFrame:
    return frame[frame["size"] == task]


def _variants(evidence: Evidence) -> list[str]:
    present = {variant for variant, _ in evidence.cells}
    return [variant for variant in ORDER if variant in present]


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [title, "", *_lines(head, rows)]


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [*(table(head, rows) if rows else ["Not evaluated."]), ""]


def _shown(show: Callable[[Estimate], str]) -> Callable[[Estimate | None], str]:
    return lambda value: NONE if value is None else show(value)


_difference = _shown(interval)
_rate = _shown(lambda value: f"{value.estimate:.3f} [{value.low:.3f}, {value.high:.3f}]".replace("-", "−"))


def _percent(value: Estimate | None) -> str:
    return "not defined" if value is None else percent_interval(value)


def _ratio(value: Estimate) -> str:
    return f"{value.estimate:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _p(value: float | None) -> str:
    return f"not tested (below {LEAST})" if value is None else f"{value:.2g}"


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value).replace("-", "−")


def write(folders: str) -> str:
    """Return the tables of exports, by comma.

    Raises:
        BadInput: a folder is no export, or a file in it cannot be read.
    """
    paths = [Path(part) for part in folders.split(",")]
    for path in paths:
        if not (path / "correct.parquet").is_file():
            raise BadInput(f"{path} holds no correct.parquet: give a folder that run.py or collect.py wrote.")
    return document(tables.answers(paths), tables.measures(paths, "cells"), tables.measures(paths, "measures"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("exports", help="folders, by comma")
    parser.add_argument("--out", type=Path, help="file for the tables; default: printed")
    given = parser.parse_args()
    try:
        text = write(given.exports)
    except BadInput as error:
        sys.exit(str(error))
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
