"""Make the page and the tables of README.md's questions from an exported sweep, without a GPU.

python tests/benchmarks/answer/report.py EXPORT --out DIR              # several exports, by comma, are joined
python tests/benchmarks/answer/report.py EXPORT --real DIR --out DIR   # with a real model on top: `real/README.md`
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent / "real"))  # last: both folders have modules `page` and `run`

import correlations
import drawn
import figure
import numpy as np
import page
import pandas as pd
import summary
import tables
from contrasts import (
    BASE,
    CLIFF,
    CONTROLS,
    FULL,
    GRPO,
    PARAMETERS,
    PRIMARY,
    SFT,
    Answers,
    answer,
    excess,
    parameters,
    relative_excess,
)
from findings import CLIFF_LOSS, CONTROL_TESTS, METHODS, OF_GRPO, PLANNED, Findings
from real import page as real_page
from study import Study

from qrl import recipe as recipes
from qrl.errors import BadInput
from qrl.stats.text import interval, table

HERE = Path(__file__).resolve().parent
REAL = HERE / "real" / "export"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return table(head, rows) if rows else ["Not evaluated."]


def primary(found: Findings) -> list[str]:
    """Question 1: the excess of grpo's loss over the base's, by scheme, and by size."""
    answers, rows = found.answers, []
    for scheme, each in found.excesses[BASE].items():
        name = f"**{scheme}** (primary)" if scheme == PRIMARY else scheme
        share, sft = relative_excess(answers, scheme, BASE), answers.contrast(excess(answers.sizes, scheme, BASE, SFT))
        said = ("none yet" if answers.missing else answer(each.value)) if scheme == PRIMARY else "exploratory"
        shown = (interval(value) if value else "" for value in (each.value, each.apart, each.larger, share, sft))
        rows.append([name, *shown, said])
    head = (
        "scheme",
        "loss(grpo) − loss(base), mean over sizes",
        "trainings apart",
        f"without {answers.sizes[0]}" if answers.sizes else "without the smallest",
        "as shares of accuracy",
        "loss(sft) − loss(base)",
        "answer",
    )
    absent = [f"**No answer yet**: {', '.join(answers.missing)} missing.", ""] if answers.missing else []
    title = "## 1. Does GRPO change what quantization costs?"
    return [title, "", *absent, *_table(head, rows), "", *_by_size(found, BASE)]


def _by_size(found: Findings, other: str) -> list[str]:
    sizes, rows = found.answers.sizes, []
    for scheme in found.answers.schemes():
        values = [found.answers.contrast(excess([size], scheme, other)) for size in sizes]
        rows += [[scheme, *(interval(value) if value else "" for value in values)]] if any(values) else []
    return [f"loss(grpo) − loss({other}) by size:", "", *_table(("scheme", *sizes), rows), ""]


def _absent(planned: Iterable, found: Mapping) -> list[str]:
    """Return a sentence on the tests of a family that were not made; they count in its correction."""
    absent = [" ".join(key) if isinstance(key, tuple) else key for key in planned if key not in found]
    return [f"Not evaluated at every size, but counted in the correction: {', '.join(absent)}.", ""] if absent else []


def controls(found: Findings) -> list[str]:
    """Question 2: RL, or any training? Holm over both controls and all schemes, whether evaluated or not."""
    rows = []
    for key, each in found.controls.items():
        apart = found.controls_apart[key]
        larger = found.excesses[key[0]][key[1]].larger
        rest = interval(larger) if larger else ""
        rows.append([*key, interval(each.value), f"{each.p:.2g}", interval(apart.value), f"{apart.p:.2g}", rest])
    head = (
        "control",
        "scheme",
        "loss(grpo) − loss(control), mean over sizes",
        "p (Holm)",
        "trainings apart",
        "p (Holm)",
        "without the smallest size",
    )
    lines = ["## 2. RL, or any training?", "", *_absent(CONTROL_TESTS, found.controls), *_table(head, rows), ""]
    return lines + [line for control in CONTROLS for line in _by_size(found, control)]


def cliffs(found: Findings) -> list[str]:
    """Question 3: the first width whose loss is above CLIFF_LOSS, before and after RL."""
    rows = [[*key, *map(interval, each.losses), each.first or "none"] for key, each in found.cliffs.items()]
    head = ("size", "weights", *(f"loss, {scheme}" for scheme in CLIFF), f"first above {CLIFF_LOSS}")
    tests = [[*key, interval(each.value), f"{each.p:.2g}"] for key, each in found.widths.items()]
    head_of_tests = ("size", "width", "loss(grpo) − loss(base)", "p (Holm, within a size)")
    title = "## 3. Where is the cliff in bits?"
    return [title, "", *_table(head, rows), "", *_table(head_of_tests, tests), ""]


def growth(found: Findings) -> list[str]:
    """Question 4: the slope of grpo's loss per decade of parameters. Holm over the schemes."""
    others = (found.slopes(BASE), found.slopes(GRPO, 1))
    rows = [
        [scheme, interval(each.value), f"{each.p:.2g}", *(interval(o[scheme]) if scheme in o else "" for o in others)]
        for scheme, each in found.growth.items()
    ]
    head = ("scheme", "loss of grpo per decade of parameters", "p (Holm)", "the base's", "without the smallest size")
    said = "The intervals leave out how far sizes lie from the line, and that bases differ in more than size."
    title = "## 4. Does the loss grow with size?"
    return [title, "", said, "", *_absent(PLANNED, found.growth), *_table(head, rows), ""]


