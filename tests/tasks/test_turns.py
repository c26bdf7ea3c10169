"""Where a turn ends: what each kind of chat template writes there, and the same tokens for every reader."""

import json
import shutil
from pathlib import Path

import pytest

from qrl import recipe, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.evaluate import cells
from qrl.serve import engines
from qrl.steps import evaluate, quantize, train
from qrl.study import preflight
from qrl.tasks import load, prompt, question_sets, turns
from qrl.train import Job, distill, grpo, sft
from qrl.train.verl import training

END, DOCUMENT = "<|im_end|>", "<|endoftext|>"
QUESTIONS = load("arithmetic", "train", 8, 0)
EACH = "{% for m in messages %}"
TURN = "<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n"
OPEN_TURN = "<|im_start|>{{m.role}}\n{{m.content}}\n"
TURN_BEFORE_ANOTHER = "<|im_start|>{{m.role}}\n{{m.content}}{% if not loop.last %}<|im_end|>\n{% endif %}"
NEXT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NEXT_OR_EOS = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{eos_token}}{% endif %}"
NEXT_AFTER_END = "{% endfor %}{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
NEXT_ALWAYS = "{% endfor %}<|im_start|>assistant\n"
NEXT_WORD = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
OWN_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TWO_AT_MOST = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}"
# What stands after an answer, up to the token that ends it, by the kind of template; None: no token.
TEMPLATES = {
    "a line break after the token": (EACH + TURN + NEXT, END),
    "a line break before it": (EACH + TURN.replace("<|im_end|>", "\n<|im_end|>") + NEXT, "\n" + END),
    "a blank before it": (
        EACH + "{% if m.role == 'user' %}[INST] {{m.content}} [/INST]{% else %} {{m.content}} <|im_end|>{% endif %}"
        "{% endfor %}",
        " " + END,
    ),
    "another token after it": (EACH + TURN + NEXT_OR_EOS, END),
    "only where a message follows": (EACH + TURN_BEFORE_ANOTHER + NEXT_AFTER_END, END),
    "the same, and a system turn of its own": (OWN_SYSTEM + EACH + TURN_BEFORE_ANOTHER + NEXT_AFTER_END, END),
    "a block of generation": (
        EACH + "<|im_start|>{{m.role}}\n{% generation %}{{m.content}}<|im_end|>{% endgeneration %}\n" + NEXT,
        END,
    ),
    "roles as words": (EACH + "{{m.role}}: {{m.content}}<|im_end|>\n" + NEXT_WORD, END),
    "another answer always begins": (EACH + TURN + NEXT_ALWAYS, END),
    "two messages at most": (TWO_AT_MOST + EACH + TURN + NEXT, END),
    "no system role": (NO_SYSTEM + EACH + TURN + NEXT, END),
    "the tokenizer's end, after the last message": (EACH + OPEN_TURN + NEXT_OR_EOS, "\n" + DOCUMENT),
    "turns begin and never end": (EACH + OPEN_TURN + NEXT, None),
    "the same, and another answer always begins": (EACH + OPEN_TURN + NEXT_ALWAYS, None),
    "words alone": (EACH + "{{m.role}}: {{m.content}}\n" + NEXT_WORD, None),
    "it fails": ("{{ raise_exception('never') }}", None),
}


def edited(folder: Path, name: str, **values) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def two_ends(tmp_path) -> Path:
    """The shipped model as Gemma's and Phi's are: the tokenizer's end is a document's, generation names both."""
    folder = shutil.copytree(tiny.PATH, tmp_path / "two-ends")
    edited(folder, "tokenizer_config.json", eos_token=DOCUMENT)
    edited(folder, "generation_config.json", eos_token_id=[0, 2])
    edited(folder, "config.json", eos_token_id=0)
    return folder


@pytest.fixture
def unnamed(tmp_path) -> Path:
    """The shipped model whose own end of a turn no settings of generation name, nor its tokenizer."""
    folder = shutil.copytree(tiny.PATH, tmp_path / "unnamed")
    edited(folder, "tokenizer_config.json", eos_token=DOCUMENT)
    edited(folder, "generation_config.json", eos_token_id=0)
    edited(folder, "config.json", eos_token_id=0)
    return folder


def settings(folder: Path, **more: str) -> recipe.Recipe:
    return recipe.load("tiny", {"model": str(folder), "device": "cpu"} | more)


