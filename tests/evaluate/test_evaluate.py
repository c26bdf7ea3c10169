"""The engine and evaluation: what is asked is what was rendered, what is unhealthy does not count."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from qrl import checkpoint, names, stats, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.evaluate import cells, groups, health, scores
from qrl.recipe import Evaluate, Recipe, rules
from qrl.tasks import prompt, question_sets
from qrl.tasks.math import pool
from qrl.tasks.question import leaked as is_leaked

pytestmark = pytest.mark.process

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(scope="module")
def loaded():
    return hf.load(tiny.PATH, "cpu", torch.float32)


@pytest.fixture(scope="module")
def prompts(loaded):
    return [prompt.render(loaded[1], q.question, "plain") for q in tasks.load("arithmetic", "heldout", 12, 0)]


def test_what_evaluation_will_not_do_is_said():
    assert (
        rules.warnings(Recipe())
        == rules.warnings(Recipe(evaluate=Evaluate(samples=8, temperature=0.7)))
        == rules.warnings(Recipe(evaluate=Evaluate(engine="vllm", deterministic=True)))
        == []
    )
    sentences = rules.warnings(Recipe(evaluate=Evaluate(temperature=0.7, deterministic=True)))
    assert [line.split(" means nothing")[0] for line in sentences] == [
        "evaluate.temperature = 0.7",
        "evaluate.deterministic",
    ]


def test_cells_of_one_tokenizer_share_their_prompts_and_others_do_not(tmp_path):
    questions, rendered_texts = tasks.load("arithmetic", "heldout", 3, 0), []

    def render(tokens, text, template):
        rendered_texts.append(text)
        return prompt.render(tokens, text, template)

    def rendered(path, template="plain"):
        return cells._rendered(path, hf.tokenizer(path), questions, template, render)

    quantized = shutil.copytree(tiny.PATH, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "other"}}))
    assert rendered(tiny.PATH) == rendered(quantized) and len(rendered_texts) == 3
    other_template = shutil.copytree(tiny.PATH, tmp_path / "other")
    chat = other_template / "chat_template.jinja"
    text = chat.read_text() if chat.is_file() else ""
    settings = json.loads((other_template / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (other_template / "tokenizer_config.json").write_text(json.dumps(settings))
    chat.write_text("Please. " + (text or hf.tokenizer(tiny.PATH).chat_template))
    assert rendered(other_template) != rendered(tiny.PATH) and len(rendered_texts) == 9
    assert rendered(tiny.PATH, "answer-line") != rendered(tiny.PATH) and len(rendered_texts) == 15


def test_batches_do_not_change_what_is_written(loaded, prompts):
    one_by_one = [hf.generate(*loaded, [ids], max_new_tokens=64, batch_size=1)[0].text for ids in prompts]
    in_one_batch = [completion.text for completion in hf.generate(*loaded, prompts, max_new_tokens=64, batch_size=12)]
    assert (
        sum(a == b for a, b in zip(one_by_one, in_one_batch, strict=True)) >= 11
    )  # fp32 sums differ by order, ties may flip


def test_completions_come_back_in_the_order_asked(loaded, prompts):
    forward = [completion.text for completion in hf.generate(*loaded, prompts, max_new_tokens=64, batch_size=5)]
    backward = [completion.text for completion in hf.generate(*loaded, prompts[::-1], max_new_tokens=64, batch_size=5)]
    assert sum(a == b for a, b in zip(forward, backward[::-1], strict=True)) >= 11


def test_the_end_token_ends_and_the_limit_cuts(loaded, prompts):
    assert {
        completion.finish_reason for completion in hf.generate(*loaded, prompts, max_new_tokens=2, batch_size=12)
    } == {"length"}
    completions = hf.generate(*loaded, prompts, max_new_tokens=96, batch_size=12)
    assert any(completion.finish_reason == "stop" for completion in completions)
    assert not any("<|im_end|>" in completion.raw for completion in completions)


def test_progress_counts_every_prompt(loaded, prompts):
    seen = []
    hf.generate(*loaded, prompts, max_new_tokens=2, batch_size=5, progress=seen.append)
    assert seen == [5, 5, 2]


def test_a_checkpoints_own_sampling_and_penalties_are_not_used(loaded):
    settings = loaded[0].generation_config
    assert not settings.do_sample and settings.repetition_penalty in (None, 1.0)


def test_samples_differ_by_seed_and_come_back_the_same_whatever_was_drawn_before(loaded, prompts):
    def drawn(seed):
        torch.rand(3)
        return [
            completion.text
            for completion in hf.generate(
                *loaded, prompts[:4] * 3, max_new_tokens=24, batch_size=5, temperature=1.0, seed=seed
            )
        ]

    first = drawn(1)
    assert drawn(1) == first != drawn(2)
    assert (
        len({first[i] for i in (0, 4, 8)} | {first[i] for i in (1, 5, 9)}) > 2
    )  # samples of one prompt are not copies


def asked_thrice(temperature=1.0, samples=3):
    questions = tasks.load("arithmetic", "heldout", 6, 0)
    cell = cells.Cell("base", "full", tiny.PATH)
    settings = Evaluate(samples=samples, temperature=temperature, max_new_tokens=48, batch_size=8)
    recipe = Recipe(task="arithmetic", prompt="plain", seed=3, evaluate=settings)
    return questions, cells.answer_questions(cell, questions, recipe, "cpu")


def test_a_cell_with_samples_has_a_row_for_each_and_scores_questions_not_answers():
    questions, answers = asked_thrice()
    assert list(answers.frame["question"]) == [question.id for question in questions for _ in range(3)]
    assert list(answers.frame["sample"]) == [0, 1, 2] * 6
    metrics = scores.metrics(answers)
    per_question = answers.frame.groupby("question", sort=False)["correct"].mean()
    assert metrics[names.N] == 6 and metrics[names.ACCURACY] == pytest.approx(per_question.mean())
    assert metrics[names.ACCURACY_STDERR] == pytest.approx(per_question.std() / 6**0.5)
    assert metrics["eval/pass_at_3"] == pytest.approx((per_question > 0).mean())
    assert metrics["eval/pass_at_2"] <= metrics["eval/pass_at_3"]
    pd.testing.assert_frame_equal(asked_thrice()[1].frame, answers.frame)


@pytest.mark.parametrize(
    ("rope", "all_known"),
    [
        ({}, False),
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64} | LLAMA3, False),
    ],
)
def test_solutions_beyond_the_positions_are_left_out_unless_these_are_scaled(rope, all_known, prompts, tmp_path):
    path = Path(shutil.copytree(tiny.PATH, tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] |= rope
    config["max_position_embeddings"] = max(map(len, prompts)) + 1  # no room for the longest one
    (path / "config.json").write_text(json.dumps(config))
    settings = Evaluate(max_new_tokens=4, batch_size=8, perplexity=True)
    recipe = Recipe(task="arithmetic", prompt="plain", evaluate=settings)
    questions = tasks.load("arithmetic", "heldout", 12, 0)
    found = cells.answer_questions(cells.Cell("base", "full", path), questions, recipe, "cpu").frame
    assert found["reference_logprob"].notna().all() == all_known


def test_a_prompt_that_fills_all_positions_is_refused_and_copies_of_questions_are_told():
    questions = tasks.load("arithmetic", "heldout", 3, 0)
    recipe = Recipe(task="arithmetic", prompt="plain", evaluate=Evaluate(max_new_tokens=4, batch_size=8))
    long_question = replace(questions[1], question="apples " * 600)
    with pytest.raises(BadInput, match=rf"Question {long_question.id} .* tokens, but the model was made for 512"):
        cells.answer_questions(cells.Cell("base", "full", tiny.PATH), [questions[0], long_question], recipe, "cpu")
    assert question_sets.describe_repeated(questions) == ""
    assert question_sets.describe_repeated(
        [*questions, replace(questions[0], id="copy", question=questions[0].question.upper())]
    ).startswith("Of 4 held-out questions 1 repeat others")


def test_one_sample_is_greedy_and_has_the_rows_and_metrics_it_always_had():
    _, first = asked_thrice(temperature=9.0, samples=1)
    _, second = asked_thrice(temperature=0.1, samples=1)
    assert set(first.frame["dtype"]) == {first.dtype} == {"float32"}
    assert "sample" not in first.frame and list(first.frame["completion"]) == list(second.frame["completion"])
    assert not any("pass_at" in name for name in scores.metrics(first))


def test_perplexity_reads_the_worked_solutions_and_changes_no_answer():
    questions = tasks.load("arithmetic", "heldout", 6, 0)
    bare = replace(questions[5], solution=f"#### {questions[5].answer}")  # no more than the answer
    cell, (plain, read) = cells.Cell("base", "full", tiny.PATH), ({}, {"perplexity": True})
    answers = [
        cells.answer_questions(
            cell, [*questions[:5], bare], Recipe(task="arithmetic", prompt="plain", evaluate=settings), "cpu"
        )
        for settings in (Evaluate(max_new_tokens=48, batch_size=8, **more) for more in (plain, read))
    ]
    assert list(answers[0].frame["completion"]) == list(answers[1].frame["completion"])
    logprobs = answers[1].frame[names.REFERENCE_LOGPROB]
    assert (logprobs[:5] < 0).all() and logprobs[5:].isna().all()
    metrics = scores.metrics(answers[1])
    assert metrics[names.REFERENCE_PERPLEXITY] == pytest.approx(math.exp(-logprobs.mean()))
    assert metrics[names.TOKENS_PER_ANSWER] == answers[1].frame["n_tokens"].mean() and names.REACHED_RATE in metrics
    assert names.REFERENCE_PERPLEXITY not in scores.metrics(answers[0])
    assert list(answers[0].frame[names.QUESTION_TEXT]) == [question.question for question in questions]


def frame(n=100, stopped=100, parsed=100, leaked=0, faults=0):
    return pd.DataFrame(
        {
            "finish_reason": ["stop"] * stopped + ["length"] * (n - stopped),
            "parsed": ["1"] * parsed + [None] * (n - parsed),
            "leaked": [1] * leaked + [0] * (n - leaked),
            "fault": ["timeout"] * faults + [None] * (n - faults),
        }
    )


def test_a_healthy_cell_breaks_no_limit():
    assert health.problems(health.rates(frame()), Evaluate(), 100) == []


@pytest.mark.parametrize(
    ("broken", "metric", "limit"),
    [
        ({"stopped": 50}, names.EOS_RATE, "evaluate.min_eos_rate"),
        ({"stopped": 50}, names.TRUNCATION_RATE, "evaluate.max_truncation_rate"),
        ({"parsed": 50}, names.PARSE_RATE, "evaluate.min_parse_rate"),
        ({"leaked": 50}, names.PROMPT_LEAK_RATE, "evaluate.max_prompt_leak_rate"),
        ({"faults": 50}, names.GRADER_FAULT_RATE, "evaluate.max_grader_fault_rate"),
    ],
)
def test_a_broken_limit_is_named_with_rate_n_and_cause(broken, metric, limit):
    problems = health.problems(health.rates(frame(**broken)), Evaluate(), 100)
    (sentence,) = [problem for problem in problems if metric in problem]
    assert limit in sentence and "0.500 (n = 100)" in sentence and "likely cause" in sentence


def test_a_limit_that_is_met_exactly_is_kept():
    at_limit = frame(stopped=95, parsed=90, leaked=1, faults=1)
    assert health.problems(health.rates(at_limit), Evaluate(), 100) == []


@pytest.mark.parametrize(
    ("raw", "text", "leaked"),
    [("4 + 3 = 7\n#### 7", "4 + 3 = 7\n#### 7", False), ("#### 7<|im_start|>user", "#### 7user", True)],
)
def test_chat_markers_are_leaks(raw, text, leaked):
    assert is_leaked("Why?", text, raw, ["<|im_start|>", "<|im_end|>"]) is leaked


@pytest.mark.parametrize(
    ("text", "leaked"),
    [
        ("The answer to the question What is 12 + 25? is 37", False),
        ("What is 12 + 25?\n37", False),
        ("Question: What is 12 + 25?\nAnswer: 37", False),
        ("The question is:\nWhat is 12 + 25?\nSo 37.", False),
        ('It is 37. "What is 12 + 25?" is a sum.', False),
        ("37\nWhat is 12 + 25?", True),
        ("37\n\nWhat is 12 + 25?\n\n37", True),
        ("37\nuser\nWhat is 12 + 25? Answer with the number only.\nassistant\n37", True),
        ("37\n### Question 2: What is 12 + 25? Answer: 37", True),
    ],
)
def test_a_question_that_an_answer_repeats_is_no_leak_and_one_in_a_new_turn_is(text, leaked):
    assert is_leaked("What is 12 + 25?", text, text, ["<|im_end|>"]) is leaked


def test_rows_of_math_carry_subject_level_and_what_the_grader_could_not_do(monkeypatch):
    monkeypatch.setattr(pool, "CPU_S", 0.5)
    bomb = r"\boxed{9^{9^{9^9}}}"
    completions = [bomb, r"\boxed{\frac{2}{12}}", "no answer"]
    monkeypatch.setattr(hf, "generate", lambda *_, **__: [hf.Completion(text, text, 5, "stop") for text in completions])
    levels = (1, 5, None)
    questions = [
        tasks.Question(f"math-heldout-{i}", f"{i}?", "", r"\frac{1}{6}", "Algebra", level)
        for i, level in enumerate(levels)
    ]
    recipe = Recipe(task="math", prompt="boxed", evaluate=Evaluate(max_new_tokens=5, batch_size=3))
    answers = cells.answer_questions(cells.Cell("base", "full", tiny.PATH), questions, recipe, "cpu")
    assert list(answers.frame["correct"]) == [0, 1, 0]
    assert list(answers.frame["subject"]) == ["Algebra"] * 3
    assert list(answers.frame["level"].dropna()) == [1, 5]
    metrics = scores.metrics(answers)
    assert (metrics[names.GRADER_TIMEOUTS], metrics[names.GRADER_ERRORS]) == (1, 0)
    assert metrics[names.GRADER_FAULT_RATE] == pytest.approx(1 / 3)


def test_accuracy_by_subject_and_level_has_an_interval_and_n_for_each_cell():
    rows = [("Algebra", 1, 1)] * 30 + [("Algebra", 5, 0)] * 10 + [("Geometry", 5, 1)]
    frame = pd.DataFrame(rows, columns=["subject", "level", "correct"]).assign(
        variant="base", scheme="full", question=range(41)
    )
    text = groups.markdown(pd.concat([frame, frame.assign(variant="grpo", correct=1)], ignore_index=True))
    assert "| subject | base · full | grpo · full |" in text
    expected = stats.accuracy(30, 40)
    assert f"| Algebra | 0.750 [{expected.low:.3f}, {expected.high:.3f}] (n = 40) | 1.000 [" in text
    assert "| Geometry | 1 of 1 | 1 of 1 |" in text
    assert text.index("| 1 |") < text.index("| 5 |")
    assert groups.markdown(frame.drop(columns=["subject", "level"])) == ""
    assert "| subject | base · full (fp32) |" in groups.markdown(frame.assign(dtype="float32"))
    for label in ("sample", "seed"):  # neither several samples nor several trainings are more questions
        of_two_groups = groups.markdown(pd.concat([frame.assign(**{label: 0}), frame.assign(**{label: 1}, correct=1)]))
        assert "| Algebra | 0.875 [" in of_two_groups and "(n = 40)" in of_two_groups and "| 1 of 1 |" in of_two_groups


def test_a_prompt_that_fills_the_model_is_refused_and_one_with_a_token_less_is_not():
    positions = checkpoint.positions(tiny.PATH)
    questions = tasks.load("arithmetic", "heldout", 1, 0)
    cells.check_lengths(tiny.PATH, questions, [[0] * (positions - 1)])
    with pytest.raises(BadInput, match=f"is a prompt of {positions:,} tokens"):
        cells.check_lengths(tiny.PATH, questions, [[0] * positions])


def test_a_solution_that_a_model_rules_out_has_a_large_perplexity_and_no_overflow():
    rows = pd.DataFrame({names.REFERENCE_LOGPROB: [-2000.0, -1000.0]})
    found = scores._references(rows)
    assert found == {names.REFERENCE_LIKELIHOOD: -1500.0, names.REFERENCE_PERPLEXITY: math.exp(700)}
