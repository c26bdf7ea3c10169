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
    columns = {"seeds": lambda row: str(row.seeds)} | _columns(plan)
    body = [[show(row) for show in columns.values()] for row in plan.rows]
    lines = [f"## {_title(plan)}", "", *table(columns, body), "", summary(plan), "", *_assumptions(plan), ""]
    return "\n".join(lines)


def summary(plan: Plan) -> str:
    """Return the plan in a sentence or two."""
    first_row = plan.rows[0]
    power = f"each with a probability of {plan.power:.2f}"
    if plan.n is not None:
        return _summary_of_n(plan, first_row, plan.n) + _at_boundary(plan)

    if plan.effect is not None:
        effect = _effect(plan.effect)
        gain = _shows(first_row.n_effect_gain, f"a gain of {effect}")
        change = _shows(first_row.n_effect_survival, f"a change of the gain by {effect}")
        return f"{_runs(first_row)}: {gain}, {change}, {power}."

    row = enough(plan)
    if row is not None:
        gain = _shows(row.n_gain, "the gain")
        sentence = f"{_runs(row)}: {gain}, n = {_n(row.n_verdict)} gives `{plan.verdict}`, {power}."
        return sentence + _at_boundary(plan)
    problem = f"No n gives `{plan.verdict}` with a probability of {plan.power:.2f}"
    if plan.assumed.between_gain or plan.assumed.between_survival:
        problem += ": the spread between training runs alone is too wide. Plan for more seeds"
    return f"{problem}.{_at_boundary(plan)}"


def _shows(n: int | None, effect: str) -> str:
    return f"n = {_n(n)} shows {effect}" if n else f"no n shows {effect}"


def _at_boundary(plan: Plan) -> str:
    """Return a sentence if the expected loss is on the boundary between two verdicts."""
    if plan.boundary is None:
        return ""
    return f" The expected loss equals {plan.boundary}: no n decides on which side of it the truth is."


def _summary_of_n(plan: Plan, row: Row, n: int) -> str:
    sentence = f"{_runs(row)} on n = {n:,} questions will show the gain with a probability of {row.power_gain:.2f}"
    other_words = (f"`{word}` {chance:.2f}" for word, chance in (row.words or {}).items() if word != plan.verdict)
    sentence += f", and give `{plan.verdict}` with a probability of {row.power_verdict:.2f} ({', '.join(other_words)})."
    if len(plan.rows) == 1:
        return sentence
    sufficient = enough(plan)
    if sufficient is None:
        return f"{sentence} None of these numbers of runs reaches {plan.power:.2f}."
    return f"{sentence} {sufficient.seeds} runs are enough for the verdict."


def enough(plan: Plan) -> Row | None:
    """Return the row with the fewest training runs that reach the verdict with the wanted power; None if none does."""
    return next((row for row in plan.rows if row.n_verdict or (row.power_verdict or 0) >= plan.power), None)


def _runs(row: Row) -> str:
    return "One training run" if row.seeds == 1 else f"{row.seeds} training runs"


def _title(plan: Plan) -> str:
    if plan.n is not None:
        return f"What n = {plan.n:,} questions can show"
    if plan.effect is not None:
        return f"Required sample size for {_effect(plan.effect)}"
    return "Required sample size"


def _columns(plan: Plan) -> dict[str, Callable[[Row], str]]:
    """Return head → cell of a row, for the columns after the seeds."""
    verdict = plan.verdict
    if plan.n is not None:
        gain = signed(plan.assumed.gain)
        survival = signed(-plan.assumed.drop)
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


def _assumptions(plan: Plan) -> list[str]:
    """Return the assumptions in sentences."""
    assumed = plan.assumed
    margin = f"{assumed.expected_margin:.3f}, fixed"
    if assumed.margin is None:
        margin = f"{assumed.expected_margin:.3f}, a tenth of the gain as the study will estimate it (at least 0.01)"
    lines = [
        f"Assumed: base {assumed.base_accuracy:.3f}, gain {assumed.gain:+.3f}, "
        f"loss of gain {signed(assumed.drop).lstrip('+')}; margin {margin}; power {plan.power:.2f}.",
        f"Correlation of a question's outcomes: {_correlation(assumed.correlation)} before and after training, "
        f"{_correlation(assumed.scheme_correlation)} at full precision and quantized.",
        "Probabilities are shares of simulated studies, each judged by the rule of the verdict itself. "
        "An n has two significant digits.",
    ]
    if plan.rows[0].seeds == 1:
        return [*lines, "One training run: the spread between seeds is not included. See --between-seed-sd."]

    questions = "all on the same questions, so the error from questions does not shrink with more runs"
    if assumed.own_questions:
        questions = "each on its own questions"
    deviations = f"{assumed.between_gain:.3f} (true gain) and {assumed.between_survival:.3f} (gain survival)"
    return [*lines, f"Standard deviation between training runs: {deviations}; {questions}."]


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
    widest_n = 2000
    for row in rows:
        for n in (row.n, row.n_gain, row.n_verdict, row.n_effect_gain, row.n_effect_survival):
            if n and n < 10**6:
                widest_n = max(widest_n, 4 * n)
    return widest_n
