"""The page of the sweep: what its questions found, in sentences whose words follow from the intervals."""

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from contrasts import (
    BASE,
    CLIFF,
    FULL,
    GRPO,
    MARGIN,
    PARAMETERS,
    PRIMARY,
    SEEDS,
    SFT,
    Answers,
    Excess,
    answer,
    excess,
    relative_excess,
)
from correlations import HEAD, Correlation, body
from findings import CLIFF_LOSS, CONTROL_TESTS, METHODS, NEAR, OF_GRPO, PLANNED, Findings, Tested

from qrl import stats
from qrl.stats import Estimate
from qrl.stats.text import interval, table

ALPHA = 1 - stats.LEVEL  # of p-values that Holm's procedure corrected
WIDTH = 140  # characters in a line of text
BROKEN = 0.1  # accuracy below which a model is as good as broken
BITS = dict(zip(CLIFF, (8, 4, 3, 2), strict=True))
BESIDE = {
    SFT: "as many steps of supervised fine-tuning on the same questions",
    "pretrained": "a model of the same shape made from text with fewer errors",
}
COMMAND = "python tests/benchmarks/answer/report.py tests/benchmarks/answer/export --out DIR"


def write(found: Findings, why: pd.DataFrame | None = None) -> str:
    """Return the page as Markdown.

    Args:
        found: all contrasts.
        why: from `tables.measures`.
    """
    moved = [] if why is None else [text for text in (_moved(why), _mxfp4(why)) if text]
    parts = [
        "# Does RL change how cleanly a model quantizes?",
        _headline(found.answers),
        f"**RL, or any training?** {_so_far(found)}{_controls(found)}",
        "![What quantization costs GRPO's weights, minus what it costs others, by scheme](excess.png)",
        f"**How many bits?** {about_bits(found)}. {_cliff(found)}",
        "![Accuracy lost to quantization, by bits](bits.png)",
        *_shares(found),
        *_growth(found),
        *(["**Methods in four bits** (exploratory):", methods(found)] if found.methods else []),
        *_correlations(found.correlations, found.near),
        *([f"**What moved** (exploratory). {' '.join(moved)}"] if moved else []),
        f"{_left_out(found)}This page and all tables: `{COMMAND}`.",
    ]
    return "\n\n".join(_wrapped(part) for part in parts if part) + "\n"


def _wrapped(part: str) -> str:
    whole = part.startswith(("|", "!", "#"))
    return part if whole else textwrap.fill(part, WIDTH, break_long_words=False, break_on_hyphens=False)


def _headline(answers: Answers) -> str:
    """Answer question 1, and say what cannot be concluded."""
    value = answers.contrast(excess(answers.sizes, PRIMARY, BASE))
    if value is None:
        return f"**No answer yet**: no size has the cells of base and grpo under `{PRIMARY}`."
    sizes = _and(f"{size} ({PARAMETERS[size] / 1e6:.3g} M parameters)" for size in answers.sizes)
    runs, over = (f"{answers.runs} seeds", "seeds and ") if answers.runs > 1 else ("one seed", "")
    counted = f"{runs}, {answers.evidence.n:,} questions"
    return (
        f"**{_answered(answers, value)}**: the accuracy that `{PRIMARY}` costs in four bits differs by "
        f"{interval(value)} after GRPO, in the mean over {sizes}; {counted}, 95 % intervals over {over}questions. "
        "The models are small, were made here, one base per size, and solve one kind of word problem: nothing follows "
        "for other bases, large pretrained models, long reasoning or other text."
    )


def _answered(answers: Answers, value: Estimate) -> str:
    if answers.missing:
        verb = "has" if len(answers.missing) == 1 else "have"
        return f"No answer yet, since {_and(answers.missing)} {verb} not been run under all seeds"
    return answer(value) if answers.runs >= SEEDS else f"No answer yet, with {answers.runs} of {SEEDS} seeds"


def title(found: Findings) -> str:
    """Say what questions 1 and 2 found, over the figure of all schemes."""
    value = found.answers.contrast(excess(found.answers.sizes, PRIMARY, BASE))
    return f"{_answered(found.answers, value)} ({PRIMARY}, four bits)\n{about_training(found)}"