@pytest.mark.parametrize(("template", "closing"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_solution_ends_as_the_template_ends_a_turn(two_ends, template, closing):
    tokens = hf.tokenizer(two_ends)
    tokens.chat_template = template
    written = turns.written_by_template(tokens)
    assert (written and written.text) == closing
    assert turns.closing(tokens) == (closing or DOCUMENT)
    ids = prompt.solution_ids(tokens, "1 + 1 = 2\n#### 2")
    assert tokens.decode(ids) == "1 + 1 = 2\n#### 2" + (closing or DOCUMENT)
    end = tokens.convert_tokens_to_ids((closing or DOCUMENT).strip())
    assert ids[-1] == end and ids.count(end) == 1
    assert turns.end_tokens(tokens, [0]) == ([0, 2] if end == 2 else [0])


@pytest.mark.parametrize("special", [True, False])
def test_an_end_that_was_added_to_the_vocabulary_counts_whether_or_not_it_is_special(two_ends, special):
    from tokenizers import AddedToken

    tokens = hf.tokenizer(two_ends)
    tokens.add_tokens([AddedToken("<turn|>", special=special), AddedToken("\n\n", normalized=False)])
    tokens.chat_template = (
        EACH
        + "<|turn>{{m.role}}\n{{m.content}}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
    )
    assert turns.closing(tokens) == "<turn|>"
    assert turns.end_tokens(tokens, [0]) == [0, tokens.convert_tokens_to_ids("<turn|>")]


def test_without_a_template_the_tokenizers_end_counts_and_without_both_there_is_none(two_ends):
    tokens = hf.tokenizer(two_ends)
    tokens.chat_template = None
    assert turns.closing(tokens) == DOCUMENT and turns.end_tokens(tokens, [2]) == [2, 0]
    tokens.eos_token = None
    with pytest.raises(BadInput, match="Neither the chat template nor the tokenizer names an end token"):
        turns.closing(tokens)
    assert turns.end_tokens(tokens, []) == [] and turns.describe_disagreement(tokens, []) == ""


def test_a_sentence_names_each_end_and_what_is_taken(two_ends, unnamed):
    taken = f"Texts for training, calibration and perplexity end with {END}; answers end at {DOCUMENT} or {END}."
    part = (
        f"after an answer its chat template writes {END}, its tokenizer's eos_token is {DOCUMENT}, and its generation "
    )
    assert f"{part}settings name {DOCUMENT} and {END}. {taken}" in hf.describe_ends(two_ends)
    assert f"{part}settings name {DOCUMENT}. {taken}" in hf.describe_ends(unnamed)
    assert hf.describe_ends(tiny.PATH) == ""
    edited(unnamed, "tokenizer_config.json", eos_token=END)  # one of three differs
    assert f"eos_token is {END}, and its generation settings name {DOCUMENT}. {taken}" in hf.describe_ends(unnamed)
    (unnamed / "generation_config.json").unlink()  # config.json says what is generated
    edited(unnamed, "config.json", eos_token_id=2)
    assert hf.describe_ends(unnamed) == ""


def test_training_calibration_and_perplexity_end_with_the_turn(two_ends, tmp_path):
    tokens, calibrating = hf.tokenizer(two_ends), hf.plain_tokenizer(two_ends)
    rows = [sft._tokenized(tokens, question, "plain") for question in QUESTIONS]
    prompts = [prompt.render(tokens, question.question, "plain") for question in QUESTIONS]
    references = cells._references(QUESTIONS, prompts, tokens, two_ends)
    for index, (question, row) in enumerate(zip(QUESTIONS, rows, strict=True)):
        labels = [label for label in row["labels"] if label != -100]
        assert labels == references[index] and labels[-1] == 2
        text = prompt.training_text(calibrating, question, "plain")
        assert calibrating(text, add_special_tokens=False)["input_ids"] == row["input_ids"]

    class Texts:
        recipe = settings(two_ends)

    solved = [(question, has_ended) for question in QUESTIONS[:2] for has_ended in (True, False)]
    ended, cut, *_ = quantize.Texts._rendered(Texts, two_ends, solved)
    assert ended == cut + END and cut.endswith(QUESTIONS[0].solution)


@pytest.mark.process
def test_every_engine_stops_where_training_does(unnamed, tmp_path):
    import torch

    model, tokens = hf.load(unnamed, "cpu", torch.float32)
    assert model.generation_config.eos_token_id == hf.end_tokens(None, unnamed) == [0, 2]
    prompts = [prompt.render(tokens, question.question, "plain") for question in QUESTIONS]
    answers = hf.generate(model, tokens, prompts, max_new_tokens=150, batch_size=8)
    shipped, own = hf.load(tiny.PATH, "cpu", torch.float32)
    assert answers == hf.generate(shipped, own, prompts, max_new_tokens=150, batch_size=8)
    assert {answer.finish_reason for answer in answers} == {"stop"}

    for folder, is_told in ((unnamed, True), (tiny.PATH, False)):
        served = engines.ServedModel("any", 1, folder)
        words = engines.arguments(engines.VLLM, served, ("127.0.0.1", 1), tmp_path / "scratch")
        assert ("--generation-config" in words) == is_told
        if is_told:
            named = Path(words[words.index("--generation-config") + 1]) / "generation_config.json"
            assert json.loads(named.read_text()) == {"eos_token_id": [0, 2]}


def test_verl_gets_a_base_that_names_the_ends_and_the_base_itself_stays(unnamed, tmp_path):
    def job(base: Path) -> Job:
        data = {"questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 0, "device": "cpu"}
        return Job(base=base, settings=recipe.Train(), work=tmp_path / "work", out=tmp_path / "out", **data)

    assert training.stage_base(job(tiny.PATH)) == tiny.PATH
    before = {file.name: file.read_bytes() for file in unnamed.iterdir()}
    for _ in range(2):  # a second try finds the first one's folder
        staged = training.stage_base(job(unnamed))
    assert hf.names_all_ends(staged) and {file.name for file in staged.iterdir()} == before.keys()
    settings_there = json.loads((staged / "generation_config.json").read_text())
    assert settings_there == json.loads(before["generation_config.json"]) | {"eos_token_id": [0, 2]}
    assert {file.name: file.read_bytes() for file in unnamed.iterdir()} == before


ALTERNATING = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
WITHOUT_SYSTEM = {
    "refuses it": NO_SYSTEM + EACH + TURN + NEXT,
    "wants roles to alternate": EACH + ALTERNATING + TURN + NEXT,
    "leaves it out": "{% for m in messages if m.role != 'system' %}" + TURN + NEXT,
}


@pytest.mark.parametrize("template", WITHOUT_SYSTEM.values(), ids=WITHOUT_SYSTEM)
def test_a_template_without_a_system_role_is_refused_before_a_run_opens(template, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "load", None)
    folder = shutil.copytree(tiny.PATH, tmp_path / "model")
    edited(folder, "tokenizer_config.json", chat_template=template)
    file = tmp_path / "polite.yaml"
    file.write_text('system: Be brief.\nuser: "{question}"\n')
    own = settings(folder, prompt=str(file))
    for step in (
        lambda: preflight.check(own, {}),
        lambda: train.train(own),
        lambda: evaluate.check_cells(own, None),
        lambda: quantize.check_sources(own, None),
    ):
        with pytest.raises(BadInput, match=r"no system role.*: move `system` into `user` in the prompt's file"):
            step()
    question_sets.check_chat(settings(folder), folder)  # a prompt without a system turn
    question_sets.check_chat(settings(tiny.PATH, prompt=str(file)), tiny.PATH)


def test_a_step_says_once_which_end_counts_and_a_study_before_its_steps(store, two_ends, capsys):
    small = {"evaluate.n": "4", "evaluate.max_new_tokens": "4", "evaluate.min_eos_rate": "0"}
    small |= {"evaluate.max_truncation_rate": "1", "evaluate.min_parse_rate": "0"}
    evaluate.evaluate(settings(two_ends, **small), f"base:full={two_ends},other:full={two_ends}")
    assert capsys.readouterr().err.count("name different ends of a turn") == 1
    preflight.check(settings(two_ends), {})
    assert capsys.readouterr().err.count("name different ends of a turn") == 1
    preflight.check(settings(tiny.PATH), {})
    assert "ends of a turn" not in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("is_distilled", [False, True])
def test_trainers_that_sample_stop_at_the_same_tokens(unnamed, tmp_path, is_distilled):
    small = {"steps": 1, "prompts_per_step": 2, "generations": 2, "micro_batch": 4, "max_completion_tokens": 150}
    made = Job(
        base=unnamed,
        settings=recipe.Train(**small),
        teacher=unnamed if is_distilled else None,
        questions=QUESTIONS,
        task="arithmetic",
        template="plain",
        seed=0,
        device="cpu",
        work=tmp_path / "work",
        out=tmp_path / "out",
    )
    trainer = distill.make_trainer(made, unnamed) if is_distilled else grpo.make_trainer(made)
    assert set(trainer.eos_token_ids) == set(hf.end_tokens(None, unnamed)) == {0, 2}


@pytest.mark.slow
@pytest.mark.process
def test_answers_end_after_a_short_sft_also_for_programs_that_read_the_generation_settings_alone(unnamed, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    small = {"steps": 8, "prompts_per_step": 8, "micro_batch": 8, "learning_rate": 1e-4}
    made = Job(
        base=unnamed,
        settings=recipe.Train(algorithm="sft", **small),
        questions=QUESTIONS,
        task="arithmetic",
        template="plain",
        seed=0,
        device="cpu",
        work=tmp_path / "work",
        out=tmp_path / "out",
    )
    trained = sft.run(made).path
    model, tokens = hf.load(trained, "cpu", torch.float32)
    prompts = [prompt.render(tokens, each.question, "plain") for each in load("arithmetic", "heldout", 16, 0)]
    answers = hf.generate(model, tokens, prompts, max_new_tokens=150, batch_size=16)
    assert [answer.finish_reason for answer in answers].count(
        "stop"
    ) >= 15  # with the document's end as theirs, 28 of 48 ended

    plain = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    assert plain.generation_config.eos_token_id == [0, 2]
    with torch.no_grad():
        ids = plain.generate(torch.tensor([prompts[0]]), max_new_tokens=150, do_sample=False)[0].tolist()
    assert ids[-1] == 2 and len(ids) == len(prompts[0]) + answers[0].n_tokens
