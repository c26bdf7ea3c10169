"""Make the tables of README.md's questions from an exported sweep, without a GPU.

    python tests/benchmarks/answer/report.py EXPORT --out DIR     # several exports, by comma, are joined

A cell is a size's variant under a scheme. All sizes answer the same questions under a seed, so what is asked of several
sizes is one contrast of cells: paired by question, over seeds (random) and questions.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pandas as pd
import tables

from qrl import names
from qrl.compare.outcomes import Answered
from qrl.compare.sizes import slope
from qrl.stats import Estimate, holm_by_key
from qrl.stats.text import interval, table

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
        """Align rows of size, seed, variant, scheme, question and correct."""
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


def whole(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
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


def _shown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return table(head, body) if body else ["Not evaluated."]


def primary(answers: Answers) -> list[str]:
    """Question 1: the excess of grpo's loss over the base's, by scheme, and by size."""
    body, missing = [], _missing(answers)
    for scheme in answers.schemes():
        value = answers.contrast(excess(answers.sizes, scheme, BASE))
        if value:
            name = f"**{scheme}** (primary)" if scheme == PRIMARY else scheme
            said = "none yet" if missing else answer(value)
            body.append([name, interval(value), said if scheme == PRIMARY else "exploratory"])
    by_size = [
        [scheme, *(interval(value) if value else "" for value in values)]
        for scheme in answers.schemes()
        if any(values := [answers.contrast(excess([size], scheme, BASE)) for size in answers.sizes])
    ]
    return [
        *("## 1. Does GRPO change what quantization costs?", ""),
        *([f"**No answer yet**: {', '.join(missing)} are missing.", ""] if missing else []),
        *_shown(("scheme", "loss(grpo) − loss(base), mean over sizes", "answer"), body),
        *("", "By size:", "", *_shown(("scheme", *answers.sizes), by_size), ""),
    ]


def _missing(answers: Answers) -> list[str]:
    return [size for size in PARAMETERS if size not in answers.sizes]


def _absent(planned: Iterable, found: Mapping) -> list[str]:
    """Return a sentence on the tests of a family that were not made; they count in its correction."""
    absent = [" ".join(key) if isinstance(key, tuple) else key for key in planned if key not in found]
    return [f"Not evaluated at every size, but counted in the correction: {', '.join(absent)}.", ""] if absent else []


def controls(answers: Answers) -> list[str]:
    """Question 2: RL, or any training? Holm over both controls and all schemes, whether evaluated or not."""
    planned = list(itertools.product(CONTROLS, PLANNED))
    found = {
        (control, scheme): value
        for control in CONTROLS
        for scheme in answers.schemes()
        if (value := answers.contrast(excess(answers.sizes, scheme, control)))
    }
    holm = holm_by_key(dict.fromkeys(planned, 1.0) | {key: value.p_two_sided for key, value in found.items()})
    body = [
        [control, scheme, interval(value), f"{holm[control, scheme]:.2g}"] for (control, scheme), value in found.items()
    ]
    head = ("control", "scheme", "loss(grpo) − loss(control), mean over sizes", "p (Holm)")
    return ["## 2. RL, or any training?", "", *_absent(planned, found), *_shown(head, body), ""]


def cliffs(answers: Answers) -> list[str]:
    """Question 3: the first width whose loss is above CLIFF_LOSS, before and after RL."""
    body = []
    for size in answers.sizes:
        for variant in (BASE, names.SFT, GRPO):
            losses = [answers.contrast(loss(size, variant, scheme)) for scheme in CLIFF]
            if any(value is None for value in losses):
                continue
            over = [scheme for scheme, value in zip(CLIFF, losses, strict=True) if value.low > CLIFF_LOSS]
            body.append([size, variant, *map(interval, losses), over[0] if over else "none"])
    head = ("size", "weights", *(f"loss, {scheme}" for scheme in CLIFF), f"first above {CLIFF_LOSS}")
    return ["## 3. Where is the cliff in bits?", "", *_shown(head, body), ""]


def growth(answers: Answers) -> list[str]:
    """Question 4: the slope of grpo's loss per decade of parameters. Holm over the schemes."""
    found = {}
    for scheme in answers.schemes():
        weights: Weights = {}
        for place, weight in slope([PARAMETERS[size] for size in answers.sizes]).items():
            weights |= loss(answers.sizes[place], GRPO, scheme, weight)
        if value := answers.contrast(weights):
            found[scheme] = value
    holm = holm_by_key(dict.fromkeys(PLANNED, 1.0) | {scheme: value.p_two_sided for scheme, value in found.items()})
    body = [[scheme, interval(value), f"{holm[scheme]:.2g}"] for scheme, value in found.items()]
    head = ("scheme", "loss of grpo per decade of parameters", "p (Holm)")
    return ["## 4. Does the loss grow with size?", "", *_absent(PLANNED, found), *_shown(head, body), ""]