def _so_far(found: Findings) -> str:
    sizes, planned = len(found.answers.sizes), len(PARAMETERS)
    return f"Over {sizes} of {planned} sizes so far. " if sizes < planned else ""


def about_training(found: Findings) -> str:
    """Say whether quantization is shown to cost GRPO's weights more or less than those of supervised fine-tuning."""
    if tests := _of(found.controls, SFT):
        return f"Beside SFT, {_count(tests)} to cost GRPO more or less, in the mean over sizes"
    return "SFT was not evaluated at every size"


def _controls(found: Findings) -> str:
    """Return what is said of each control."""
    said = []
    for control, what in BESIDE.items():
        if not (tests := _of(found.controls, control)):
            said.append(f"`{control}` was not evaluated at every size.")
            continue
        shown, apart = _significant(tests), _significant(_of(found.controls_apart, control))
        said.append(f"Compared with {what}, {_count(tests)} to cost GRPO more or less (Holm, {100 * ALPHA:.0f} %).")
        said.append(_reach(found, control))
        if changed := sorted(set(shown) ^ set(apart)):
            verb = "changes" if len(changed) == 1 else "change"
            said.append(f"With the trainings of each size counted apart, {_code(changed)} {verb} sides.")
    return " ".join(said)


def _reach(found: Findings, control: str) -> str:
    """Say how far the excesses over a control reach, and how accurate the control is."""
    held, sizes = found.excesses[control], found.answers.sizes
    if control == SFT:
        mean = max(_bound(each.value) for each in held.values())
        single = max(_bound(value) for each in held.values() for value in each.by_size.values())
        return f"All intervals lie within ±{mean:.3f}, those of single sizes within ±{single:.3f} (exploratory)."
    scheme = _largest({scheme: each.value for scheme, each in held.items()})
    by_size = _and(f"{interval(value)} at {size}" for size, value in held[scheme].by_size.items())
    more = {size: found.answers.contrast({(size, control, FULL): 1.0, (size, GRPO, FULL): -1.0}) for size in sizes}
    full = _and(interval(value) for value in more.values() if value)
    return (
        f"The largest difference is that of `{scheme}`, {interval(held[scheme].value)}: {by_size}. This control is one "
        f"model per size, and at full precision its accuracy differs from GRPO's by {full}, so differences may come "
        f"from that or from the model.{_equal(held, [size for size, each in more.items() if each and _within(each)])}"
    )


def _equal(held: Mapping[str, Excess], sizes: Sequence[str]) -> str:
    """Return the largest excess at sizes where a control is as accurate as GRPO."""
    said = ""
    for size in sizes:
        values = {scheme: each.by_size[size] for scheme, each in held.items() if size in each.by_size}
        if values:
            scheme = _largest(values)
            said += (
                f" At {size}, where that is less than {MARGIN}, the largest of {len(values)} is that of `{scheme}`, "
                f"{interval(values[scheme])} (exploratory)."
            )
    return said


def about_bits(found: Findings) -> str:
    """Say at which widths quantization is shown to cost GRPO's weights more or less than the base's."""
    if not found.widths:
        return "The widths were not evaluated"
    by_scheme: dict[str, list[str]] = {}
    for (size, scheme), each in found.widths.items():
        if each.p < ALPHA:
            by_scheme.setdefault(scheme, []).append(size)
    if not by_scheme:
        return "No width is shown to cost more or less after GRPO than before"
    listed = _and(f"{BITS[scheme]} bits at {_and(sizes)}" for scheme, sizes in by_scheme.items())
    return f"Shown to cost more or less after GRPO than before (Holm over the widths of a size): {listed}"


def _cliff(found: Findings) -> str:
    """Say where the first width lies that costs more than CLIFF_LOSS, before and after GRPO."""
    none, said, undecided = [], [], []
    for size in found.answers.sizes:
        both = [found.cliffs.get((size, variant)) for variant in (BASE, GRPO)]
        if not all(both):
            continue
        before, after = (f"{BITS[each.first]} bits" if each.first else "none" for each in both)
        if before == after == "none":
            none.append(size)
        else:
            said.append(f"at {size} it is {before} before GRPO and {after} after")
        for variant, each in zip((BASE, GRPO), both, strict=True):
            losses = zip(CLIFF, each.losses, strict=True)
            undecided += [f"{size} {variant} in {BITS[q]} bits" for q, v in losses if v.low <= CLIFF_LOSS <= v.high]
    said += [f"at {_and(none)} none is"] if none else []
    open_ = f" Undecided: {_and(undecided)}." if undecided else ""
    return f"The first width that is shown to cost more than {CLIFF_LOSS}: {'; '.join(said)}.{open_}" if said else ""


