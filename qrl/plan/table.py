"""A plan as a table for people and as JSON."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from qrl.plan import Plan, Row
from qrl.stats.estimate import signed
from qrl.stats.text import table


def as_json(plan: Plan) -> dict[str, Any]:
    """Return all assumptions, the given numbers and the results; null if no size, or no effect, reaches the power."""
    document = asdict(plan)
    del document["assumed"]["pilot"]
    document["assumed"]["expected_margin"] = plan.assumed.expected_margin
    return document


def as_markdown(plan: Plan) -> str:
    """Return the results, then the assumptions."""
    title, columns = _title(plan), {"seeds": lambda row: str(row.seeds)} | _columns(plan)
    body = ([show(row) for show in columns.values()] for row in plan.rows)
    return "\n".join((f"## {title}", "", *table(columns, body), "", summary(plan), "", *_assumed(plan), ""))


def summary(plan: Plan) -> str:
    """Return the plan in a sentence or two."""
    row, power = plan.rows[0], f"each with a probability of {plan.power:.2f}"
    if plan.n is not None:
        return _of_n(plan, row, plan.n) + _at_boundary(plan)
    if plan.effect is not None:
        effect = _effect(plan.effect)
        sizes = {f"a gain of {effect}": row.n_effect_gain, f"a change of the gain by {effect}": row.n_effect_survival}
        shows = ", ".join(f"n = {_n(n)} shows {what}" if n else f"no n shows {what}" for what, n in sizes.items())
        return f"{_runs(row)}: {shows}, {power}."
    best = enough(plan)
    if best is not None:
        shows = f"n = {_n(best.n_gain)} shows the gain" if best.n_gain else "no n shows the gain"
        found = f"{_runs(best)}: {shows}, n = {_n(best.n_verdict)} gives `{plan.verdict}`, {power}."
        return found + _at_boundary(plan)
    failed = f"No n gives `{plan.verdict}` with a probability of {plan.power:.2f}"
    if plan.assumed.between_gain or plan.assumed.between_survival:
        failed += ": the spread between training runs alone is too wide. Plan for more seeds"
    return f"{failed}.{_at_boundary(plan)}"


def _at_boundary(plan: Plan) -> str:
    """Return a sentence if the expected loss is on the boundary between two verdicts."""
    if plan.boundary is None:
        return ""
    return f" The expected loss equals {plan.boundary}: no n decides on which side of it the truth is."


def _of_n(plan: Plan, row: Row, n: int) -> str:
    sentence = f"{_runs(row)} on n = {n:,} questions will show the gain with a probability of {row.power_gain:.2f}"
    others = (f"`{word}` {chance:.2f}" for word, chance in (row.words or {}).items() if word != plan.verdict)
    sentence += f", and give `{plan.verdict}` with a probability of {row.power_verdict:.2f} ({', '.join(others)})."
    if len(plan.rows) == 1:
        return sentence
    best = enough(plan)
    if best is None:
        return f"{sentence} None of these numbers of runs reaches {plan.power:.2f}."
    return f"{sentence} {best.seeds} runs are enough for the verdict."


def enough(plan: Plan) -> Row | None:
    """Return the row with the fewest training runs that reach the verdict with the wanted power; None if none does."""
    return next((row for row in plan.rows if row.n_verdict or (row.power_verdict or 0) >= plan.power), None)


def _runs(row: Row) -> str:
    return "One training run" if row.seeds == 1 else f"{row.seeds} training runs"


def _title(plan: Plan) -> str:
    if plan.n is not None:
        return f"What n = {plan.n:,} questions can show"
    return "Required sample size" if plan.effect is None else f"Required sample size for {_effect(plan.effect)}"


def _columns(plan: Plan) -> dict[str, Callable[[Row], str]]:
    """Return head → cell of a row, for the columns after the seeds."""
    verdict = plan.verdict
    if plan.n is not None:
        gain, survival = signed(plan.assumed.gain), signed(-plan.assumed.drop)
        return {
            "gain, ± half its 95 % interval": lambda row: f"{gain} ± {row.half_gain:.3f}",
            "probability to show it": lambda row: f"{row.power_gain:.2f}",
            "gain survival": lambda row: f"{survival} ± {row.half_survival:.3f}",
            f"probability of `{verdict}`": lambda row: f"{row.power_verdict:.2f}",
            "smallest gain shown": lambda row: _accuracy(row.least_gain),
            "smallest change of it shown": lambda row: _accuracy(row.least_change),
            "largest loss of gain that is shown to survive": lambda row: _accuracy(row.largest_drop),
        }
    if plan.effect is not None:
        return {
            f"n to show a gain of {_effect(plan.effect)}": lambda row: _n(row.n_effect_gain),
            f"n to show a change of the gain by {_effect(plan.effect)}": lambda row: _n(row.n_effect_survival),
        }
    return {"n to show the gain": lambda row: _n(row.n_gain), f"n for `{verdict}`": lambda row: _n(row.n_verdict)}


def _assumed(plan: Plan) -> list[str]:
    a = plan.assumed
    kind = "a tenth of the gain as the study will estimate it (at least 0.01)" if a.margin is None else "fixed"
    lines = [
        f"Assumed: base {a.base_accuracy:.3f}, gain {a.gain:+.3f}, loss of gain {signed(a.drop).lstrip('+')}; "
        f"margin {a.expected_margin:.3f}, {kind}; power {plan.power:.2f}.",
        f"Correlation of a question's outcomes: {_correlation(a.correlation)} before and after training, "
        f"{_correlation(a.scheme_correlation)} at full precision and quantized.",
        "Probabilities are shares of simulated studies, each judged by the rule of the verdict itself. "
        "An n has two significant digits.",
    ]
    if plan.rows[0].seeds == 1:
        return [*lines, "One training run: the spread between seeds is not included. See --between-seed-sd."]
    questions = "all on the same questions, so the error from questions does not shrink with more runs"
    questions = "each on its own questions" if a.own_questions else questions
    sds = f"{a.between_gain:.3f} (true gain) and {a.between_survival:.3f} (gain survival)"
    return [*lines, f"Standard deviation between training runs: {sds}; {questions}."]


def _effect(effect: float) -> str:
    """Return the effect as it was given: 0.0004 is not 0.000."""
    return f"{effect:.3f}" if effect >= 0.001 else f"{effect:g}"


def _n(n: int | None) -> str:
    return "none is enough" if n is None else f"{n:,}"


def _correlation(value: float | None) -> str:
    """Return a correlation with two decimals: 0.00 rather than -0.00."""
    return f"{round(value or 0.0, 2) + 0.0:.2f}"


def _accuracy(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def widest(rows: tuple[Row, ...]) -> int:
    """Return the number of questions up to which a figure should reach."""
    sizes = [(row.n, row.n_gain, row.n_verdict, row.n_effect_gain, row.n_effect_survival) for row in rows]
    return max([2000, *(4 * n for row in sizes for n in row if n and n < 10**6)])
