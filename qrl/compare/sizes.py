"""Methods across models: what each loses against full precision, by the number of parameters, and whether that grows.

A loss is the accuracy of GRPO at full precision minus that of the method, on the same model, question by question. The
trend is the slope of a method's losses over log10 of the parameters: a weighted sum of cells, since all models answer
the same questions. So it has a paired interval like any other contrast, over seeds if there are several.

All models' rows are put into one table of outcomes, in which each cell of each model is a variant of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qrl import names
from qrl.compare.estimates import numbers, numbers_or_null, with_ends
from qrl.compare.evidence import Cell, Questions
from qrl.compare.outcomes import Answered
from qrl.compare.validate import check_columns
from qrl.errors import BadInput
from qrl.stats import LEVEL, Estimate, holm_by_key
from qrl.stats.text import interval, table

REFERENCE = (names.GRPO, names.FULL)
REWARD = "reward"  # a column of the rows, where training's rewards are more than the strict verdict
SIZES_MD = "sizes.md"
SIZES_JSON = "sizes.json"


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
        if self.runs > 1:
            return f"{self.runs} training runs and the questions"
        return "the questions, since there is one training run each"


@dataclass(frozen=True)
class _Values:
    """Accuracies or rewards of all cells of all models.

    Attributes:
        models: the smallest first.
        evidence: the values, moved into 0..1.
        scale: how far apart the values are that 0 and 1 stand for.
        minimum: the value that 0 stands for.
    """

    models: Sequence[str]
    evidence: Questions
    scale: float = 1.0
    minimum: float = 0.0

    def joint_cell(self, model: str, cell: Cell) -> Cell:
        """Return what a model's cell is called in the table of all models."""
        return _joint_cell(self.models.index(model), cell)

    def means(self, models: Sequence[str], cell: Cell) -> dict[str, Estimate]:
        """Return model → the cell's mean."""
        means = {}
        for model in models:
            means[model] = self.evidence.accuracy(self.joint_cell(model, cell)).scaled(self.scale, self.minimum)
        return means

    def losses(self, models: Sequence[str], cell: Cell) -> dict[str, Estimate]:
        """Return model → grpo at full precision − the cell; empty for grpo itself."""
        if cell == REFERENCE:
            return {}
        losses = {}
        for model in models:
            weights = {self.joint_cell(model, REFERENCE): 1, self.joint_cell(model, cell): -1}
            losses[model] = self.evidence.contrast(weights).scaled(self.scale)
        return losses

    def trend(self, models: Sequence[str], cell: Cell, parameters: Mapping[str, int]) -> Estimate | None:
        """Return the slope of a cell's losses over the size of models; None for the reference, and for one size."""
        if cell == REFERENCE:
            return None
        weights = {}
        for index, weight in slope([parameters[model] for model in models]).items():
            weights[self.joint_cell(models[index], REFERENCE)] = weight
            weights[self.joint_cell(models[index], cell)] = -weight
        return self.evidence.contrast(weights) if weights else None


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
    models_of_cell: dict[Cell, list[str]] = {REFERENCE: []}
    parts = []
    for index, model in enumerate(models):
        for cell in _trained_cells(model, frames[model]):
            models_of_cell.setdefault(cell, []).append(model)
        parts.append(_joint_rows(index, frames[model]))

    answered = Answered(pd.concat(parts, ignore_index=True))
    accuracies = _Values(models, answered.outcomes)
    rewards = None
    if REWARD in answered.frame:
        rewards = _rewards(models, answered, pd.Series(answered.frame[REWARD]).astype(float))

    methods = []
    for cell, cell_models in models_of_cell.items():
        variant, scheme = cell
        method = Method(
            variant=variant,
            scheme=scheme,
            accuracy=accuracies.means(cell_models, cell),
            loss=accuracies.losses(cell_models, cell),
            reward=rewards.means(cell_models, cell) if rewards else {},
            reward_loss=rewards.losses(cell_models, cell) if rewards else {},
            trend=accuracies.trend(cell_models, cell, parameters),
        )
        methods.append(method)
    return Sizes(
        parameters={model: parameters[model] for model in models},
        methods=tuple(methods),
        n=accuracies.evidence.n,
        runs=len(accuracies.evidence.runs),
        holm=holm_by_key({method.name: method.trend.p_two_sided for method in methods if method.trend}),
    )


