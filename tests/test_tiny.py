"""The shipped model, and models of other shapes: architecture, corpus, the format of answers, resumed trainings."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from qrl import checkpoint, tiny, workspace
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.tasks import arithmetic, grade, load, prompt
from qrl.tiny import corpus, make, shape, train
from qrl.tiny import tokenizer as tokenizers
from qrl.tiny.corpus import Corpus
from qrl.tiny.shape import LONGEST, Shape
from qrl.tiny.train import Budget

pytestmark = pytest.mark.process

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
        solution, answer = arithmetic.solve(problem, corpus.slipped(problem, rng))
        assert solution.endswith(f"#### {answer}")
        if "times" not in kinds:
            assert (solution, answer) == arithmetic.solve(problem)
        elif kinds == ["times"]:
            steps, slipped = steps + 1, slipped + ("*" not in solution)
    assert abs(slipped / steps - corpus.SLIP) < 4 * (corpus.SLIP * (1 - corpus.SLIP) / steps) ** 0.5


def test_the_corpus_is_from_the_training_split_alone_and_pinned(tokenizer):
    texts = Corpus().texts(tokenizer, 300, 0)
    assert len(texts) == 300
    questions = [text.split("user\n")[1].split("<|im_end|>")[0].split("\n\n")[0] for text in texts]
    assert {arithmetic.split_of(question) for question in questions} == {"train"}
    assert sha256(json.dumps(texts).encode()).hexdigest()[:16] == "0736e346916fd1cf"  # qrl-tiny saw these texts first


def test_token_ids_are_the_texts_in_order_from_any_step_and_by_any_number_of_workers(tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 8)
    wanted = [tokenizer(text)["input_ids"] for index in range(3) for text in Corpus(5).texts(tokenizer, 8, index)]
    assert list(Corpus(5).token_ids(tiny.PATH, 0, 20, 512, 0)) == wanted[:20]
    assert list(Corpus(5).token_ids(tiny.PATH, 11, 20, 512, 0)) == wanted[11:20]
    with pytest.raises(BadInput, match="64 positions"):
        list(Corpus(5).token_ids(tiny.PATH, 0, 8, 64, 0))


@pytest.mark.slow
@pytest.mark.process
def test_worker_processes_make_the_same_token_ids(tokenizer):
    wanted = [tokenizer(text)["input_ids"] for text in Corpus(5).texts(tokenizer, 30, 0)]
    assert list(Corpus(5).token_ids(tiny.PATH, 0, 30, 512, 2)) == wanted


@pytest.mark.parametrize("form", corpus.FORMS)
@pytest.mark.parametrize("thinking", [False, True])
def test_solutions_of_every_form_are_right_for_the_grader_of_their_task(form, thinking):
    questions = Corpus(3, form, thinking, slip=0.0).questions(40, 0)
    assert all(grade(form, question.solution, question.answer).strict for question in questions)
    empty = [question.solution.startswith(corpus.NO_THOUGHT) for question in questions]
    assert sum(empty) == (20 if thinking else 0)
    thoughts = [
        question.solution.split("</think>\n\n") for question in questions if "<think>\n\n" not in question.solution
    ]
    for thought, worked in (part for part in thoughts if len(part) == 2):
        assert thought.splitlines()[-1].partition("=")[2] in worked.splitlines()[-1]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A tokenizer that knows `enable_thinking`."""
    texts = [question.solution for question in Corpus(form="math", thinking=True).questions(200, 0)]
    return tokenizers.make(texts, tmp_path_factory.mktemp("thinker"), 400, 1024, thinking=True)


def test_without_thinking_the_prompt_ends_in_an_empty_part_as_qwen3s_does_and_the_corpus_has_such_texts(thinker):
    chat = prompt.messages("How many?", "plain")
    on, plain, off = (
        thinker.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **options)
        for options in ({"enable_thinking": True}, {}, {"enable_thinking": False})
    )
    assert on == plain
    assert off == plain + "<think>\n\n</think>\n\n"
    assert thinker(off)["input_ids"] == thinker(plain)["input_ids"] + thinker(corpus.NO_THOUGHT)["input_ids"]
    texts = Corpus(form="math", thinking=True).texts(thinker, 8, 0)
    assert [text.split("assistant\n")[1].startswith("<think>\n\n</think>\n\n") for text in texts] == [False] * 4 + [
        True
    ] * 4