def methods(found: Findings) -> list[str]:
    """Question 5: which method keeps the gain in four bits; exploratory."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in found.methods:
        rows.setdefault((each.method, each.size), [each.method, each.size]).append(interval(each.value))
    head = ("accuracy of", "size", *(f"minus {GRPO}:{scheme}" for scheme in OF_GRPO))
    lines = ["## 5. Which method keeps the gain in four bits?", "", *_table(head, list(rows.values())), ""]
    if absent := [method for method in METHODS if method not in {each for each, _ in rows}]:
        lines += [f"Not run under all seeds of a size: {', '.join(absent)}.", ""]
    if found.compared is not found.answers:
        own = f"{found.compared.runs} seeds, {found.compared.evidence.n:,} questions"
        lines += [f"{own}; from runs of its own where there are any, else from the sweep's.", ""]
    return lines


def correlated(found: Findings) -> list[str]:
    """Question 6: what goes with the loss; exploratory."""
    said = (
        "`relative_mse` is the error of the stored weights, `code_flip_rate` the share of codes that training changed, "
        "`update_survival` ‖Q(W′) − Q(W)‖ / ‖W′ − W‖, above 1 mostly noise, `update_cosine` the cosine of both, "
        "`kl` the KL divergence of next-token distributions, full precision to quantized, and `top1_agreement` the "
        "share of positions where both have the same likeliest token, on held-out questions with their solutions."
    )
    lines = ["## 6. What goes with the loss?", "", said, ""]
    tables_ = {
        "With the loss of grpo's weights, all cells:": found.correlations,
        f"The same over cells that lose less than {page.NEAR}:": found.near,
        "With what the gain loses, loss(grpo) − loss(base), all cells:": found.of_gain,
    }
    for text, held in tables_.items():
        lines += [text, "", *_table(correlations.HEAD, correlations.body(held)), ""]
    return lines


def movement(why: pd.DataFrame, sizes: Iterable[str]) -> list[str]:
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
    rows = _means(why, sizes, (SFT, GRPO), heads)
    return ["## 7. What moved?", "", *_table(("size", "weights", *heads.values()), rows), "", *_mxfp4(why, sizes)]


def _mxfp4(why: pd.DataFrame, sizes: Iterable[str]) -> list[str]:
    """Return MXFP4's squared error and its parts, in percent of the weights' squared norm, as a table."""
    heads = {"mx_error": "error", "mx_scale": "scale", "mx_dead": "rounded to 0", "mx_grid": "the rest of rounding"}
    percent = why.assign(**{key: 100 * why[key] for key in heads})
    rows = _means(percent, sizes, (BASE, SFT, GRPO), heads)
    head = ("size", "weights", *(f"{name}, %" for name in heads.values()))
    said = "MXFP4's squared error, over that of the weights. Its parts partly cancel, so their sum is larger:"
    return [said, "", *_table(head, rows), ""]


def _means(why: pd.DataFrame, sizes: Iterable[str], variants: Sequence[str], keys: Iterable[str]) -> list[list[str]]:
    """Return a row for each size and variant that was measured."""
    body = []
    for size in sizes:
        for variant in variants:
            part = why[(why["size"] == size) & (why["variant"] == variant)]
            if len(part):
                body.append([size, variant, *(_spread(part, key) for key in keys)])
    return body


def _spread(part: pd.DataFrame, key: str) -> str:
    """Return a measure's mean over matrices by their weights, and its range over seeds, or over pairs of seeds."""
    if key not in part:  # of a pair of seeds, where there is one
        return ""
    known = part.dropna(subset=[key])
    by_seed = [
        np.average(rows[key], weights=rows["numel"])
        for _, rows in known.groupby(["seed", *(["other"] if key.startswith("again") else [])])
    ]
    if not by_seed:
        return ""
    return f"{np.mean(by_seed):.3g} ({min(by_seed):.3g} to {max(by_seed):.3g})"


