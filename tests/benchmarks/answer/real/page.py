"""The real model's part of found/page.md: the question, the answer, a figure, findings, how sure, then the details.

Every number comes from the export, and every claim follows from `summary.outcome`, so that another export gets other,
still true sentences. `../report.py` writes the page. Import it as `real.page`: the first answer has a module `page`.
"""

import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import contrasts
import details
import summary
from evidence import BASE, FULL, GRPO, SFT, accuracy_kept, gain_kept
from findings import Findings
from study import (
    MODEL,
    OF_OUTPUTS,
    OUTPUT_MEASURE,
    PARAMETERS,
    RATE,
    STORED,
    Study,
    code,
    correlation_text,
    joined,
    loss_text,
    over_seeds,
    p_value,
    power,
    rate,
    ratio_text,
    seeds_text,
    share_text,
    wrapped,
)
from summary import (
    LORA,
    MARGIN,
    MEASURES,
    PRIMARY,
    RATIO_MARGIN,
    RTN_INT4,
    SAME_RATE,
    SCHEMES,
    FourBits,
    Outcome,
    Tested,
    answer,
    in_four_bits,
    outcome,
)

from qrl import names
from qrl.stats import Estimate, signed
from qrl.stats.text import interval, percent_interval

FOUR_BITS = (*summary.PLANNED, RTN_INT4, names.NVFP4A16)


def write(study: Study, made: Findings | None = None) -> str:
    """Return the real model's part of the page as Markdown.

    Args:
        study: the real model's answers and measures.
        made: what was found on the models made here, as the contrast.
    """
    parts = [
        "# Does RL change how cleanly a model quantizes?",
        _question(),
        _setting(study),
        *_answer(study, made),
        "![Accuracy lost to quantization before and after training, in points and as a share](real.png)",
        *_numbered([_training(study), _schemes(study), _methods(study), _measures(study)]),
        f"**How sure.** {_scope(study)}",
        f"**Models made here.** {_contrast(study, made)}" if made else "",
        f"## {MODEL} in detail",
        "All tables, with intervals and every seed: [real.md](real.md). [Design, deviations](../real/README.md). "
        "What is not marked as planned below is exploratory.",
        *details.parts(study),
    ]
    return "\n\n".join(wrapped(part) for part in parts if part) + "\n"


def title(study: Study) -> str:
    """Say what was found under the primary scheme, over the figure."""
    sentences = f"Under {PRIMARY}, {_clause(study.primary)}"
    tests = study.tested(GRPO, SFT)
    if PRIMARY not in tests:
        return sentences
    shown = outcome(tests[PRIMARY])
    if _is_of_the_rate(study):
        return f"{sentences}. SFT at GRPO's learning rate does no better, at ten times that rate far better"
    words = {1: "less", -1: "more"}
    if shown.both:
        return f"{sentences}. After SFT it keeps {words[shown.both]} than after RL, on both scales"
    if shown.within:
        return f"{sentences}. After SFT it loses as much, within the margin"
    return f"{sentences}. Beside SFT: {answer(tests[PRIMARY])}"


def _question() -> str:
    return (
        "A *scheme* stores a model's weights in fewer bits, which costs accuracy. The *loss* is the accuracy at full "
        "precision minus the accuracy under the scheme. **The question**: does training by RL (GRPO) change this loss, "
        "compared with the *base*, the model before training? And compared with as many steps of supervised "
        "fine-tuning (SFT)?"
    )


def _setting(study: Study) -> str:
    """Say on what model and task the question was asked, and what training reached."""
    evidence = study.evidence
    counts = sorted(set(evidence.asked((GRPO, PRIMARY)).values()))
    n = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    steps = study.setting(GRPO, "train.steps")
    trained = f"{steps} steps of GRPO" if steps else "GRPO"
    sentences = (
        f"**Model and task**: {MODEL}, a pretrained model, and small sums, differences and products (“What is 47 + "
        f"36?”). {seeds_text(study.seeds)}, n = {n} held-out questions each, greedy answers. The base answers "
        f"{rate(evidence.accuracy((BASE, FULL)))} of them correctly, after {trained} "
        f"{rate(evidence.accuracy((GRPO, FULL)))}"
    )
    if (full := evidence.accuracy((SFT, FULL))) is not None:
        sentences += f", after SFT {rate(full)}"
    return f"{sentences}. Brackets are 95 % intervals over seeds and questions."


