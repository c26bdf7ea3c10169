"""The promotion decision: numbers in, verdict and reasons out. It reads nothing and moves nothing.

A recipe declares its stages (`promote.stages`), and each asks for its own cell, a healthy evaluation, and weights that
were made from the version at an earlier stage. `gain_over` and `loss_to` name the stages to compare with:

    base   base:full, the base model itself; healthy, on at least `promote.min_n` questions; and the weights that were
           evaluated are the version's
    grpo   grpo:full, made from the base version; the lower bound of its paired gain is above `promote.min_gain`
    awq    grpo:awq, made from the grpo version; its loss against that is smaller than `promote.max_loss`

With `promote.min_gain_kept`, a quantized stage must keep that share of the gain. With `promote.max_length_growth`, the
tokens per answer of a stage made from another may not grow by more than that.
Bounds are those of the two-sided 95 % interval, the one that the table prints. What cannot be compared (a bound that is
NaN, an empty digest, another task) counts as not shown and is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qrl.recipe.stages import Stage
from qrl.stats import Estimate, signed
from qrl.stats.text import interval, percent_interval
from qrl.tracking.cells import Evaluated

_Check = tuple[bool, str, dict[str, float | str]]  # passed, the reason, what was compared


@dataclass(frozen=True)
class Comparison:
    """The candidate's accuracy minus that of the version at a stage, paired, and how it is judged."""

    stage: str
    other: str  # the stage, as the reason names it
    value: Estimate
    limit: float  # accuracy
    gain: bool  # the lower bound must be above the limit; otherwise above minus the limit


@dataclass(frozen=True)
class GainKept:
    """The share of the gain that a quantized candidate keeps, and how it is judged."""

    share: Estimate | None  # None if no gain is shown at full precision, or if cells are missing
    least: float  # the lower bound may not be below
    missing: tuple[str, ...] = ()  # cells without which the share is unknown


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


def decide(
    stage: Stage,
    cell: Evaluated,
    version_digest: str,
    *,
    parent: str = "",
    before_digest: str = "",
    tasks: Mapping[str, str] | None = None,
    differences: Sequence[Comparison] = (),
    growth: Estimate | None = None,
    max_growth: float | None = None,
    gain_kept: GainKept | None = None,
    min_n: int = 1,
) -> Decision:
    """Decide on a stage: by cell, health, digest and lineage, by task, and by every difference that the stage asks for.

    Args:
        stage: as the recipe declares it, complete.
        cell: the candidate's evaluation.
        version_digest: of the weights that would be served.
        parent: digest of the model that must be the one at `stage.made_from`; for the base, unused.
        before_digest: of the version at `stage.made_from`; for the base, of the base model.
        tasks: stage → task of its evaluation, for the stages that the candidate is compared with.
        differences: as the stage asks for; without them, only another task can have kept them from being computed.
        growth: relative change of tokens per answer against the version at `stage.made_from`.
        max_growth: `promote.max_length_growth`; None sets no limit.
        gain_kept: as the stage asks for; None asks for nothing.
        min_n: `promote.min_n`, the least number of questions.
    """
    checks = [_cell(stage, cell), _health(cell), _digest(cell.digest, version_digest)]
    checks += [_few(cell.n, min_n)] if cell.n < min_n else []
    checks += [_itself(cell.digest, before_digest)] if stage.made_from is None else []
    checks += [_lineage(parent, before_digest, stage.made_from)] if stage.made_from else []
    others = [_task(cell.task, task, other) for other, task in (tasks or {}).items() if task != cell.task]
    if not others and len(differences) != sum(other is not None for other in (stage.gain_over, stage.loss_to)):
        raise ValueError(f"Stage {stage.stage} needs a difference to each stage that it is compared with.")
    checks += [*others, *map(_bound, differences)]
    checks += [_length(stage.made_from, growth, max_growth)] if stage.made_from and max_growth is not None else []
    checks += [_kept(gain_kept)] if gain_kept else []
    facts = {key: value for _, _, compared in checks for key, value in compared.items()}
    reasons = tuple(reason for _, reason, _ in sorted(checks, key=lambda check: check[0]))  # failed ones first
    return Decision(stage.stage, all(passed for passed, _, _ in checks), reasons, facts)


def _cell(stage: Stage, cell: Evaluated) -> _Check:
    wanted, actual = stage.cell, f"{cell.variant}:{cell.scheme}"
    facts: dict[str, float | str] = {"cell": actual, "chat": cell.chat}
    if actual == wanted:
        return True, f"It is the cell {wanted}.", facts
    return False, f"It is the cell {actual}, but only {wanted} can hold the stage: give a run of {wanted}.", facts