def accuracies(frame: pd.DataFrame, schemes: Sequence[str], sizes: Iterable[str]) -> list[str]:
    """Return the accuracies of base, controls and grpo, means over seeds, and their shares of full precision's."""
    mean = frame.groupby(["size", "variant", "scheme"], observed=True)["correct"].mean()
    body = []
    for size in sizes:
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
        *_table(("size", "weights", FULL, *schemes), body),
        "",
    ]


def unhealthy(cells: pd.DataFrame) -> list[str]:
    """Return the cells that an evaluation's default limits would have refused."""
    limits = recipes.load("tiny").evaluate
    seen = cells.reindex(columns=[*tables.CELL, "truncated", "parsed"])
    bad = seen[(seen["truncated"] > limits.max_truncation_rate) | (seen["parsed"] < limits.min_parse_rate)]
    rows = [[*map(str, row[:4]), f"{row.truncated:.3f}", f"{row.parsed:.3f}"] for row in bad.itertuples(index=False)]
    known = f"The share in the required form is known of {seen['parsed'].notna().sum()} of {len(seen)} cells."
    shown = (
        table(("size", "seed", "weights", "scheme", "truncated", "parsed"), rows)
        if rows
        else ["None among those known."]
    )
    return ["Cells beyond the limits that an evaluation has by default:", "", *shown, "", known]


def document(found: Findings, why: pd.DataFrame | None = None, cells: pd.DataFrame | None = None) -> str:
    """Return all tables as Markdown.

    Args:
        found: all contrasts.
        why, cells: from `tables.measures`.
    """
    answers = found.answers
    over = "questions alone: there is one seed"
    if answers.runs > 1:
        over = f"{answers.runs} seeds and questions; those of the base, which is one model, over questions alone"
    size = f"Sizes {', '.join(answers.sizes)}; {answers.runs} seeds; {answers.evidence.n:,} questions."
    lines = [f"{size} Brackets: 95 % intervals over {over}.", ""]
    if answers.begun:
        lines += [f"Begun, without all cells of the primary outcome: {', '.join(answers.begun)}.", ""]
    if answers.partial:
        own = " Question 5 has runs of its own." if found.compared is not answers else ""
        left = ", ".join(answers.partial)
        lines += [f"Left out because they were not evaluated under all seeds: {left}.{own}", ""]
    for part in (primary, controls, cliffs, growth, methods, correlated):
        lines += part(found)
    lines += movement(why, answers.parameters) if why is not None else []
    lines += accuracies(answers.frame, answers.schemes(), answers.parameters)
    lines += unhealthy(cells) if cells is not None else []
    return "\n".join(lines) + "\n"