def _answer(study: Study, made: Findings | None) -> list[str]:
    """Answer the primary question on both scales; say whether the first answer disagrees."""
    tested, evidence = study.primary, study.evidence
    value = tested.value
    full, under = (
        {variant: evidence.accuracy((variant, scheme)).estimate for variant in (BASE, GRPO)}
        for scheme in (FULL, PRIMARY)
    )
    gain = gain_kept(evidence, GRPO, PRIMARY)
    kept = f"; {percent_interval(gain)} of the gain is kept" if gain else ""
    shares = {variant: accuracy_kept(evidence, variant, PRIMARY) for variant in (BASE, GRPO)}
    costs = {variant: loss_text(study.cost(variant, PRIMARY)) for variant in (BASE, GRPO)}
    in_points = (
        f"- *In points* GRPO's model loses {costs[GRPO]}, the base {costs[BASE]}: gain survival, the "
        f"base's loss minus GRPO's, is {interval(value.points)} ({p_value(tested.p_points)}){kept}."
    )
    as_share = (
        f"- *As a share* GRPO's model keeps {share_text(shares[GRPO])} of its accuracy, the base "
        f"{share_text(shares[BASE])}: ratio {ratio_text(value.ratio)} ({p_value(tested.p_ratio)})."
    )
    if outcome(tested).opposed and full[GRPO] > full[BASE]:
        as_share += f" The scales differ because the base has less to lose: {full[BASE]:.3f} in all."
    return [
        f"**{_headline(tested)}.** In this scheme of four bits, fixed in advance, accuracy falls from "
        f"{full[GRPO]:.3f} to {under[GRPO]:.3f} after GRPO and from {full[BASE]:.3f} to {under[BASE]:.3f} before:",
        in_points,
        as_share,
        _disagreement(study, made),
    ]


def _headline(tested: Tested) -> str:
    """Return the answer to the primary question in one sentence."""
    found, sentences = outcome(tested), _clause(tested)
    if found.opposed:
        return f"Under `{PRIMARY}` it depends on the scale: {sentences}"
    if found.open:
        return f"Inconclusive: {sentences}"
    return sentences[0].upper() + sentences[1:]


def _clause(tested: Tested) -> str:
    """Return what is shown of RL's effect in one clause."""
    found = outcome(tested)
    words, sizes = {1: "more", -1: "less"}, {1: "larger", -1: "smaller"}
    if found.both:
        return f"after RL this model quantizes {words[found.both]} cleanly, on both scales"
    if found.opposed:
        lost, kept = words[-found.points], sizes[found.ratio]
        return f"after RL this model loses {lost} accuracy in points, but keeps a {kept} share of it"
    if found.points:
        return f"after RL this model loses {words[-found.points]} accuracy in points; as a share the answer is open"
    if found.ratio:
        return f"after RL this model keeps a {sizes[found.ratio]} share of its accuracy; in points the answer is open"
    if found.within:
        return "RL changes what quantization costs this model by less than the margin, on both scales"
    return "neither a change by RL nor its absence is shown"


def _disagreement(study: Study, made: Findings | None) -> str:
    """Say whether the first answer, on models made here, is another one."""
    if made is None or made.answers.missing or contrasts.PRIMARY not in made.excesses[BASE]:
        return ""
    value = made.excesses[BASE][contrasts.PRIMARY].value
    there = contrasts.answer(value)
    small = value.low > -contrasts.MARGIN and value.high < contrasts.MARGIN
    shown = outcome(study.primary)
    here = shown.points or shown.ratio
    link = "[models made here](#models-made-here-the-contrast)"
    if (small and here) or (not small and shown.within):
        sentences = f"**This differs from the first answer**, given on {link}: “{there}”."
    else:
        sentences = f"The first answer, given on {link}: “{there}”."
    same = study.tested(GRPO, BASE).get(contrasts.PRIMARY)
    if same is None or contrasts.PRIMARY == PRIMARY:
        return sentences
    here = f"{answer(same)}, {interval(same.value.points)} points"
    return f"{sentences} Under `{contrasts.PRIMARY}` the answer on {MODEL} is: {here}."


def _numbered(findings: Iterable[str]) -> list[str]:
    return [f"{place}. {sentences}" for place, sentences in enumerate(filter(None, findings), 1)]


