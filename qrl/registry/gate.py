"""The promotion decision: numbers in, verdict and reasons out. It reads nothing and moves nothing.

A recipe declares its stages (`promote.stages`). Each requires its own cell, a healthy evaluation, and weights that were
made from the version at an earlier stage. `gain_over` and `loss_to` name the stages to compare with:

    base   base:full, the base model itself; healthy, on at least `promote.min_n` questions; and the weights that were
           evaluated are the version's
    grpo   grpo:full, made from the base version; the lower bound of its paired gain is above `promote.min_gain`
    awq    grpo:awq, made from the grpo version; its loss against that is smaller than `promote.max_loss`

With `promote.min_gain_kept`, a quantized stage must keep that share of the gain. With `promote.max_length_growth`, the
tokens per answer of a stage made from another may not grow by more than that.
Bounds are those of the two-sided 95 % interval, the one that the table prints. What cannot be compared (a bound that is
NaN, an empty digest, another task) counts as not shown and is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qrl.recipe.stages import Stage
from qrl.stats import Estimate, signed
from qrl.stats.text import interval, percent_interval
from qrl.tracking.cells import Evaluated


@dataclass(frozen=True)
class Gain:
    """The candidate's accuracy minus that of the version at a stage, paired; its lower bound must be above `least`."""

    stage: str
    value: Estimate
    least: float  # accuracy


@dataclass(frozen=True)
class Loss:
    """The candidate's accuracy minus that of the version at a stage, paired; its lower bound must be above −`limit`."""

    stage: str
    label: str  # the stage, as the reason names it
    difference: Estimate
    limit: float  # accuracy


@dataclass(frozen=True)
class GainKept:
    """The share of the gain that a quantized candidate keeps, and how it is judged."""

    share: Estimate | None  # None if no gain is shown at full precision, or if cells are missing
    least: float  # the lower bound may not be below
    missing: tuple[str, ...] = ()  # cells without which the share is unknown


@dataclass(frozen=True)
class LengthGrowth:
    """The relative change of tokens per answer against the version at `stage.made_from`, and how it is judged."""

    change: Estimate | None  # None if lengths were not recorded
    limit: float  # the upper bound may not be above


@dataclass(frozen=True)
class Evidence:
    """What a gate is given in addition to the candidate's own evaluation.

    The stage says which of `gain` and `loss` it needs. Without them, only another task can have kept them from being
    computed.
    """

    version_digest: str  # of the weights that would be served
    parent_digest: str = ""  # of the model that must be the one at `stage.made_from`; unused for the base
    origin_digest: str = ""  # of the version at `stage.made_from`; for the base, of the base model
    tasks: Mapping[str, str] = field(default_factory=dict)  # stage that is compared with → task of its evaluation
    gain: Gain | None = None
    loss: Loss | None = None
    length_growth: LengthGrowth | None = None  # None: `promote.max_length_growth` sets no limit
    gain_kept: GainKept | None = None  # None: no share of the gain must be kept
    min_n: int = 1  # `promote.min_n`, the least number of questions


@dataclass(frozen=True)
class Decision:
    """Whether a version earns a stage.

    `reasons` are sentences, one per check, the failed ones first; `facts` the numbers and digests that were compared.
    """

    stage: str
    passed: bool
    reasons: tuple[str, ...]
    facts: dict[str, float | str] = field(default_factory=dict)

    def __str__(self) -> str:
        verb = "passes" if self.passed else "is refused"
        return f"Stage {self.stage} {verb}: {' '.join(self.reasons)}"


@dataclass(frozen=True)
class _Check:
    """The outcome of one check: a sentence that gives the reason, and what was compared."""

    passed: bool
    reason: str
    facts: Mapping[str, float | str]