def with_own_runs(frame: pd.DataFrame, trained: pd.DataFrame, counts: Mapping[str, float] = PARAMETERS) -> Answers:
    """Return the answers for question 5 where some sizes have runs of their own, under the seeds that all share.

    Args:
        frame, trained: answers of the sweep, and of those runs.
        counts: parameters of all sizes.

    Raises:
        BadInput: no seed is shared.
    """
    rows = pd.concat([trained, frame[~frame["size"].isin(trained["size"].unique())]])
    shared = set.intersection(*map(set, rows.groupby("size")["seed"].unique()))
    if not shared:
        raise BadInput("The sizes of the exports and of --methods share no seed.")
    return Answers(rows[rows["seed"].isin(shared)], counts)


def _answers(folders: str) -> tuple[pd.DataFrame, list[Path]]:
    """Return the answers of folders, by comma, and the folders."""
    paths = [Path(part) for part in folders.split(",")]
    for path in paths:
        if not any((path / f"{name}.parquet").is_file() for name in (*tables.TABLES, "correct")):
            raise BadInput(f"{path} is no export: run.py or export.py writes one.")
    if (frame := tables.answers(paths)).empty:
        raise BadInput(f"{folders} holds no correct.parquet: run.py or export.py writes it.")
    return frame, paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("exports", help="folders of export.py, by comma")
    parser.add_argument("--methods", help="folders, by comma, whose sizes answer question 5 instead")
    parser.add_argument(
        "--real",
        help="folders, by comma, of a real model's export (real/collect.py), which the page begins with, or an empty\n"
        "text; default: the one in this repository, beside this repository's own EXPORT",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for page.md, the tables (tables.md, real.md) and the figures"
    )
    given = parser.parse_args()
    real = default_real(given.exports) if given.real is None else given.real
    try:
        print(write(given.exports, given.methods, given.out, real))
    except (BadInput, OSError) as error:
        sys.exit(str(error))


def default_real(exports: str) -> str:
    """Return the real model's export of this repository beside the repository's own export; else nothing."""
    is_own = Path(exports).resolve() == HERE / "export"
    return str(REAL) if is_own and (REAL / "correct.parquet").is_file() else ""


def write(exports: str, methods: str | None, out: Path, real: str = "") -> str:
    """Write page, tables and figures of exports, and return the page.

    Args:
        exports: folders, by comma.
        methods: those whose sizes answer question 5 instead.
        out: folder; made if it is missing.
        real: folders of a real model's export, by comma; the page begins with it.

    Raises:
        BadInput: a folder is no export, a file is damaged, or there is nothing to compare.
    """
    frame, folders = _answers(exports)
    weights, why, cells = (tables.measures(folders, name) for name in ("weights", "why", "cells"))
    answers = Answers(frame, parameters(frame, cells))
    compared = with_own_runs(frame, _answers(methods)[0], answers.parameters) if methods else answers
    found = Findings(answers, compared, weights)
    study = Study.read(real) if real else None

    options = ["--methods", methods] if methods else []
    if real != default_real(exports):
        options += ["--real", real]
    command = f"python {page.SCRIPT} {shlex.join([exports, *options])} --out DIR"
    told = page.write(found, why, command, below_real_model=study is not None)
    texts = {"page.md": told, "tables.md": document(found, why, cells)}
    if study is not None:
        texts["page.md"] = f"{real_page.write(study, found)}\n{told}"
        texts["real.md"] = summary.document(study.frame, study.cells, study.measures)

    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    if answers.sizes:
        drawn.excess_by_scheme(found, page.title(found), out / "excess.png")
        drawn.loss_by_bits(found, page.about_bits(found), out / "bits.png")
    if study is not None:
        figure.draw(study, real_page.title(study), out / "real.png")
    return texts["page.md"]


if __name__ == "__main__":
    main()
