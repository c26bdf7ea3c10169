"""The engine and evaluation: what is asked is what was rendered, what is unhealthy does not count."""

import pandas as pd
import pytest
import torch

from qrl import names, tasks, tiny
from qrl.engine import hf
from qrl.evaluate import cells, health
from qrl.recipe import Evaluate
from qrl.tasks import prompt


@pytest.fixture(scope="module")
def loaded():
    return hf.load(tiny.PATH, "cpu", torch.float32)


@pytest.fixture(scope="module")
def prompts(loaded):
    return [prompt.render(loaded[1], q.question, "plain") for q in tasks.load("arithmetic", "heldout", 12, 0)]


def test_batches_do_not_change_what_is_written(loaded, prompts):
    alone = [hf.generate(*loaded, [ids], max_new_tokens=64, batch_size=1)[0].text for ids in prompts]
    together = [done.text for done in hf.generate(*loaded, prompts, max_new_tokens=64, batch_size=12)]
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 11  # fp32 sums differ by order, ties may flip


def test_completions_come_back_in_the_order_asked(loaded, prompts):
    forward = [done.text for done in hf.generate(*loaded, prompts, max_new_tokens=64, batch_size=5)]
    backward = [done.text for done in hf.generate(*loaded, prompts[::-1], max_new_tokens=64, batch_size=5)]
    assert sum(a == b for a, b in zip(forward, backward[::-1], strict=True)) >= 11


def test_the_end_token_ends_and_the_limit_cuts(loaded, prompts):
    assert {done.finish_reason for done in hf.generate(*loaded, prompts, max_new_tokens=2, batch_size=12)} == {"length"}
    whole = hf.generate(*loaded, prompts, max_new_tokens=96, batch_size=12)
    assert any(done.finish_reason == "stop" for done in whole)
    assert not any("<|im_end|>" in done.raw for done in whole)


def test_progress_counts_every_prompt(loaded, prompts):
    seen = []
    hf.generate(*loaded, prompts, max_new_tokens=2, batch_size=5, progress=seen.append)
    assert seen == [5, 5, 2]


def test_a_checkpoints_own_sampling_and_penalties_are_not_used(loaded):
    settings = loaded[0].generation_config
    assert not settings.do_sample and settings.repetition_penalty in (None, 1.0)


def frame(n=100, stopped=100, parsed=100, leaked=0):
    return pd.DataFrame(
        {
            "finish_reason": ["stop"] * stopped + ["length"] * (n - stopped),
            "parsed": ["1"] * parsed + [None] * (n - parsed),
            "leaked": [1] * leaked + [0] * (n - leaked),
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
    ],
)
def test_a_broken_limit_is_named_with_rate_n_and_cause(broken, metric, limit):
    problems = health.problems(health.rates(frame(**broken)), Evaluate(), 100)
    (said,) = [problem for problem in problems if metric in problem]
    assert limit in said and "0.500 (n = 100)" in said and "likely cause" in said


def test_a_limit_that_is_met_exactly_is_kept():
    at_limit = frame(stopped=95, parsed=90, leaked=1)
    assert health.problems(health.rates(at_limit), Evaluate(), 100) == []


@pytest.mark.parametrize(
    ("raw", "text", "leaked"),
    [
        ("4 + 3 = 7\n#### 7", "4 + 3 = 7\n#### 7", False),
        ("#### 7<|im_start|>user", "#### 7user", True),
        ("Why? #### 7", "Why? #### 7", True),
    ],
)
def test_chat_markers_and_a_repeated_question_are_leaks(raw, text, leaked):
    completion = hf.Completion(text, raw, 9, "stop")
    assert cells._leaked("Why?", completion, ["<|im_start|>", "<|im_end|>"]) is leaked
