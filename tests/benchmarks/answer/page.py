"""The page of the sweep: a figure, three findings, then the details, in words that follow from the intervals."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from contrasts import (
    BASE,
    CLIFF,
    FULL,
    GRPO,
    MARGIN,
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
from correlations import BEHAVIOUR
from findings import CLIFF_LOSS, NEAR, TRAINED, Findings, Tested

from qrl import stats
from qrl.stats import Estimate
from qrl.stats.text import interval, table

ALPHA = 1 - stats.LEVEL  # of p-values that Holm's procedure corrected
WIDTH = 140  # characters in a line of text
BITS = dict(zip(CLIFF, (8, 4, 3, 2), strict=True))
BESIDE = {
    SFT: "as many steps of supervised fine-tuning on the same questions",
    PRETRAINED: "a model of the same shape made from text with fewer errors",
}
_HERE = "tests/benchmarks/answer"
TURNED = "Here a difference is the loss after GRPO minus another loss, which is gain survival with its sign turned."
CONTRAST = "Models made here: the contrast"  # heading of the second part
SCRIPT = f"{_HERE}/report.py"
COMMAND = f"python {SCRIPT} {_HERE}/export --methods {_HERE}/methods --out DIR"


def write(
    found: Findings, why: pd.DataFrame | None = None, command: str = COMMAND, *, below_real_model: bool = False
) -> str:
    """Return the page as Markdown.

    Args:
        found: all contrasts.
        why: from `tables.measures`.
        command: that made it.
        below_real_model: whether this is the second part of a page that begins with a real model's.
    """
    changed = ""
    if found.answers.designed:
        changed = "Some tests and settings were fixed or changed after outcomes were seen: "
        changed += "[design and deviations](../README.md). "
    moved = "" if why is None else _moved(why)
    heading, details = "# Does RL change how cleanly a model quantizes?", "## In detail"
    if below_real_model:
        heading, details = f"## {CONTRAST}", "### Models made here in detail"
    parts = [
        heading,
        f"{_models(found.answers)}{TURNED}" if below_real_model else _terms(found.answers),
        "![What quantization costs GRPO's weights, minus what it costs others, by scheme](excess.png)",
        *_three_findings(found),
        details,
        _headline(found.answers),
        f"**RL, or any training?** {_so_far(found)}{_controls(found)}",
        f"**How many bits?** {about_bits(found)}.{_together(found)} {_cliff(found)}",
        "![Accuracy lost to quantization, by bits](bits.png)",
        f"**More to lose?** {said}" if (said := _more_to_lose(found)) else "",
        f"**Size.** {_growth(found)}",
        f"**What goes with the loss?** {said}" if (said := _correlations(found)) else "",
        f"**What moved?** {moved}" if moved else "",
        *_methods(found),
        f"Planned tests are the first answer, the first width that costs more than {CLIFF_LOSS} and what is marked "
        f"(Holm), but for methods; the rest is exploratory, uncorrected. {changed}"
        f"[All tables, and what was not run](tables.md). Made by `{command}`.",
    ]
    return "\n\n".join(_wrapped(part) for part in parts if part) + "\n"


def _wrapped(part: str) -> str:
    whole = part.startswith(("!", "#", "|"))
    return part if whole else textwrap.fill(part, WIDTH, break_long_words=False, break_on_hyphens=False)


def _terms(answers: Answers) -> str:
    """Say in a reader's own words what was compared."""
    return (
        "A *scheme* stores a model's weights in fewer bits. Its *loss* is the share of questions that the model "
        "answers correctly with all bits minus that with fewer. The question is whether the loss of a model that was "
        "trained further by RL (GRPO) differs from that of the *base* it started from, and from that of the same base "
        f"after as many steps of supervised fine-tuning (SFT). {_models(answers)}Brackets are 95 % intervals."
    )


def _models(answers: Answers) -> str:
    if not answers.designed:
        return ""
    return "Each model was made for this study and solves word problems with one number as their answer. "


def _three_findings(found: Findings) -> list[str]:
    """Return the answers to the first, second and fourth question, each with one number."""
    answers = found.answers
    value = answers.contrast(excess(answers.sizes, PRIMARY, BASE))
    if value is None:
        return [_headline(answers)]
    same = f"1. **{_answered(answers, value)}**: loss after GRPO minus loss of the base, {interval(value)}."
    tests = _of(found.controls, SFT)
    training = f"2. **{about_training(found)}**."
    if tests:
        training = f"2. **{about_training(found)}**: the largest difference is {_largest_difference(tests)}."
    return [same, training, f"3. {_growth(found, bold=True)}"]


