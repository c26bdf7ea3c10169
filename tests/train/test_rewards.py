"""Rewards: what each gives, the user's own in sentences, and which of them a training logs."""

import json

import pandas as pd
import pytest

from qrl import checkpoint, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.recipe import Train, rules
from qrl.tasks.question import leaked
from qrl.train import Job, grpo, reward

QUESTIONS = tasks.load("arithmetic", "train", 32, 0)
SMALL = {"steps": 2, "prompts_per_step": 4, "generations": 4, "micro_batch": 16, "max_completion_tokens": 48}
OWN = """
def short(completions, answers):
    return [-0.01 * len(completion) for completion in completions]
def few(completions, answers):
    return [1.0]
def unclear(completions, answers):
    return [float("nan")] * len(completions)
def failing(completions, answers):
    return [1 / int(answer == "never") for answer in answers]
def text(completions, answers):
    return ["high"] * len(completions)
def number(completions, answers):
    return 1.0
def slow(completions, answers):
    while True: pass
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return f"{tmp_path}/mine.py:"


@pytest.mark.parametrize(
    ("task", "completion", "answer", "right"),
    [
        ("gsm8k", "<answer>18</answer> and 7 more", "18", 1),
        ("gsm8k", "<answer>18</answer> <ANSWER> $20 </ANSWER>", "20", 1),
        ("gsm8k", "<answer>about</answer> 18", "18", 0),
        ("gsm8k", "#### 18\nOr 20", "18", 1),
        ("gsm8k", "The answer is $1,018.50. There are 3 left", "1018.5", 1),
        ("gsm8k", "the answer is: 18 dollars because 3 x 6", "18", 1),
        ("gsm8k", "Answer: -4\nCheck 5", "-4", 1),
        ("gsm8k", "The answer is 3. No, the answer is 4.", "4", 1),
        ("gsm8k", "The answer is unknown, perhaps 18", "18", 1),  # its first number
        ("gsm8k", "The answer is 3 + 2 = 5.", "5", 1),
        ("gsm8k", "<answer></answer> 5", "5", 1),
        ("gsm8k", "She has 18 left", "18", 1),
        ("gsm8k", "The answers are many", "18", 0),
        ("gsm8k", "", "18", 0),
        ("math", r"<answer>\frac{14}{3}</answer>", r"\frac{14}{3}", 1),
        ("math", r"so \boxed{7}. The answer is 8", "7", 1),
        ("math", r"The answer is $\frac{14}{3}$.", r"\frac{14}{3}", 1),
        ("math", r"The answer is $\frac{1}{2}$, which is positive.", r"\frac{1}{2}", 1),
        ("math", "The answer is 5.", "7", 0),
    ],
)
def test_the_flexible_reward_reads_tag_form_phrase_and_last_number_in_this_order(task, completion, answer, right):
    (flexible,) = reward.functions(task, ("flexible",))
    assert flexible([completion, ""], [answer] * 2) == [right, 0]


def test_a_files_grader_judges_flexibly_by_its_own_rules(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from qrl.tasks import Verdict\ndef load(split, n, seed): ...\n"
        "def grade(completion, answer): return Verdict(None, False, completion == answer)\n"
    )
    (flexible,) = reward.functions(str(tmp_path / "mine.py"), ("flexible",))
    assert flexible(["x", "the answer is x"], ["x", "x"]) == [1, 0]


def test_a_leak_costs_a_quarter_where_evaluation_counts_one():
    tokens = hf.tokenizer(tiny.PATH)
    (leak,) = reward.functions("arithmetic", ("leak",), tokens=tokens)
    question, end = QUESTIONS[0].question, tokens.eos_token_id
    texts = ["#### 7", f"#### 7\n{question}", "#### 7<|im_start|>user", "#### 7"]
    ids = [tokens(text, add_special_tokens=False)["input_ids"] for text in texts]
    ids = [[*ids[0], end], [*ids[1], end], ids[2], ids[3]]  # the last two are cut off
    markers = tokens.all_special_tokens
    wanted = [-0.25 if leaked(question, text, text, markers) else 0.0 for text in texts]
    assert leak(texts, completion_ids=ids, question=[question] * 4) == wanted == [0, -0.25, -0.25, 0]


def test_soft_overlong_falls_over_its_last_tokens_as_in_equation_13():
    lengths = [1, 64, 72, 80]
    for tokens, wanted in ((None, [0, 0, -0.5, -1]), (16, [0, 0, -0.5, -1]), (80, [-1 / 80, -0.8, -0.9, -1])):
        settings = Train(max_completion_tokens=80, soft_overlong_tokens=tokens)
        (punish,) = reward.functions("arithmetic", ("soft_overlong",), settings)
        assert punish(completion_ids=[[0] * length for length in lengths]) == pytest.approx(wanted)
        assert punish.__name__ == "soft_overlong"


FAULTS = {
    "few": "returned 1 rewards for 2 completions",
    "unclear": "returned nan, but finite numbers",
    "failing": "line 9, ZeroDivisionError",
    "text": "line .*ValueError|ValueError",
    "number": "TypeError",
    "slow": "took longer than 0.4 s for 2 completions: make it faster",
    "missing": r"no function missing: expected missing\(completions, answers\)",
}


@pytest.mark.process
@pytest.mark.parametrize("name", FAULTS)
def test_what_a_reward_of_the_users_does_wrong_is_a_sentence_before_and_during_the_run(name, own, monkeypatch):
    monkeypatch.setattr("qrl.tasks.own.REWARD_S", 0.4)
    monkeypatch.setattr("qrl.tasks.own.GRADE_S", 0.2)
    with pytest.raises(BadInput, match=FAULTS[name]):
        reward.check(Train(rewards=("correct", own + name)), QUESTIONS)
    with pytest.raises(QrlError, match=FAULTS[name]):
        (wrong,) = reward.functions("arithmetic", (own + name,))
        wrong(["a", "b"], ["1", "2"])


def test_settings_without_effect_and_names_that_cannot_be_told_apart_are_refused(own, tmp_path):
    with pytest.raises(BadInput, match="soft_overlong_tokens = 8 has no effect"):
        rules.check_training(Train(soft_overlong_tokens=8))
    with pytest.raises(BadInput, match=r"exceeds train\.max_completion_tokens = 80"):
        rules.check_training(Train(rewards=("soft_overlong",), soft_overlong_tokens=81))
    with pytest.raises(BadInput, match="cannot be read"):
        reward.check(Train(rewards=(f"{tmp_path}/none.py:short",)), ())
    for names in (("correct", "a.py:correct"), ("a.py:f", "b.py:f")):
        with pytest.raises(ValueError, match="different names"):
            Train(rewards=names)
    for name in ("best", "a.py", "a.py:1f", "a.txt:f", ":f"):
        with pytest.raises(ValueError, match=r"FILE\.py:FUNCTION"):
            Train(rewards=(name,))


@pytest.mark.slow
@pytest.mark.process
def test_every_reward_is_weighted_summed_and_logged_by_its_name(own, tmp_path):
    rewards = ("correct", "format", "flexible", "leak", "soft_overlong", f"{own}short")
    weights = (1.0, 0.1, 0.5, 2.0, 0.25, 3.0)
    settings = Train(rewards=rewards, reward_weights=weights, **SMALL)
    data = {"base": tiny.PATH, "questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 0}
    seen = []
    job = Job(
        settings=settings,
        device="cpu",
        work=tmp_path / "work",
        out=tmp_path / "model",
        log=lambda metrics, step: seen.append(metrics),
        **data,
    )
    done = grpo.run(job)
    assert checkpoint.check(done.path)
    names = ["correct", "format", "flexible", "leak", "soft_overlong", "short"]
    for metrics, (_, row) in zip(seen, done.history.iterrows(), strict=True):
        assert all(row[f"reward_{name}"] == metrics[f"train/reward_{name}"] for name in names)
        total = sum(metrics[f"train/reward_{name}"] * weight for name, weight in zip(names, weights, strict=True))
        assert metrics["train/reward"] == pytest.approx(total, abs=1e-5)
    table = pd.read_parquet(next((tmp_path / "work" / "completions").glob("*.parquet")))
    assert table["short"].tolist() == pytest.approx([-0.01 * len(_text(value)) for value in table["completion"]])
    assert done.completions["reward"].notna().all()


def _text(completion) -> str:
    value = json.loads(completion) if isinstance(completion, str) else completion
    return value[-1]["content"]
