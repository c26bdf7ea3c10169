"""The promotion decision: numbers in, verdict and reasons out. It reads nothing and moves nothing.

    base   healthy, and the weights that were evaluated are the version's
    grpo   the same, made from the base version, and the lower bound of its paired gain is above `promote.min_gain`
    awq    the same, made from the grpo version, and its loss against that is smaller than `promote.max_loss`

Bounds are those of the two-sided 95 % interval, the one that the table prints. What cannot be compared (a bound that is
NaN, an empty digest) counts as not shown and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qrl.stats import Estimate, signed
from qrl.stats.text import interval


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


class _Check(NamedTuple):
    passed: bool
    reason: str
    facts: Mapping[str, float | str]


def decide_base(evidence: Evidence) -> Decision:
    """Decide on stage base: there is no gain yet, so health and digest count."""
    return _decide("base", evidence)


def decide_grpo(
    evidence: Evidence, parent_digest: str, base_digest: str, *, gain: Estimate, min_gain: float
) -> Decision:
    """Decide on stage grpo: also made from the base version, and better than it.

    Args:
        parent_digest: of the weights that training started from.
        base_digest: of the version at stage base.
        gain: grpo − base at full precision, paired.
        min_gain: accuracy that the lower 95 % bound of `gain` must be above.
    """
    bound = _bound("gain", "gain over base", gain, min_gain, limit=min_gain)
    return _decide("grpo", evidence, _lineage(parent_digest, base_digest, "base"), bound)


def decide_awq(
    evidence: Evidence, parent_digest: str, grpo_digest: str, *, difference: Estimate, max_loss: float
) -> Decision:
    """Decide on stage awq: also quantized from the grpo version, and hardly worse than it.

    Args:
        parent_digest: of the weights that were quantized.
        grpo_digest: of the version at stage grpo.
        difference: (grpo, awq) − (grpo, full), paired.
        max_loss: accuracy; the lower 95 % bound of `difference` must be above minus this.
    """
    bound = _bound("difference", "difference to grpo at full precision", difference, -max_loss, limit=max_loss)
    return _decide("awq", evidence, _lineage(parent_digest, grpo_digest, "grpo"), bound)


def _decide(stage: str, evidence: Evidence, *more: _Check) -> Decision:
    checks = (_health(evidence), _digest(evidence), *more)
    facts = {key: value for check in checks for key, value in check.facts.items()}
    reasons = tuple(check.reason for check in sorted(checks, key=lambda check: check.passed))  # failed ones first
    return Decision(stage, all(check.passed for check in checks), reasons, facts)


def _health(evidence: Evidence) -> _Check:
    broken = list(evidence.broken_limits)
    unhealthy = f"The evaluation was unhealthy, so its accuracy does not count: {'; '.join(broken)}."
    reason = unhealthy if broken else "The evaluation was healthy."
    return _Check(not broken, reason, {"broken_limits": float(len(broken))})


def _digest(evidence: Evidence) -> _Check:
    evaluated, version = evidence.evaluated_digest, evidence.version_digest
    passed = bool(version) and evaluated == version
    reason = f"The weights that were evaluated are the version's ({_short(version)})."
    if not passed:
        other = f"The evaluated weights ({_short(evaluated)}) are not the version's ({_short(version)})"
        reason = f"{other}: evaluate this version."
    return _Check(passed, reason, {"evaluated_digest": evaluated, "version_digest": version})


def _lineage(parent: str, expected: str, stage: str) -> _Check:
    passed = bool(expected) and parent == expected
    at_stage = f"the version at stage {stage} ({_short(expected)})"
    other = f"It was made from {_short(parent)}, not from {at_stage}: promote its own parent first."
    facts = {"parent_digest": parent, f"{stage}_digest": expected}
    return _Check(passed, f"It was made from {at_stage}." if passed else other, facts)


def _bound(key: str, name: str, value: Estimate, bound: float, *, limit: float) -> _Check:
    passed = value.low > bound
    where = f"{'above' if passed else 'not above'} {'0' if bound == 0 else signed(bound)}"
    reason = f"The {name} is {interval(value)} on n = {value.n} questions; its lower 95 % bound is {where}."
    facts = {key: value.estimate, f"{key}_low": value.low, f"{key}_high": value.high}
    return _Check(passed, reason, {**facts, "n": float(value.n), "limit": limit})


def _short(digest: str) -> str:
    return digest[:12] if digest else "none recorded"