def _trained_cells(model: str, frame: pd.DataFrame) -> list[Cell]:
    """Return a model's cells but those of the base, in the order of their first rows."""
    check_columns(frame)
    pairs = zip(frame["variant"].astype(str), frame["scheme"].astype(str), strict=True)
    cells = [cell for cell in dict.fromkeys(pairs) if cell[0] != names.BASE]
    if REFERENCE not in cells:
        raise BadInput(f"Cell {names.cell_name(*REFERENCE)} of {model} is missing: losses are measured from it.")
    return cells


def _joint_rows(index: int, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a model's rows with a variant for each cell of it, all at full precision.

    The first model's base stays, at full precision, since a table of outcomes must have one.
    """
    labels = []
    for variant, scheme in zip(frame["variant"].astype(str), frame["scheme"].astype(str), strict=True):
        if variant != names.BASE:
            label, _ = _joint_cell(index, (variant, scheme))
        elif index == 0 and scheme == names.FULL:
            label = names.BASE
        else:
            label = None
        labels.append(label)
    rows = frame.assign(variant=labels, scheme=names.FULL).drop(columns=names.SETTINGS, errors="ignore")
    return pd.DataFrame(rows[rows["variant"].notna()])


def _joint_cell(index: int, cell: Cell) -> Cell:
    """Return what a cell of one model is called in the table of all: its number, since a name may be a path."""
    variant, scheme = cell
    return f"{index} {variant} {scheme}", names.FULL


def slope(parameters: Sequence[int]) -> dict[int, float]:
    """Return index → weight, such that the weighted sum of values is their slope per decade of parameters.

    Values of weight 0 are left out; empty if all have one size.

    Source: least squares, slope = Σ (xᵢ − x̄) yᵢ / Σ (xᵢ − x̄)², a linear contrast; Draper and Smith, Applied Regression
        Analysis, 3rd ed., equation 1.2.9.
    """
    x = np.log10(np.asarray(parameters, dtype=float))
    centred = x - x.mean()
    if float(np.abs(centred).max()) < 1e-9:
        return {}
    weights = centred / float(centred @ centred)
    return {index: float(weight) for index, weight in enumerate(weights) if abs(weight) > 1e-12}


def _rewards(models: Sequence[str], answered: Answered, rewards: pd.Series) -> _Values:
    """Return the rewards, moved into 0..1: the least and the greatest one that occurred limit the intervals."""
    minimum = float(rewards.min())
    scale = float(rewards.max()) - minimum or 1.0
    return _Values(models, answered.read((rewards - minimum) / scale), scale, minimum)


def markdown(sizes: Sizes, failed: Sequence[str] = (), rewards: Sequence[str] = ()) -> str:
    """Return the losses by model, the trends, the findings, and what failed.

    Args:
        sizes: as `measure` returns them.
        failed: sentences.
        rewards: what training rewarded (`train.rewards`).
    """
    lines = [*_losses_table(sizes, rewards), *_trends_table(sizes)]
    lines += [*(f"- {finding}" for finding in findings(sizes)), ""]
    if failed:
        lines += ["## Did not count", "", *(f"- {sentence}" for sentence in failed), ""]
    return "\n".join(lines)


def _losses_table(sizes: Sizes, rewards: Sequence[str]) -> list[str]:
    with_reward = any(method.reward for method in sizes.methods)
    head = ["method", "model", "parameters", "accuracy", "loss in points: full − method"]
    if with_reward:
        head += ["mean reward", "loss of reward"]
    body = []
    for method in sizes.methods:
        for model, accuracy in method.accuracy.items():
            loss = interval(method.loss[model]) if method.loss else "reference"
            row = [method.name, model, size(sizes.parameters[model]), _rate(accuracy), loss]
            if with_reward:
                row.append(_rate(method.reward[model]))
                row.append(interval(method.reward_loss[model]) if method.reward_loss else "reference")
            body.append(row)

    note = f"n = {sizes.n} held-out questions, the same for every model. ± is one standard error, brackets are paired "
    note += f"95 % intervals over {sizes.over}. "
    if with_reward:
        note += f"Training rewards: {', '.join(rewards)}."
    else:
        note += "The mean reward is the accuracy: the strict verdict alone is rewarded."
    return ["## Sizes", "", *table(head, body), "", note, ""]


def _trends_table(sizes: Sizes) -> list[str]:
    """Return the lines on trends; none if no method has one."""
    body = []
    for method in sizes.methods:
        if method.trend:
            p_value = f"{sizes.holm[method.name]:.2g}"
            body.append((method.name, str(len(method.loss)), interval(method.trend), p_value, method.answer))
    if not body:
        return []
    head = ("method", "models", "loss in points per decade of parameters", "p (Holm)", "the loss")
    note = (
        "The slope is that of a straight line through these models' losses. Its interval does not include how far "
        "other models lie from that line. Losses are in points: a model with a higher accuracy has more of them "
        "to lose."
    )
    return ["## Does the loss grow with size?", "", *table(head, body), "", note, ""]


def findings(sizes: Sizes) -> list[str]:
    """Return sentences: for which methods the loss grows with size, shrinks, or cannot be told."""
    growing = []
    shrinking = []
    unclear = []
    for method in sizes.methods:
        if method.trend is None:
            continue
        if method.answer == "cannot tell":
            unclear.append(method.name)
            continue
        corrected = "" if sizes.holm[method.name] < 1 - LEVEL else ", not significant after Holm's correction"
        sentence = (
            f"In points, the loss of {method.name} {method.answer} with size: {interval(method.trend)} per decade"
            f"{corrected}."
        )
        if method.answer == "grows":
            growing.append(sentence)
        else:
            shrinking.append(sentence)
    sentences = [*growing, *shrinking]
    if unclear:
        sentences.append(f"Whether the loss in points grows with size cannot be told for {', '.join(unclear)}.")
    return sentences


def as_json(sizes: Sizes, failed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the table as a document."""
    methods = []
    for method in sizes.methods:
        entry: dict[str, Any] = {"variant": method.variant, "scheme": method.scheme}
        for name in ("accuracy", "loss", "reward", "reward_loss"):
            entry[name] = {model: numbers(value) for model, value in getattr(method, name).items()}
        entry["trend"] = numbers_or_null(method.trend)
        entry["p_holm"] = sizes.holm.get(method.name)
        entry["answer"] = method.answer if method.trend else None
        methods.append(entry)
    return {
        "n": sizes.n,
        "runs": sizes.runs,
        "parameters": sizes.parameters,
        "findings": findings(sizes),
        "methods": methods,
        "failed": list(failed),
    }


def metrics(sizes: Sizes) -> dict[str, float]:
    """Return `sizes/trend_<variant>_<scheme>` of every method, with `_low` and `_high`."""
    scores = {}
    for method in sizes.methods:
        if method.trend:
            scores |= with_ends(f"sizes/trend_{names.in_metric(method.variant, method.scheme)}", method.trend)
    return scores


def size(parameters: int) -> str:
    """Return a number of parameters as text with two significant digits or more: `2.5 M`, `15 M`, `1.5 B`."""
    if parameters >= 1e9:
        value = parameters / 1e9
        unit = "B"
    else:
        value = parameters / 1e6
        unit = "M"
    digits_before_point = int(math.log10(max(1, value))) + 1
    return f"{value:.{max(0, 2 - digits_before_point)}f} {unit}"


def _rate(value: Estimate) -> str:
    return f"{value.estimate:.3f} ± {value.stderr:.3f}".replace("-", "−")
