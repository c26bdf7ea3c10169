"""The gate decides from numbers alone and always says why."""

import math

import pytest

from qrl.registry.gate import decide
from qrl.stats import Estimate
from qrl.tracking.cells import Evaluated


def cell(name="base:full", digest="sha256-aaaa", parent="", broken=()):
    variant, scheme = name.split(":")
    return Evaluated("run", variant, scheme, digest, parent, "models:/m-1", 0.6, 0.01, 2000, tuple(broken))


def base(digest="sha256-aaaa", version="sha256-aaaa", model="sha256-aaaa", **facts):
    return decide("base", cell(digest=digest, **facts), version, before_digest=model)


def grpo(gain=(0.05, 0.03, 0.07), parent="bbbb", base="bbbb", min_gain=0.0, name="grpo:full"):
    estimate, low, high = gain
    gain = Estimate(estimate, 0.01, low, high, 2000)
    return decide("grpo", cell(name, parent=parent), "sha256-aaaa", before_digest=base, difference=gain, limit=min_gain)


def awq(low, parent="cccc", max_loss=0.05, name="grpo:awq"):
    difference = Estimate(-0.02, 0.01, low, 0.0, 2000)
    before = {"before_digest": "cccc", "difference": difference}
    return decide("awq", cell(name, parent=parent), "sha256-aaaa", **before, limit=max_loss)


def test_a_good_version_passes_with_its_reasons():
    decision = grpo()
    assert decision.passed and decision.stage == "grpo" and len(decision.reasons) == 5
    reason = next(reason for reason in decision.reasons if "gain over base" in reason)
    assert "+0.050 [+0.030, +0.070]" in reason and "n = 2000" in reason and "lower 95 % bound is above 0." in reason
    assert decision.facts["gain_low"] == 0.03 and decision.facts["version_digest"] == "sha256-aaaa"
    assert str(decision).startswith("Stage grpo passes: ")


@pytest.mark.parametrize(
    ("low", "min_gain", "passed"),
    [
        (0.03, 0.0, True),
        (0.0, 0.0, False),
        (-0.01, 0.0, False),
        (0.03, 0.03, False),
        (0.03, 0.02, True),
        (math.nan, 0.0, False),
    ],
)
def test_the_gains_lower_bound_decides(low, min_gain, passed):
    decision = grpo(gain=(0.05, low, 0.07), min_gain=min_gain)
    assert decision.passed is passed
    if not passed:
        assert "lower 95 % bound is not above" in decision.reasons[0]


@pytest.mark.parametrize(
    ("low", "max_loss", "passed"),
    [(-0.04, 0.05, True), (-0.05, 0.05, False), (-0.06, 0.05, False), (-0.06, 0.07, True), (math.nan, 0.05, False)],
)
def test_the_loss_to_awq_decides(low, max_loss, passed):
    assert awq(low, max_loss=max_loss).passed is passed


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (base(broken=["eos rate 0.20 is under 0.95"]), "eos rate 0.20 is under 0.95"),
        (base("aaaa", "bbbb", "aaaa"), "are not the version's (bbbb)"),
        (base("", "", ""), "none recorded"),
        (grpo(parent="dddd"), "from dddd, not from the version at stage base (bbbb)"),
        (grpo(parent="", base=""), "none recorded"),
        (awq(-0.01, parent="dddd"), "not from the version at stage grpo (cccc)"),
        (base(name="grpo:full"), "grpo:full, but only base:full"),
        (grpo(name="grpo:awq"), "grpo:awq, but only grpo:full"),
        (grpo(name="qat-int4:full"), "qat-int4:full, but only grpo:full"),
        (awq(-0.01, name="grpo:awq+kv-fp8"), "grpo:awq+kv-fp8, but only grpo:awq"),
        (awq(-0.01, name="grpo:nf4"), "grpo:nf4, but only grpo:awq"),
        (awq(-0.01, name="base:awq"), "base:awq, but only grpo:awq"),
        (base(model="bbbb"), "not the base model itself"),
    ],
)
def test_any_failed_check_refuses_and_is_named_first(decision, reason):
    assert not decision.passed and reason in decision.reasons[0]
    assert f"Stage {decision.stage} is refused" in str(decision)


@pytest.mark.parametrize(
    ("high", "passed"), [(0.19, True), (0.2, True), (0.21, False), (math.nan, False), (None, False)]
)
def test_the_growth_of_answers_is_limited_by_its_upper_bound_if_a_limit_is_set(high, passed):
    growth = None if high is None else Estimate(0.1, 0.01, 0.05, high, 2000)
    loss = Estimate(-0.01, 0.01, -0.02, 0.0, 2000)
    given = {"before_digest": "cccc", "difference": loss, "limit": 0.05, "growth": growth}
    candidate = cell("grpo:awq", parent="cccc"), "sha256-aaaa"
    decision = decide("awq", *candidate, **given, max_growth=0.2)
    assert decision.passed is passed
    if high in (0.19, 0.21):
        where = "not above 20 %" if passed else "above 20 %"
        assert any(
            f"+10.0 % [+5.0 %, +{100 * high:.1f} %]" in reason and where in reason for reason in decision.reasons
        )
        assert decision.facts["length_growth_high"] == high
    assert decide("awq", *candidate, **given).passed  # no limit by default


def test_base_needs_no_gain():
    assert base().passed
