"""A comparison for programs: the contract `table.json`, and MLflow metrics."""

from typing import Any

from qrl import names
from qrl.compare import answers, scales, subgroups
from qrl.compare.comparison import Comparison, Row
from qrl.compare.estimates import numbers, numbers_or_null, with_ends
from qrl.compare.evidence import Cell
from qrl.stats import Estimate

_VERDICT_FIELDS = (
    "verdict",
    "headline",
    "reason",
    "all_lost",
    "more_than_half_kept",
    "margin",
    "smallest_effect",
    "n_to_decide",
    "seeds_to_decide",
    "p_value",
)


def table_json(comparison: Comparison) -> dict[str, Any]:
    """Return the contract `table.json`: one entry per scheme.

    Returns:
        scheme → {"label", "trained", "delta", "gain_survival", "gain_survival_bounds": [lower, upper], "gain_kept",
        "verdict", "headline", "reason", "all_lost", "more_than_half_kept", "remarks", "margin", "smallest_effect",
        "n_to_decide", "seeds_to_decide", "p_value", "p_holm", "holds_after_holm", "p_delta", "mcnemar", "bootstrap",
        "loss": {variant: …}, "accuracy_kept": {variant: …}, "accuracy_kept_ratio", "log_odds_difference",
        "scales_agree", "scales", "seeds", "between_seed_sd", "within_seed_sd", "per_seed", "paired", "engine", "cells":
        {variant: {"n", "accuracy", "stderr", "low", "high"}}, "answers": {variant: …}}.

        Differences and shares are {"estimate", "stderr", "low", "high"}. Under full, gain survival and all that depends
        on it are null; so is a share of what is not shown to be above 0. "gain_survival_bounds" are the one-sided 95 %
        bounds that verdicts use. "headline" is the verdict with the share of the gain that is kept, "scales" a sentence
        on points, shares of accuracy and log-odds. `label` is the scheme as tables show it: `full (bf16)`. `seeds`
        counts training runs, null if only counts are known. With one run the spreads are null and `per_seed` is empty;
        with several, both spreads map "delta" and "gain_survival" to standard deviations, and `per_seed` maps each seed
        to the same two differences and to "gain_kept", with errors from its questions alone. Cells with several
        samples per question also have "samples" and "pass_at": {k: …}. "answers" maps each variant to the measures of
        `answers.Answers` that are known, as {"n", "mean", "change"} (against full precision, null under it), and to
        "reference_perplexity", "right_to_wrong", "wrong_to_right", "compared" (answers) and "mcnemar"; it is empty if
        only counts are known. A cell has "unhealthy" if quantization made its answers so. With more than one trained
        variant, the entry is the first one's, and "others" maps each further label to the same keys.

        Cells with missing answers that count as wrong have "missing", their number. "subgroups" is there if rows name
        subjects or levels, with differences for each variant and accuracies as differences are written: {kind: {group:
        {"n", "cells": {variant: …}, "delta": {variant: …}}}}.
    """
    entries = {}
    for scheme in comparison.schemes:
        first, *further = (row for row in comparison.rows if row.scheme == scheme)
        entry = {"label": comparison.scheme_label(scheme)} | _row(first)
        entry["seeds"] = len(comparison.runs) or None
        entry["paired"] = comparison.paired
        entry["engine"] = comparison.engine or None
        entry["cells"] = {variant: _cell(comparison, (variant, scheme)) for variant in comparison.variants}
        entry["answers"] = {}
        for variant in comparison.variants:
            cell_answers = comparison.answers.get((variant, scheme))
            if cell_answers:
                entry["answers"][variant] = answers.as_json(cell_answers)
        if comparison.subgroups:
            entry["subgroups"] = subgroups.as_json(comparison.subgroups, scheme)
        if further:
            entry["others"] = {row.variant: _row(row) for row in further}
        entries[scheme] = entry
    return entries


