"""The details of the real model's part of found/page.md: every seed, all schemes, the control, and what was not had."""

import itertools
import math

import summary
from evidence import BASE, FULL, GRPO, SEEN, SFT, accuracy_kept, gain_kept, of_one_seed
from study import (
    NAMED,
    OUTPUT_MEASURE,
    Study,
    code,
    correlation_text,
    difference_text,
    joined,
    loss_text,
    number,
    rate,
    ratio_text,
    seeds_text,
    share_or_undefined,
    two_decimals,
)
from summary import (
    LORA,
    MEASURES,
    METHODS,
    NONE,
    PRIMARY,
    RTN_INT4,
    SAME_RATE,
    SCHEMES,
    answer,
    given_back,
    in_four_bits,
    kept_parts,
)

from qrl.stats import signed
from qrl.stats.text import interval, percent_interval, table


def parts(study: Study) -> list[str]:
    """Return the paragraphs and tables below the answer."""
    return [
        *_by_seed(study),
        *_by_scheme(study),
        *_beside_sft(study),
        *_other_rate(study),
        *_lora(study),
        *_in_four_bits(study),
        *_calibration(study),
        *_layers(study),
        *_knew_before(study),
        *_elsewhere(study),
        *_gsm8k(study),
        *_health(study),
        *_absent(study),
    ]


def _by_seed(study: Study) -> list[str]:
    tested = study.primary
    with_sft = study.tested(GRPO, SFT).get(PRIMARY)
    head = ["seed", *(f"{name}: {scheme}" for name in (BASE, GRPO, SFT) for scheme in (FULL, PRIMARY))]
    head += ["grpo − base: points", "ratio", "log-odds", "grpo − sft: points", "ratio"]
    rows = []
    for seed in tested.value.seeds:
        cells = itertools.product((BASE, GRPO, SFT), (FULL, PRIMARY))
        accuracies = [study.evidence.by_seed(cell).get(seed, math.nan) for cell in cells]
        points, ratio, log_odds = of_one_seed(study.evidence, tested.value, seed)
        own = [signed(points), number(ratio, "{:.2f}"), number(log_odds, "{:+.2f}")]
        if with_sft and seed in with_sft.value.seeds:
            points, ratio, _ = of_one_seed(study.evidence, with_sft.value, seed)
            own += [signed(points), number(ratio, "{:.2f}")]
        else:
            own += ["", ""]
        rows.append([str(seed), *(number(value, "{:.3f}") for value in accuracies), *own])
    sentences = (
        f"**Seed by seed** (planned): accuracy, and both primary outcomes. In log-odds, a third scale that tests "
        f"nothing, grpo − base is {two_decimals(tested.value.log_odds)} under `{PRIMARY}`."
    )
    return [sentences, "\n".join(table(head, rows))]


def _by_scheme(study: Study) -> list[str]:
    tests = study.tested(GRPO, BASE)
    rows = []
    for scheme, each in tests.items():
        costs = [difference_text(study.cost(variant, scheme)) for variant in (BASE, GRPO)]
        gain = gain_kept(study.evidence, GRPO, scheme)
        kept = percent_interval(gain) if gain else "not defined"
        rows.append([scheme, *costs, kept, interval(each.value.points), ratio_text(each.value.ratio), answer(each)])
    head = ("scheme", "loss of base", "loss of grpo", "gain kept", "gain survival", "ratio of shares", "answer")
    planned = f"{code(summary.PLANNED)} are planned, the rest is exploratory"
    return [f"**Other schemes: GRPO and the base.** {planned[0].upper()}{planned[1:]}.", "\n".join(table(head, rows))]


def _beside_sft(study: Study) -> list[str]:
    tests = study.tested(GRPO, SFT)
    if not tests:
        return []
    rows = []
    for scheme, each in tests.items():
        shares = [share_or_undefined(accuracy_kept(study.evidence, variant, scheme)) for variant in (SFT, GRPO)]
        both = (interval(each.value.points), ratio_text(each.value.ratio), answer(each))
        rows.append([scheme, difference_text(study.cost(SFT, scheme)), *shares, *both])
    head = ("scheme", "loss of sft", "accuracy kept: sft", "grpo", "grpo − sft, points", "ratio", "answer")
    sentences = f"**The control: GRPO and SFT.** {code(summary.PLANNED)} are planned. {_lengths(study)}"
    return [sentences, "\n".join(table(head, rows))]


