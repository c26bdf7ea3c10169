"""A comparison as tables and sentences for people. No difference without its interval, no rate without its n."""

from qrl import names
from qrl.compare import answers, health, missing, seeds, subgroups
from qrl.compare.comparison import Comparison, Row
from qrl.compare.evidence import Cell
from qrl.compare.scales import kept_text, ratio_texts
from qrl.compare.scales import sentence as scales_sentence
from qrl.stats import LEVEL, Estimate
from qrl.stats.clusters import ENOUGH
from qrl.stats.text import interval, p_text, percent_interval, table
from qrl.stats.verdict import Verdict

AGREES = 0.02  # largest distance between the ends of a bootstrap's interval and those of the closed form


def sentence(comparison: Comparison) -> str:
    """Return one sentence per trained variant and quantized scheme, or the gains if there is no quantized scheme."""
    judged = comparison.judged()
    if judged:
        return "\n".join(_verdict(comparison, row, verdict, survival) for row, verdict, survival in judged)
    gains = []
    for row in comparison.rows:
        gains.append(f"{row.variant} gains {interval(row.delta)} over base on n = {row.delta.n} questions")
    return f"No quantized scheme was evaluated, so gain survival is not defined; at full precision {'; '.join(gains)}."


def markdown(comparison: Comparison) -> str:
    """Return cells, gains and verdicts; per seed if there are several; losses; then how to read them."""
    lines = [
        *_repeated(comparison),
        *_cells(comparison),
        *_verdicts(comparison),
        *seeds.sections(comparison),
        *_losses(comparison),
        *_scales(comparison),
        *_answers(comparison),
        *_notes(comparison),
        *subgroups.markdown(comparison.subgroups, comparison.variants, comparison.schemes, comparison.scheme_label),
    ]
    return "\n".join(lines)


def _repeated(comparison: Comparison) -> list[str]:
    """Return a warning, before everything else, that some seeds are copies of one run."""
    notes = seeds.repeated_notes(comparison.answered) if comparison.answered else []
    return [*(f"**{note}**" for note in notes), ""] if notes else []


def _cells(comparison: Comparison) -> list[str]:
    """Return a table per trained variant: its accuracies, gains and verdicts; then what they need to be read."""
    lines = []
    for trained in comparison.variants[1:]:
        lines += [f"## Did the gain of {trained} survive?", "", *_gains(comparison, trained), ""]
    unhealthy = {names.cell_name(*cell): note for cell, note in comparison.unhealthy.items()}
    return [*lines, *health.section(unhealthy), *_pass_at(comparison)]


def _gains(comparison: Comparison, trained: str) -> list[str]:
    rows = [row for row in comparison.rows if row.variant == trained]
    # McNemar's test is of one answer per question; with several runs or samples a t test takes its place.
    has_t_test = comparison.paired and all(row.mcnemar is None for row in rows)

    head = ["scheme"]
    if comparison.engine:
        head.append("engine")
    head += [names.BASE, trained, f"gain: {trained} − base"]
    head.append("p of gain (t)" if has_t_test else "McNemar's p")
    head += ["gain survival", "gain kept", "verdict"]

    body = []
    for row in rows:
        line = [comparison.scheme_label(row.scheme)]
        if comparison.engine:
            line.append(comparison.engine)
        line += [_accuracy(comparison, (names.BASE, row.scheme)), _accuracy(comparison, (trained, row.scheme))]
        p_value = row.delta.p_two_sided if has_t_test else row.mcnemar
        line += [interval(row.delta), "unpaired" if p_value is None else p_text(p_value)]
        line.append(interval(row.gain_survival) if row.gain_survival else "not defined")
        line.append(percent_interval(row.gain_kept) if row.gain_kept else "not defined")
        line.append(f"**{row.verdict.verdict}**" if row.verdict else "reference")
        body.append(line)
    return table(head, body)


def _accuracy(comparison: Comparison, cell: Cell) -> str:
    variant, _ = cell
    value = comparison.cells[cell]
    size = f"n = {value.n}"
    if len(comparison.runs) > 1 and variant != names.BASE:
        size += f", {len(comparison.runs)} seeds"
    text = f"{_with_error(value)} ({size})"
    return f"{text} {health.MARK}" if cell in comparison.unhealthy else text