def test_thinking_tags_are_tokens_that_answers_keep(thinker):
    ids = thinker("<think>\n3+4=7\n</think>\n\nIt is 7.")["input_ids"]
    assert len(thinker) <= 400 and thinker.convert_ids_to_tokens(ids)[0] == "<think>"
    assert thinker.decode(ids, skip_special_tokens=True) == "<think>\n3+4=7\n</think>\n\nIt is 7."
    assert "enable_thinking" in thinker.chat_template


def test_the_defaults_are_the_shipped_models_shape(tokenizer):
    found = shape.new_model(Shape().whole(), tokenizer).config.to_dict()
    shipped = json.loads((tiny.PATH / "config.json").read_text())
    same = shipped.keys() - {"architectures", "dtype", "transformers_version"}
    assert {key: found[key] for key in same} == {key: shipped[key] for key in same}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = Shape(layers=1, hidden=32, heads=2, intermediate=64, vocab=400, positions=512)
MADE = {"heldout": 4, "device": "cpu", "workers": 0, "save_every": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", shape.TYPES)
def test_every_type_is_made_with_its_sizes_and_answers_in_the_engine(place, kind):
    sizes = replace(SMALL, type=kind, layers=2, heads=4, kv_heads=1, vocab=700, untied=True)
    make.make(place / "model", sizes, Corpus(form="math", thinking=kind == "qwen3"), Budget(steps=2, batch=4), **MADE)
    assert checkpoint.check(place / "model").dtype == "bfloat16"
    model, tokens = hf.load(place / "model", "cpu", torch.float32)
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.num_key_value_heads) == (kind, 2, 1)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (700, 512, False)
    record = json.loads((place / "model" / "made.json").read_text())
    assert record["result"]["parameters"] == model.num_parameters()
    assert len(record["scores"]) == (4 if kind == "qwen3" else 2)
    assert all(score["n"] == 4 and score["low"] <= score["accuracy"] <= score["high"] for score in record["scores"])
    assert ("enable_thinking" in tokens.chat_template) == (kind == "qwen3")


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_weights_and_a_finished_one_is_not_made_again(place, monkeypatch, capsys):
    budget = Budget(steps=6, batch=4)
    make.make(place / "straight", SMALL, Corpus(), budget, **MADE)
    saves = iter(range(2))

    def killed(path):
        if next(saves) == 1:  # the second state, after step 4, is never stored
            raise KeyboardInterrupt
        return workspace.write_atomically(path)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(train, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            make.make(place / "resumed", SMALL, Corpus(), budget, **MADE)
    assert not (place / "resumed").exists()
    with pytest.raises(BadInput, match="another budget"):
        make.make(place / "resumed", SMALL, Corpus(), replace(budget, steps=8), **MADE)
    capsys.readouterr()
    with monkeypatch.context() as patched:  # and killed again while it answers held-out questions
        patched.setattr(make, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make.make(place / "resumed", SMALL, Corpus(), budget, **MADE)
    make.make(place / "resumed", SMALL, Corpus(), budget, **MADE)
    assert "Resumed after step 2" in capsys.readouterr().out
    assert checkpoint.digest(place / "resumed") == checkpoint.digest(place / "straight")
    assert not list((place / ".qrl").iterdir())
    make.make(place / "resumed", SMALL, Corpus(), budget, **MADE)
    assert "already" in capsys.readouterr().out
    with pytest.raises(BadInput, match="holds something else"):
        make.make(place / "resumed", SMALL, Corpus(seed=1), budget, **MADE)


def test_texts_computed_in_parts_give_the_same_update_up_to_rounding(place, tokenizer, monkeypatch):
    pad, lengths = torch.nn.utils.rnn.pad_sequence, []

    def noted(part, **options):
        lengths.append(sorted(map(len, part)))
        return pad(part, **options)

    def update(micro_batch: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = shape.new_model(replace(SMALL, vocab=512).whole(), tokenizer)
        before, folder = [weight.detach().clone() for weight in model.parameters()], place / str(micro_batch)
        tokenizer.save_pretrained(folder / "tokenizer")
        limits = {"workers": 0, "save_every": 9, "micro_batch": micro_batch}
        train.train(model, tokenizer, Corpus(), Budget(steps=2, batch=8), folder, 512, **limits)
        return [weight.detach() - old for weight, old in zip(model.parameters(), before, strict=True)]

    whole = update(0)
    monkeypatch.setattr(torch.nn.utils.rnn, "pad_sequence", noted)
    for one, parts in zip(whole, update(3), strict=True):  # 0.04 in bf16; parts of equal weight would give 0.5
        assert (one - parts).norm() < 0.2 * one.norm()
    steps = lengths[:3], lengths[3:]  # of 8 texts, in parts of like lengths, the longest first
    assert [[len(part) for part in step] for step in steps] == [[3, 3, 2]] * 2
    assert all(before[0] >= after[-1] for step in steps for before, after in pairwise(step))


@pytest.mark.parametrize("room", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_memory_that_runs_out_halves_the_texts_once(place, monkeypatch, capsys, room):
    tried, real = [], train.train

    def within(*args, micro_batch: int, **limits):
        tried.append(micro_batch)
        if micro_batch > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 182.00 MiB.")
        return real(*args, micro_batch=micro_batch, **limits)

    monkeypatch.setattr(make, "train", within)
    arguments = (place / "model", SMALL, Corpus(), Budget(steps=1, batch=4))
    if room == 1:
        with pytest.raises(QrlError, match="--micro-batch = 4, and with 2: lower --micro-batch"):
            make.make(*arguments, **MADE)
    else:
        make.make(*arguments, **MADE)
        assert "--micro-batch = 4" in capsys.readouterr().out and (place / "model").is_dir()
    assert tried == [4, 2]


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_command_leaves_its_state_and_no_worker(place):
    sizes = "--hidden 32 --layers 1 --steps 9999 --batch 4 --workers 1 --save-every 1"
    command = [sys.executable, "-m", "qrl.tiny.make", "--out", "model", "--device", "cpu", *sizes.split()]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)
    while not process.stdout.readline().startswith("step 1 of 9,999"):
        assert process.poll() is None
    workers = psutil.Process(process.pid).children(recursive=True)
    process.stdout.readline()  # ten seconds later: steps and states have followed
    process.kill()
    process.wait()
    assert workers and not psutil.wait_procs(workers, timeout=20)[1]
    (state,) = (place / ".qrl").glob("*/state.pt")
    assert torch.load(state, weights_only=True)["progress"]["step"] > 1
    assert not (place / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("options", "rate"), [("", 2e-3), ("--hidden 512", 0.7 / 512), ("--learning-rate 1", 1)])
def test_a_wide_model_learns_at_a_lower_rate(place, options, rate):
    assert train.peak_rate(1152) == pytest.approx(6e-4, rel=0.02)  # at which such a model was made; 2e-3 failed
    words = ["--out", "model", "--device", "cpu", "--layers", "1", "--steps", "0", *options.split()]
    assert CliRunner().invoke(make.main, words).exit_code == 0
    made = json.loads((place / "model" / make.RECORD).read_text())
    assert made["settings"]["budget"]["learning_rate"] == rate


def test_without_steps_the_weights_stay_random(place):
    make.make(place / "model", SMALL, Corpus(), Budget(steps=0), **MADE)
    assert checkpoint.check(place / "model").dtype == "bfloat16"
    assert "random" in (place / "model" / "README.md").read_text()


@pytest.mark.slow
def test_a_model_of_the_most_positions_scores_a_text_of_that_length(place):
    make.make(place / "model", replace(SMALL, positions=LONGEST), Corpus(), Budget(steps=0), **MADE)
    model, _ = hf.load(place / "model", "cpu", torch.float32)
    ids = torch.arange(LONGEST)[None] % SMALL.vocab
    with torch.no_grad():
        assert model(input_ids=ids, logits_to_keep=1).logits.isfinite().all()
    assert hf.tokenizer(place / "model").model_max_length == LONGEST


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--hidden 100 --heads 3", "3 heads"),
        ("--heads 4 --kv-heads 3", "3 kv-heads"),
        ("--positions 16385", "16385"),
        ("--type gpt2", "gpt2"),
        ("--vocab 100", "100"),
        ("--form latex", "latex"),
    ],
)
def test_impossible_settings_get_a_sentence(place, options, reason):
    result = CliRunner().invoke(make.main, ["--out", "model", "--device", "cpu", *options.split()])
    assert (result.exit_code, reason in result.output) == (2, True)
    assert not (place / "model").exists()


def test_the_loss_is_the_mean_over_all_predicted_tokens_whatever_the_parts():
    model, _ = hf.load(tiny.PATH, "cpu", torch.float32)
    texts = [torch.tensor(list(range(5, 5 + length))) for length in (9, 4, 12)]
    with torch.autocast("cpu", torch.bfloat16):
        sums = [len(text) - 1 for text in texts]
        losses = [model(text[None], labels=text[None]).loss.item() for text in texts]
    expected = sum(n * loss for n, loss in zip(sums, losses, strict=True)) / sum(sums)
    for size in (1, 2, 3):
        assert train._backward(model, texts, size, pad=0).item() == pytest.approx(expected, rel=1e-2)
