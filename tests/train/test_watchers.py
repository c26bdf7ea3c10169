"""Watchers: each warns once when its trouble lasts, and never on a healthy run; probes change no weight."""

import re

import pytest
import torch

from qrl import checkpoint, recipe, tasks, tiny
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train, Watch, rules
from qrl.tasks import question_sets
from qrl.train import Job, grpo
from qrl.train.monitor import watchers
from qrl.train.rollout import engine_gap

pytestmark = pytest.mark.process

HEALTHY = {"reward": 0.5, "entropy": 1.0, "frac_reward_zero_std": 0.4, "kl": 0.01, "completions/clipped_ratio": 0.02}
TROUBLES = {
    "entropy": ({"entropy": 0.05}, r"nats per token over steps 6 to 8, 1 over steps 1 to 3.*watch\.min_entropy_share"),
    "signal": ({"frac_reward_zero_std": 1.0, "reward": 0.0}, r"steps 6 to 8 .*mean reward 0\).*too hard"),
    "kl": ({"kl": 3.0}, r": 3 nats per token .*watch\.max_reference_kl"),
    "truncation": ({"completions/clipped_ratio": 0.9}, r"0\.9 .*steps 6 to 8 .*watch\.max_truncation"),
}


def seen(rows, **settings):
    watching = watchers.Watchers(Watch(window=3, **settings))
    return watching, [alarm for step, row in enumerate(rows, 1) for alarm in watching.see({"step": step} | row)]


def test_a_healthy_run_is_left_alone():
    assert seen([HEALTHY | {"reward": 0.1 * step, "entropy": 1 - 0.08 * step} for step in range(10)])[1] == []


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_is_told_once_when_it_has_lasted_a_window(name):
    change, sentence = TROUBLES[name]
    _, alarms = seen([HEALTHY] * 5 + [HEALTHY | change] * 6)
    assert [(alarm.watcher, alarm.step) for alarm in alarms] == [(name, 8)]
    assert re.search(sentence, alarms[0].sentence), alarms[0].sentence
    assert seen([HEALTHY, HEALTHY, HEALTHY | change, HEALTHY] * 3)[1] == []  # now and then is no trouble


def test_a_stop_for_what_is_never_measured_is_refused():
    plain = Train(prompts_per_step=8, micro_batch=64)

    def check(*stop, settings=plain, rollout=Rollout(), every=0):
        rules.check_training(settings, rollout, Watch(stop=stop, probe_every=every))

    with pytest.raises(BadInput, match=r"watch\.stop = kl .*train\.beta"):
        check("kl")
    with pytest.raises(BadInput, match=r"watch\.stop = probe .*watch\.probe_every"):
        check("probe")
    for unmeasured in (Rollout(), Rollout(engine="vllm", is_correction="none")):
        with pytest.raises(BadInput, match=r"watch\.stop = rollout .*rollout\.is_correction"):
            check("rollout", rollout=unmeasured)
    check("rollout", rollout=Rollout(engine="vllm"))
    check("kl", "probe", settings=plain.model_copy(update={"beta": 0.1}), every=2)


def test_an_engine_further_away_than_the_recipe_allows_is_told_at_its_first_step():
    near = HEALTHY | {"rollout/kl_k3": 0.001, "rollout/token_ess": 0.99}
    for wide in ({"rollout/kl_k3": 0.1}, {"rollout/token_ess": 0.5}):
        _, (alarm,) = seen([near, near | wide, near | wide])
        assert (alarm.watcher, alarm.step) == ("rollout", 2)
        assert re.search(r"rollout\.max_engine_kl = 0\.01.*rollout\.min_effective_sample_size = 0\.9", alarm.sentence)
    assert (
        seen([near] * 4)[1] == [] and seen([HEALTHY | {"rollout/completions_per_s": 9.0}] * 4)[1] == []
    )  # a gap that is not measured
    fp8 = watchers.Watchers(Watch(stop=("rollout",)), Rollout(engine="vllm", quantization="fp8", max_engine_kl=1))
    (alarm,) = fp8.see(near | {"step": 1, "rollout/kl_k3": 2.0})
    assert "rollout.quantization = fp8" in alarm.sentence and fp8.stop([alarm]) is alarm
    rounding = watchers.Watchers(Watch(), Rollout(engine="vllm"), "nvfp4-a4")
    (alarm,) = rounding.see(near | {"step": 1, "rollout/kl_k3": 0.02})
    assert "train in another format than nvfp4-a4" in alarm.sentence