def decide(stage: Stage, cell: Evaluated, evidence: Evidence) -> Decision:
    """Decide on a stage: by cell, health, digest and lineage, by task, and by every difference that the stage needs.

    Args:
        stage: as the recipe declares it, complete.
        cell: the candidate's evaluation.
        evidence: what the candidate is compared with.

    Raises:
        ValueError: a gain or a loss that the stage needs is missing, although the tasks are the same.
    """
    checks = [_check_cell(stage, cell), _check_health(cell), _check_digest(cell.digest, evidence.version_digest)]
    if cell.n < evidence.min_n:
        checks.append(_too_few_questions(cell.n, evidence.min_n))

    if stage.made_from is None:
        checks.append(_check_is_base(cell.digest, evidence.origin_digest))
    else:
        checks.append(_check_lineage(evidence.parent_digest, evidence.origin_digest, stage.made_from))

    # Accuracies on two tasks have no difference, so another task takes the place of every difference.
    other_tasks = {name: task for name, task in evidence.tasks.items() if task != cell.task}
    if not other_tasks and not _has_differences(stage, evidence):
        raise ValueError(f"Stage {stage.stage} needs a difference to each stage that it is compared with.")
    checks += [_other_task(cell.task, task, name) for name, task in other_tasks.items()]

    if evidence.gain:
        checks.append(_check_gain(evidence.gain))
    if evidence.loss:
        checks.append(_check_loss(evidence.loss))
    if evidence.length_growth and stage.made_from:
        checks.append(_check_length_growth(evidence.length_growth, stage.made_from))
    if evidence.gain_kept:
        checks.append(_check_gain_kept(evidence.gain_kept))

    facts: dict[str, float | str] = {}
    for check in checks:
        facts |= check.facts
    failed_first = sorted(checks, key=lambda check: check.passed)
    reasons = tuple(check.reason for check in failed_first)
    return Decision(stage.stage, all(check.passed for check in checks), reasons, facts)


def _has_differences(stage: Stage, evidence: Evidence) -> bool:
    """Return whether the evidence holds the gain and the loss that a stage needs, and no other."""
    has_gain = (evidence.gain is None) == (stage.gain_over is None)
    has_loss = (evidence.loss is None) == (stage.loss_to is None)
    return has_gain and has_loss


def _check_cell(stage: Stage, cell: Evaluated) -> _Check:
    required = stage.cell
    actual = f"{cell.variant}:{cell.scheme}"
    facts = {"cell": actual, "chat": cell.chat}
    if actual == required:
        return _Check(True, f"It is the cell {required}.", facts)
    reason = (
        f"It is the cell {actual}, but only {required} can hold the stage: give a run of {required}, or declare a "
        f"stage for {actual} in promote.stages, such as base=base:full,{cell.variant}={actual}."
    )
    return _Check(False, reason, facts)


def _check_health(cell: Evaluated) -> _Check:
    facts = {"broken_limits": float(len(cell.broken))}
    if not cell.broken:
        return _Check(True, "The evaluation was healthy.", facts)
    message = "The evaluation was unhealthy, so its accuracy does not count"
    if cell.unhealthy:
        message = f"Quantization made the answers unhealthy ({cell.unhealthy}), and such a cell holds no stage"
    broken_limits = "; ".join(sentence.rstrip(".") for sentence in cell.broken)
    return _Check(False, f"{message}: {broken_limits}.", facts)


def _check_digest(evaluated: str, version: str) -> _Check:
    facts = {"evaluated_digest": evaluated, "version_digest": version}
    if version and evaluated == version:
        return _Check(True, f"The weights that were evaluated are the version's ({_short(version)}).", facts)
    message = f"The evaluated weights ({_short(evaluated)}) are not the version's ({_short(version)})"
    return _Check(False, f"{message}: evaluate this version.", facts)


def _too_few_questions(n: int, min_n: int) -> _Check:
    reason = f"It answered {n} questions, fewer than promote.min_n = {min_n}: raise evaluate.n and evaluate it again."
    return _Check(False, reason, {"n": float(n), "min_n": float(min_n)})


def _check_is_base(digest: str, base_digest: str) -> _Check:
    facts = {"base_digest": base_digest}
    if base_digest and digest == base_digest:
        return _Check(True, "It is the base model itself.", facts)
    message = f"It is not the base model itself ({_short(base_digest)}) but was made from it"
    return _Check(False, f"{message}: give the base's own evaluation.", facts)