def _training(study: Study) -> str:
    """Say whether SFT changes what quantization costs as GRPO does, at its own learning rate and at GRPO's."""
    tests = study.tested(GRPO, SFT)
    if PRIMARY not in tests:
        return f"**RL, or any training?** SFT was not evaluated under `{PRIMARY}`."
    tested = tests[PRIMARY]
    shown, value = outcome(tested), tested.value
    shares = {variant: accuracy_kept(study.evidence, variant, PRIMARY) for variant in (SFT, GRPO)}
    points = f"{interval(value.points)} points ({p_value(tested.p_points)})"
    ratio = f"ratio {ratio_text(value.ratio)} ({p_value(tested.p_ratio)})"
    planned = (
        f"Under `{PRIMARY}` SFT's model keeps {share_text(shares[SFT])} of its accuracy, GRPO's "
        f"{share_text(shares[GRPO])}: {points}, {ratio}, {seeds_text(value.seeds, bare=True)}."
    )
    if PRIMARY in study.tested(GRPO, SAME_RATE):
        return f"**{_about_rate(study, shown, tested)}.** {planned} {_at_same_rate(study)}"
    return f"**{_about_training(shown, tested)}.** {planned} {_groups(tests)} {_not_separated(study)}".rstrip()


def _about_rate(study: Study, planned: Outcome, tested: Tested) -> str:
    """Return what the comparisons with SFT at two learning rates say together, in one clause."""
    if planned.both < 0 and outcome(study.tested(GRPO, SAME_RATE)[PRIMARY]).both < 0:
        return "Not any training costs as much: after SFT the same scheme costs less, also at GRPO's learning rate"
    if _is_of_the_rate(study):
        return (
            "At the same learning rate SFT's model loses no less: under no scheme is it found to lose less than "
            "GRPO's. At ten times that rate it loses far less"
        )
    return _about_training(planned, tested)


def _is_of_the_rate(study: Study) -> bool:
    """Return whether SFT costs less than GRPO at its own learning rate, and under no scheme at GRPO's."""
    pairs = ((GRPO, SFT), (SFT, SAME_RATE))
    planned, two_rates = (study.tested(*pair).get(PRIMARY) for pair in pairs)
    at_same_rate = [outcome(each) for each in study.tested(GRPO, SAME_RATE).values()]
    if planned is None or two_rates is None or not at_same_rate:
        return False
    is_worse = any(each.points < 0 or each.ratio < 0 for each in at_same_rate)
    return outcome(planned).both < 0 and outcome(two_rates).both > 0 and not is_worse


def _at_same_rate(study: Study) -> str:
    """Say what SFT at GRPO's learning rate costs, and what the rate alone changes."""
    tests = study.tested(GRPO, SAME_RATE)
    rates = {variant: study.setting(variant, RATE) for variant in (SFT, SAME_RATE)}
    named = f"SFT at GRPO's learning rate, {power(rates[SAME_RATE])}" if rates[SAME_RATE] else "SFT at GRPO's rate"
    tested = tests[PRIMARY]
    kept = share_text(accuracy_kept(study.evidence, SAME_RATE, PRIMARY))
    full = study.evidence.accuracy((SAME_RATE, FULL))
    reached = f" of its {rate(full)}" if full else ""
    sentences = (
        f"**{named}** (exploratory, {seeds_text(tested.value.seeds, bare=True)}), keeps {kept}{reached}; GRPO − SFT is "
        f"then {interval(tested.value.points)} points ({p_value(tested.p_points)}), ratio "
        f"{ratio_text(tested.value.ratio)} ({p_value(tested.p_ratio)}). {_clauses_by_outcome(tests)}"
    )
    two_rates = study.tested(SFT, SAME_RATE).get(PRIMARY)
    if two_rates is not None and rates[SFT]:
        sentences += (
            f" With SFT, {power(rates[SFT])} instead of {power(rates[SAME_RATE])} alone changes the loss by "
            f"{interval(_negative(two_rates.value.points))} ({p_value(two_rates.p_points)})."
        )
    return f"{sentences} {_moved(study)} GRPO at {power(rates[SFT]) if rates[SFT] else 'that rate'} was not run."


def _clauses_by_outcome(tests: Mapping[str, Tested]) -> str:
    """Say under which schemes GRPO's model is shown to quantize less or more cleanly than another one."""
    shown = {scheme: outcome(each) for scheme, each in tests.items() if each.p_ratio is not None}
    broken = [scheme for scheme in tests if scheme not in shown]
    less = [scheme for scheme, each in shown.items() if each.points < 0 or each.ratio < 0]
    more = [scheme for scheme, each in shown.items() if each.points > 0 or each.ratio > 0]
    within = [scheme for scheme, each in shown.items() if each.within]
    clauses = [f"GRPO's is found to lose more under {code(less) if less else f'none of {len(shown)} schemes'}"]
    clauses += [f"less, on one scale or both, under {code(more)}"] if more else []
    clauses += [f"and the two differ by less than the margin under {code(within)}"] if within else []
    left = f" Under {code(broken)} almost nothing is left of either." if broken else ""
    return f"{'; '.join(clauses)}.{left}"


