"""A plan as a table for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qrl.plan import Plan, Row


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that was assumed, asked and found; null where no size, or no effect, does it."""
    given = {"power": plan.power, "n": plan.n, "effect": plan.effect}
    return {
        "assumed": asdict(plan.assumed) | {"expected_margin": plan.assumed.expected_margin},
        **given,
        "verdict": plan.verdict,
        "rows": [asdict(row) for row in plan.rows],
    }


def as_markdown(plan: Plan) -> str:
    """What was found, then what it rests on."""
    columns = _columns(plan)
    rows = [[show(row) for _, show in columns] for row in plan.rows]
    lines = [[name for name, _ in columns], ["---:"] * len(columns), *rows]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join((f"## {_title(plan)}", "", *table, "", found(plan), "", *_assumed(plan), ""))


def found(plan: Plan) -> str:
    """The plan in a sentence or two."""
    row = plan.rows[0]
    runs = "One training run" if row.seeds == 1 else f"{row.seeds} training runs"
    if plan.n is not None:
        says = f"{runs} on n = {plan.n:,} questions will show the gain with a chance of {row.power_gain:.2f}"
        if plan.verdict is None:
            return f"{says}; the loss that is expected is the margin itself, so no n decides on which side it lies."
        says += f", and say `{plan.verdict}` with one of {row.power_verdict:.2f}."
        enough = next((row for row in plan.rows if (row.power_verdict or 0) >= plan.power), None)
        if len(plan.rows) > 1:
            says += (
                f" {enough.seeds} are enough for the verdict."
                if enough
                else f" None of these numbers of runs reaches {plan.power:.2f}."
            )
        return says
    if plan.effect is not None:
        effect = _effect(plan)
        sizes = {f"a gain of {effect}": row.n_effect_gain, f"a change of the gain by {effect}": row.n_effect_survival}
        return f"{runs}: {', '.join(f'n = {_n(n)} shows {what}' if n else f'no n shows {what}' for what, n in sizes.items())}, each with a chance of {plan.power:.2f}."
    if plan.verdict is None:
        return "The loss that is expected is the margin itself: no n decides on which side it lies."
    best = next((row for row in plan.rows if row.n_verdict), None)
    if best is None:
        return _never(plan)
    runs = "One training run" if best.seeds == 1 else f"{best.seeds} training runs"
    shows = f"n = {_n(best.n_gain)} shows the gain" if best.n_gain else "no n shows the gain"
    return f"{runs}: {shows}, n = {_n(best.n_verdict)} says `{plan.verdict}`, each with a chance of {plan.power:.2f}."


def _never(plan: Plan) -> str:
    assumed = plan.assumed
    if plan.verdict == "survives" and assumed.gain <= assumed.expected_margin:
        return f"No n says `survives`: a gain of {assumed.gain:.3f} is no larger than the margin, {assumed.expected_margin:.3f}, so losing all of it would pass; plan for a larger gain, or set a smaller margin."
    return f"No n reaches `{plan.verdict}` with a chance of {plan.power:.2f}: the spread between training runs alone is too wide; plan for more seeds."


def _title(plan: Plan) -> str:
    if plan.n is not None:
        return f"What n = {plan.n:,} questions can show"
    return f"What it takes to see {_effect(plan)}" if plan.effect is not None else "What it takes"


def _columns(plan: Plan) -> list[tuple[str, Any]]:
    seeds = ("seeds", lambda row: str(row.seeds))
    if plan.n is not None:
        return [
            seeds,
            ("gain, ± half its 95 % interval", lambda row: f"{plan.assumed.gain:+.3f} ± {row.half_gain:.3f}"),
            ("chance to show it", lambda row: f"{row.power_gain:.2f}"),
            ("gain survival", lambda row: f"{-plan.assumed.drop:+.3f} ± {row.half_survival:.3f}".replace("-", "−")),
            (f"chance of `{plan.verdict or 'a verdict'}`", lambda row: f"{row.power_verdict:.2f}"),
            ("smallest gain shown", lambda row: _accuracy(row.least_gain)),
            ("smallest change of it seen", lambda row: _accuracy(row.least_change)),
            ("largest loss that `survives`", lambda row: _accuracy(row.largest_drop)),
        ]
    if plan.effect is not None:
        return [
            seeds,
            (f"n to show a gain of {_effect(plan)}", lambda row: _n(row.n_effect_gain)),
            (f"n to see the gain change by {_effect(plan)}", lambda row: _n(row.n_effect_survival)),
        ]
    return [
        seeds,
        ("n to show the gain", lambda row: _n(row.n_gain)),
        (f"n for `{plan.verdict or 'a verdict'}`", lambda row: _n(row.n_verdict)),
    ]


def _assumed(plan: Plan) -> list[str]:
    a = plan.assumed
    margin = (
        f"{a.margin:.3f}, fixed"
        if a.margin is not None
        else f"{a.expected_margin:.3f}, half the gain as the study will estimate it (at least 0.02)"
    )
    lines = [
        f"Assumed: base {a.base_accuracy:.3f}, gain {a.gain:+.3f}, of which the scheme takes {a.drop:.3f}; margin {margin}; power {plan.power:.2f}.",
        f"A question's outcomes correlate by {a.correlation:.2f} before and after training, and by {a.scheme_correlation:.2f} at full precision and quantized.",
        "Chances follow the verdict's own rule: the gain's 95 % interval above 0, and the one-sided 95 % bound of gain survival beyond −margin.",
    ]
    if plan.rows[0].seeds == 1:
        lines.append(
            "One training run: the verdict is about this run; how much another seed would differ is left out. See --between-seed-sd."
        )
    else:
        asked = (
            "each asked questions of its own"
            if a.own_questions
            else "all asked the same questions, whose share in the error does not shrink with them"
        )
        lines.append(
            f"Training runs differ by {a.between_gain:.3f} (sd of the true gain) and {a.between_survival:.3f} (of gain survival); {asked}."
        )
    return lines


def _effect(plan: Plan) -> str:
    """The effect as it was asked for: 0.0004 is not 0.000."""
    return f"{plan.effect:.3f}" if plan.effect >= 0.001 else f"{plan.effect:g}"


def _n(n: int | None) -> str:
    return "none is enough" if n is None else f"{n:,}"


def _accuracy(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def widest(rows: tuple[Row, ...]) -> int:
    """Questions up to which a figure should reach."""
    sizes = [
        n for row in rows for n in (row.n, row.n_gain, row.n_verdict, row.n_effect_gain, row.n_effect_survival) if n
    ]
    return max([2000, *(4 * n for n in sizes if n < 10**6)])