def _with_error(value: Estimate) -> str:
    return f"{value.estimate:.3f} ± {value.stderr:.3f}"


def _pass_at(comparison: Comparison) -> list[str]:
    """Return a table of pass@k for the cells that have several samples per question."""
    if not comparison.pass_at:
        return []
    columns = {1}  # every k that some cell has
    for by_k in comparison.pass_at.values():
        columns.update(by_k)

    body = []
    for cell, by_k in comparison.pass_at.items():
        variant, scheme = cell
        accuracy = comparison.cells[cell]  # which is pass@1
        estimates = {1: accuracy} | by_k
        line = [names.cell_name(variant, comparison.scheme_label(scheme)), str(accuracy.n)]
        line.append(str(comparison.evidence.samples[cell]))
        line += [_with_error(estimates[k]) if k in estimates else "too few" for k in sorted(columns)]
        body.append(line)
    head = ("cell", "n", "samples per question", *(f"pass@{k}" for k in sorted(columns)))
    note = "Accuracies above are pass@1: the mean over a question's samples, with errors over questions."
    return ["## Several samples per question", "", *table(head, body), "", note, ""]


def _losses(comparison: Comparison) -> list[str]:
    """Return a table of what each quantized scheme costs each variant; none without quantized schemes."""
    quantized = comparison.schemes[1:]
    if not quantized:
        return []
    body = []
    for scheme in quantized:
        losses = {}
        for row in comparison.rows:
            if row.scheme == scheme:
                losses |= row.losses
        body.append((comparison.scheme_label(scheme), *(interval(losses[variant]) for variant in comparison.variants)))
    head = (f"scheme − {comparison.full}", *comparison.variants)
    return [f"## What quantization costs (n = {comparison.n})", "", *table(head, body), ""]


def _scales(comparison: Comparison) -> list[str]:
    """Return a table per trained variant, and a sentence per scheme; none without quantized schemes."""
    lines = []
    for variant in comparison.variants[1:]:
        body = []
        sentences = []
        for row in comparison.rows:
            if row.variant != variant or row.scales is None:
                continue
            scheme = comparison.scheme_label(row.scheme)
            kept = [kept_text(row.scales.kept[name]) for name in (names.BASE, variant)]
            body.append((scheme, *kept, *ratio_texts(row.scales)))
            sentences.append(f"- {scheme}: {scales_sentence(row.scales, variant)}")
        if not body:
            continue
        base = names.BASE
        head = ("scheme", f"accuracy kept: {base}", f"accuracy kept: {variant}", "ratio", "difference in log-odds")
        title = f"## Does quantization cost {variant} more than {base}?"
        note = (
            f"*accuracy kept* = accuracy under the scheme / accuracy at full precision (n = {comparison.n}). *ratio* = "
            f"{variant} / {base}; above 1, {variant} keeps more. In points the difference is gain survival, above."
        )
        lines += [title, "", *table(head, body), "", *sentences, "", note, ""]
    return lines


def _answers(comparison: Comparison) -> list[str]:
    def cell_label(cell: Cell) -> str:
        variant, scheme = cell
        return names.cell_name(variant, comparison.scheme_label(scheme))

    return answers.markdown(comparison.answers, cell_label, f"{comparison.full} of the same variant")


def _verdicts(comparison: Comparison) -> list[str]:
    lines = ["## Verdict", ""]
    judged = comparison.judged()
    for row, verdict, survival in judged:
        lines.append(f"- {_verdict(comparison, row, verdict, survival)} {_support(row, verdict)}")
    if not judged:
        lines.append(f"- {sentence(comparison)}")
    return [*lines, ""]


def _verdict(comparison: Comparison, row: Row, verdict: Verdict, survival: Estimate) -> str:
    """Return the verdict in a sentence: what is left of the gain, by how many questions, and what is shown."""
    has_several_variants = len(comparison.variants) > 2
    scheme = f"{row.variant} under {row.scheme}" if has_several_variants else row.scheme
    size = f"n = {survival.n}"
    if survival.runs:
        size += f", {survival.runs.count} seeds"
    return f"{scheme}: {verdict.headline} (gain survival {interval(survival)}, {size}); {verdict.reason}."