def metrics(comparison: Comparison) -> dict[str, float]:
    """Return `compare/delta_<scheme>`, `compare/gain_survival_<scheme>`, `compare/gain_kept_<scheme>`, and their ends.

    The ends are `_stderr`, `_low`, `_high`. With them come `compare/<measure>_change_<scheme>` with the same ends, for
    each measure of `answers.MEASURES` that is known, and `compare/right_to_wrong_<scheme>`,
    `compare/wrong_to_right_<scheme>`. For base and for further trained variants the scheme is followed by their label.
    """

    def suffix(cell: Cell) -> str:
        variant, scheme = cell
        first_trained = comparison.variants[1]
        return names.in_metric(scheme) if variant == first_trained else names.in_metric(scheme, variant)

    scores = {}
    for row in comparison.rows:
        row_suffix = suffix((row.variant, row.scheme))
        if row.gain_kept:
            scores |= with_ends(f"compare/gain_kept_{row_suffix}", row.gain_kept, "stderr")
        for name, value in row.differences.items():
            key = f"compare/{name}_{row_suffix}"
            scores |= with_ends(key, value, "stderr")
            if value.runs:
                scores[f"{key}_between_seed_sd"] = value.runs.between_sd
                scores[f"{key}_within_seed_sd"] = value.runs.within_sd
    return scores | answers.metrics("compare", comparison.answers, suffix)


def _row(row: Row) -> dict[str, Any]:
    survival = row.gain_survival
    return {
        "trained": row.variant,
        "delta": numbers(row.delta),
        "gain_survival": numbers_or_null(survival),
        "gain_survival_bounds": [survival.lower, survival.upper] if survival else None,
        "gain_kept": numbers_or_null(row.gain_kept),
        **_verdict(row),
        "p_holm": row.p_holm,
        "holds_after_holm": row.holds_after_holm,
        "p_delta": row.delta.p_two_sided,
        "mcnemar": row.mcnemar,
        "bootstrap": {name: numbers(value) for name, value in row.bootstrap.items()},
        "loss": {variant: numbers(loss) for variant, loss in row.losses.items()},
        **_scales(row),
        **_seeds(row),
    }


def _verdict(row: Row) -> dict[str, Any]:
    if row.verdict is None:
        return dict.fromkeys(_VERDICT_FIELDS) | {"remarks": []}
    fields = {name: getattr(row.verdict, name) for name in _VERDICT_FIELDS}
    return fields | {"remarks": list(row.verdict.remarks)}


def _scales(row: Row) -> dict[str, Any]:
    """Return what the scheme costs the variant and the base on other scales than points."""
    if row.scales is None:
        keys = ("accuracy_kept", "accuracy_kept_ratio", "log_odds_difference", "scales_agree", "scales")
        return dict.fromkeys(keys)
    return {
        "accuracy_kept": {variant: numbers_or_null(share) for variant, share in row.scales.kept.items()},
        "accuracy_kept_ratio": numbers(row.scales.ratio),
        "log_odds_difference": numbers(row.scales.log_odds),
        "scales_agree": row.scales.agree,
        "scales": scales.sentence(row.scales, row.variant),
    }


def _seeds(row: Row) -> dict[str, Any]:
    """Return the spread between and within training runs, and each run's own estimates."""
    runs_by_difference = {name: value.runs for name, value in row.differences.items() if value.runs}
    per_seed: dict[str, Any] = {}
    for name, runs in runs_by_difference.items():
        for seed, value in zip(runs.labels, runs.values, strict=True):
            per_seed.setdefault(seed, {})[name] = numbers(value) | {"n": value.n}
    for seed, share in row.kept_by_seed.items():
        per_seed[seed]["gain_kept"] = numbers_or_null(share)
    between = {name: runs.between_sd for name, runs in runs_by_difference.items()}
    within = {name: runs.within_sd for name, runs in runs_by_difference.items()}
    return {"between_seed_sd": between or None, "within_seed_sd": within or None, "per_seed": per_seed}


def _cell(comparison: Comparison, cell: Cell) -> dict[str, Any]:
    entry = _accuracy(comparison.cells[cell])
    missing_answers = comparison.missing_answers.get(cell)
    if missing_answers:
        entry["missing"] = missing_answers
    by_k = comparison.pass_at.get(cell)
    if by_k:
        entry["samples"] = comparison.evidence.samples[cell]
        entry["pass_at"] = {str(k): _accuracy(value) for k, value in by_k.items()}
    note = comparison.unhealthy.get(cell)
    if note:
        entry["unhealthy"] = note
    return entry


def _accuracy(value: Estimate) -> dict[str, Any]:
    return {"n": value.n, "accuracy": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}
