"""The promotion decision: numbers in, verdict and reasons out. Nothing is read and nothing is moved here.

    base   healthy, and the weights that were evaluated are the version's
    grpo   the same, descends from the base version, and its paired gain's lower bound lies above `promote.min_gain`
    awq    the same, descends from the grpo version, and loses less than `promote.max_loss` against it

Bounds are those of the two-sided 95 % interval, the one that the table prints. What cannot be compared, a bound that is
NaN or a digest that is empty, counts as not shown and refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qrl.stats import Estimate, signed


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
class Evidence:
    """What every gate looks at.

    `broken_limits` are the sentences of the cells' health checks, empty for healthy cells; `evaluated_digest` is of the
    weights that answered the questions, `version_digest` of those that would be served.
    """

    broken_limits: Sequence[str]
    evaluated_digest: str
    version_digest: str


Check = tuple[bool, str, dict[str, float | str]]


def decide_base(evidence: Evidence) -> Decision:
    """Base: nothing to gain yet, so health and digest decide."""
    return _decide("base", _health(evidence), _digest(evidence))


def decide_grpo(
    evidence: Evidence, *, parent_digest: str, base_digest: str, gain: Estimate, min_gain: float
) -> Decision:
    """GRPO: healthy, measured, descended from the base version, and better than it.

    Args:
        parent_digest: of the weights that training started from.
        base_digest: of the version at stage base.
        gain: grpo − base at full precision, paired.
        min_gain: accuracy that the lower 95 % bound of `gain` must lie above.
    """
    lineage = _lineage(parent_digest, base_digest, "base")
    return _decide(
        "grpo",
        _health(evidence),
        _digest(evidence),
        lineage,
        _bound("gain", "gain over base", gain, min_gain, min_gain),
    )


def decide_awq(
    evidence: Evidence, *, parent_digest: str, grpo_digest: str, difference: Estimate, max_loss: float
) -> Decision:
    """AWQ: healthy, measured, quantized from the grpo version, and hardly worse than it.

    Args:
        parent_digest: of the weights that were quantized.
        grpo_digest: of the version at stage grpo.
        difference: (grpo, awq) − (grpo, full), paired.
        max_loss: accuracy; the lower 95 % bound of `difference` must lie above minus this.
    """
    lineage = _lineage(parent_digest, grpo_digest, "grpo")
    check = _bound("difference", "difference to grpo at full precision", difference, -max_loss, max_loss)
    return _decide("awq", _health(evidence), _digest(evidence), lineage, check)


def _decide(stage: str, *checks: Check) -> Decision:
    ordered = sorted(checks, key=lambda check: check[0])  # failed ones first
    facts = {key: value for _, _, found in checks for key, value in found.items()}
    return Decision(stage, all(passed for passed, _, _ in checks), tuple(reason for _, reason, _ in ordered), facts)


def _health(evidence: Evidence) -> Check:
    broken = list(evidence.broken_limits)
    reason = (
        f"The evaluation was unhealthy, so its accuracy does not count: {'; '.join(broken)}."
        if broken
        else "The evaluation was healthy."
    )
    return not broken, reason, {"broken_limits": float(len(broken))}


def _digest(evidence: Evidence) -> Check:
    evaluated, version = evidence.evaluated_digest, evidence.version_digest
    passed = bool(version) and evaluated == version
    facts = {"evaluated_digest": evaluated, "version_digest": version}
    if passed:
        return True, f"The weights that were evaluated are the version's ({_short(version)}).", facts
    return (
        False,
        f"The weights that were evaluated ({_short(evaluated)}) are not the version's ({_short(version)}): evaluate this version.",
        facts,
    )


def _lineage(parent: str, expected: str, stage: str) -> Check:
    passed = bool(expected) and parent == expected
    facts = {"parent_digest": parent, f"{stage}_digest": expected}
    if passed:
        return True, f"It descends from the version at stage {stage} ({_short(expected)}).", facts
    return (
        False,
        f"It descends from {_short(parent)}, not from the version at stage {stage} ({_short(expected)}): promote its own parent first.",
        facts,
    )


def _bound(key: str, name: str, value: Estimate, bound: float, limit: float) -> Check:
    passed = value.low > bound
    interval = f"{signed(value.estimate)} [{signed(value.low)}, {signed(value.high)}]"
    where = "lies above" if passed else "does not lie above"
    text = "0" if bound == 0 else signed(bound)
    reason = f"The {name} is {interval} on n = {value.n} questions; its lower 95 % bound {where} {text}."
    facts = {
        key: value.estimate,
        f"{key}_low": value.low,
        f"{key}_high": value.high,
        "n": float(value.n),
        "limit": limit,
    }
    return passed, reason, facts


def _short(digest: str) -> str:
    return digest[:12] if digest else "none recorded"