def _task(task: str, expected: str, stage: str) -> _Check:
    facts: dict[str, float | str] = {"task": task, f"{stage}_task": expected}
    differ = f"It was evaluated on the task {task}, but stage {stage} on {expected}"
    return False, f"{differ}: evaluate both on the same task.", facts


def _itself(digest: str, base: str) -> _Check:
    if base and digest == base:
        return True, "It is the base model itself.", {"base_digest": base}
    made = f"It is not the base model itself ({_short(base)}) but was made from it"
    return False, f"{made}: give the base's own evaluation.", {"base_digest": base}


def _health(cell: Evaluated) -> _Check:
    broken = cell.broken
    facts: dict[str, float | str] = {"broken_limits": float(len(broken))}
    if not broken:
        return True, "The evaluation was healthy.", facts
    unhealthy = "The evaluation was unhealthy, so its accuracy does not count"
    if cell.unhealthy:
        unhealthy = f"Quantization made the answers unhealthy ({cell.unhealthy}), and such a cell holds no stage"
    return False, f"{unhealthy}: {'; '.join(sentence.rstrip('.') for sentence in broken)}.", facts


def _few(n: int, least: int) -> _Check:
    few = f"It answered {n} questions, fewer than promote.min_n = {least}: raise evaluate.n and evaluate it again."
    return False, few, {"n": float(n), "min_n": float(least)}


def _digest(evaluated: str, version: str) -> _Check:
    facts: dict[str, float | str] = {"evaluated_digest": evaluated, "version_digest": version}
    if version and evaluated == version:
        return True, f"The weights that were evaluated are the version's ({_short(version)}).", facts
    differ = f"The evaluated weights ({_short(evaluated)}) are not the version's ({_short(version)})"
    return False, f"{differ}: evaluate this version.", facts


def _lineage(parent: str, expected: str, stage: str) -> _Check:
    at_stage = f"the version at stage {stage} ({_short(expected)})"
    facts: dict[str, float | str] = {"parent_digest": parent, f"{stage}_digest": expected}
    if expected and parent == expected:
        return True, f"It was made from {at_stage}.", facts
    return False, f"It was made from {_short(parent)}, not from {at_stage}: promote its own parent first.", facts


def _bound(compared: Comparison) -> _Check:
    value, limit = compared.value, compared.limit
    bound = limit if compared.gain else -limit
    passed = value.low > bound
    where = f"{'above' if passed else 'not above'} {'0' if bound == 0 else signed(bound)}"
    key = "gain" if compared.gain else "difference"
    name = f"{'gain over' if compared.gain else 'difference to'} {compared.other}"
    reason = f"The {name} is {interval(value)} on n = {value.n} questions; its lower 95 % bound is {where}."
    facts = {key: value.estimate, f"{key}_low": value.low, f"{key}_high": value.high, f"{key}_to": compared.stage}
    return passed, reason, {**facts, "n": float(value.n), "limit": limit}


def _kept(kept: GainKept) -> _Check:
    """Check the share of the gain that is kept; where no gain is shown at full precision, no share of it is."""
    asked = f"at least {100 * kept.least:g} % of the gain must be kept"
    facts: dict[str, float | str] = {"min_gain_kept": kept.least}
    if kept.missing:
        without = f"on its questions there is no sealed evaluation of {', '.join(kept.missing)}"
        return False, f"{asked.capitalize()}, but {without}: evaluate base and trained model together.", facts
    share = kept.share
    if share is None:
        return False, f"{asked.capitalize()}, but no gain is shown at full precision.", facts
    passed = share.low >= kept.least
    where = f"{'not below' if passed else 'below'} {100 * kept.least:g} %"
    kept_share = f"It keeps {percent_interval(share)} of the gain on n = {share.n} questions"
    reason = f"{kept_share}; the lower 95 % bound is {where}."
    facts |= {"gain_kept": share.estimate, "gain_kept_low": share.low, "gain_kept_high": share.high}
    return passed, reason, facts


def _length(before: str, value: Estimate | None, limit: float) -> _Check:
    """Check the growth of answers; without a record of their lengths it is not shown to be small."""
    if value is None:
        unknown = "The lengths of its answers, or of those before, were not recorded"
        return False, f"{unknown}, but promote.max_length_growth limits them: evaluate both again.", {}
    passed = value.high <= limit
    change, low, high = (f"{100 * end:+.1f} %".replace("-", "−") for end in (value.estimate, value.low, value.high))
    where = f"{'not above' if passed else 'above'} {100 * limit:g} %"
    reason = f"Tokens per answer change by {change} [{low}, {high}] against stage {before} on n = {value.n} questions"
    facts = {"length_growth": value.estimate, "length_growth_low": value.low, "length_growth_high": value.high}
    return passed, f"{reason}; the upper 95 % bound is {where}.", {**facts, "max_length_growth": limit}


def _short(digest: str) -> str:
    return digest[:12] if digest else "none recorded"