def _moved(study: Study) -> str:
    """Say how many of the stored weights each training moved."""
    named = {GRPO: "GRPO", SAME_RATE: "SFT at its rate", SFT: "the planned SFT"}
    shares = {variant: study.moved(variant) for variant in named}
    if not all(shares.values()):
        return ""
    listed = joined(f"{named[variant]} moved {share}" for variant, share in shares.items())
    sentences = f"Of the stored weights {listed} (least to most over seeds)."
    lora, share = study.tested(LORA, GRPO).get(PRIMARY), study.moved(LORA)
    if lora is None or not share:
        return sentences
    return (
        f"{sentences} LoRA, also by GRPO, moved {share}; under `{PRIMARY}` GRPO's loss minus that of LoRA's model is "
        f"{interval(lora.value.points)} ({answer(lora)})."
    )


def _negative(value: Estimate) -> Estimate:
    return replace(value, estimate=-value.estimate, low=-value.high, high=-value.low)


def _about_training(shown: Outcome, tested: Tested) -> str:
    """Return what the comparison with SFT says, in one clause."""
    if shown.both < 0:
        return "Not any training costs as much: after SFT the same scheme costs less, on both scales"
    if shown.both > 0:
        return "After SFT the same scheme costs more than after RL, on both scales"
    if shown.within:
        return "Not specific to RL: after SFT the same scheme costs as much, within the margin"
    if shown.open:
        return "RL, or any training? Inconclusive: neither a difference to SFT nor its absence is shown"
    return f"RL, or any training? {answer(tested)}"


def _groups(tests: Mapping[str, Tested]) -> str:
    """Say of the other schemes what they show of GRPO and SFT, those that show the same together."""
    groups: dict[str, list[str]] = {}
    for scheme, each in tests.items():
        if scheme == PRIMARY:
            continue
        shown = outcome(each)
        if shown.both:
            group = f"GRPO's model quantizes {'more' if shown.both > 0 else 'less'} cleanly on both scales"
        elif shown.within:
            group = "the two differ by less than the margin"
        elif shown.open:
            group = "it is open"
        else:
            group = answer(each)
        groups.setdefault(group, []).append(scheme)
    clauses = [f"{sentences} under {code(schemes)}" for sentences, schemes in groups.items()]
    if not clauses:
        return ""
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."


def _not_separated(study: Study) -> str:
    """Say what differs between GRPO and SFT besides the algorithm: learning rate, and how many weights moved."""
    rates = {variant: study.setting(variant, RATE) for variant in (SFT, GRPO)}
    if not all(rates.values()) or float(rates[SFT]) == float(rates[GRPO]):
        return ""
    shares = {variant: study.moved(variant) for variant in (SFT, GRPO)}
    moved = f", and SFT moved {shares[SFT]} of the stored weights, GRPO {shares[GRPO]}" if all(shares.values()) else ""
    sentences = (
        f"**Not separated yet**: SFT's learning rate was {power(rates[SFT])}, GRPO's {power(rates[GRPO])}{moved}. So "
        "the size of the update may matter, and not only its kind."
    )
    lora, share = study.tested(LORA, SFT).get(PRIMARY), study.moved(LORA)
    if lora is None or not share or not outcome(lora).both:
        return sentences
    words = {1: "more", -1: "less"}
    return (
        f"{sentences} LoRA, also RL, moved {share}, and its model quantizes {words[outcome(lora).both]} cleanly than "
        "SFT's as well, on both scales."
    )


def _schemes(study: Study) -> str:
    """Say which schemes cost GRPO's model little, and which much."""
    costs = {scheme: value for scheme in SCHEMES if (value := study.cost(GRPO, scheme)) is not None}
    little = {scheme: value for scheme, value in costs.items() if value.high < MARGIN}
    much = {scheme: value for scheme, value in costs.items() if value.low > MARGIN}
    rest = [scheme for scheme in costs if scheme not in little and scheme not in much]
    claim = f"No scheme is shown to cost GRPO's model less than {MARGIN}"
    if little:
        verb = "costs" if len(little) == 1 else "cost"
        claim = f"It depends on the scheme: {code(little)} {verb} GRPO's model less than {MARGIN}"
    sentences = f"**{claim}** ({len(costs)} schemes, {seeds_text(study.seeds, bare=True)})."
    if little:
        shares = {scheme: share_text(accuracy_kept(study.evidence, GRPO, scheme)) for scheme in little}
        listed = joined(f"`{q}` {loss_text(value)}, {shares[q]}" for q, value in little.items())
        sentences += f" Loss and share of accuracy kept: {listed}."
    if much:
        listed = joined(f"`{q}` {loss_text(value)}" for q, value in much.items())
        sentences += f" Shown to cost more than {MARGIN}: {listed}."
    return sentences + (f" Undecided: {code(rest)}." if rest else "")