def _lengths(study: Study) -> str:
    """Compare the lengths of answers: longer ones would have more places to go wrong."""
    if study.cells is None or "n_tokens" not in study.cells:
        return ""
    own = study.cells[(study.cells["size"] == "sums") & ~study.cells["seed"].isin(SEEN)]
    means = own.groupby(["variant", "scheme"])["n_tokens"].mean()
    listed = [f"{NAMED[name]} {means[name, FULL]:.1f}" for name in (BASE, SFT, GRPO) if (name, FULL) in means]
    return f"Mean tokens of an answer at full precision: {joined(listed)}." if listed else ""


def _other_rate(study: Study) -> list[str]:
    """Return GRPO beside SFT at GRPO's learning rate, where it was quantized under seeds of the study."""
    tests = study.tested(GRPO, SAME_RATE)
    if not tests:
        return []
    rows = []
    for scheme, each in tests.items():
        shares = [share_or_undefined(accuracy_kept(study.evidence, variant, scheme)) for variant in (SAME_RATE, GRPO)]
        both = (interval(each.value.points), ratio_text(each.value.ratio), answer(each))
        rows.append([scheme, difference_text(study.cost(SAME_RATE, scheme)), *shares, *both])
    head = ("scheme", f"loss of {SAME_RATE}", f"accuracy kept: {SAME_RATE}", "grpo", "points", "ratio", "answer")
    known = study.evidence.accuracy((SAME_RATE, FULL))
    sentences = (
        f"**SFT at GRPO's learning rate** ({seeds_text(next(iter(tests.values())).value.seeds, bare=True)}). Its "
        f"accuracy at full precision is {rate(known)}. Points and ratio are those of GRPO beside it."
    )
    return [sentences, "\n".join(table(head, rows))]


def _lora(study: Study) -> list[str]:
    tests = {other: study.tested(LORA, other).get(PRIMARY) for other in (BASE, GRPO, SFT)}
    known = {other: each for other, each in tests.items() if each}
    if not known:
        return []
    sentences = (
        f"**LoRA.** GRPO on an adapter, merged; under `{PRIMARY}` it loses {loss_text(study.cost(LORA, PRIMARY))}."
    )
    for other, each in known.items():
        sentences += (
            f" Beside {NAMED[other]}: {interval(each.value.points)} points, ratio {ratio_text(each.value.ratio)} "
            f"({answer(each)})."
        )
    shares = {variant: study.moved(variant) for variant in (GRPO, LORA, SFT)}
    if all(shares.values()):
        moved = joined(f"{share} ({variant})" for variant, share in shares.items())
        sentences += f" Training moved these shares of the stored weights: {moved}."
    return [sentences]


def _in_four_bits(study: Study) -> list[str]:
    found = in_four_bits(study.evidence)
    if not found:
        return []
    rows = []
    for method, each in found.items():
        accuracies = [study.evidence.accuracy((method, scheme)) for scheme in (FULL, RTN_INT4)]
        shown = [rate(value) if value else NONE for value in accuracies]
        below = difference_text(each.below_full)
        rows.append([method, str(each.seeds), *shown, interval(each.value), f"{each.p:.2g}", below])
    head = ("method", "seeds", FULL, RTN_INT4, f"minus grpo:{RTN_INT4}", "p (Holm)", "minus grpo:full")
    sentences = (
        "**Training in four bits** (planned). `qat-int4` is GRPO with linears rounded in every step: its weights are "
        "meant for four bits and may answer worse without. `qad-int4` starts from GRPO's weights and trains on."
    )
    return [sentences, "\n".join(table(head, rows))]


