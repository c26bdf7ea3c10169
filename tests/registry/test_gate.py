"""The gate decides from numbers alone and always says why."""

import dataclasses
import math

import pytest

from qrl.recipe.stages import DEFAULT, Stage, completed
from qrl.registry.gate import Evidence, Gain, GainKept, LengthGrowth, Loss, decide
from qrl.stats import Estimate
from qrl.tracking.cells import Evaluated

STAGES = {stage.stage: stage for stage in DEFAULT}


def cell(name="base:full", digest="sha256-aaaa", parent="", broken=()):
    variant, scheme = name.split(":")
    return Evaluated("run", variant, scheme, digest, parent, "models:/m-1", 0.6, 0.01, 2000, tuple(broken))


def base(digest="sha256-aaaa", version="sha256-aaaa", model="sha256-aaaa", **facts):
    return decide(STAGES["base"], cell(digest=digest, **facts), Evidence(version, origin_digest=model))


def grpo(gain=(0.05, 0.03, 0.07), parent="bbbb", base="bbbb", min_gain=0.0, name="grpo:full"):
    estimate, low, high = gain
    gain = Gain("base", Estimate(estimate, 0.01, low, high, 2000), min_gain)
    return decide(STAGES["grpo"], cell(name), Evidence("sha256-aaaa", parent, base, gain=gain))


def awq(low, parent="cccc", max_loss=0.05, name="grpo:awq", **further):
    loss = Loss("grpo", "grpo at full precision", Estimate(-0.02, 0.01, low, 0.0, 2000), max_loss)
    return decide(STAGES["awq"], cell(name), Evidence("sha256-aaaa", parent, "cccc", loss=loss, **further))


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
    change = None if high is None else Estimate(0.1, 0.01, 0.05, high, 2000)
    decision = awq(-0.02, length_growth=LengthGrowth(change, 0.2))
    assert decision.passed is passed
    if high in (0.19, 0.21):
        where = "not above 20 %" if passed else "above 20 %"
        assert any(
            f"+10.0 % [+5.0 %, +{100 * high:.1f} %]" in reason and where in reason for reason in decision.reasons
        )
        assert decision.facts["length_growth_high"] == high
    assert awq(-0.02).passed  # no limit by default


@pytest.mark.parametrize(
    ("low", "least", "passed"), [(0.58, 0.5, True), (0.5, 0.5, True), (0.49, 0.5, False), (math.nan, 0.5, False)]
)
def test_the_share_of_the_gain_that_is_kept_decides_by_its_lower_bound(low, least, passed):
    share = Estimate(0.62, 0.02, low, 0.66, 2000)
    decision = awq(-0.02, gain_kept=GainKept(share, least))
    assert decision.passed is passed and decision.facts["min_gain_kept"] == least
    reason = next(reason for reason in decision.reasons if "of the gain" in reason)
    shown = "?" if math.isnan(low) else f"{100 * low:.0f}"
    assert f"62 % [{shown}, 66] of the gain on n = 2000 questions" in reason
    assert f"is {'not below' if passed else 'below'} 50 %" in reason
    assert awq(-0.02).passed  # no share is asked for by default


def test_a_share_that_is_unknown_is_not_shown():
    decision = awq(-0.02, gain_kept=GainKept(None, 0.5))
    assert not decision.passed and "no gain is shown at full precision" in decision.reasons[0]
    decision = awq(-0.02, gain_kept=GainKept(None, 0.5, ("base:full", "base:awq")))
    assert not decision.passed and "no sealed evaluation of base:full, base:awq" in decision.reasons[0]


def test_base_needs_no_gain():
    assert base().passed


def test_another_task_is_refused_before_anything_is_subtracted():
    candidate = dataclasses.replace(cell("grpo:full"), task="math")
    decision = decide(STAGES["grpo"], candidate, Evidence("sha256-aaaa", "bbbb", "bbbb", tasks={"base": "gsm8k"}))
    assert not decision.passed and "on the task math, but stage base on gsm8k" in decision.reasons[0]
    with pytest.raises(ValueError, match="needs a difference"):
        decide(STAGES["grpo"], candidate, Evidence("sha256-aaaa", "bbbb", "bbbb", tasks={"base": "math"}))


def test_a_stage_may_ask_for_a_gain_and_a_loss_and_both_count():
    int4 = Stage.model_validate("int4=qat-int4:rtn-int4;made_from=base")
    stages = completed((STAGES["base"], STAGES["grpo"], int4))
    stage = stages[-1].model_copy(update={"gain_over": "base", "loss_to": "grpo"})
    for low, passed in ((-0.04, True), (-0.06, False)):
        loss = Loss("grpo", "grpo at full precision", Estimate(-0.02, 0.01, low, 0.0, 2000), 0.05)
        gain = Gain("base", Estimate(0.2, 0.01, 0.1, 0.3, 2000), 0.0)
        evidence = Evidence("sha256-aaaa", "bbbb", "bbbb", gain=gain, loss=loss)
        decision = decide(stage, cell("qat-int4:rtn-int4"), evidence)
        assert decision.passed is passed
        assert decision.facts["gain_to"] == "base" and decision.facts["difference_to"] == "grpo"