def _shares(found: Findings) -> list[str]:
    """Return the large excesses over the base, and the same as shares of the accuracy that there was to lose."""
    held, answers = found.excesses[BASE], found.answers
    if not held:
        return []
    full = {v: _and(f"{_accuracy(answers, size, v, FULL):.3f}" for size in answers.sizes) for v in (BASE, GRPO)}
    large = [q for q, each in held.items() if each.value.low > MARGIN or each.value.high < -MARGIN]
    accuracies = f"At full precision the base answers {full[BASE]} of the questions right, after GRPO {full[GRPO]}."
    if not large:
        none = f"Under no scheme is GRPO's loss shown to differ from the base's by more than {MARGIN}."
        return [f"**More to lose?** {accuracies} {none}"]
    shares = [relative_excess(answers, q, BASE) for q in large]
    rows = [[q, interval(held[q].value), interval(v) if v else ""] for q, v in zip(large, shares, strict=True)]
    broken = [
        f"`{q}` at {size}"
        for q, size in itertools.product(large, answers.sizes)
        if max(_accuracy(answers, size, v, q) for v in (BASE, GRPO)) < BROKEN
    ]
    note = f"; {_and(broken)} leaves both below {BROKEN}" if broken else ""
    head = ("scheme", "loss(grpo) − loss(base)", "as shares of full precision's accuracy")
    return [
        f"**More to lose?** {accuracies} Schemes whose interval lies beyond ±{MARGIN}, and the same as a share of "
        f"accuracy (exploratory{note}):",
        "\n".join(table(head, rows)),
    ]


def _growth(found: Findings) -> list[str]:
    """Answer question 4."""
    sizes, tests, title = found.answers.sizes, found.growth, f"**Size.** {_so_far(found)}"
    if len(sizes) < 2:
        return [f"{title}One size has no trend."]
    if not tests:
        return [f"{title}No scheme was evaluated at every size."]
    if not (shown := _significant(tests)):
        return [f"{title}No trend of GRPO's loss is shown under any of {len(tests)} schemes."]
    base, most = found.slopes(BASE), _largest({scheme: tests[scheme].value for scheme in shown})
    least, largest = (f"{PARAMETERS[size] / 1e6:.3g}" for size in (sizes[0], sizes[-1]))
    return [
        f"{title}Under {len(shown)} of {len(tests)} schemes ({_code(shown)}) GRPO's loss is shown to change with size "
        f"(Holm, {100 * ALPHA:.0f} %), most under `{most}`: {interval(tests[most].value)} per tenfold increase in "
        f"parameters (the base's: {interval(base[most])}). This is a straight line from {least} M to {largest} M "
        "parameters, whose interval leaves out how far sizes lie from it; with one base per size, size cannot be told "
        "from the base."
    ]


def methods(found: Findings) -> str:
    """Return question 5 as a table; nothing if it was not evaluated."""
    rows: dict[str, list[str]] = {}
    for each in found.methods:
        rows.setdefault(each.method, [each.method, ", ".join(each.sizes)]).append(interval(each.value))
    head = ("accuracy of", "sizes", *(f"minus grpo:{scheme}" for scheme in OF_GRPO))
    return "\n".join(table(head, list(rows.values()))) if rows else ""


def _correlations(found: Sequence[Correlation], near: Sequence[Correlation]) -> list[str]:
    """Answer question 6."""
    if not found:
        return []
    best = _and(f"`{each.measure}` {each}" for each in near[:2])
    rest = f" Among the {near[0].cells} cells that lose less than {NEAR}, the strongest are {best}." if near else ""
    text = (
        "**What goes with the loss?** (exploratory) `top1_agreement` and `kl` compare the quantized model's tokens "
        "with full precision's on held-out solutions. `update_survival` is the length of the stored update over the "
        "true one, which rounding noise makes large, and `update_cosine` their cosine. The others compare weights."
    )
    return [text + rest, "\n".join(table(HEAD, body(found)))]