def _calibration(study: Study) -> list[str]:
    evidence, clauses = study.evidence, []
    for scheme in SCHEMES:
        variants = [BASE, *(f"{BASE}-{label}" for label in ("c100", "c101"))]
        ranges = []
        for seed in evidence.shared((variant, scheme) for variant in variants):
            drawn = [evidence.by_seed((variant, scheme))[seed] for variant in variants]
            ranges.append(max(drawn) - min(drawn))
        if ranges:
            clauses.append(f"`{scheme}` by {min(ranges):.3f} to {max(ranges):.3f} ({len(ranges)} seeds)")
    if not clauses:
        return []
    sentences = f"**Calibration sets.** Three sets move the base's accuracy on the same questions: {joined(clauses)}."
    texts = {"g32": "Groups of 32 instead of 64 change", "own": "Calibration on a model's own answers changes"}
    for label, text in texts.items():
        changes = []
        for scheme in SCHEMES:
            value = evidence.contrast({(f"{GRPO}-{label}", scheme): 1.0, (GRPO, scheme): -1.0})
            changes += [f"`{scheme}` {interval(value)}"] if value is not None else []
        if changes:
            sentences += f" {text} GRPO's accuracy by {joined(changes)}."
    return [sentences]


def _layers(study: Study) -> list[str]:
    evidence = study.evidence
    rows, backs = [], {}
    for part in kept_parts(evidence):
        values = {variant: given_back(evidence, variant, part) for variant in (GRPO, BASE)}
        if values[GRPO] is not None:
            rows.append([part, *map(difference_text, values.values())])
            backs[part] = values[GRPO].estimate
    whole = evidence.contrast({(GRPO, FULL): 1.0, (f"{GRPO}-keep-none", FULL): -1.0})
    if not rows or whole is None:
        return []
    rows.sort(key=lambda row: -backs[row[0]])
    most, least = rows[0], rows[-1]
    sentences = (
        f"**Layers.** With every linear in NF4 GRPO's model loses {loss_text(whole)}. Of the parts kept in full "
        f"precision `{most[0]}` gives most of it back, {most[1]}, and `{least[0]}` least, {least[1]}. `ends` are the "
        "first and last two layers."
    )
    head = ("kept in full precision", "gives grpo back", "gives the base back")
    return [sentences, "\n".join(table(head, rows))]


def _knew_before(study: Study) -> list[str]:
    variants = (BASE, SFT, GRPO, LORA)
    ranks = {variant: summary.ranks(study.evidence, study.measures, variant) for variant in variants}
    present = [name for name in MEASURES if any(name in own for own in ranks.values())]
    if not present:
        return []
    rows = []
    for variant, own in ranks.items():
        if own:
            counts = sorted({rank.schemes for rank in own.values()})
            cells = [_range(own[name]) if name in own else "not measured" for name in present]
            rows.append([variant, " to ".join(map(str, counts)), *cells])
    sentences = (
        "**What knew before?** Spearman's correlation of a measure with the loss, over schemes: of means over seeds, "
        "and in brackets the least and the largest of single seeds; these are no intervals. "
        f"{_same_weights(study)} {_wrong_about(study)}"
    )
    head = ("weights", "schemes", *(MEASURES[name] for name in present))
    return [sentences.rstrip(), "\n".join(table(head, rows))]


def _range(rank: summary.Rank) -> str:
    whole, low, high = map(correlation_text, (rank.of_means, min(rank.by_seed), max(rank.by_seed)))
    return f"{whole} [{low}, {high}]"


def _wrong_about(study: Study) -> str:
    """Say where weights that were trained in four bits have an error after the last layer, but lose little."""
    sentences = []
    for method in (GRPO, *METHODS):
        errors = summary.measured(study.measures, method, RTN_INT4, OUTPUT_MEASURE)
        cost = study.cost(method, RTN_INT4)
        if errors and cost is not None:
            sentences.append(f"{sum(errors.values()) / len(errors):.2f} ({method}, loss {interval(cost)})")
    return f"Under `{RTN_INT4}` the error after the last layer is {joined(sentences)}." if len(sentences) > 1 else ""


def _same_weights(study: Study) -> str:
    """Say how far the statistics of full-precision weights of base and GRPO differ."""
    if study.measures is None or "kurtosis" not in study.measures:
        return ""
    whole = study.measures[(study.measures["projection"] == "all") & (study.measures["scheme"] == FULL)]
    means = whole[~whole["seed"].isin(SEEN)].groupby("variant")[["kurtosis", "w4_snr_db"]].mean()
    if not {BASE, GRPO} <= set(means.index):
        return ""
    pairs = {name: [means.loc[variant, key] for variant in (BASE, GRPO)] for name, key in _STATISTICS.items()}
    listed = joined(f"{name} {before:.4g} and {after:.4g}" for name, (before, after) in pairs.items())
    return f"In full precision the weights of base and GRPO have {listed}."