def methods(answers: Answers) -> list[str]:
    """Question 5: which method keeps the gain in four bits; exploratory."""
    body = []
    for method in METHODS:
        variant, _, scheme = method.partition(":")
        for against in (PRIMARY, "rtn-int4"):
            having = [size for size in answers.sizes if (size, variant, scheme) in answers.cells]
            each = 1 / max(1, len(having))
            weights = {(size, variant, scheme): each for size in having} | {
                (size, GRPO, against): -each for size in having
            }
            if value := answers.contrast(weights):
                body.append([method, f"grpo:{against}", ", ".join(having), interval(value)])
    return [
        "## 5. Which method keeps the gain in four bits?",
        "",
        *_shown(("method", "minus", "sizes", "difference"), body),
        "",
    ]


@dataclass(frozen=True)
class Rank:
    """Spearman's correlation of a measure with the loss, over cells."""

    measure: str
    rho: float
    low: float
    high: float
    cells: int
    units: int  # sizes × seeds, which are resampled


def predictors(frame: pd.DataFrame, weights: pd.DataFrame, draws: int = 2000) -> list[Rank]:
    """Question 6: what of the weights predicts grpo's loss; exploratory.

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
    return ranks


def correlations(ranks: Sequence[Rank]) -> list[str]:
    """Return question 6 as a table."""
    body = [
        [
            rank.measure,
            f"{rank.rho:+.2f} [{rank.low:+.2f}, {rank.high:+.2f}]".replace("-", "−"),
            str(rank.cells),
            str(rank.units),
        ]
        for rank in sorted(ranks, key=lambda rank: -abs(rank.rho))
    ]
    head = ("measure", "Spearman's correlation with the loss", "cells", "sizes × seeds")
    return ["## 6. What predicts the loss?", "", *_shown(head, body), ""]


def movement(why: pd.DataFrame) -> list[str]:
    """Return what moved, and where, as a table: means over matrices, by size and variant, over seeds."""
    heads = {
        "moved_fp32": "moved, in fp32",
        "moved": "as bf16 stores them",
        "again": "moved under both of two seeds",
        "again_lift": "over chance",
        "principal": "among principal weights, over all",
        "principal_by_size": "over weights of their size",
        "rotation_deg": "rotation, °",
        "spectrum_shift": "spectrum shift",
    }
    body = _means(why, (names.SFT, GRPO), heads)
    return ["## 7. What moved?", "", *_shown(("size", "weights", *heads.values()), body), "", *_mxfp4(why)]


def _mxfp4(why: pd.DataFrame) -> list[str]:
    """Return MXFP4's squared error and its parts, in percent of the weights' squared norm, as a table."""
    heads = {"mx_error": "error", "mx_scale": "scale", "mx_dead": "rounded to 0", "mx_grid": "the rest of rounding"}
    percent = why.assign(**{key: 100 * why[key] for key in heads})
    body = _means(percent, (BASE, names.SFT, GRPO), heads)
    head = ("size", "weights", *(f"{name}, %" for name in heads.values()))
    return ["MXFP4's squared error, over that of the weights:", "", *_shown(head, body), ""]


def _means(why: pd.DataFrame, variants: Sequence[str], keys: Iterable[str]) -> list[list[str]]:
    """Return a row for each size and variant that was measured."""
    body = []
    for size in sorted(why["size"].unique(), key=PARAMETERS.__getitem__):
        for variant in variants:
            part = why[(why["size"] == size) & (why["variant"] == variant)]
            if len(part):
                body.append([size, variant, *(_spread(part, key) for key in keys)])
    return body


def _spread(part: pd.DataFrame, key: str) -> str:
    """Return a measure's mean over matrices by their weights, and its range over seeds, or over pairs of seeds."""
    known = part.dropna(subset=[key])
    by_seed = [
        np.average(rows[key], weights=rows["numel"])
        for _, rows in known.groupby(["seed", *(["other"] if key.startswith("again") else [])])
    ]
    if not by_seed:
        return ""
    return f"{np.mean(by_seed):.3g} ({min(by_seed):.3g} to {max(by_seed):.3g})"


