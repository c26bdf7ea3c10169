"""The page of the sweep: what its questions found, in sentences whose words follow from the intervals."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

import contrasts
import numpy as np
import pandas as pd
from contrasts import BASE, CLIFF_LOSS, GRPO, MARGIN, PARAMETERS, PRIMARY, Answers, Rank, Tested

from qrl import names
from qrl.stats.text import interval, table

LEVEL = 0.05  # of p-values that Holm's procedure corrected
NEAR = 0.02  # a loss near full precision
WIDTH = 140  # characters in a line of text
BITS = dict(zip(contrasts.CLIFF, (8, 4, 3, 2), strict=True))
BESIDE = {
    names.SFT: "as many steps of supervised fine-tuning on the same questions",
    "pretrained": "a model of the same shape made from text with fewer errors",
}
MEASURES = {
    "top1_agreement": "how often the likeliest token of held-out solutions stays that of full precision",
    "kl": "the KL divergence from full precision on the same solutions",
    "relative_mse": "the relative error of the weights",
    "code_flip_rate": "the share of codes that training flipped",
    "update_survival": "the share of the update that rounding keeps",
    "update_cosine": "the cosine of the update and what is left of it",
}
COMMAND = "python tests/benchmarks/answer/report.py tests/benchmarks/answer/export --out DIR"


def write(
    answers: Answers, ranks: Sequence[Rank], near: Sequence[Rank], why: pd.DataFrame | None, compared: Answers
) -> str:
    """Return the page as Markdown.

    Args:
        answers: of the sweep.
        ranks: from `contrasts.predictors`.
        near: the same, over cells that lose less than NEAR.
        why: from `tables.measures`.
        compared: answers for question 5, the sweep's or those of runs of their own.
    """
    parts = [
        "# Does RL change how cleanly a model quantizes?",
        *(_headline(answers), f"**RL, or any training?** {about_training(answers)}. {_controls(answers)}"),
        "![What quantization costs GRPO's weights, minus what it costs others, by scheme](excess.png)",
        *(f"**How many bits?** {about_bits(answers)}.", _cliffs(answers)),
        "![Accuracy lost to quantization, by bits](bits.png)",
        *_shares(answers),
        f"**Size.** {_growth(answers)}",
        *(["**Methods in four bits** (exploratory).", held] if (held := _methods(compared)) else []),
        *([f"**What predicts the loss** (exploratory). {_predictors(ranks, near)}"] if ranks else []),
        *([f"**What moved** (exploratory). {_moved(why)} {_mxfp4(why)}"] if why is not None else []),
        f"{_left_out(answers)}This page and all tables: `{COMMAND}`.",
    ]
    return "\n\n".join(_wrapped(part) for part in parts if part) + "\n"


def _wrapped(part: str) -> str:
    whole = part.startswith(("|", "!", "#"))
    return part if whole else textwrap.fill(part, WIDTH, break_long_words=False, break_on_hyphens=False)


def _headline(answers: Answers) -> str:
    """Answer question 1, and say what cannot be concluded."""
    value = answers.contrast(contrasts.excess(answers.sizes, PRIMARY, BASE))
    absent, runs, n = contrasts.missing(answers), len(answers.evidence.runs), answers.evidence.n
    if value is None:
        return f"**No answer yet**: a cell of base or grpo under `{PRIMARY}` is missing."
    said = f"No answer yet, for {_and(absent)} has not been run" if absent else contrasts.answer(value)
    sizes = _and(f"{size} ({PARAMETERS[size] / 1e6:.3g} M parameters)" for size in answers.sizes)
    return (
        f"**{said[0].upper()}{said[1:]}**: rounding to four bits by `{PRIMARY}` costs {interval(value)} more accuracy "
        f"after GRPO than before, in the mean over {sizes} ({runs} seeds, {n:,} questions, 95 % intervals over "
        f"{'seeds and questions' if runs > 1 else 'questions alone'}). The models are small, were made here, one base "
        "a size, and solve one kind of word problem: nothing follows for large pretrained models, long reasoning or "
        "other text."
    )


def about_training(answers: Answers) -> str:
    """Say whether GRPO differs from supervised fine-tuning in what quantization costs."""
    tests = _of(contrasts.controls(answers), names.SFT)
    if not tests:
        return "The control with supervised fine-tuning was not evaluated"
    if shown := _shown(tests):
        return f"GRPO differs from as many steps of supervised fine-tuning under {_and(shown)}"
    if all(each.value.low > -MARGIN and each.value.high < MARGIN for each in tests.values()):
        return f"In the mean over sizes, each scheme costs the same after GRPO and SFT, to within {MARGIN}"
    return "No scheme is shown to cost more or less after GRPO than after supervised fine-tuning"


def _controls(answers: Answers) -> str:
    """Return a sentence for each control, with its largest difference."""
    said, tests = [], contrasts.controls(answers)
    for control, what in BESIDE.items():
        if own := _of(tests, control):
            scheme = max(own, key=lambda scheme: abs(own[scheme].value.estimate))
            largest = f"`{scheme}`, {interval(own[scheme].value)} (p {own[scheme].p:.2g} after Holm)"
            said.append(f"Beside {what}, {_count(_shown(own), len(own))}; the largest difference: {largest}.")
    return " ".join(said)


def about_bits(answers: Answers) -> str:
    """Say at which width the weights break, before and after training."""
    found = contrasts.cliffs(answers)
    firsts = {
        size: {found[size, variant].first for variant in (BASE, GRPO)}
        for size in answers.sizes
        if {(size, BASE), (size, GRPO)} <= found.keys()
    }
    if not firsts:
        return "The widths were not evaluated"
    if moved := [size for size, both in firsts.items() if len(both) > 1]:
        return f"GRPO moves the first width that costs more than {CLIFF_LOSS} at {_and(moved)}"
    return f"The first width that costs more than {CLIFF_LOSS} is the same before and after GRPO at every size"


def _cliffs(answers: Answers) -> str:
    body = [
        [*key, *map(interval, cliff.losses[1:]), f"{BITS[cliff.first]} bits" if cliff.first else "none"]
        for key, cliff in contrasts.cliffs(answers).items()
    ]
    head = ("size", "weights", "loss in 4 bits", "3 bits", "2 bits", f"first above {CLIFF_LOSS}")
    return "\n".join(table(head, body)) if body else ""


def _shares(answers: Answers) -> list[str]:
    """Return the large excesses over the base, and the same as shares of the accuracy that there was to lose."""
    excesses = contrasts.against(answers, BASE)
    large = [scheme for scheme, value in excesses.items() if value.low > MARGIN or value.high < -MARGIN]
    if not large:
        return [f"**More to lose?** Under no scheme is GRPO's loss shown to differ from the base's by {MARGIN}."]
    shares = [contrasts.relative_excess(answers, answers.sizes, scheme, BASE) for scheme in large]
    body = [[scheme, interval(excesses[scheme]), interval(share)] for scheme, share in zip(large, shares, strict=True)]
    head = ("scheme", "loss(grpo) − loss(base)", "as shares of full precision's accuracy")
    return [
        f"**More to lose?** GRPO's weights are right more often than the base's. Where their loss differs by more than "
        f"{MARGIN}, as a difference and as a difference of shares (exploratory):",
        "\n".join(table(head, body)),
    ]


def _growth(answers: Answers) -> str:
    """Answer question 4."""
    tests = contrasts.growth(answers) if len(answers.sizes) > 1 else {}
    if not (shown := _shown(tests)):
        return "No trend of GRPO's loss with size is shown under any scheme."
    listed = _and(f"{interval(tests[scheme].value)} (`{scheme}`)" for scheme in shown)
    rest = "; under the other schemes no trend is shown" if len(shown) < len(tests) else ""
    return f"For ten times the parameters, GRPO's loss changes by {listed}{rest}."


def _methods(compared: Answers) -> str:
    found = contrasts.methods(compared)
    body = [[each.method, each.other, ", ".join(each.sizes), interval(each.value)] for each in found]
    return "\n".join(table(("method", "minus", "sizes", "accuracy"), body)) if body else ""


def _predictors(ranks: Sequence[Rank], near: Sequence[Rank]) -> str:
    """Answer question 6."""

    def listed(those: Sequence[Rank]) -> str:
        return "; ".join(f"{MEASURES[rank.measure]}, {rank}" for rank in those)

    first, *_ = ranks
    said = f"Spearman's correlations with the loss, {first.cells} cells in {first.units} trainings: {listed(ranks)}."
    best = near[:2]
    return (
        f"{said} Over the {best[0].cells} cells that lose less than {NEAR}, the best are: {listed(best)}."
        if best
        else said
    )


def _moved(why: pd.DataFrame) -> str:
    rows = why[why["variant"] == GRPO]
    if rows["moved"].isna().all():
        return ""
    shares = rows.assign(moved=100 * rows["moved"], moved_fp32=100 * rows["moved_fp32"])
    fp32, stored = (_range(shares, key) for key in ("moved_fp32", "moved"))
    lift, principal, by_size = (_range(rows, key) for key in ("again_lift", "principal", "principal_by_size"))
    return (
        f"GRPO moves {fp32} % of the weights in fp32, and {stored} % as bf16 stores them (means of the sizes). Two "
        f"seeds move the same weights {lift} times as often as chance would. Principal weights move {principal} times "
        f"as often as all weights, and {by_size} times as often as weights of their own size, for which bf16's steps "
        "are as coarse."
    )


def _mxfp4(why: pd.DataFrame) -> str:
    percent = why.assign(**{key: 100 * why[key] for key in ("mx_scale", "mx_dead", "mx_grid", "mx_error")})
    base, grpo = (percent[percent["variant"] == variant] for variant in (BASE, GRPO))
    if grpo["mx_error"].isna().all():
        return ""
    scale, grid, dead = (_range(grpo, key) for key in ("mx_scale", "mx_grid", "mx_dead"))
    return (
        f"MXFP4's squared error is {_range(base, 'mx_error')} % of the weights' squares before GRPO and "
        f"{_range(grpo, 'mx_error')} % after. Its parts, which cancel in part: scales that are powers of two {scale} "
        f"%, rounding to the grid {grid} %, weights rounded to 0 {dead} %."
    )


def _left_out(answers: Answers) -> str:
    absent = [scheme for scheme in contrasts.PLANNED if scheme not in contrasts.against(answers, BASE)]
    return f"Not evaluated at every size: {_and(f'`{scheme}`' for scheme in absent)}. " if absent else ""


def _range(rows: pd.DataFrame, key: str) -> str:
    """Return the least and the largest mean of a size, over matrices by their weights."""
    known = rows.dropna(subset=[key])
    means = sorted(float(np.average(part[key], weights=part["numel"])) for _, part in known.groupby("size"))
    low, high = (f"{value:.3g}" for value in (means[0], means[-1])) if means else ("", "")
    return low if low == high else f"{low} to {high}"


def _of(tests: Mapping[tuple[str, str], Tested], control: str) -> dict[str, Tested]:
    return {scheme: each for (other, scheme), each in tests.items() if other == control}


def _shown(tests: Mapping[str, Tested]) -> list[str]:
    return [scheme for scheme, each in tests.items() if each.p < LEVEL]


def _count(shown: Sequence[str], of: int) -> str:
    if not shown:
        return f"none of {of} schemes is shown to differ"
    return f"{len(shown)} of {of} schemes differ{'s' * (len(shown) == 1)}: {_and(f'`{scheme}`' for scheme in shown)}"


def _and(words: Iterable[str]) -> str:
    *first, last = list(words)
    return f"{', '.join(first)} and {last}" if first else last