def _moved(why: pd.DataFrame) -> str:
    """Say what GRPO moved, and what supervised fine-tuning did."""
    rows = {variant: why[why["variant"] == variant] for variant in (GRPO, SFT)}

    def both(key: str, scale: float = 1.0, unit: str = "") -> str:
        grpo, sft = (_range(rows[variant], key, scale) for variant in (GRPO, SFT))
        return f"{grpo}{unit} (SFT: {sft}{unit})" if sft else f"{grpo}{unit}"

    texts = {
        "moved": f"As bf16 stores them, GRPO moves {both('moved', 100, ' %')} of the weights (means, by size).",
        "moved_fp32": f"In fp32 it moves {both('moved_fp32', 100, ' %')}.",
        "again_lift": f"Two seeds move the same weights {both('again_lift')} times as often as chance would.",
        "principal": f"Principal weights move {both('principal')} times as often as all,",
        "principal_by_size": f"{both('principal_by_size')} times as often as others of their own size.",
    }
    return " ".join(text for key, text in texts.items() if _range(rows[GRPO], key))


def _mxfp4(why: pd.DataFrame) -> str:
    base, grpo = (why[why["variant"] == variant] for variant in (BASE, GRPO))
    before, after = (_range(rows, "mx_error", 100) for rows in (base, grpo))
    if not after:
        return ""
    both = f"{after} % before and after GRPO" if before == after else f"{before} % before GRPO and {after} % after"
    return f"MXFP4's squared error is {both}, of the weights' squares; the tables have its parts."


def _left_out(found: Findings) -> str:
    """Name what was planned and is not here."""
    tests = [f"{c} {q}" for c, q in CONTROL_TESTS if (c, q) not in found.controls]
    tests = [f"{BASE} {q}" for q in PLANNED if q not in found.excesses[BASE]] + tests
    made = {each.method for each in found.methods}
    methods = [method for method in METHODS if method not in made]
    said = f"Not evaluated at every size, but counted in Holm's correction: {_and(tests)}. " if tests else ""
    said += f"Not run: {_and(methods)}. " if methods else ""
    partial = len(found.answers.partial)
    return said + (f"Left out, not evaluated under all seeds: {partial} cells. " if partial else "")


def _accuracy(answers: Answers, size: str, variant: str, scheme: str) -> float:
    return answers.contrast({(size, variant, scheme): 1.0}).estimate


def _largest(values: Mapping[str, Estimate]) -> str:
    return max(values, key=lambda scheme: abs(values[scheme].estimate))


def _within(value: Estimate) -> bool:
    return _bound(value) < MARGIN


def _bound(value: Estimate) -> float:
    return max(abs(value.low), abs(value.high))


def _range(rows: pd.DataFrame, key: str, scale: float = 1.0) -> str:
    """Return the least and the largest mean of a size, over matrices by their weights; nothing if none is known."""
    known = rows.dropna(subset=[key]) if key in rows else rows[:0]
    means = [scale * float(np.average(part[key], weights=part["numel"])) for _, part in known.groupby("size")]
    if not means:
        return ""
    low, high = (f"{value:.5g}" if 99.9 < value < 100 else f"{value:.3g}" for value in (min(means), max(means)))
    return low if low == high else f"{low} to {high}"


def _of(tests: Mapping[tuple[str, str], Tested], control: str) -> dict[str, Tested]:
    return {scheme: each for (other, scheme), each in tests.items() if other == control}


def _significant(tests: Mapping[str, Tested]) -> list[str]:
    return [scheme for scheme, each in tests.items() if each.p < ALPHA]


def _count(tests: Mapping[str, Tested]) -> str:
    shown = _significant(tests)
    if not shown:
        return f"none of {len(tests)} schemes is shown"
    return f"{len(shown)} of {len(tests)} schemes ({_code(shown)}) {'is' if len(shown) == 1 else 'are'} shown"


def _code(words: Iterable[str]) -> str:
    return _and(f"`{word}`" for word in words)


def _and(words: Iterable[str]) -> str:
    *first, last = list(words)
    return f"{', '.join(first)} and {last}" if first else last
