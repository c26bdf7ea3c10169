"""Methods across models: what each loses against full precision, by the number of parameters, and whether that grows.

A loss is the accuracy of GRPO at full precision minus that of the method, on the same model, question by question. The
trend is the slope of a method's losses over log10 of the parameters: a weighted sum of cells, since all models answer
the same questions. So it has a paired interval like any other contrast, over seeds if there are several.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qrl import names
from qrl.compare.estimates import numbers, with_ends
from qrl.compare.evidence import Cell, Questions
from qrl.compare.outcomes import Answered
from qrl.compare.validate import check_columns
from qrl.errors import BadInput
from qrl.stats import LEVEL, Estimate, holm_by_key
from qrl.stats.text import interval, table

REFERENCE = (names.GRPO, names.FULL)
REWARD = "reward"  # a column of the rows, where training's rewards are more than the strict verdict
SIZES_MD, SIZES_JSON = "sizes.md", "sizes.json"


@dataclass(frozen=True)
class Method:
    """One cell on every model that has it.

    Attributes:
        variant, scheme: its labels.
        accuracy: by model.
        loss: by model, grpo at full precision − this; empty for that cell itself.
        reward: by model, the mean reward of its answers; empty if that is the accuracy.
        reward_loss: as `loss`, of the mean reward.
        trend: loss per decade of parameters; None with fewer than two sizes.
    """

    variant: str
    scheme: str
    accuracy: dict[str, Estimate]
    loss: dict[str, Estimate]
    reward: dict[str, Estimate]
    reward_loss: dict[str, Estimate]
    trend: Estimate | None

    @property
    def name(self) -> str:
        return names.cell_name(self.variant, self.scheme)

    @property
    def answer(self) -> str:
        """Whether the loss grows with size: `grows`, `shrinks`, or `cannot tell` if the interval contains 0."""
        if self.trend is None or self.trend.low <= 0 <= self.trend.high:
            return "cannot tell"
        return "grows" if self.trend.estimate > 0 else "shrinks"


@dataclass(frozen=True)
class Sizes:
    """All methods on all models.

    Attributes:
        parameters: by model, the smallest first.
        methods: grpo at full precision first.
        n: questions.
        runs: training runs.
        holm: method's name → p-value of "its loss does not depend on size", Holm-corrected over all methods.
    """

    parameters: dict[str, int]
    methods: tuple[Method, ...]
    n: int
    runs: int
    holm: dict[str, float]

    @property
    def over(self) -> str:
        """What the intervals are over."""
        of_seeds = f"{self.runs} training runs and the questions"
        return of_seeds if self.runs > 1 else "the questions, since there is one training run each"


def measure(frames: Mapping[str, pd.DataFrame], parameters: Mapping[str, int]) -> Sizes:
    """Return what every method loses on every model, and its trend.

    Args:
        frames: model → rows as for `ranking.measure`, and optionally `reward` per answer; the same questions for all.
        parameters: model → number of parameters.

    Raises:
        BadInput: there are fewer than two models, a model lacks grpo at full precision, or cells are not comparable.
    """
    if len(frames) < 2:
        raise BadInput(f"{len(frames)} model has no trend: give at least two by --models.")
    models = sorted(frames, key=lambda model: parameters[model])
    cells: dict[Cell, list[str]] = {REFERENCE: []}  # → the models that have it
    parts = []
    for place, model in enumerate(models):
        frame = frames[model]
        check_columns(frame)
        of_rows = list(zip(frame["variant"].astype(str), frame["scheme"].astype(str), strict=True))
        own = [cell for cell in dict.fromkeys(of_rows) if cell[0] != names.BASE]
        if REFERENCE not in own:
            raise BadInput(f"Cell {names.cell_name(*REFERENCE)} of {model} is missing: losses are measured from it.")
        for cell in own:
            cells.setdefault(cell, []).append(model)
        # Every cell becomes a variant; one model's base stays, since a table of outcomes must have one.
        kept = {(names.BASE, names.FULL): names.BASE} if place == 0 else {}
        labels = [_label(place, cell) if cell[0] != names.BASE else kept.get(cell) for cell in of_rows]
        part = frame.assign(variant=labels, scheme=names.FULL).drop(columns=names.SETTINGS, errors="ignore")
        parts.append(part[part["variant"].notna()])
    answered = Answered(pd.concat(parts, ignore_index=True))
    evidence, rows = answered.outcomes, answered.frame
    rewarded = _rewarded(answered, pd.Series(rows[REWARD]).astype(float)) if REWARD in rows else None
    place_of = {model: place for place, model in enumerate(models)}

    def by_model(source: tuple[Questions, float, float] | None, cell: Cell, *, loss: bool) -> dict[str, Estimate]:
        if source is None or (loss and cell == REFERENCE):
            return {}
        found, scale, least = source
        key = {model: (_label(place_of[model], cell), names.FULL) for model in cells[cell]}
        if not loss:
            return {model: found.accuracy(key[model]).scaled(scale, least) for model in key}
        against = {model: (_label(place_of[model], REFERENCE), names.FULL) for model in key}
        return {model: found.contrast({against[model]: 1, key[model]: -1}).scaled(scale) for model in key}

    methods, plain = [], (evidence, 1.0, 0.0)
    for cell, having in cells.items():
        weights = {} if cell == REFERENCE else slope([parameters[model] for model in having])
        terms = {}
        for number, weight in weights.items():
            place = place_of[having[number]]
            terms |= {(_label(place, REFERENCE), names.FULL): weight, (_label(place, cell), names.FULL): -weight}
        accuracy, loss = by_model(plain, cell, loss=False), by_model(plain, cell, loss=True)
        reward, lost = by_model(rewarded, cell, loss=False), by_model(rewarded, cell, loss=True)
        methods.append(Method(*cell, accuracy, loss, reward, lost, evidence.contrast(terms) if terms else None))
    holm = holm_by_key({method.name: method.trend.p_two_sided for method in methods if method.trend})
    sizes = {model: parameters[model] for model in models}
    return Sizes(sizes, tuple(methods), evidence.n, len(evidence.runs), holm)


def slope(parameters: Sequence[int]) -> dict[int, float]:
    """Return place → weight, such that the weighted sum of values is their slope per decade of parameters.

    Places of weight 0 are left out; empty if all have one size.

    Source: least squares, slope = Σ (xᵢ − x̄) yᵢ / Σ (xᵢ − x̄)², a linear contrast; Draper and Smith, Applied Regression
        Analysis, 3rd ed., equation 1.2.9.
    """
    x = np.log10(np.asarray(parameters, dtype=float))
    centred = x - x.mean()
    if float(np.abs(centred).max()) < 1e-9:
        return {}
    weights = centred / float(centred @ centred)
    return {place: float(weight) for place, weight in enumerate(weights) if abs(weight) > 1e-12}


def _label(place: int, cell: Cell) -> str:
    return f"{place} {cell[0]} {cell[1]}"


def _rewarded(answered: Answered, given: pd.Series) -> tuple[Questions, float, float]:
    """Return the evidence with rewards for outcomes, moved into 0..1; how far apart 0 and 1 are; and what 0 stands for.

    An interval is as wide in rewards as in this scale; its limits are the least and the greatest reward that occurred.
    """
    least, most = float(given.min()), float(given.max())
    scale = (most - least) or 1.0
    return answered.read((given - least) / scale), scale, least


def markdown(sizes: Sizes, failed: Sequence[str] = (), rewards: Sequence[str] = ()) -> str:
    """Return the losses by model, the trends, the findings, and what failed.

    Args:
        sizes: as `measure` returns them.
        failed: sentences.
        rewards: what training rewarded (`train.rewards`).
    """
    with_reward = any(method.reward for method in sizes.methods)
    head = ["method", "model", "parameters", "accuracy", "loss in points: full − method"]
    head += ["mean reward", "loss of reward"] if with_reward else []
    body, trends = [], []
    for method in sizes.methods:
        for model, accuracy in method.accuracy.items():
            loss = interval(method.loss[model]) if method.loss else "reference"
            row = [method.name, model, size(sizes.parameters[model]), _rate(accuracy), loss]
            if with_reward:
                of_reward = interval(method.reward_loss[model]) if method.reward_loss else "reference"
                row += [_rate(method.reward[model]), of_reward]
            body.append(row)
        if method.trend:
            p = f"{sizes.holm[method.name]:.2g}"
            trends.append((method.name, str(len(method.loss)), interval(method.trend), p, method.answer))
    note = f"n = {sizes.n} held-out questions, the same for every model. ± is one standard error, brackets are paired "
    note += f"95 % intervals over {sizes.over}. "
    note += f"Training rewards: {', '.join(rewards)}. " if with_reward else ""
    note += "" if with_reward else "The mean reward is the accuracy: the strict verdict alone is rewarded. "
    lines = ["## Sizes", "", *table(head, body), "", note.strip(), ""]
    if trends:
        slope = "loss in points per decade of parameters"
        lines += [
            "## Does the loss grow with size?",
            "",
            *table(("method", "models", slope, "p (Holm)", "the loss"), trends),
            "",
        ]
        lines += [
            "The slope is that of a straight line through these models' losses. Its interval does not include how far "
            "other models lie from that line. Losses are in points: a model with a higher accuracy has more of them "
            "to lose.",
            "",
        ]
    lines += [*(f"- {finding}" for finding in findings(sizes)), ""]
    if failed:
        lines += ["## Did not count", "", *(f"- {sentence}" for sentence in failed), ""]
    return "\n".join(lines)


def findings(sizes: Sizes) -> list[str]:
    """Return sentences: for which methods the loss grows with size, shrinks, or cannot be told."""
    trends = [(method, method.trend) for method in sizes.methods if method.trend]
    sentences = []
    for answer, says in (("grows", "grows with size"), ("shrinks", "shrinks with size")):
        for method, trend in (each for each in trends if each[0].answer == answer):
            corrected = "" if sizes.holm[method.name] < 1 - LEVEL else ", not significant after Holm's correction"
            sentences.append(f"In points, the loss of {method.name} {says}: {interval(trend)} per decade{corrected}.")
    if unknown := [method.name for method, _ in trends if method.answer == "cannot tell"]:
        sentences.append(f"Whether the loss in points grows with size cannot be told for {', '.join(unknown)}.")
    return sentences


def as_json(sizes: Sizes, failed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the table as a document."""
    methods = []
    for method in sizes.methods:
        by_model = {
            key: {model: numbers(value) for model, value in getattr(method, key).items()}
            for key in ("accuracy", "loss", "reward", "reward_loss")
        }
        trend = {"trend": numbers(method.trend) if method.trend else None, "p_holm": sizes.holm.get(method.name)}
        labels = {"variant": method.variant, "scheme": method.scheme}
        methods.append(labels | by_model | trend | {"answer": method.answer if method.trend else None})
    facts = {"n": sizes.n, "runs": sizes.runs, "parameters": sizes.parameters, "findings": findings(sizes)}
    return facts | {"methods": methods, "failed": list(failed)}


def metrics(sizes: Sizes) -> dict[str, float]:
    """Return `sizes/trend_<variant>_<scheme>` of every method, with `_low` and `_high`."""
    scores = {}
    for method in sizes.methods:
        if method.trend:
            scores |= with_ends(f"sizes/trend_{names.in_metric(method.variant, method.scheme)}", method.trend)
    return scores


def size(parameters: int) -> str:
    """Return a number of parameters as text: `2.5 M`, `1.5 B`."""
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:.{max(0, 1 - int(math.log10(max(1, parameters / unit))))}f} {name}"


def _rate(value: Estimate) -> str:
    return f"{value.estimate:.3f} ± {value.stderr:.3f}".replace("-", "−")
