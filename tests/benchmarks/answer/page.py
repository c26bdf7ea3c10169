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
    PRETRAINED,
    PRIMARY,
    SEEDS,
    SFT,
    Answers,
    Weights,
    answer,
    excess,
    loss,
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
    SFT: "as many steps of supervised fine-tuning on the same questions, with one solution each",
    PRETRAINED: "a model of the same shape made from text with fewer errors",
}
COMMAND = "python tests/benchmarks/answer/report.py tests/benchmarks/answer/export --out DIR"


def write(found: Findings, why: pd.DataFrame | None = None) -> str:
    """Return the page as Markdown.

    Args:
        found: all contrasts.
        why: from `tables.measures`.
    """
    moved = "" if why is None else _moved(why)
    parts = [
        "# Does RL change how cleanly a model quantizes?",
        _headline(found.answers),
        f"**RL, or any training?** {_so_far(found)}{_controls(found)}",
        "![What quantization costs GRPO's weights, minus what it costs others, by scheme](excess.png)",
        f"**How many bits?** {about_bits(found)}.{_together(found)} {_cliff(found)}",
        "![Accuracy lost to quantization, by bits](bits.png)",
        *_shares(found),
        *_growth(found),
        *(
            [
                "**Methods in four bits** (exploratory; beside another scheme, the schemes differ as well):",
                methods(found),
            ]
            if found.methods
            else []
        ),
        *_correlations(found.correlations, found.near),
        f"**What moved?** (exploratory) {moved}" if moved else "",
        f"{_left_out(found)}Some tests and settings were fixed or changed after outcomes were seen: [design and "
        f"deviations](../README.md). [All tables](tables.md). Page and tables are made by `{COMMAND}`.",
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
    sizes = f"{_and(answers.sizes)} ({_and(f'{PARAMETERS[size] / 1e6:.3g} M' for size in answers.sizes)} parameters)"
    runs, over = (f"{answers.runs} seeds", "seeds and ") if answers.runs > 1 else ("one seed", "")
    after, before = (interval(answers.contrast(_mean_loss(answers, variant, PRIMARY))) for variant in (GRPO, BASE))
    return (
        f"**{_answered(answers, value)}**: the loss, accuracy at full precision minus accuracy quantized, is {after} "
        f"after GRPO and {before} before. They differ by {interval(value)}, in the mean over {sizes}; {runs}, "
        f"{answers.evidence.n:,} questions, 95 % intervals over {over}questions. The models are small, were made here, "
        "one base per size, and solve one kind of word problem: nothing follows for other bases, large pretrained "
        "models, long reasoning or other text."
    )


def _answered(answers: Answers, value: Estimate) -> str:
    if answers.missing:
        verb = "has" if len(answers.missing) == 1 else "have"
        return f"No answer yet, since {_and(answers.missing)} {verb} not been run under all seeds"
    return answer(value) if answers.runs >= SEEDS else f"No answer yet, with {answers.runs} of {SEEDS} seeds"


def _mean_loss(answers: Answers, variant: str, scheme: str) -> Weights:
    each = 1 / len(answers.sizes)
    return {cell: w for size in answers.sizes for cell, w in loss(size, variant, scheme, each).items()}


def title(found: Findings) -> str:
    """Say what questions 1 and 2 found, over the figure of all schemes."""
    value = found.answers.contrast(excess(found.answers.sizes, PRIMARY, BASE))
    return f"{_answered(found.answers, value)}\n{about_training(found)}"


def _so_far(found: Findings) -> str:
    sizes, planned = len(found.answers.sizes), len(PARAMETERS)
    return f"Over {sizes} of {planned} sizes so far. " if sizes < planned else ""


def about_training(found: Findings) -> str:
    """Say whether GRPO's weights are shown to lose more or less than those of supervised fine-tuning."""
    if tests := _of(found.controls, SFT):
        return f"Compared with SFT, {_shown(tests)}, in the mean over sizes"
    return "SFT was not evaluated at every size"


def _controls(found: Findings) -> str:
    """Return what is said of each control."""
    said = []
    for control, what in BESIDE.items():
        if not (tests := _of(found.controls, control)):
            said.append(f"`{control}` was not evaluated at every size.")
            continue
        said.append(f"Compared with {what}, {_shown(tests)}, in the mean over sizes (Holm, {100 * ALPHA:.0f} %).")
        said.append(_reach(found) if control == SFT else _by_size(found, control, _significant(tests)))
    return " ".join(said)


def _reach(found: Findings) -> str:
    """Say how far the differences to supervised fine-tuning reach."""
    held = found.excesses[SFT]
    mean = max(_bound(each.value) for each in held.values())
    single = {(size, q): value for q, each in held.items() for size, value in each.by_size.items()}
    apart = {key: value for key, value in single.items() if value.low > 0 or value.high < 0}
    most = ""
    if apart:
        size, scheme = max(apart, key=lambda key: abs(apart[key].estimate))
        most = f", most under `{scheme}` at {size}: {interval(apart[size, scheme])}"
    return (
        f"All these intervals lie within ±{mean:.3f}. Of the {len(single)} at single sizes, which reach "
        f"±{max(map(_bound, single.values())):.3f}, {len(apart)} exclude 0 (exploratory, uncorrected){most}."
    )


def _by_size(found: Findings, control: str, marked: Sequence[str]) -> str:
    """Say what is left of the differences without the smallest size, and how accurate the control is."""
    held, sizes = found.excesses[control], found.answers.sizes
    more = {size: found.answers.contrast({(size, control, FULL): 1.0, (size, GRPO, FULL): -1.0}) for size in sizes}
    full = _and(interval(value) for value in more.values() if value)
    left = [interval(each) for q in marked if (each := held[q].larger)]
    rest = f" Without {sizes[0]} the differences under these schemes are {_and(left)}." if left else ""
    return (
        f"This control is one model per size, whose accuracy at full precision differs from GRPO's by {full}, so it "
        f"does not isolate RL.{rest}"
        f"{_equal(found, control, [size for size, each in more.items() if each and _bound(each) < MARGIN])}"
    )


def _equal(found: Findings, control: str, sizes: Sequence[str]) -> str:
    """Return the largest difference at sizes where a control is as accurate as GRPO."""
    said = ""
    for size in sizes:
        by_scheme = {q: each.by_size[size] for q, each in found.excesses[control].items()}
        scheme, full = _largest(by_scheme), _accuracy(found.answers, size, control, FULL)
        said += (
            f" At {size}, where both are equally accurate ({full:.3f}), the largest of {len(by_scheme)} differences is "
            f"{interval(by_scheme[scheme])}, under `{scheme}` (exploratory)."
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
        return "At no width is GRPO shown to change GPTQ's loss"
    listed = _and(f"{BITS[scheme]} bits at {_and(sizes)}" for scheme, sizes in by_scheme.items())
    return f"GRPO is shown to change GPTQ's loss in {listed} (Holm over the widths of a size)"


def _together(found: Findings) -> str:
    """Say which widths remain if all sizes and widths are one family."""
    apart, together = (
        {key for key, each in held.items() if each.p < ALPHA} for held in (found.widths, found.widths_together)
    )
    if apart == together:
        return ""
    left = _and(f"{BITS[scheme]} bits at {size}" for size, scheme in sorted(together)) if together else "none"
    return f" With all sizes and widths as one family: {left}."


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
    return f"The first width whose loss is shown to exceed {CLIFF_LOSS}: {'; '.join(said)}.{open_}" if said else ""


def _shares(found: Findings) -> list[str]:
    """Return where GRPO's loss differs from the base's, beside that of SFT, and as shares of what there was to lose."""
    held, answers = found.excesses[BASE], found.answers
    if not held:
        return []
    variants = {BASE: "before training", SFT: "after SFT", GRPO: "after GRPO"}
    known = {v: said for v, said in variants.items() if all((size, v, FULL) in answers.cells for size in answers.sizes)}
    full = [
        f"{said} {_and(f'{_accuracy(answers, size, v, FULL):.3f}' for size in answers.sizes)}"
        for v, said in known.items()
    ]
    accuracies = f"At full precision {', '.join(full)} of the questions are right."
    apart = [q for q, each in held.items() if each.value.low > 0 or each.value.high < 0]
    if not apart:
        return [
            f"**More to lose?** {accuracies} Under no scheme does the interval of loss(grpo) − loss(base) exclude 0."
        ]
    rows = []
    for q in apart:
        share, sft = relative_excess(answers, q, BASE), answers.contrast(excess(answers.sizes, q, BASE, SFT))
        rows.append([q, *(interval(value) if value else "" for value in (held[q].value, sft, share))])
    broken = [
        f"`{q}` at {size}"
        for q, size in itertools.product(apart, answers.sizes)
        if max(_accuracy(answers, size, v, q) for v in (BASE, GRPO)) < BROKEN
    ]
    note = f"; {_and(broken)} leaves both below {BROKEN}" if broken else ""
    head = ("scheme", "loss(grpo) − loss(base)", "loss(sft) − loss(base)", "grpo − base, as shares of accuracy")
    return [
        f"**More to lose?** {accuracies} Schemes whose interval excludes 0, and how much is left of it as a share of "
        f"full precision's accuracy (exploratory, uncorrected, given these bases{note}):",
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
    falls = all(tests[scheme].value.estimate < 0 for scheme in shown)
    larger = found.slopes(GRPO, 1).get(most)
    without = f" Without {sizes[0]}, GRPO's is {interval(larger)}." if larger else ""
    return [
        f"{title}Under {len(shown)} of {len(tests)} schemes ({_code(shown)}) the line of GRPO's loss over these bases "
        f"{'falls' if falls else 'changes'} with size (Holm, {100 * ALPHA:.0f} %, over seeds), most under `{most}`: "
        f"{interval(tests[most].value)} per tenfold increase in parameters, {interval(base[most])} before GRPO."
        f"{without} The intervals leave out how far sizes lie from the line, and that bases differ in more than size."
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
        "**What goes with the loss?** (exploratory; over schemes, trainings and sizes) `top1_agreement` and `kl` "
        "compare the quantized model's tokens with full precision's on held-out solutions; the others compare weights."
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
        "again_lift": f"Two seeds move the same weights {both('again_lift')} times as often as chance would.",
        "principal": f"Those of the principal directions (2511.08567) move {both('principal')} times as often as all,",
        "principal_by_size": f"{both('principal_by_size')} times as often as weights with the same exponent.",
    }
    return " ".join(text for key, text in texts.items() if _range(rows[GRPO], key))


def _left_out(found: Findings) -> str:
    """Name what was planned and is not here."""
    answers = found.answers
    tests = [f"{GRPO} {q}" for q in PLANNED if q not in found.growth]
    tests += [f"{c} {q}" for c, q in CONTROL_TESTS if (c, q) not in found.controls]
    said = f"Not evaluated at every size, but counted in Holm's correction: {_and(tests)}. " if tests else ""
    for scheme in answers.schemes():
        if scheme not in found.excesses[BASE]:
            single = {size: answers.contrast(excess([size], scheme, BASE)) for size in answers.sizes}
            known = [f"{interval(value)} at {size}" for size, value in single.items() if value]
            said += f"Under `{scheme}`, loss(grpo) − loss(base) is {_and(known)} (exploratory). " if known else ""
    made = {each.method for each in found.methods}
    begun = [m for m in METHODS if any(cell.endswith(m.replace(":", " ")) for cell in answers.partial)]
    absent = [m for m in METHODS if m not in made and m not in begun]
    said += f"Not run: {_and(absent)}. " if absent else ""
    return said + (f"Run under some seeds only, left out: {len(answers.partial)} cells. " if answers.partial else "")


def _accuracy(answers: Answers, size: str, variant: str, scheme: str) -> float:
    return answers.contrast({(size, variant, scheme): 1.0}).estimate


def _largest(values: Mapping[str, Estimate]) -> str:
    return max(values, key=lambda scheme: abs(values[scheme].estimate))


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


def _shown(tests: Mapping[str, Tested]) -> str:
    """Say under which schemes GRPO's loss is shown to differ, and to which side."""
    shown = _significant(tests)
    if not shown:
        return f"under none of {len(tests)} schemes is GRPO's loss shown to differ"
    signs = {tests[scheme].value.estimate > 0 for scheme in shown}
    side = {(True,): "be larger", (False,): "be smaller"}.get(tuple(signs), "differ")
    return f"under {len(shown)} of {len(tests)} schemes ({_code(shown)}) GRPO's loss is shown to {side}"


def _code(words: Iterable[str]) -> str:
    return _and(f"`{word}`" for word in words)


def _and(words: Iterable[str]) -> str:
    *first, last = list(words)
    return f"{', '.join(first)} and {last}" if first else last
