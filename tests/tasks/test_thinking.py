"""What a model thinks is no answer: the tags of a template, and everything that reads a completion."""

import pandas as pd
import pytest

from qrl import recipe, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.evaluate import cells
from qrl.recipe import Train
from qrl.study import report
from qrl.tasks import prompt, thinking
from qrl.tasks.question import leaked
from qrl.tasks.thinking import Tags
from qrl.tiny import tokenizer as tiny_tokenizer
from qrl.train import reward, sft
from qrl.train.verl import score, translate

QUESTION = tasks.Question("q", "How much is it with the tip?", "40+6=46\n#### 46", "46")
DRAFT = "so far 40\n#### 40\nno, the tip is missing"


@pytest.mark.parametrize(
    ("template", "tail", "pairs", "begun"),
    [
        ("{{ messages }}", "assistant\n", thinking.TAGS.pairs, False),
        ("{{ content.split('</think>')[-1] }}", "assistant\n<think>\n", (("<think>", "</think>"),), True),
        ("{{ content.split('</think>')[-1] }}", "<think>\n\n</think>\n\n", (("<think>", "</think>"),), False),
        ("{{ '[THINK]' + thought + '[/THINK]' }}", "[/INST]", (("[THINK]", "[/THINK]"),), False),
        ("{{ '</seed:think>' }}", "", (("<seed:think>", "</seed:think>"),), False),
        ("{{ '◁/think▷' }}", "◁think▷", (("◁think▷", "◁/think▷"),), True),
        ("{{ '<|END_THINKING|>' }}", "", (("<|START_THINKING|>", "<|END_THINKING|>"),), False),
        ("{{ '<|end_of_thought|>' }}", "", (("<|begin_of_thought|>", "<|end_of_thought|>"),), False),
        ("{{ '<|channel>thought\n<channel|>' }}", "", (("<|channel>thought", "<channel|>"),), False),
        ("{{ '<reasoning>' }}", "assistant\n<reasoning>\n", (("<reasoning>", "</reasoning>"),), True),
        ("{# no [tags] here, </answer> is none #}", "", thinking.TAGS.pairs, False),
        ("{{ '<longcat_think>' }}{{ '</longcat_think>' }}", "", (("<longcat_think>", "</longcat_think>"),), False),
        ("{{ '<|think_end|>' }}", "<|think_start|>", (("<|think_start|>", "<|think_end|>"),), True),
        (
            "{{ '<|thought_begin|>' + thought + '<|thought_end|>' }}",
            "",
            (("<|thought_begin|>", "<|thought_end|>"),),
            False,
        ),
        (
            "{{ '<|inner_prefix|>' + thought + '<|inner_suffix|>' }}",
            "",
            (("<|inner_prefix|>", "<|inner_suffix|>"),),
            False,
        ),
        (
            "{{ '<|start|>assistant<|channel|>final<|message|>' + content + '<|return|>' }}",
            "<|start|>assistant",
            (("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),),
            False,
        ),
    ],
)
def test_the_tags_are_those_that_a_template_names(template, tail, pairs, begun):
    assert thinking.of_prompt(template, f"How much? {tail}") == Tags(pairs, begun)


def test_tags_of_a_template_are_the_only_ones():
    tags = thinking.of_prompt("{{ '[THINK]' + thought + '[/THINK]' }}", "[/INST]")
    assert thinking.answer("<thought>a</thought>b", tags) == "<thought>a</thought>b"


def test_the_channels_of_a_turn_survive_a_decoder_that_drops_special_tokens():
    tags = thinking.of_prompt("<|start|>assistant<|channel|>final<|message|>", "<|start|>assistant")
    special_tokens = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>", "<|endoftext|>"]
    raw = "<|channel|>analysis<|message|>40<|end|><|start|>assistant<|channel|>final<|message|>46<|return|>"
    text = tags.text("analysis40assistantfinal46", raw, special_tokens)
    assert thinking.answer(text, tags) == "46"
    assert thinking.answer(tags.text("analysis40", raw[:33], special_tokens), tags) == ""
    assert thinking.answer("analysis40assistantfinal46") == "46"  # where only the decoded text is left
    assert thinking.answer("Analysis40ASSISTANTfinal46") == "46"


def test_a_solution_ends_the_thinking_that_the_prompt_began():
    tokens = hf.tokenizer(tiny.PATH)
    tokens.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    text = prompt.training_text(tokens, QUESTION, "answer-line")
    tags = prompt.thinking_tags(tokens, "answer-line")
    assert tags.begun and text.count("<think>\n\n</think>\n\n40+6=46") == 1
    ids = prompt.solution_ids(tokens, QUESTION.solution, tags)
    completion = tokens.decode(ids)
    (verdict,) = tasks.grade_many("gsm8k", [completion], ["46"], tags=tags)
    assert text.endswith(completion) and verdict.strict
    labels = [token for token in sft._tokenized(tokens, QUESTION, "answer-line")["labels"] if token != -100]
    assert labels == ids


@pytest.mark.parametrize(
    ("text", "begun", "answer"),
    [
        ("a", False, "a"),
        ("a", True, ""),
        ("a</think>b", True, "b"),
        ("a</think>b", False, "b"),
        ("<think>a", False, ""),
        ("<think>a</think>b<think>c", False, ""),
        ("<think>a</think>b<think>c</think>d", False, "d"),
        ("<think>a</think>b<|im_end|>c</think>d", False, "b"),
        ("<think>a</think>", False, ""),
        ("[THINK]a[/THINK]b", False, "b"),
        ("<Thinking>a</Thinking>b", False, "b"),
        ("a</reasoning>b", True, "b"),
        ("<answer>a</answer>b", False, "<answer>a</answer>b"),
        ("<|channel|>analysis<|message|>a", False, ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>c", False, "b"),
        ("<|channel|>final<|message|>b<|return|>", False, "<|channel|>final<|message|>b"),
    ],
)
def test_an_answer_follows_the_thinking(text, begun, answer):
    tags = Tags(begun=begun)
    assert thinking.answer(text, tags) == answer
    assert thinking.until_end(text)[thinking.length(text, tags) :] == answer


@pytest.mark.parametrize(
    ("completion", "right", "reached"),
    [
        (f"<think>{DRAFT}</think>\n#### 46", True, None),
        (f"{DRAFT}</think>\n#### 46", True, None),
        ("<think>46\n#### 46\nLet me check", False, True),  # cut in a thought that had it
        ("<think>\n#### 46\n</think>I do not know.", False, True),
        ("<think>\n#### 46\n</think>\n#### 40", False, True),
        ("<think>\n#### 40\n</think>\n#### 40", False, False),
    ],
)
def test_rewards_verdicts_and_reached_agree_on_it(completion, right, reached):
    for task, write in (
        ("gsm8k", str),
        ("math", lambda text: text.replace("#### 46", "\\boxed{46}").replace("#### 40", "\\boxed{40}")),
    ):
        text = write(completion)
        verdict = tasks.grade(task, text, "46")
        assert verdict.strict == verdict.flexible == right
        for name in ("correct", "flexible"):
            (function,) = reward.functions(task, (name,))
            assert function([text], ["46"]) == [float(right)], name
        (form,) = reward.functions(task, ("format",))
        assert form([text], ["46"]) == [float(verdict.parsed is not None)]
        if reached is not None:
            assert tasks.has_stated_answer(task, text, QUESTION) is reached


def test_an_answer_phrase_within_the_thinking_is_not_claimed():
    (flexible,) = reward.functions("gsm8k", ("flexible",))
    texts = [
        "<think>The answer is 46.</think>It is 40.",
        "<think><answer>46</answer></think>",
        "</think>The answer is 46.",
    ]
    assert flexible(texts, ["46"] * 3) == [0.0, 0.0, 1.0]


def test_thinking_may_repeat_the_question_and_an_answer_may_not():
    again = f"Let me see.\nQuestion: {QUESTION.question}\n40+6"
    for text, is_leak in (
        (f"<think>{again}</think>\n#### 46", False),
        (f"{again}</think>\n#### 46", False),
        (f"<think>{again}", False),
        (f"<think>hm</think>\n{again}", True),
        (again, True),
    ):
        assert leaked(QUESTION.question, text, text, ["<|im_start|>"]) is is_leak
    assert leaked(QUESTION.question, "<think>a", "<think>a<|im_start|>user", ["<|im_start|>"])
    assert not leaked(
        QUESTION.question, "ab", "[THINK]a[/THINK]b", ["[THINK]", "[/THINK]"], Tags((("[THINK]", "[/THINK]"),))
    )


@pytest.fixture(scope="module")
def special_tokens(tmp_path_factory):
    """A tokenizer whose template marks the thinking by special tokens, and opens it in the prompt."""
    tokens = tiny_tokenizer.make([QUESTION.question, DRAFT] * 20, tmp_path_factory.mktemp("tokens"))
    tokens.add_special_tokens({"extra_special_tokens": ["[THINK]", "[/THINK]", *tokens.extra_special_tokens]})
    opened = "<|im_start|>assistant\\n[THINK]"
    tokens.chat_template = tiny_tokenizer.CHAT_TEMPLATE.replace("<|im_start|>assistant\\n", opened) + "{# [/THINK] #}"
    return tokens


def test_tags_that_are_special_tokens_are_kept_for_the_graders(special_tokens):
    tokens = special_tokens
    tags = prompt.thinking_tags(tokens, "answer-line")
    assert tags == Tags((("[THINK]", "[/THINK]"),), begun=True)

    texts = [f"{DRAFT}[/THINK]\n#### 46", "#### 46", f"{DRAFT}[/THINK]\n#### 40"]
    ids = [tokens(text, add_special_tokens=False)["input_ids"] for text in texts]
    special = set(tokens.all_special_ids)
    completions = [hf.completion(tokens, row, {tokens.eos_token_id}, special) for row in ids]
    assert completions[0].text == f"{DRAFT}\n#### 46"  # as a decoder gives it
    frame = cells.graded_frame({}, [QUESTION] * 3, completions, "gsm8k", tokens, tags)
    assert frame["correct"].tolist() == [1, 0, 0]
    assert frame["leaked"].tolist() == [0, 0, 0]
    assert frame["completion"].tolist() == texts
    assert frame["answer_start"].tolist() == [len(f"{DRAFT}[/THINK]"), len("#### 46"), len(f"{DRAFT}[/THINK]")]

    functions = reward.functions("gsm8k", ("correct", "leak"), Train(), tokens, tags)
    plain = [completion.text for completion in completions]
    given = {"completions": plain, "completion_ids": ids, "question": [QUESTION.question] * 3, "answer": ["46"] * 3}
    assert [function(**given) for function in functions] == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_verl_rewards_what_follows_the_thinking_and_refuses_special_tags(special_tokens):
    row = {"data_source": "gsm8k", "ground_truth": "46", "extra_info": {"question": QUESTION.question}}
    given = {"task": "gsm8k", "rewards": ["correct"], "weights": [1.0], "thinking_tags": [["[THINK]", "[/THINK]"]]}
    for text, begun, right in ((f"{DRAFT}[/THINK]#### 46", True, 1.0), ("#### 46", False, 1.0), ("#### 46", True, 0.0)):
        assert score.compute_score(solution_str=text, thinking_begun=begun, **row, **given)["score"] == right
    with pytest.raises(BadInput, match=r"special token \[THINK\].* set train.trainer = trl"):
        translate.check_tags(special_tokens, "answer-line")
    translate.check_tags(hf.tokenizer(tiny.PATH), "answer-line")


def test_the_model_that_ships_names_no_tags():
    tokens = hf.tokenizer(tiny.PATH)
    assert prompt.thinking_tags(tokens, "answer-line") == thinking.TAGS


def test_a_users_grader_reads_the_whole_completion(tmp_path):
    path = tmp_path / "whole.py"
    path.write_text(
        "from qrl.tasks import Question\n"
        "def load(split, n, seed):\n    return [Question('1', 'a', '<think>a</think>b', 'b')]\n"
        "def grade(completion, answer):\n    return completion == '<think>a</think>b'\n"
        "def whole(completions, answers):\n    return [float(c == '<think>a</think>b') for c in completions]\n"
    )
    assert tasks.grade(str(path), "<think>a</think>b", "b").strict
    (whole,) = reward.functions("gsm8k", (f"{path}:whole",))
    assert whole(["<think>a</think>b"], answer=["b"]) == [1.0]


def test_a_report_rewards_what_training_rewarded():
    thoughts = ["[THINK]#### 46[/THINK]", "x[/THINK]"]
    frame = pd.DataFrame(
        {
            "completion": [f"{thoughts[0]}#### 40", f"{thoughts[1]}#### 46"],
            "answer": ["46", "46"],
            "answer_start": [len(thought) for thought in thoughts],
        }
    )
    chosen = recipe.load("tiny", {"device": "cpu", "train.rewards": "correct,flexible"})
    assert report._reward_values(frame, "flexible", chosen) == [0.0, 1.0]
    frame["answer_start"] = [float("nan"), len(thoughts[1])]  # a row of an older run
    assert report._reward_values(frame, "flexible", chosen) == [0.0, 1.0]
