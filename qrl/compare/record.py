"""A comparison for programs: the contract `table.json`, and MLflow metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from qrl import names
from qrl.compare import answers, scales, subgroups
from qrl.stats import Estimate

if TYPE_CHECKING:
    from qrl.compare.comparison import Comparison, Row
    from qrl.compare.evidence import Cell

_VERDICT = (
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


def as_json(comparison: Comparison) -> dict[str, Any]:
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
        to the same two differences and to "gain_kept", whose errors come from its questions alone. Cells with several
        samples per question also have "samples" and "pass_at": {k: …}. "answers" maps each variant to the measures of
        `answers.Answers` that are known, as {"n", "mean", "change"} (against full precision, null under it), and to
        "reference_perplexity", "right_to_wrong", "wrong_to_right", "compared" (answers) and "mcnemar"; it is empty if
        only counts are known. A cell whose answers quantization made unhealthy says so in "unhealthy". With more than
        one trained variant, the entry is the first one's, and "others" maps each further label to the same keys.

        Cells whose missing answers count as wrong have "missing", their number. "subgroups" is there if rows name
        subjects or levels, with differences for each variant and accuracies as differences are written: {kind: {group:
        {"n", "cells": {variant: …}, "delta": {variant: …}}}}.
    """
    entries = {}
    for scheme in comparison.schemes:
        first, *others = (row for row in comparison.rows if row.scheme == scheme)
        entry = {"label": comparison.shown(scheme)} | _row(first)
        entry |= {"seeds": len(comparison.runs) or None, "paired": comparison.paired}
        entry["engine"] = comparison.engine or None
        entry["cells"] = {variant: _cell(comparison, (variant, scheme)) for variant in comparison.variants}
        measured = {
            variant: answers.as_json(comparison.answers, (variant, scheme), numbers) for variant in entry["cells"]
        }
        entry["answers"] = {variant: of_cell for variant, of_cell in measured.items() if of_cell}
        if found := subgroups.as_json(comparison, scheme, numbers):
            entry["subgroups"] = found
        if others:
            entry["others"] = {row.variant: _row(row) for row in others}
        entries[scheme] = entry
    return entries


def as_metrics(comparison: Comparison) -> dict[str, float]:
    """Return `compare/delta_<scheme>`, `compare/gain_survival_<scheme>`, `compare/gain_kept_<scheme>`, and their ends.

    The ends are `_stderr`, `_low`, `_high`. Beside them are `compare/<measure>_change_<scheme>` with the same ends, for
    each measure of `answers.MEASURES` that is known, and `compare/right_to_wrong_<scheme>`,
    `compare/wrong_to_right_<scheme>`. For base and for further trained variants the scheme is followed by their label.
    """
    metrics = {}
    for row in comparison.rows:
        suffix = _suffix(comparison, (row.variant, row.scheme))
        if row.gain_kept:
            metrics |= with_ends(f"compare/gain_kept_{suffix}", row.gain_kept, "stderr")
        for name, value in row.differences.items():
            key = f"compare/{name}_{suffix}"
            metrics |= with_ends(key, value, "stderr")
            if value.runs:
                between, within = value.runs.between_sd, value.runs.within_sd
                metrics |= {f"{key}_between_seed_sd": between, f"{key}_within_seed_sd": within}
    return metrics | of_answers("compare", comparison.answers, lambda cell: _suffix(comparison, cell))


def of_answers(folder: str, by_cell: Mapping[Cell, answers.Answers], suffix: Callable[[Cell], str]) -> dict[str, float]:
    """Return `<folder>/<measure>_change_<suffix>` of answers, with its ends, and how many of them changed."""
    metrics = {}
    for cell, found in by_cell.items():
        for name, value in found.changes.items():
            metrics |= with_ends(f"{folder}/{name}_change_{suffix(cell)}", value, "stderr")
        for name in ("right_to_wrong", "wrong_to_right"):
            if (count := getattr(found, name)) is not None:
                metrics[f"{folder}/{name}_{suffix(cell)}"] = float(count)
    return metrics


def _suffix(comparison: Comparison, cell: Cell) -> str:
    variant, scheme = cell
    return names.in_metric(scheme) if variant == comparison.variants[1] else names.in_metric(scheme, variant)


def with_ends(key: str, value: Estimate, *more: str) -> dict[str, float]:
    """Return an estimate, `more` of it and the ends of its interval as metrics."""
    return {key: value.estimate} | {f"{key}_{name}": getattr(value, name) for name in (*more, "low", "high")}


def numbers(value: Estimate) -> dict[str, float]:
    """Return an estimate as JSON."""
    return {"estimate": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}


def numbers_or_null(value: Estimate | None) -> dict[str, float] | None:
    """Return an estimate as JSON, null where it is not defined."""
    return None if value is None else numbers(value)


def _row(row: Row) -> dict[str, Any]:
    return {
        "trained": row.variant,
        "delta": numbers(row.delta),
        "gain_survival": numbers_or_null(row.gain_survival),
        "gain_survival_bounds": [row.gain_survival.lower, row.gain_survival.upper] if row.gain_survival else None,
        "gain_kept": numbers_or_null(row.gain_kept),
        **{key: getattr(row.verdict, key) if row.verdict else None for key in _VERDICT},
        "remarks": list(row.verdict.remarks) if row.verdict else [],
        "p_holm": row.p_holm,
        "holds_after_holm": row.holds_together,
        "p_delta": row.delta.p_two_sided,
        "mcnemar": row.mcnemar,
        "bootstrap": {name: numbers(value) for name, value in row.bootstrap.items()},
        "loss": {variant: numbers(loss) for variant, loss in row.losses.items()},
        **_scales(row),
        **_seeds(row),
    }


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
    runs = {name: value.runs for name, value in row.differences.items() if value.runs}
    per_seed: dict[str, Any] = {}
    for name, of_difference in runs.items():
        for label, value in zip(of_difference.labels, of_difference.values, strict=True):
            per_seed.setdefault(label, {})[name] = numbers(value) | {"n": value.n}
    for label, share in row.kept_by_seed.items():
        per_seed[label]["gain_kept"] = numbers_or_null(share)
    between = {name: value.between_sd for name, value in runs.items()}
    within = {name: value.within_sd for name, value in runs.items()}
    return {"between_seed_sd": between or None, "within_seed_sd": within or None, "per_seed": per_seed}


def _cell(comparison: Comparison, cell: Cell) -> dict[str, Any]:
    entry = _share(comparison.cells[cell])
    if comparison.answered and (missing := comparison.answered.filled.get(cell)):
        entry["missing"] = missing
    if by_k := comparison.pass_at.get(cell):
        entry["samples"] = comparison.evidence.samples[cell]
        entry["pass_at"] = {str(k): _share(value) for k, value in by_k.items()}
    if note := comparison.unhealthy.get(cell):
        entry["unhealthy"] = note
    return entry


def _share(value: Estimate) -> dict[str, Any]:
    return {"n": value.n, "accuracy": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}
