"""A comparison as tables and sentences for people. No difference without its interval, no rate without its n."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from qrl import names
from qrl.compare import health, missing, scales, seeds, subgroups
from qrl.compare.answers import Answers, References
from qrl.stats import LEVEL
from qrl.stats.clusters import ENOUGH
from qrl.stats.text import interval, percent_interval, table

if TYPE_CHECKING:
    from qrl.compare.comparison import Comparison, Row
    from qrl.compare.evidence import Cell
    from qrl.stats import Estimate
    from qrl.stats.verdict import Verdict

_SMALLEST_P = 1e-12
AGREES = 0.02  # how far a bootstrap's interval may end from the closed form's
_MEASURES = {  # of `Answers` → column, and decimals of a mean
    "tokens": ("tokens an answer", 1),
    "unfinished": ("unfinished", 3),
    "reached": ("reached, then wrong", 3),
    "reference_logprob": ("perplexity of references", 3),
}


def as_sentence(comparison: Comparison) -> str:
    """Return one sentence per trained variant and quantized scheme, or the gains if there is no quantized scheme."""
    judged, rows = comparison.judged(), comparison.rows
    if judged:
        return "\n".join(_verdict(comparison, *row) for row in judged)
    gains = [f"{row.variant} gains {interval(row.delta)} over base on n = {row.delta.n} questions" for row in rows]
    return f"No quantized scheme was evaluated, so gain survival is not defined; at full precision {'; '.join(gains)}."


def as_markdown(comparison: Comparison) -> str:
    """Return cells, gains and verdicts; per seed if there are several; losses; then how to read them."""
    parts = (
        _repeated,
        _cells,
        _verdicts,
        seeds.sections,
        _losses,
        scales.sections,
        _answers,
        _notes,
        subgroups.as_markdown,
    )
    return "\n".join(line for part in parts for line in part(comparison))


def _repeated(comparison: Comparison) -> list[str]:
    """Return a warning, before everything else, that some seeds are copies of one run."""
    notes = seeds.repeated_notes(comparison.answered) if comparison.answered else []
    return [*(f"**{note}**" for note in notes), ""] if notes else []


def _cells(comparison: Comparison) -> list[str]:
    lines, engine = [], [comparison.engine] if comparison.engine else []
    for trained in comparison.variants[1:]:
        rows = [row for row in comparison.rows if row.variant == trained]
        t_test = comparison.paired and all(row.mcnemar is None for row in rows)  # several runs or samples
        head = ["scheme", *(["engine"] if engine else []), names.BASE, trained, f"gain: {trained} − base"]
        head += ["p of gain (t)" if t_test else "McNemar's p", "gain survival", "gain kept", "verdict"]
        body = []
        for row in rows:
            accuracies = [_accuracy(comparison, (variant, row.scheme)) for variant in (names.BASE, trained)]
            p = row.delta.p_two_sided if t_test else row.mcnemar
            gain = [interval(row.delta), "unpaired" if p is None else _p(p)]
            survival = interval(row.gain_survival) if row.gain_survival else "not defined"
            kept = percent_interval(row.gain_kept) if row.gain_kept else "not defined"
            verdict = f"**{row.verdict.verdict}**" if row.verdict else "reference"
            body.append((comparison.shown(row.scheme), *engine, *accuracies, *gain, survival, kept, verdict))
        lines += [f"## Did the gain of {trained} survive?", "", *table(head, body), ""]
    marked = {names.cell_name(*cell): note for cell, note in comparison.unhealthy.items()}
    return [*lines, *health.section(marked), *_pass_at(comparison)]


def _accuracy(comparison: Comparison, cell: Cell) -> str:
    value, runs = comparison.cells[cell], len(comparison.runs)
    of_seeds = f", {runs} seeds" if runs > 1 and cell[0] != names.BASE else ""
    mark = f" {health.MARK}" if cell in comparison.unhealthy else ""
    return f"{_with_error(value)} (n = {value.n}{of_seeds}){mark}"


def _with_error(value: Estimate) -> str:
    return f"{value.estimate:.3f} ± {value.stderr:.3f}"


def _pass_at(comparison: Comparison) -> list[str]:
    """Return a table of pass@k for the cells that have several samples per question."""
    if not comparison.pass_at:
        return []
    every = (1, *sorted({k for by_k in comparison.pass_at.values() for k in by_k}))
    body = []
    for (variant, scheme), by_k in comparison.pass_at.items():
        first, samples = comparison.cells[variant, scheme], comparison.evidence.samples[variant, scheme]
        shares = {1: first} | by_k
        texts = (_with_error(shares[k]) if k in shares else "too few" for k in every)
        body.append((names.cell_name(variant, comparison.shown(scheme)), str(first.n), str(samples), *texts))
    head = ("cell", "n", "samples per question", *(f"pass@{k}" for k in every))
    note = "Accuracies above are pass@1: the mean over a question's samples, with errors over questions."
    return ["## Several samples per question", "", *table(head, body), "", note, ""]


def _losses(comparison: Comparison) -> list[str]:
    body = []
    for scheme in comparison.schemes[1:]:
        losses = {name: loss for row in comparison.rows if row.scheme == scheme for name, loss in row.losses.items()}
        body.append((comparison.shown(scheme), *(interval(losses[variant]) for variant in comparison.variants)))
    head = (f"scheme − {comparison.full}", *comparison.variants)
    return [f"## What quantization costs (n = {comparison.n})", "", *table(head, body), ""] if body else []


def _answers(comparison: Comparison) -> list[str]:
    def shown(cell: Cell) -> str:
        return names.cell_name(cell[0], comparison.shown(cell[1]))

    return answers_table(comparison.answers, shown, f"{comparison.full} of the same variant")


def answers_table(
    by_cell: Mapping[Cell, Answers], shown: Callable[[Cell], str], against: str, references: References | None = None
) -> list[str]:
    """Return a table of the answers, if more is known of them than right or wrong, or if some of them changed.

    Args:
        by_cell: in the order of rows.
        shown: a cell's name.
        against: what the reference is, in words.
        references: of the cells, for a column; none if `against` says which they are.
    """
    if not any(answers.means or answers.right_to_wrong is not None for answers in by_cell.values()):
        return []
    known = {name: mean.n for answers in by_cell.values() for name, mean in answers.means.items()}
    head = ["cell", *(["reference"] if references else [])]
    head += [f"{_MEASURES[name][0]} (n = {n})" for name, n in known.items()]
    body = []
    for cell, answers in by_cell.items():
        line = [shown(cell)]
        if references:
            line.append(shown(reference) if (reference := references[cell]) else "")
        line += [_measure(answers, name) for name in known]
        counts = (answers.right_to_wrong, answers.wrong_to_right)
        line += ["" if count is None else f"{count} of {answers.compared}" for count in counts]
        body.append((*line, "" if answers.mcnemar is None else _p(answers.mcnemar)))
    note = f"Brackets: the difference to {against}, and its interval. Where few answers differ it is widened: a rare, "
    note += "large change may not have been drawn."
    if "reached" in known:
        note += " *reached, then wrong*: the right value appears before a wrong or missing answer."
    if "reference_logprob" in known:
        note += " *references*: worked solutions; the difference is that of their log-likelihood, in nats a token."
    partial = any(answers.partial for answers in by_cell.values())
    head += ["less credit", "more credit"] if partial else ["right → wrong", "wrong → right"]
    head.append("McNemar's p")
    return ["## Answers", "", *table(head, body), "", note, ""]


def _measure(answers: Answers, name: str) -> str:
    if name not in answers.means:
        return ""
    mean = answers.perplexity if name == "reference_logprob" else answers.means[name].estimate
    text = f"{mean:.{_MEASURES[name][1]}f}"
    return f"{text}, {interval(answers.changes[name])}" if name in answers.changes else text


def _verdicts(comparison: Comparison) -> list[str]:
    sentences = [f"- {_verdict(comparison, *row)} {_evidence(*row)}" for row in comparison.judged()]
    return ["## Verdict", "", *(sentences or [f"- {as_sentence(comparison)}"]), ""]


def _verdict(comparison: Comparison, row: Row, verdict: Verdict, survival: Estimate) -> str:
    """Return the verdict in a sentence: what is left of the gain, by how many questions, and what is shown."""
    several = len(comparison.variants) > 2
    scheme = f"{row.variant} under {row.scheme}" if several else row.scheme
    of_seeds = f", {survival.runs.count} seeds" if survival.runs else ""
    numbers = f"gain survival {interval(survival)}, n = {survival.n}{of_seeds}"
    return f"{scheme}: {verdict.headline} ({numbers}); {verdict.reason}."


def _evidence(row: Row, verdict: Verdict, _survival: Estimate) -> str:
    """Return remarks, what would decide an inconclusive verdict, and the p-value of one that makes a claim."""
    sentences = [f"Remark: {remark}." for remark in verdict.remarks]
    if verdict.verdict == "inconclusive":
        sentences.append(f"This n detects a change of the gain of {verdict.smallest_effect:.3f} with 80 % power.")
    ways = [f"about {_rounded_up(verdict.n_to_decide):,} questions"] if verdict.n_to_decide else []
    ways += [f"{verdict.seeds_to_decide} seeds"] if verdict.seeds_to_decide else []
    if ways:
        sentences.append(f"If these estimates are the truth, {' or '.join(ways)} would decide with the same power.")
    if row.p_holm is not None:
        sentences.append(f"One-sided p of this claim: {_p(verdict.p_value)}, Holm-corrected {_p(row.p_holm)}.")
    if row.holds_together is False:
        alone = "**Significant alone, but not after Holm's correction for the other schemes**"
        sentences.append(f"{alone}: a lead, not a result.")
    return " ".join(sentences)


def _p(value: float | None) -> str:
    """Return a p-value as text; far tails of a distribution are no more precise than their bound."""
    if value is None:
        return "not defined"
    return f"{value:.2g}" if value >= _SMALLEST_P else f"below {_SMALLEST_P:g}"


def _rounded_up(n: int) -> int:
    """Return n with two significant digits, rounded up: the estimate is no more precise."""
    unit = 10 ** max(0, len(str(n)) - 2)
    return -(-n // unit) * unit


def _notes(comparison: Comparison) -> list[str]:
    """Return how to read the tables."""
    pairing = "Differences are paired by question: every cell answered the same questions."
    if not comparison.paired:
        pairing = (
            "Only counts are known, so cells are compared as independent samples; "
            "outcomes per question would make most intervals narrower."
        )
    elif comparison.evidence.clusters:
        groups = f"{comparison.evidence.clusters} groups of questions"
        effective = f"as informative as {comparison.evidence.effective_clusters:.1f} of equal size"
        pairing = f"Differences are paired by question, with standard errors clustered over {groups} ({effective})."
    if len(comparison.runs) == 1:
        pairing += " There is one training run, so no interval includes the variation between training seeds."
    margin = "a tenth of the full-precision gain, at least 0.01"
    if comparison.margin is not None:
        margin = f"{comparison.margin:g}, set by `compare.margin`"
    return [
        f"Brackets are 95 % confidence intervals (CI); ± is one standard error. {pairing}",
        *_clusters(comparison),
        *_differing(comparison),
        *(missing.notes(comparison.answered.filled, comparison.n) if comparison.answered else []),
        *_bootstrap(comparison),
        "",
        "- *gain* = trained − base under one scheme.",
        "- *gain survival* = gain under the scheme − gain at full precision; 0 means that no gain is lost.",
        "- *gain kept* = gain under the scheme / gain at full precision.",
        "- The verdict is the first of these that is shown, by one-sided 95 % bounds. *lost*: more than half of the",
        "  gain is lost. *survives*: gain survival is above −margin, and the gain under the scheme above 0.",
        f"  *reduced*: gain survival is below 0. *inconclusive*: none of these. The margin is {margin}.",
        *_error_rate(comparison),
        "",
    ]


def _error_rate(comparison: Comparison) -> list[str]:
    """Return how often a verdict is wrong, and on what that rests."""
    error = f"{100 * (1 - LEVEL):.0f} %"
    several_schemes = "For several schemes, use the Holm-corrected p-values: they limit the chance of any wrong claim."
    runs = len(comparison.runs)
    if comparison.evidence.clusters:
        return [
            f"- Each claim is wrong in at most {error} of studies with many groups of questions. With 10 to 20 that",
            "  lose unequally, *survives* at the margin was wrong in up to 10 % of simulated studies.",
            f"  {several_schemes}",
        ]
    if runs <= 1:
        of_run = " about this training run" if runs else ""
        return [f"- Each claim{of_run} is wrong in at most {error} of studies. {several_schemes}"]
    return [
        f"- Each claim is wrong in at most {error} of studies if the values of training runs are normally distributed.",
        f"  {runs} runs cannot show that they are. Where one run in five collapses, two or three runs often include",
        f"  none that does, and *survives* then comes too often. {several_schemes}",
    ]


def _clusters(comparison: Comparison) -> list[str]:
    """Return a warning if few groups of questions decide the result."""
    effective = comparison.evidence.effective_clusters
    if effective is None or effective >= ENOUGH:
        return []
    return [
        f"Warning: the {comparison.evidence.clusters} groups of questions are as informative as {effective:.1f} groups "
        f"of equal size. Below {ENOUGH}, a few groups decide the result: add groups, not questions to a group."
    ]


def _differing(comparison: Comparison) -> list[str]:
    """Return a warning for each cell of the base that answers differently under different seeds."""
    used = "averaged over the runs that have their own" if len(comparison.runs) > 1 else "taken from the first seed"
    return [
        f"The base is one model, but {names.cell_name(*cell)} answers {count} question(s) differently under another "
        f"seed; its answers are {used}."
        for cell, count in comparison.evidence.differing.items()
    ]


def _bootstrap(comparison: Comparison) -> list[str]:
    """Return how far the bootstrap's interval ends are from the closed form's."""
    pairs = [(drawn, row.differences[name]) for row in comparison.rows for name, drawn in row.bootstrap.items()]
    if not pairs:
        return []
    apart = max(max(abs(drawn.low - closed.low), abs(drawn.high - closed.high)) for drawn, closed in pairs)
    check = "A paired bootstrap over questions (10,000 resamples, seeded)"
    if apart > AGREES:
        few = "Too few answers change for a bootstrap; the intervals above are exact there"
        return [f"{check} differs by up to {apart:.3f} at an end of an interval. {few}."]
    return [f"{check} moves no end of a gain's or gain survival's interval by more than {max(apart, 0.001):.3f}."]