def _largest_difference(tests: Mapping[str, Tested]) -> str:
    """Return the largest difference of losses in the mean over sizes, with its interval and its scheme."""
    values = {scheme: test.value for scheme, test in tests.items()}
    scheme = _largest(values)
    return f"{interval(values[scheme])}, under `{scheme}`"


def _headline(answers: Answers) -> str:
    """Answer question 1, and say what cannot be concluded."""
    value = answers.contrast(excess(answers.sizes, PRIMARY, BASE))
    if value is None:
        return f"**No answer yet**: no size has the cells of base and grpo under `{PRIMARY}`."
    counts = _and(f"{answers.parameters[size] / 1e6:.3g} M" for size in answers.sizes)
    sizes = f"{_and(answers.sizes)} ({counts} parameters)"
    runs, over = "one seed", "questions"
    if answers.runs > 1:
        runs = f"{answers.runs} seeds"
        over = "seeds and questions (the base is one model under every seed: over questions alone)"
    after, before = (interval(answers.contrast(_mean_loss(answers, variant, PRIMARY))) for variant in (GRPO, BASE))
    limits = "Nothing follows for other models, tasks and settings."
    if answers.designed:
        limits = (
            "The models are small, were made here, one base per size, and solve one kind of word problem: nothing "
            "follows for other bases, large pretrained models, long reasoning or other text."
        )
    return (
        f"**{_answered(answers, value)}**: the loss, accuracy at full precision minus accuracy quantized, is {after} "
        f"after GRPO and {before} before, a difference of {interval(value)}, in the mean over {sizes}; {runs}, "
        f"{answers.evidence.n:,} questions, the same for all sizes, 95 % intervals over {over}. {limits}"
        f"{_largest_loss(answers)}"
    )


def _largest_loss(answers: Answers) -> str:
    """Say how much the primary scheme costs where it costs most, if that is shown to be less than the margin."""
    losses = {(size, v): answers.contrast(loss(size, v, PRIMARY)) for size in answers.sizes for v in (GRPO, BASE)}
    size, variant = max(losses, key=lambda cell: losses[cell].estimate)
    most = losses[size, variant]
    if most.high >= MARGIN:
        return ""
    when = "after GRPO" if variant == GRPO else "before GRPO"
    return f" The largest loss at one size is {interval(most)} ({size}, {when}): beside it, ±{MARGIN} is wide."


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
    sizes, planned = len(found.answers.sizes), len(found.answers.parameters)
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
        said.append(_reach(found) if control == SFT else _apart(found, control, _significant(tests)))
    return " ".join(said)


def _reach(found: Findings) -> str:
    """Say how far the differences to supervised fine-tuning reach."""
    held = found.excesses[SFT].values()
    mean = max(_bound(each.value) for each in held)
    single = max(_bound(value) for each in held for value in each.by_size.values())
    return f"These intervals lie within ±{mean:.3f}, those of single sizes within ±{single:.3f}."


def _apart(found: Findings, control: str, marked: Sequence[str]) -> str:
    """Say what is left without the smallest size, and at which sizes a control is as accurate as GRPO."""
    sizes = found.answers.sizes
    more = {size: found.answers.contrast({(size, control, FULL): 1.0, (size, GRPO, FULL): -1.0}) for size in sizes}
    sides = {
        word: [size for size, each in more.items() if each and _side(each) == side]
        for word, side in (("more", 1), ("less", -1))
    }
    said = _and(f"{word} accurate than GRPO at {_and(places)}" for word, places in sides.items() if places)
    equal = [size for size, each in more.items() if each and _bound(each) < MARGIN]
    alone = f"This control is one model per size{f', {said}' if said else ''}: it does not isolate RL."
    return _without(found, control, marked) + alone + _equal(found, control, equal)