_STATISTICS = {"a kurtosis of": "kurtosis", "a signal-to-noise ratio in INT4, in dB, of": "w4_snr_db"}


def _elsewhere(study: Study) -> list[str]:
    changes = {}
    for variant, scheme in itertools.product((BASE, GRPO), (FULL, *SCHEMES)):
        value = study.evidence.contrast({(f"{variant}-{summary.HF}", scheme): 1.0, (variant, scheme): -1.0})
        if value is not None:
            changes[variant, scheme] = value
    if not changes:
        return []
    (variant, scheme), most = max(changes.items(), key=lambda item: abs(item[1].estimate))
    return [
        f"**The same checkpoints, loaded by transformers.** Of {len(changes)} cells (base and grpo) the accuracy that "
        f"differs most from vLLM's is that of {variant} under `{scheme}`: {interval(most)}."
    ]


def _gsm8k(study: Study) -> list[str]:
    if study.words is None:
        return []
    lines = summary.accuracies(study.words, "GSM8K")[2:] + summary.losses(study.words, "GSM8K")[2:]
    shown = "\n".join(lines).strip().split("\n\n")
    sentences = (
        "**GSM8K** (exploratory). RL began with the model after SFT, here `base`. n = 1,319 a seed. By design "
        "gain survival is not judged there. Accuracy, then loss."
    )
    return [sentences, *shown]


def _health(study: Study) -> list[str]:
    if study.cells is None:
        return []
    own = study.cells[(study.cells["size"] == "sums") & ~study.cells["seed"].isin(SEEN)]
    bad = summary.unhealthy(own)
    if not len(bad):
        return [f"**Health.** All {len(own)} cells are within the limits that an evaluation has by default."]
    broken = bad.groupby("variant").size()
    listed = joined(f"{broken[name]} of `{name}`" for name in (BASE, SFT, GRPO, LORA) if name in broken)
    beside = [(variant, scheme) for variant in (BASE, GRPO) for scheme in (FULL, PRIMARY)]
    rates = own.groupby(["variant", "scheme"])["truncated"].mean()
    shown = [f"{v} {100 * rates[v, q]:.0f} % ({q})" for v, q in beside if (v, q) in rates]
    of_main = f", {listed}" if listed else ""
    return [
        f"**Health.** {len(bad)} of {len(own)} cells break a default limit on unfinished or unreadable answers"
        f"{of_main}; they count all the same. Unfinished answers, which count as wrong: {joined(shown)}."
    ]


def _absent(study: Study) -> list[str]:
    """Say which parts of the design the export lacks."""
    evidence = study.evidence
    planned = [(variant, scheme) for variant in (BASE, GRPO, SFT, LORA) for scheme in (FULL, *SCHEMES)]
    planned += [(method, scheme) for method in METHODS for scheme in (FULL, RTN_INT4)]
    lacking: dict[tuple[int, ...], list[str]] = {}
    for cell in planned:
        seeds = tuple(sorted(set(study.seeds) - set(evidence.seeds.get(cell, ()))))
        if seeds:
            lacking.setdefault(seeds, []).append(":".join(cell))
    sentences = [f"{code(cells)} ({seeds_text(seeds, bare=True, listed=True)})" for seeds, cells in lacking.items()]
    if study.measures is None or "kl" not in study.measures or study.measures["kl"].isna().all():
        sentences.append("the KL divergence of quantized models")
    measured = set()
    if study.measures is not None:
        measured = set(study.measures.loc[study.measures["scheme"] == FULL, "variant"])
    unmeasured = [name for name in (SFT, LORA) if name not in measured]
    sentences += [f"statistics of the weights of {code(unmeasured)}"] if unmeasured else []
    sentences += ["GSM8K"] if study.words is None else []
    return [f"**Not had**: {joined(sentences)}."] if sentences else []