def _check_lineage(parent_digest: str, required_digest: str, stage: str) -> _Check:
    required = f"the version at stage {stage} ({_short(required_digest)})"
    facts = {"parent_digest": parent_digest, f"{stage}_digest": required_digest}
    if required_digest and parent_digest == required_digest:
        return _Check(True, f"It was made from {required}.", facts)
    reason = f"It was made from {_short(parent_digest)}, not from {required}: promote its own parent first."
    return _Check(False, reason, facts)


def _other_task(task: str, stage_task: str, stage: str) -> _Check:
    message = f"It was evaluated on the task {task}, but stage {stage} on {stage_task}"
    facts = {"task": task, f"{stage}_task": stage_task}
    return _Check(False, f"{message}: evaluate both on the same task.", facts)


def _check_gain(gain: Gain) -> _Check:
    facts = _bounds("gain", gain.value, gain.stage, gain.least)
    passed = gain.value.low > gain.least
    return _Check(passed, _bound_reason(f"gain over {gain.stage}", gain.value, gain.least, passed), facts)


def _check_loss(loss: Loss) -> _Check:
    facts = _bounds("difference", loss.difference, loss.stage, loss.limit)
    least = -loss.limit
    passed = loss.difference.low > least
    return _Check(passed, _bound_reason(f"difference to {loss.label}", loss.difference, least, passed), facts)


def _bounds(key: str, value: Estimate, stage: str, limit: float) -> dict[str, float | str]:
    """Return a difference as a decision's facts, under the names that registered models' records have."""
    return {
        key: value.estimate,
        f"{key}_low": value.low,
        f"{key}_high": value.high,
        f"{key}_to": stage,
        "n": float(value.n),
        "limit": limit,
    }


def _bound_reason(name: str, value: Estimate, least: float, passed: bool) -> str:
    position = "above" if passed else "not above"
    threshold = "0" if least == 0 else signed(least)
    return (
        f"The {name} is {interval(value)} on n = {value.n} questions; its lower 95 % bound is {position} {threshold}."
    )


def _check_gain_kept(kept: GainKept) -> _Check:
    """Check the share of the gain that is kept; where no gain is shown at full precision, no share of it is."""
    facts: dict[str, float | str] = {"min_gain_kept": kept.least}
    requirement = f"At least {100 * kept.least:g} % of the gain must be kept"
    if kept.missing:
        problem = f"on its questions there is no sealed evaluation of {', '.join(kept.missing)}"
        return _Check(False, f"{requirement}, but {problem}: evaluate base and trained model together.", facts)
    share = kept.share
    if share is None:
        return _Check(False, f"{requirement}, but no gain is shown at full precision.", facts)

    passed = share.low >= kept.least
    position = "not below" if passed else "below"
    message = f"It keeps {percent_interval(share)} of the gain on n = {share.n} questions"
    facts |= {"gain_kept": share.estimate, "gain_kept_low": share.low, "gain_kept_high": share.high}
    return _Check(passed, f"{message}; the lower 95 % bound is {position} {100 * kept.least:g} %.", facts)


def _check_length_growth(growth: LengthGrowth, stage: str) -> _Check:
    """Check the growth of answers; without a record of their lengths it is not shown to be small."""
    change = growth.change
    if change is None:
        message = "The lengths of its answers, or of those before, were not recorded"
        return _Check(False, f"{message}, but promote.max_length_growth limits them: evaluate both again.", {})

    passed = change.high <= growth.limit
    position = "not above" if passed else "above"
    bounds = f"{_percent(change.estimate)} [{_percent(change.low)}, {_percent(change.high)}]"
    message = f"Tokens per answer change by {bounds} against stage {stage} on n = {change.n} questions"
    facts = {"length_growth": change.estimate, "length_growth_low": change.low, "length_growth_high": change.high}
    facts |= {"max_length_growth": growth.limit}
    return _Check(passed, f"{message}; the upper 95 % bound is {position} {100 * growth.limit:g} %.", facts)


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _short(digest: str) -> str:
    return digest[:12] if digest else "none recorded"
