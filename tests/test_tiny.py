"""The shipped model: its architecture, its corpus, and the format of its answers."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrl import tiny
from qrl.tasks import arithmetic, grade, load, prompt
from qrl.tiny import corpus

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(tiny.PATH)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32).eval()


def test_it_is_a_small_qwen2_divisible_into_groups_of_128(model):
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert 2.0e6 < model.num_parameters() < 3.0e6
    linears = [module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert linears
    assert all(linear.in_features % 128 == 0 and linear.out_features % 64 == 0 for linear in linears)


def test_it_ships_as_bf16_safetensors_with_a_card():
    from safetensors import safe_open

    with safe_open(tiny.PATH / "model.safetensors", "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert "python -m qrl.tiny.make" in (tiny.PATH / "README.md").read_text()


def test_end_and_padding_agree_everywhere(model, tokenizer):
    for ids in (model.config, model.generation_config):
        assert ids.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert ids.pad_token_id == tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert len(tokenizer) == model.config.vocab_size == 512


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80))
def test_the_tokenizer_reads_back_any_text_and_splits_digits(tokenizer, text):
    import unicodedata

    normal = unicodedata.normalize("NFC", text)
    ids = tokenizer(normal, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == normal
    numbers = [tokenizer.decode([token]) for token in tokenizer("1234567890")["input_ids"]]
    assert numbers == list("1234567890")


def test_the_generic_class_reads_tokenizer_json_the_same_way(tokenizer):
    generic = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny.PATH / "tokenizer.json"))
    for question in load("arithmetic", "train", 200, 9):
        text = prompt.training_text(tokenizer, question, "answer-line")
        assert generic(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_it_stops_and_answers_in_the_format(model, tokenizer):
    tokenizer.padding_side = "left"
    questions = load("arithmetic", "heldout", 32, 1)
    prompts = {"input_ids": [prompt.render(tokenizer, question.question, "plain") for question in questions]}
    inputs = tokenizer.pad(prompts, return_tensors="pt")
    with torch.inference_mode():
        written = model.generate(**inputs, max_new_tokens=96, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    assert (written == tokenizer.eos_token_id).any(1).all()
    answers = tokenizer.batch_decode(written, skip_special_tokens=True)
    pairs = zip(answers, questions, strict=True)
    assert all(grade("arithmetic", answer, question.answer).parsed for answer, question in pairs)


def test_the_corpus_slips_at_the_stated_rate_and_only_in_times_steps():
    rng, slipped, steps = random.Random(0), 0, 0
    for problem, _ in zip(arithmetic.problems("train", 4), range(3000), strict=False):
        kinds = [step.kind for step in problem.steps]
        solution, answer = corpus.solve_with_slips(problem, rng)
        assert solution.endswith(f"#### {answer}")
        if "times" not in kinds:
            assert (solution, answer) == arithmetic.solve(problem)
        elif kinds == ["times"]:
            steps, slipped = steps + 1, slipped + ("*" not in solution)
    assert abs(slipped / steps - corpus.SLIP) < 4 * (corpus.SLIP * (1 - corpus.SLIP) / steps) ** 0.5


def test_the_corpus_is_from_the_training_split_alone(tokenizer):
    texts = list(corpus.texts(tokenizer, 300, seed=0, workers=1))
    assert len(texts) == 300
    questions = [text.split("user\n")[1].split("<|im_end|>")[0].split("\n\n")[0] for text in texts]
    assert {arithmetic.split_of(question) for question in questions} == {"train"}
    assert json.dumps(texts) == json.dumps(list(corpus.texts(tokenizer, 300, seed=0, workers=1)))