def _methods(study: Study) -> str:
    """Say whether training in four bits gives back what rounding afterwards takes."""
    found = in_four_bits(study.evidence)
    cost = study.cost(GRPO, RTN_INT4)
    if not found or cost is None:
        return ""
    shown = {method for method, each in found.items() if each.p < summary.SIGNIFICANT}
    better = [method for method in shown if found[method].value.low > 0]
    if len(better) == len(found):
        claim = "Training in four bits gives most of it back" if _most(found, cost) else "Training in four bits helps"
    elif better:
        claim = f"Of the methods that train in four bits {code(sorted(better))} helps"
    elif shown:
        claim = "Training in four bits costs accuracy"
    else:
        claim = "That training in four bits helps is not shown"
    clauses = [f"{_NAMES[m]} {interval(e.value)} ({p_value(e.p)}, {e.seeds} seeds)" for m, e in found.items()]
    left = [f"{_NAMES[m]} {interval(e.below_full)}" for m, e in found.items() if e.below_full]
    below = f" Minus that of GRPO's model at full precision: {'; '.join(left)}." if left else ""
    untrained = study.cost(GRPO, names.GPTQ)
    without = f" `{names.GPTQ}`, which needs no training, costs {loss_text(untrained)}." if untrained else ""
    return (
        f"**{claim}.** `{RTN_INT4}` costs GRPO's model {loss_text(cost)}. Accuracy under `{RTN_INT4}` minus that of "
        f"GRPO's model: {'; '.join(clauses)}.{below} QAT is GRPO with rounded weights, QAD distills GRPO's model into "
        f"four bits.{without}"
    )


def _most(found: Mapping[str, FourBits], cost: Estimate) -> bool:
    """Return whether every method gives back more than half of what rounding takes."""
    return all(each.value.low > cost.estimate / 2 for each in found.values())


_NAMES = {"qat-int4": "QAT", "qad-int4": "QAD"}


def _measures(study: Study) -> str:
    """Say which measure ranks the schemes as the losses do, and whether it tells GRPO's weights from SFT's."""
    ranks = summary.ranks(study.evidence, study.measures, GRPO)
    if OUTPUT_MEASURE not in ranks:
        return ""
    own = ranks[OUTPUT_MEASURE]
    others = {name: rank for name, rank in ranks.items() if name not in OF_OUTPUTS}
    claim = "Which measure knew before? The error after the last layer does not rank the schemes"
    if min(own.by_seed) > 0:
        claim = "The error after the last layer ranks the schemes as the losses do"
        if others and min(own.by_seed) > max(abs(rank) for each in others.values() for rank in each.by_seed):
            claim = "The error after the last layer ranks the schemes; statistics of the weights do so less"
    sentences = (
        f"**{claim}** (exploratory). Over {own.schemes} schemes its rank correlation with the loss of GRPO's model is "
        f"{_spread(own)}"
    )
    if others:
        best = max(others, key=lambda name: abs(others[name].of_means))
        sentences += f". Of the statistics of the weights the best is {MEASURES[best]}, {_spread(others[best])}"
    sentences += ". So few schemes cannot separate correlations that are near each other"
    apart = _error_apart(study)
    return f"{sentences}.{f' {apart}' if apart else ''}"


def _spread(rank: summary.Rank) -> str:
    """Return a correlation of means over seeds, and the range of single seeds."""
    whole, low, high = map(correlation_text, (rank.of_means, min(rank.by_seed), max(rank.by_seed)))
    return f"{whole} ({low} to {high} in single seeds)"