def accuracies(frame: pd.DataFrame, schemes: Sequence[str]) -> list[str]:
    """Return the accuracies of base, controls and grpo, means over seeds, and their shares of full precision's."""
    mean = frame.groupby(["size", "variant", "scheme"], observed=True)["correct"].mean()
    body = []
    for size in sorted(frame["size"].unique(), key=PARAMETERS.__getitem__):
        for variant in (BASE, *CONTROLS, GRPO):
            if full := mean.get((size, variant, FULL)):
                held = [mean.get((size, variant, scheme)) for scheme in schemes]
                shown = ["" if value is None else f"{value:.3f} ({value / full:.0%})" for value in held]
                body.append([size, variant, f"{full:.3f}", *shown])
    return [
        "## 8. Accuracies",
        "",
        "Means over seeds, without intervals; in brackets their share of full precision's.",
        "",
        *_shown(("size", "weights", FULL, *schemes), body),
        "",
    ]


def draw_excess(answers: Answers, out: Path) -> None:
    """Draw, for every scheme, how much more it costs grpo than the base and both controls."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    schemes = answers.schemes()
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.32 * len(schemes)))
    for shift, other in zip((-0.22, 0.0, 0.22), (BASE, *CONTROLS), strict=True):
        values = [
            (place, answers.contrast(excess(answers.sizes, scheme, other))) for place, scheme in enumerate(schemes)
        ]
        found = [(place, value) for place, value in values if value]
        if found:
            middle = [value.estimate for _, value in found]
            ends = np.array([[value.estimate - value.low, value.high - value.estimate] for _, value in found]).T
            places = [place + shift for place, _ in found]
            axis.errorbar(middle, places, xerr=ends, fmt="o", ms=3, capsize=2, label=f"against {other}")
    axis.axvspan(-MARGIN, MARGIN, color="grey", alpha=0.15, lw=0)
    axis.axvline(0, color="grey", lw=0.5)
    axis.set_yticks(range(len(schemes)), schemes)
    axis.invert_yaxis()
    axis.set_xlabel(
        "accuracy that quantization costs after GRPO, minus without (mean over sizes, 95 % intervals)", fontsize=8
    )
    value = answers.contrast(excess(answers.sizes, PRIMARY, BASE))
    if value:
        said = f"sizes {', '.join(answers.sizes)} alone" if _missing(answers) else answer(value)
        axis.set_title(f"{PRIMARY}: {interval(value)}; {said}", fontsize=9)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    plt.close(figure)


def draw(answers: Answers, out: Path) -> None:
    """Draw the loss by bits before and after RL, a panel per size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(answers.sizes), figsize=(3 * len(answers.sizes), 3), sharey=True, squeeze=False)
    for axis, size in zip(axes[0], answers.sizes, strict=True):
        for shift, variant in ((-0.06, BASE), (0.0, names.SFT), (0.06, GRPO)):
            values = [answers.contrast(loss(size, variant, scheme)) for scheme in CLIFF]
            points = [(place + shift, value) for place, value in enumerate(values) if value]
            if points:
                middle = np.array([value.estimate for _, value in points])
                ends = np.array([[value.estimate - value.low, value.high - value.estimate] for _, value in points]).T
                axis.errorbar([place for place, _ in points], middle, ends, marker="o", ms=3, capsize=2, label=variant)
        axis.set_xticks(range(len(CLIFF)), ["8", "4", "3", "2"])
        axis.set_xlabel("bits of the weights")
        axis.set_title(f"{size}, {PARAMETERS[size] / 1e6:.3g} M", fontsize=9)
        axis.axhline(0, color="grey", lw=0.5)
    axes[0, 0].set_ylabel("accuracy lost to quantization")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    plt.close(figure)