def gaps(scale, tokens=2048, completions=64, steps=8):
    """Return a row for each step of an engine whose gap to the trainer has the spread scale(step, position)."""
    chance = torch.Generator().manual_seed(0)
    position = torch.linspace(0, 1, tokens)
    for step in range(steps):
        spread = scale(step, position) * torch.ones(completions, tokens)
        engine = -torch.rand(completions, tokens, generator=chance)
        # Of log p − log q with samples from q: its mean is −KL, half its variance.
        trainer = engine + spread * torch.randn(completions, tokens, generator=chance) - spread.square() / 2
        gap = vars(engine_gap.measure(trainer, engine, torch.ones_like(engine)))
        yield HEALTHY | {f"rollout/{name}": value for name, value in gap.items()}


COLLAPSES = {  # spreads of a token's log-ratio, k3 being half their square, and what the watcher says of them
    "along completions": (
        {"tokens": 1024},
        lambda step, position: 0.02 + 0.08 * position,
        r"along completions: KL 0\.0\d+ .*last quarter.*rollout\.max_gap_growth = 5 .*train\.max_completion_tokens",
    ),
    "over steps": (
        {"tokens": 64},
        lambda step, position: 0.02 + 0.015 * step,
        r"grows over steps: KL 0\.0\d+ .*over steps 6 to 8, 0\.0\d+ over steps 1 to 3.*rollout\.max_gap_growth = 5 ",
    ),
    "in whole completions": (  # each token's gap is FP8's on qrl-tiny
        {"tokens": 16384},
        lambda step, position: 0.02,
        r"over steps 1 to 3, below rollout\.min_sequence_ess = 0\.2",
    ),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_gap_that_makes_long_completions_worthless_is_told_though_each_tokens_is_small(name):
    shape, scale, sentence = COLLAPSES[name]
    rows = list(gaps(scale, **shape))
    assert all(row["rollout/kl_k3"] < 0.01 and row["rollout/token_ess"] > 0.9 for row in rows)  # the limits of a token
    _, (alarm,) = seen(rows)
    assert alarm.watcher == "rollout" and re.search(sentence, alarm.sentence), alarm.sentence
    assert seen(rows[:2])[1] == []  # not before a whole window
    fp8 = watchers.Watchers(Watch(window=1), Rollout(engine="vllm", quantization="fp8"))
    told = [alarm for step, row in enumerate(rows, 1) for alarm in fp8.see({"step": step} | row)]
    assert name == "over steps" or "leave rollout.quantization = fp8 out" in told[0].sentence
    near = next(gaps(lambda step, position: 0.0035, tokens=64))
    assert seen([near, near, *(row for each in rows for row in (each, near))])[1] == []  # now and then is no trouble


def test_a_gap_that_stays_or_stays_negligible_is_left_alone():
    for scale, tokens in (
        (lambda step, position: 0.0035, 8192),  # bf16 rollouts, k3 6e-6
        (lambda step, position: 0.02, 2048),  # FP8's, k3 2e-4
        (lambda step, position: 0.057, 256),  # nvfp4-a4, k3 1.6e-3
        (lambda step, position: 0.0002 * (1 + 9 * position) * (1 + 2 * step), 2048),  # grows, to nearly nothing
        (lambda step, position: 0.03 + 0.02 * position, 512),  # grows a little
    ):
        assert seen(gaps(scale, tokens=tokens))[1] == []
    old = [HEALTHY | {"rollout/kl_k3": 0.005, "rollout/token_ess": 0.99}] * 8  # before quarters were measured
    assert seen(old)[1] == [] and seen([HEALTHY, *old])[1] == []


def test_without_a_reference_or_completions_nothing_is_said_of_them():
    assert seen([{"reward": 0.5, "entropy": 1.0}] * 8)[1] == []


def probed(before: int, after: int, rewards=(0.3, 0.6)):
    rows = [HEALTHY | {"reward": rewards[0]}] * 4 + [HEALTHY | {"reward": rewards[1]}] * 4
    answers = [{"probe": [1] * right + [0] * (100 - right)} for right in (before, after)]
    return seen([answers[0], *rows, answers[1]])[1]


def test_a_reward_that_rises_while_held_out_accuracy_falls_is_told_with_its_interval():
    (alarm,) = probed(60, 40)
    assert alarm.watcher == "probe" and "n = 100 probe questions −0.200 [−0.292, −0.118]" in alarm.sentence
    assert probed(60, 59) == []  # one question in a hundred is no fall
    assert probed(40, 60) == [] and probed(60, 40, rewards=(0.6, 0.3)) == []  # the reward says the same as the probe


def test_a_recipe_stops_for_what_it_names_and_for_nothing_else():
    watching, alarms = seen([HEALTHY] * 3 + [HEALTHY | {"kl": 3.0, "frac_reward_zero_std": 1.0}] * 4, stop=("signal",))
    assert {alarm.watcher for alarm in alarms} == {"kl", "signal"}
    assert watching.stop(alarms).watcher == "signal"
    assert watchers.Watchers(Watch()).stop(alarms) is None


QUESTIONS = tasks.load("arithmetic", "train", 24, 0)
CUT = Train(steps=5, prompts_per_step=4, generations=2, micro_batch=8, max_completion_tokens=4, save_every=2)


def job(folder, settings, **changes):
    data = {"base": tiny.PATH, "questions": QUESTIONS[:16], "task": "arithmetic", "template": "plain", "seed": 0}
    return Job(settings=settings, device="cpu", work=folder / "work", out=folder / "model", **data | changes)


@pytest.mark.slow
def test_a_training_that_learns_nothing_is_warned_of_and_stopped_with_the_weights_of_that_step(tmp_path):
    warnings, logged = [], []
    watched = {"watch": Watch(window=2, stop=("signal",), probe_every=1, probe_n=8), "probe_questions": QUESTIONS[16:]}
    watched |= {"warn": warnings.append, "log": lambda metrics, step: logged.append((step, metrics))}
    done = grpo.run(job(tmp_path / "watched", CUT, **watched))
    assert sorted(alarm.watcher for alarm in warnings) == ["signal", "truncation"]
    assert done.stopped.watcher == "signal" and done.stopped.step == 2 and done.history["step"].tolist() == [1, 2]
    assert [step for step, metrics in logged if "probe/accuracy" in metrics] == [0, 1, 2]
    assert [step for step, metrics in logged if metrics.get("watch/signal") == 1] == [2]
    curve = done.probes
    assert curve["step"].tolist() == [0, 1, 2] and set(curve["n"]) == {8}
    assert (
        (curve["low"] <= curve["accuracy"]).all()
        and (curve["accuracy"] <= curve["high"]).all()
        and (curve["low"] < curve["high"]).all()
    )
    plain = grpo.run(job(tmp_path / "plain", CUT.model_copy(update={"steps": 2})))
    assert checkpoint.digest(done.path) == checkpoint.digest(plain.path)  # a probe draws no random number
    assert plain.stopped is None


@pytest.mark.parametrize("seed", [0, 7])
def test_probe_questions_are_neither_trained_on_nor_held_out(seed):
    settings = recipe.load("tiny", {"seed": str(seed), "watch.probe_every": "5", "evaluate.n": "3000"})
    trained, heldout = (
        question_sets.load(settings, "train", settings.train.questions),
        question_sets.load_all_heldout(settings),
    )
    probe = question_sets.load_probe(settings, trained, heldout)
    texts = {question.question for question in probe}
    assert len(texts) == len(probe) == settings.watch.probe_n
    assert not texts & {question.question for question in (*trained, *heldout)}


def test_a_folder_with_too_few_questions_for_a_probe_is_refused(tmp_path):
    for file, n in (("train.jsonl", 12), ("test.jsonl", 4)):
        lines = [f'{{"question": "{file}: {i}?", "answer": "#### {i}"}}\n' for i in range(n)]
        (tmp_path / file).write_text("".join(lines))
    overrides = {"data": str(tmp_path), "train.questions": "8", "watch.probe_every": "1", "watch.probe_n": "4"}
    settings = recipe.load("tiny", overrides)
    trained, heldout = question_sets.load(settings, "train", 8), question_sets.load_all_heldout(settings)
    probe = question_sets.load_probe(settings, trained, heldout)
    assert len(probe) == 4 and not {q.question for q in probe} & {q.question for q in (*trained, *heldout)}
    with pytest.raises(BadInput, match=r"4 questions .*watch\.probe_n asks for 5"):
        question_sets.load_probe(recipe.load("tiny", overrides | {"watch.probe_n": "5"}), trained, heldout)


def test_a_probe_larger_than_any_use_of_it_is_refused_before_questions_are_made():
    with pytest.raises(BadInput, match=r"'watch\.probe_n' is '100000000'"):
        recipe.load("tiny", {"watch.probe_n": "100000000"})