def _support(row: Row, verdict: Verdict) -> str:
    """Return remarks, what would decide an inconclusive verdict, and the p-value of one that makes a claim."""
    sentences = [f"Remark: {remark}." for remark in verdict.remarks]
    if verdict.verdict == "inconclusive":
        sentences.append(f"This n detects a change of the gain of {verdict.smallest_effect:.3f} with 80 % power.")

    sizes = []
    if verdict.n_to_decide:
        sizes.append(f"about {_rounded_up(verdict.n_to_decide):,} questions")
    if verdict.seeds_to_decide:
        sizes.append(f"{verdict.seeds_to_decide} seeds")
    if sizes:
        sentences.append(f"If these estimates are the truth, {' or '.join(sizes)} would decide with the same power.")

    if row.p_holm is not None:
        p_values = f"{p_text(verdict.p_value)}, Holm-corrected {p_text(row.p_holm)}"
        sentences.append(f"One-sided p of this claim: {p_values}.")
    if row.holds_after_holm is False:
        warning = "**Significant alone, but not after Holm's correction for the other schemes**"
        sentences.append(f"{warning}: a lead, not a result.")
    return " ".join(sentences)


def _rounded_up(n: int) -> int:
    """Return n with two significant digits, rounded up: the estimate is no more precise."""
    unit = 10 ** max(0, len(str(n)) - 2)
    return -(-n // unit) * unit


def _notes(comparison: Comparison) -> list[str]:
    """Return how to read the tables."""
    margin = "a tenth of the full-precision gain, at least 0.01"
    if comparison.margin is not None:
        margin = f"{comparison.margin:g}, set by `compare.margin`"
    return [
        f"Brackets are 95 % confidence intervals (CI); ± is one standard error. {_pairing(comparison)}",
        *_clusters(comparison),
        *_differing(comparison),
        *missing.notes(comparison.missing_answers, comparison.n),
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


def _pairing(comparison: Comparison) -> str:
    """Return what differences are computed from, and what their intervals leave out."""
    evidence = comparison.evidence
    if not comparison.paired:
        text = (
            "Only counts are known, so cells are compared as independent samples; "
            "outcomes per question would make most intervals narrower."
        )
    elif evidence.clusters:
        groups = f"{evidence.clusters} groups of questions"
        effective = f"as informative as {evidence.effective_clusters:.1f} of equal size"
        text = f"Differences are paired by question, with standard errors clustered over {groups} ({effective})."
    else:
        text = "Differences are paired by question: every cell answered the same questions."
    if len(comparison.runs) == 1:
        text += " There is one training run, so no interval includes the variation between training seeds."
    return text


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
    if runs == 0:
        return [f"- Each claim is wrong in at most {error} of studies. {several_schemes}"]
    if runs == 1:
        return [f"- Each claim about this training run is wrong in at most {error} of studies. {several_schemes}"]
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
    source = "averaged over the runs that have their own" if len(comparison.runs) > 1 else "taken from the first seed"
    return [
        f"The base is one model, but {names.cell_name(*cell)} answers {count} question(s) differently under another "
        f"seed; its answers are {source}."
        for cell, count in comparison.evidence.differing.items()
    ]


def _bootstrap(comparison: Comparison) -> list[str]:
    """Return how far the ends of the bootstrap's intervals are from those of the closed form."""
    distances = []
    for row in comparison.rows:
        for name, resampled in row.bootstrap.items():
            closed_form = row.differences[name]
            distances += [abs(resampled.low - closed_form.low), abs(resampled.high - closed_form.high)]
    if not distances:
        return []
    check = "A paired bootstrap over questions (10,000 resamples, seeded)"
    largest = max(distances)
    if largest > AGREES:
        explanation = "Too few answers change for a bootstrap; the intervals above are exact there"
        return [f"{check} differs by up to {largest:.3f} at an end of an interval. {explanation}."]
    return [f"{check} moves no end of a gain's or gain survival's interval by more than {max(largest, 0.001):.3f}."]