def page(
    frame: pd.DataFrame,
    weights: pd.DataFrame | None,
    why: pd.DataFrame | None = None,
    trained: pd.DataFrame | None = None,
) -> tuple[Answers, str]:
    """Return the aligned answers and all tables as Markdown.

    Args:
        frame: answers, from `tables.answers`.
        weights, why: from `tables.measures`.
        trained: answers of runs of their own for question 5; their sizes are left out of `frame` there.
    """
    frame, partial = whole(frame)
    answers = Answers(frame)
    compared = answers
    if trained is not None:
        rows = pd.concat([trained, frame[~frame["size"].isin(trained["size"].unique())]])
        seeds = rows.groupby("size")["seed"].unique()
        shared = set.intersection(*map(set, seeds))  # a size may have been run under fewer
        compared = Answers(rows[rows["seed"].isin(shared)])
    runs, n = len(answers.evidence.runs), answers.evidence.n
    over = f"{runs} seeds and questions" if runs > 1 else "questions alone: there is one seed"
    lines = [
        f"Sizes {', '.join(answers.sizes)}; {runs} seeds; {n:,} questions. Brackets: 95 % intervals over {over}.",
        "",
    ]
    if partial:
        lines += [f"Left out, for they were not evaluated under all seeds: {', '.join(partial)}.", ""]
    for part in (primary, controls, cliffs, growth):
        lines += part(answers)
    lines += methods(compared)
    if compared is not answers:
        own = ", ".join(sorted(trained["size"].unique()))
        lines += [
            f"{own}: from runs of their own; {len(compared.evidence.runs)} seeds, {compared.evidence.n:,} questions.",
            "",
        ]
    if weights is not None:
        lines += correlations(predictors(frame, weights))
    if why is not None:
        lines += movement(why)
    lines += accuracies(frame, answers.schemes())
    return answers, "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("exports", help="folders of export.py, by comma")
    parser.add_argument("--methods", help="folders, by comma, whose sizes answer question 5 instead")
    parser.add_argument("--out", type=Path, required=True, help="folder for tables.md, bits.png and excess.png")
    given = parser.parse_args()
    exports = [Path(part) for part in given.exports.split(",")]
    frame = tables.answers(exports)
    if frame.empty:
        sys.exit(f"{given.exports} holds no correct.parquet: run.py or export.py writes it.")
    given.out.mkdir(parents=True, exist_ok=True)
    trained = tables.answers([Path(part) for part in given.methods.split(",")]) if given.methods else None
    if trained is not None and trained.empty:
        sys.exit(f"{given.methods} holds no correct.parquet: run.py or export.py writes it.")
    answers, text = page(frame, tables.measures(exports, "weights"), tables.measures(exports, "why"), trained)
    (given.out / "tables.md").write_text(text + "\n", encoding="utf-8")
    draw(answers, given.out / "bits.png")
    draw_excess(answers, given.out / "excess.png")
    print(text)


if __name__ == "__main__":
    main()