def _without(found: Findings, control: str, marked: Sequence[str]) -> str:
    """Say how many differences are left without the smallest size, by their intervals, and which are reversed."""
    held = {scheme: each for scheme in marked if (each := found.excesses[control][scheme]).larger}
    if not held:
        return ""
    sides = {scheme: _side(each.larger) * np.sign(each.value.estimate) for scheme, each in held.items()}
    left = sum(side > 0 for side in sides.values())
    turned = _and(f"`{scheme}`: {interval(held[scheme].larger)}" for scheme, side in sides.items() if side < 0)
    remain = "remains" if left < 2 else "remain"
    said = f"Without {found.answers.sizes[0]}, {left or 'none'} of these differences {remain}"
    return f"{said}, and the sign turns under {turned}. " if turned else f"{said}. "


def _equal(found: Findings, control: str, sizes: Sequence[str]) -> str:
    """Return the largest difference at sizes where a control is as accurate as GRPO."""
    said = ""
    for size in sizes:
        by_scheme = {q: each.by_size[size] for q, each in found.excesses[control].items()}
        scheme, full = _largest(by_scheme), _accuracy(found.answers, size, control, FULL)
        said += (
            f" At {size}, where both are equally accurate ({full:.3f}), the largest of {len(by_scheme)} differences is "
            f"{interval(by_scheme[scheme])}, under `{scheme}`."
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


def _more_to_lose(found: Findings) -> str:
    """Say under how many schemes GRPO's loss differs from the base's, and by how much SFT's does."""
    held, answers = found.excesses[BASE], found.answers
    if not held:
        return ""
    right = {v: _and(f"{_accuracy(answers, size, v, FULL):.3f}" for size in answers.sizes) for v in (BASE, GRPO)}
    said = f"At full precision {right[BASE]} of the questions are right before GRPO, {right[GRPO]} after."
    apart = {q: each.value for q, each in held.items() if _side(each.value)}
    if not apart:
        return f"{said} Under no scheme does the interval of loss(grpo) − loss(base) exclude 0."
    most = _largest(apart)
    share, sft = relative_excess(answers, most, BASE), answers.contrast(excess(answers.sizes, most, BASE, SFT))
    beside = f", as a share of accuracy {interval(share)}" if share else ""
    beside += f"; SFT's exceeds the base's by {interval(sft)}" if sft else ""
    return (
        f"{said} Under {len(apart)} of {len(held)} schemes the interval of loss(grpo) − loss(base), gain survival "
        f"with its sign turned, excludes 0, most under `{most}`: {interval(apart[most])}{beside}."
        f"{_least_left(answers, most)}"
    )


def _least_left(answers: Answers, scheme: str) -> str:
    """Say what a scheme leaves of the gain at the size where it costs the gain most."""

    def gain(size: str, scheme: str) -> Estimate | None:
        return answers.contrast({(size, GRPO, scheme): 1.0, (size, BASE, scheme): -1.0})

    gains = {size: (gain(size, FULL), gain(size, scheme)) for size in answers.sizes}
    known = {size: (whole, kept) for size, (whole, kept) in gains.items() if whole and kept}
    if not known:
        return ""
    size = min(known, key=lambda size: known[size][1].estimate - known[size][0].estimate)
    whole, kept = (interval(value) for value in known[size])
    return f" At {size} `{scheme}` leaves {kept} of a gain of {whole}."


def _growth(found: Findings, *, bold: bool = False) -> str:
    """Answer question 4; `bold` marks the clause that answers it."""
    tests = found.growth
    if len(found.answers.sizes) < 2:
        return "One size has no trend."
    if not tests:
        return "No scheme was evaluated at every size."
    if not (shown := _significant(tests)):
        return f"No trend of GRPO's loss with size is shown under any of {len(tests)} schemes."
    most = _largest({scheme: tests[scheme].value for scheme in shown})
    falls = all(tests[scheme].value.estimate < 0 for scheme in shown)
    claim = f"Under {len(shown)} of {len(tests)} schemes GRPO's loss {'falls' if falls else 'changes'} with size"
    if bold:
        claim = f"**{claim}**"
    return f"{claim} (Holm), most under `{most}`: {interval(tests[most].value)} per tenfold increase in parameters."


def _methods(found: Findings) -> list[str]:
    """Answer question 5: what trains in four bits beside both cells of GRPO's, the rest beside the same scheme."""
    rows: dict[str, dict[str, str]] = {}  # difference → size → its interval
    for each in found.methods:
        scheme = each.other.partition(":")[2]
        if each.method in TRAINED or each.method.endswith(f":{scheme}"):
            rows.setdefault(f"`{each.method}` − `{each.other}`", {})[each.size] = interval(each.value)
    if not rows:
        return []
    sizes = [size for size in found.answers.parameters if any(size in row for row in rows.values())]
    said = "**Methods in four bits.**" + (f" {_beside_gptq(tests)}" if (tests := found.beside_gptq) else "")
    said += " Accuracy minus that of GRPO's weights quantized afterwards, by size."
    if any(name.startswith("`qlora:full`") for name in rows):
        said += " QLoRA's `full` is an NF4 base with its adapter in bf16, merged, so it is not in four bits."
        said += " Its rank and rate were not searched."
    if any(name.startswith("`qad-int4") for name in rows):
        said += " `qad-int4` starts from GRPO's weights and trains them further."
    body = [[name, *(row.get(size, "") for size in sizes)] for name, row in rows.items()]
    return [said, "\n".join(table(("", *sizes), body))]


def _beside_gptq(tests: Mapping[tuple[str, str], Tested]) -> str:
    """Say at which sizes a method that trains in four bits lies above or below GPTQ of GRPO's weights."""

    def at_sizes(held: Iterable[tuple[str, str]]) -> str:
        sizes: dict[str, list[str]] = {}
        for method, size in held:
            sizes.setdefault(method, []).append(size)
        return _and(f"`{method}` at {_and(each)}" for method, each in sizes.items())

    other = f"`{GRPO}:{PRIMARY}`"
    above, below = (at_sizes(key for key, each in tests.items() if _side(each.value) == side) for side in (1, -1))
    said = f"The intervals of {above} lie above {other}, " if above else f"No method's interval lies above {other}, "
    said += f"those of {below} lie below." if below else "none lies below."
    left = at_sizes(_significant(tests))
    corrected = f"Holm's correction over these {len(tests)} comparisons (5 %, exploratory)"
    return f"{said} {corrected} leaves {left or 'none'}."


def _correlations(found: Findings) -> str:
    """Answer question 6."""
    if not (all_ := found.correlations):
        return ""
    spoken, stored = ([e for e in all_ if (e.measure in BEHAVIOUR) == behaves] for behaves in (True, False))
    best = [f"`{spoken[0].measure}` on held-out solutions {spoken[0]}"] if spoken else []
    best += [f"of measures of weights `{stored[0].measure}` {stored[0]}"] if stored else []
    said = f"Spearman's correlation over {all_[0].cells} cells: {', '.join(best)}."
    if found.of_gain:
        most = found.of_gain[0]
        said += f" What the gain loses, loss(grpo) − loss(base), goes most with `{most.measure}`: {most}."
    if low := [f"`{each.measure}` {each}" for each in found.near if each.measure in BEHAVIOUR]:
        said += f" Among the {found.near[0].cells} that lose less than {NEAR}: {_and(low)}; near full precision, arXiv "
        said += "2606.19558 found no significant correlation on two large models."
    return said


def _moved(why: pd.DataFrame) -> str:
    """Say what GRPO moved, and what supervised fine-tuning did."""
    rows = {variant: why[why["variant"] == variant] for variant in (GRPO, SFT)}

    def both(key: str, scale: float = 1.0, unit: str = "") -> str:
        grpo, sft = (_range(rows[variant], key, scale) for variant in (GRPO, SFT))
        return f"{grpo}{unit} (SFT: {sft}{unit})" if sft else f"{grpo}{unit}"

    texts = {
        "moved": f"As bf16 stores them, GRPO moves {both('moved', 100, ' %')} of the weights.",
        "again_lift": f"Two seeds move the same ones {both('again_lift')} times as often as chance would.",
        "principal_by_size": (
            f"Those of the principal directions (2511.08567) move {both('principal_by_size')} times as often as others "
            "with the same exponent."
        ),
    }
    return " ".join(text for key, text in texts.items() if _range(rows[GRPO], key))


def _accuracy(answers: Answers, size: str, variant: str, scheme: str) -> float:
    return answers.contrast({(size, variant, scheme): 1.0}).estimate


def _largest(values: Mapping[str, Estimate]) -> str:
    return max(values, key=lambda scheme: abs(values[scheme].estimate))


def _side(value: Estimate) -> int:
    """Return on which side of 0 an interval lies; 0 if it holds 0."""
    return (value.low > 0) - (value.high < 0)


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


def _significant(tests: Mapping[Any, Tested]) -> list:
    return [key for key, each in tests.items() if each.p < ALPHA]


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
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last
