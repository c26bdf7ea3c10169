"""Make the page and the tables of README.md's questions from an exported sweep, without a GPU.

python tests/benchmarks/answer/report.py EXPORT --out DIR     # several exports, by comma, are joined
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import contrasts
import drawn
import numpy as np
import page
import pandas as pd
import tables
from contrasts import BASE, CLIFF, CLIFF_LOSS, CONTROLS, FULL, GRPO, PARAMETERS, PLANNED, PRIMARY, Answers, Rank

from qrl import names
from qrl.stats.text import interval, table


def _shown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return table(head, body) if body else ["Not evaluated."]


def primary(answers: Answers) -> list[str]:
    """Question 1: the excess of grpo's loss over the base's, by scheme, and by size."""
    body, missing = [], contrasts.missing(answers)
    for scheme, value in contrasts.against(answers, BASE).items():
        name = f"**{scheme}** (primary)" if scheme == PRIMARY else scheme
        said = "none yet" if missing else contrasts.answer(value)
        share = contrasts.relative_excess(answers, answers.sizes, scheme, BASE)
        body.append([name, interval(value), interval(share), said if scheme == PRIMARY else "exploratory"])
    by_size = []
    for scheme in answers.schemes():
        values = [answers.contrast(contrasts.excess([size], scheme, BASE)) for size in answers.sizes]
        if any(values):
            by_size.append([scheme, *(interval(value) if value else "" for value in values)])
    head = ("scheme", "loss(grpo) − loss(base), mean over sizes", "as shares of full precision's accuracy", "answer")
    return [
        *("## 1. Does GRPO change what quantization costs?", ""),
        *([f"**No answer yet**: {', '.join(missing)} missing.", ""] if missing else []),
        *_shown(head, body),
        *("", "By size:", "", *_shown(("scheme", *answers.sizes), by_size), ""),
    ]


def _absent(planned: Iterable, found: Mapping) -> list[str]:
    """Return a sentence on the tests of a family that were not made; they count in its correction."""
    absent = [" ".join(key) if isinstance(key, tuple) else key for key in planned if key not in found]
    return [f"Not evaluated at every size, but counted in the correction: {', '.join(absent)}.", ""] if absent else []


def controls(answers: Answers) -> list[str]:
    """Question 2: RL, or any training? Holm over both controls and all schemes, whether evaluated or not."""
    found = contrasts.controls(answers)
    body = [[*key, interval(each.value), f"{each.p:.2g}"] for key, each in found.items()]
    head = ("control", "scheme", "loss(grpo) − loss(control), mean over sizes", "p (Holm)")
    missed = _absent(contrasts.CONTROL_TESTS, found)
    return ["## 2. RL, or any training?", "", *missed, *_shown(head, body), ""]


def cliffs(answers: Answers) -> list[str]:
    """Question 3: the first width whose loss is above CLIFF_LOSS, before and after RL."""
    found = contrasts.cliffs(answers)
    body = [[*key, *map(interval, cliff.losses), cliff.first or "none"] for key, cliff in found.items()]
    head = ("size", "weights", *(f"loss, {scheme}" for scheme in CLIFF), f"first above {CLIFF_LOSS}")
    return ["## 3. Where is the cliff in bits?", "", *_shown(head, body), ""]


def growth(answers: Answers) -> list[str]:
    """Question 4: the slope of grpo's loss per decade of parameters. Holm over the schemes."""
    found = contrasts.growth(answers)
    body = [[scheme, interval(each.value), f"{each.p:.2g}"] for scheme, each in found.items()]
    head = ("scheme", "loss of grpo per decade of parameters", "p (Holm)")
    return ["## 4. Does the loss grow with size?", "", *_absent(PLANNED, found), *_shown(head, body), ""]


def methods(answers: Answers) -> list[str]:
    """Question 5: which method keeps the gain in four bits; exploratory."""
    found = contrasts.methods(answers)
    body = [[each.method, each.other, ", ".join(each.sizes), interval(each.value)] for each in found]
    head = ("method", "minus", "sizes", "difference")
    return ["## 5. Which method keeps the gain in four bits?", "", *_shown(head, body), ""]


def correlations(ranks: Sequence[Rank]) -> list[str]:
    """Return question 6 as a table."""
    body = [[rank.measure, str(rank), str(rank.cells), str(rank.units)] for rank in ranks]
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


def document(
    answers: Answers, frame: pd.DataFrame, ranks: Sequence[Rank], why: pd.DataFrame | None, compared: Answers
) -> str:
    """Return all tables as Markdown.

    Args:
        answers: the sweep's.
        frame: the same, a row per answer.
        ranks: from `contrasts.predictors`.
        why: from `tables.measures`.
        compared: answers for question 5, the sweep's or those of runs of their own.
    """
    runs, n = len(answers.evidence.runs), answers.evidence.n
    over = f"{runs} seeds and questions" if runs > 1 else "questions alone: there is one seed"
    lines = [
        f"Sizes {', '.join(answers.sizes)}; {runs} seeds; {n:,} questions. Brackets: 95 % intervals over {over}.",
        "",
    ]
    if answers.partial:
        lines += [f"Left out, for they were not evaluated under all seeds: {', '.join(answers.partial)}.", ""]
    for part in (primary, controls, cliffs, growth):
        lines += part(answers)
    lines += methods(compared)
    if compared is not answers:
        seeds, asked = len(compared.evidence.runs), compared.evidence.n
        lines += [f"Question 5 has runs of its own: {seeds} seeds, {asked:,} questions.", ""]
    lines += correlations(ranks) if ranks else []
    lines += movement(why) if why is not None else []
    lines += accuracies(frame, answers.schemes())
    return "\n".join(lines)


def separate(frame: pd.DataFrame, trained: pd.DataFrame) -> Answers:
    """Return the answers for question 5 where some sizes have runs of their own, under the seeds that all share."""
    rows = pd.concat([trained, frame[~frame["size"].isin(trained["size"].unique())]])
    shared = set.intersection(*map(set, rows.groupby("size")["seed"].unique()))
    return Answers(rows[rows["seed"].isin(shared)])


def _answers(folders: str) -> pd.DataFrame:
    frame = tables.answers([Path(part) for part in folders.split(",")])
    if frame.empty:
        sys.exit(f"{folders} holds no correct.parquet: run.py or export.py writes it.")
    return frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("exports", help="folders of export.py, by comma")
    parser.add_argument("--methods", help="folders, by comma, whose sizes answer question 5 instead")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for page.md, tables.md, bits.png and excess.png"
    )
    given = parser.parse_args()
    frame, exports = _answers(given.exports), [Path(part) for part in given.exports.split(",")]
    weights, why = (tables.measures(exports, name) for name in ("weights", "why"))
    answers = Answers(frame)
    compared = separate(frame, _answers(given.methods)) if given.methods else answers
    ranks = [] if weights is None else contrasts.predictors(frame, weights)
    near = [] if weights is None else contrasts.predictors(frame, weights, page.NEAR)
    given.out.mkdir(parents=True, exist_ok=True)
    said = page.write(answers, ranks, near, why, compared)
    text = document(answers, frame, ranks, why, compared)
    (given.out / "page.md").write_text(said, encoding="utf-8")
    (given.out / "tables.md").write_text(text + "\n", encoding="utf-8")
    drawn.excess_by_scheme(answers, page.about_training(answers), given.out / "excess.png")
    drawn.loss_by_bits(answers, page.about_bits(answers), given.out / "bits.png")
    print(said)


if __name__ == "__main__":
    main()
