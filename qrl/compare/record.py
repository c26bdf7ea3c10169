"""A comparison for programs: the contract `table.json`, and MLflow metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qrl.stats import Estimate

if TYPE_CHECKING:
    from qrl.compare import Cell, Comparison, Row


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The contract `table.json`: one entry per scheme.

    Returns:
        scheme → {"trained", "delta", "gain_survival", "verdict", "reason", "margin", "smallest_effect", "n_to_decide",
        "seeds_to_decide", "p_value", "p_holm", "holds_after_holm", "p_delta", "mcnemar", "bootstrap", "loss":
        {variant: …}, "seeds", "between_seed_sd", "within_seed_sd", "per_seed", "paired", "engine", "cells": {variant: {"n", "accuracy",
        "stderr", "low", "high"}}}. Differences are {"estimate", "stderr", "low", "high"}. Under full gain survival is not
        defined: it and what follows from it are null. `seeds` counts training runs, null where only counts are known; with
        one, the spreads are null and `per_seed` is empty; with several, both spreads map "delta" and "gain_survival" to
        standard deviations, and `per_seed` maps each seed to the same two differences, whose errors are its questions'
        alone. Cells with several samples per question have "samples" and "pass_at": {k: …} too. Where there is more than one
        trained variant, the entry is the first one's and "others" maps each further label to the same keys.
    """
    entries = {}
    for scheme in comparison.schemes:
        first, *others = (row for row in comparison.rows if row.scheme == scheme)
        entry = _row(first) | {
            "seeds": len(comparison.runs) or None,
            "paired": comparison.paired,
            "engine": comparison.engine or None,
        }
        entry["cells"] = {variant: _cell(comparison, (variant, scheme)) for variant in comparison.variants}
        if others:
            entry["others"] = {row.variant: _row(row) for row in others}
        entries[scheme] = entry
    return entries


def as_metrics(comparison: Comparison) -> dict[str, float]:
    """Metric name → value; further trained variants carry their label at the end of the scheme's name."""
    metrics = {}
    for row in comparison.rows:
        suffix = row.scheme if row.variant == comparison.variants[1] else f"{row.scheme}_{row.variant}"
        for name, value in _differences(row).items():
            key = f"compare/{name}_{suffix}"
            metrics |= {
                key: value.estimate,
                f"{key}_stderr": value.stderr,
                f"{key}_low": value.low,
                f"{key}_high": value.high,
            }
            if value.runs:
                metrics |= {
                    f"{key}_between_seed_sd": value.runs.between_sd,
                    f"{key}_within_seed_sd": value.runs.within_sd,
                }
    return metrics


def _differences(row: Row) -> dict[str, Estimate]:
    return {"delta": row.delta} | ({"gain_survival": row.gain_survival} if row.gain_survival else {})


def _row(row: Row) -> dict[str, Any]:
    verdict = row.verdict
    keys = ("verdict", "reason", "margin", "smallest_effect", "n_to_decide", "seeds_to_decide", "p_value")
    return {
        "trained": row.variant,
        "delta": _difference(row.delta),
        "gain_survival": _difference(row.gain_survival) if row.gain_survival else None,
        **{key: getattr(verdict, key) if verdict else None for key in keys},
        "p_holm": row.p_holm,
        "holds_after_holm": row.holds_together,
        "p_delta": row.delta.p_two_sided,
        "mcnemar": row.mcnemar,
        "bootstrap": {name: _difference(value) for name, value in row.bootstrap.items()},
        "loss": {variant: _difference(loss) for variant, loss in row.losses.items()},
        **_seeds(row),
    }


def _seeds(row: Row) -> dict[str, Any]:
    """Spread between and within training runs, and what each run says alone."""
    found = _differences(row)
    if row.delta.runs is None:
        return {"between_seed_sd": None, "within_seed_sd": None, "per_seed": {}}
    alone = {name: dict(zip(value.runs.labels, value.runs.values, strict=True)) for name, value in found.items()}
    return {
        "between_seed_sd": {name: value.runs.between_sd for name, value in found.items()},
        "within_seed_sd": {name: value.runs.within_sd for name, value in found.items()},
        "per_seed": {
            label: {name: _difference(values[label]) | {"n": values[label].n} for name, values in alone.items()}
            for label in row.delta.runs.labels
        },
    }


def _cell(comparison: Comparison, cell: Cell) -> dict[str, Any]:
    found = _share(comparison.cells[cell])
    if by_k := comparison.pass_at.get(cell):
        found |= {
            "samples": comparison.evidence.samples(cell),
            "pass_at": {str(k): _share(value) for k, value in by_k.items()},
        }
    return found


def _difference(value: Estimate) -> dict[str, float]:
    return {"estimate": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}


def _share(value: Estimate) -> dict[str, float]:
    return {"n": value.n, "accuracy": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}