def _error_apart(study: Study) -> str:
    """Compare the error after the last layer of GRPO's and SFT's weights under the primary scheme."""
    errors = {v: summary.measured(study.measures, v, PRIMARY, OUTPUT_MEASURE) for v in (GRPO, SFT)}
    seeds = sorted(set(errors[GRPO]) & set(errors[SFT]))
    if len(seeds) < 2:
        return ""
    means = {variant: sum(errors[variant][seed] for seed in seeds) / len(seeds) for variant in (GRPO, SFT)}
    value = over_seeds([errors[GRPO][seed] - errors[SFT][seed] for seed in seeds])
    return (
        f"Under `{PRIMARY}` the error is {means[GRPO]:.2f} for GRPO's weights and {means[SFT]:.2f} for SFT's, a "
        f"difference of {interval(value)} ({len(seeds)} seeds)."
    )


def _scope(study: Study) -> str:
    """Say what the answer rests on, and what it does not cover."""
    seeds = ", ".join(map(str, study.seeds))
    return (
        f"One model of {PARAMETERS} parameters, whose packager had rounded its weights to {STORED}, to 16 values in "
        "groups of 32, which may change what further rounding costs it, up or down; one kind of question; seeds "
        f"{seeds}. The [design](../real/README.md) fixed the primary outcome, the margins ({MARGIN} in points, a ratio "
        f"from {RATIO_MARGIN[0]:.2f} to {RATIO_MARGIN[1]}) and the tests before the first run. *Found* or *shown* "
        "means that the 95 % interval excludes 0 (or a ratio of 1) and that p, Holm-corrected within a family of "
        "tests, is below 0.05; intervals are not corrected. Seeds 0 and 1, which led to the design, are left out. "
        "Nothing follows for larger models, longer answers or other tasks."
    )


def _contrast(study: Study, made: Findings) -> str:
    """Compare with the models made here: whether GRPO differs from SFT, and how much there is to tell apart."""
    there = {scheme: each for (control, scheme), each in made.controls.items() if control == SFT}
    here = study.tested(GRPO, SFT)
    apart_there = [scheme for scheme, each in there.items() if each.p < summary.SIGNIFICANT]
    apart_here = [scheme for scheme, each in here.items() if outcome(each).points or outcome(each).ratio]
    if not there or not here:
        return "The first answer was given on four models made here; it follows below."
    both = (
        f"On them GRPO's loss is shown to differ from SFT's under {len(apart_there) or 'none'} of {len(there)} "
        f"schemes; on {MODEL} (SFT at the planned rate) under {len(apart_here) or 'none'} of {len(here)}."
    )
    costs_there, costs_here = _costs_made(made), _costs(study)
    schemes = [scheme for scheme in FOUR_BITS if (GRPO, scheme) in costs_there and (GRPO, scheme) in costs_here]
    if not schemes:
        return both
    of_there, of_here = (
        [costs[variant, scheme] for scheme in schemes for variant in (BASE, SFT, GRPO) if (variant, scheme) in costs]
        for costs in (costs_there, costs_here)
    )
    why = ""
    if not apart_there and apart_here and max(of_there) < min(MARGIN, max(of_here)):
        why = "Where so little is lost, no difference could show. "
    most = max(costs_there, key=costs_there.__getitem__)
    beyond = ""
    if costs_there[most] > MARGIN and (SFT, most[1]) in costs_there and not apart_there:
        after_grpo, after_sft = (costs_there[variant, most[1]] for variant in (GRPO, SFT))
        beyond = (
            f"But under `{most[1]}`, where much is lost there, no difference is shown either: GRPO's weights lose "
            f"{after_grpo:.3f}, SFT's {after_sft:.3f}."
        )
    return (
        f"{both} In four bits ({code(schemes)}) the models made here lose {signed(min(of_there))} to "
        f"{signed(max(of_there))} in the mean over sizes, before and after training; {MODEL} loses "
        f"{signed(min(of_here))} to {signed(max(of_here))}. {why}{beyond}"
    ).rstrip()


def _costs_made(made: Findings) -> dict[tuple[str, str], float]:
    """Return the mean loss over sizes of the models made here, by variant and scheme."""
    found = {}
    for variant, scheme in itertools.product((BASE, SFT, GRPO), made.answers.schemes()):
        each = 1 / len(made.answers.sizes)
        weights = {}
        for size in made.answers.sizes:
            weights |= contrasts.loss(size, variant, scheme, each)
        if (value := made.answers.contrast(weights)) is not None:
            found[variant, scheme] = value.estimate
    return found


def _costs(study: Study) -> dict[tuple[str, str], float]:
    """Return the loss of the real model, by variant and scheme."""
    cells = itertools.product((BASE, SFT, GRPO), SCHEMES)
    return {cell: value.estimate for cell in cells if (value := study.cost(*cell)) is not None}
