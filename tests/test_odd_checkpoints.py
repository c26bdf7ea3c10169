"""Checkpoints that loaders read differently, or that fail deep in a kernel: the right model, or a sentence."""

import re

import pytest
import torch

from qrl import checkpoint, cli, tiny
from qrl.engine import hf, pretrained
from qrl.errors import BadInput
from tests import odd


@pytest.fixture
def folder(tmp_path):
    return odd.copied(tmp_path / "model")


def logits(folder) -> torch.Tensor:
    model, _ = hf.load(folder, "cpu", torch.float32)
    with torch.no_grad():
        return model(torch.arange(16)[None]).logits[0]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_another_head_beside_a_tie_is_refused_with_both_ways_out(folder, is_sharded):
    odd.swap_head(folder)
    if is_sharded:
        odd.shard_head(folder)
    with pytest.raises(BadInput, match=r'Set "tie_word_embeddings": false in config\.json') as refused:
        checkpoint.check(folder)
    assert "remove lm_head.weight" in str(refused.value) and refused.value.field == "tie_word_embeddings"
    assert "00002-of-00002" in str(refused.value) or not is_sharded


@pytest.mark.parametrize("tied", [False, None])  # Qwen2's class in transformers is untied where nothing is said
def test_another_head_without_a_tie_is_the_head(folder, tied):
    head = odd.swapped_head(folder)
    odd.swap_head(folder, tied=tied)
    checkpoint.check(folder)
    model, _ = hf.load(folder, "cpu", torch.float32)
    assert model.get_output_embeddings().weight.equal(head.float())
    expected = logits(tiny.PATH)
    one, two = (checkpoint.tokens(folder)[digit] for digit in "12")
    expected[:, [one, two]] = expected[:, [two, one]]
    assert torch.allclose(logits(folder), expected, atol=1e-4)


def test_a_class_that_ties_by_itself_counts_where_config_json_says_nothing():
    assert checkpoint.head.is_tied({"model_type": "gemma"}) and not checkpoint.head.is_tied({"model_type": "llama"})
    assert checkpoint.head.is_tied({"model_type": "llama", "text_config": {"tie_word_embeddings": True}})
    assert not checkpoint.head.is_tied({"model_type": "of nobody"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_head_that_is_the_embedding_is_harmless_in_any_dtype(folder, dtype):
    tensors = odd.weights(folder)
    odd.write(folder, tensors | {odd.HEAD: tensors[odd.EMBEDDING].to(dtype)})
    checkpoint.check(folder)
    assert logits(folder).equal(logits(tiny.PATH))


def test_a_head_that_is_the_embedding_rounded_is_replaced_by_it_so_that_training_stores_one(folder, tmp_path):
    tensors = {name: 1.0001 * tensor.float() for name, tensor in odd.weights(folder).items()}
    odd.write(folder, tensors)
    expected = logits(folder)
    odd.write(folder, tensors | {odd.HEAD: tensors[odd.EMBEDDING].bfloat16()})
    checkpoint.check(folder)
    assert logits(folder).equal(expected)
    pretrained.load(folder, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    assert odd.HEAD not in checkpoint.entries(tmp_path / "saved")


def test_a_head_of_another_size_or_of_codes_is_another_head(folder):
    tensors = odd.weights(folder)
    for other in (tensors[odd.EMBEDDING][:-1], torch.zeros(odd.ROWS, 256, dtype=torch.uint8)):
        odd.write(folder, tensors | {odd.HEAD: other})
        with pytest.raises(BadInput, match="another head"):
            checkpoint.check(folder)


def test_a_tied_head_without_its_embedding_is_refused(folder):
    tensors = odd.weights(folder)
    tensors[odd.HEAD] = tensors.pop(odd.EMBEDDING)
    odd.write(folder, tensors)
    with pytest.raises(BadInput, match=r"the head alone, lm_head\.weight"):
        checkpoint.check(folder)


def test_a_head_of_its_own_that_is_missing_or_for_other_tokens_is_refused_before_it_is_loaded(folder):
    odd.edit(folder, "config.json", tie_word_embeddings=False)
    with pytest.raises(BadInput, match=r"no file holds a head \(lm_head\.weight\).* set tie_word_embeddings to true"):
        checkpoint.check(folder)
    odd.swap_head(folder, tied=False)
    odd.pad_rows(folder, 1)
    with pytest.raises(BadInput, match=r"lm_head\.weight for 512 tokens, .* for 513: .*resize_token_embeddings\(513\)"):
        checkpoint.check(folder)


def test_an_end_token_by_its_name_is_refused(folder):
    for ends in ("2", [2, "<|im_end|>"], 2.0):
        odd.edit(folder, "generation_config.json", eos_token_id=ends)
        with pytest.raises(BadInput, match=r"\(eos_token_id\), but a whole number was expected"):
            checkpoint.check(folder)


def test_a_file_that_is_mended_is_read_again(folder):
    head = odd.weights(folder)[odd.EMBEDDING]
    odd.swap_head(folder)
    with pytest.raises(BadInput, match="another head"):
        checkpoint.check(folder)
    odd.write(folder, odd.weights(folder) | {odd.HEAD: head})
    checkpoint.check(folder)


BEYOND = {
    "pad in tokenizer.json": lambda folder: (
        odd.add_token(folder, odd.PAD, odd.ROWS),
        odd.edit(folder, "tokenizer_config.json", pad_token=odd.PAD),
    ),
    "pad by its name alone": lambda folder: odd.edit(folder, "tokenizer_config.json", pad_token=odd.PAD),
    "in the chat template": lambda folder: (
        odd.add_token(folder, odd.PAD, odd.ROWS),
        (folder / "chat_template.jinja").write_text(f"{odd.PAD}{{{{ messages[0].content }}}}"),
    ),
    "an ordinary word": lambda folder: odd.add_token(folder, odd.PAD, odd.ROWS, special=False),
}


@pytest.mark.parametrize("case", BEYOND)
def test_a_token_beyond_the_embedding_is_named_with_its_id_and_the_size(folder, case):
    BEYOND[case](folder)
    sentence = rf"'{re.escape(odd.PAD)}'.* has the id 512, but the embedding has 512 rows, for ids 0 to 511"
    with pytest.raises(BadInput, match=sentence) as refused:
        checkpoint.check(folder)
    assert "resize_token_embeddings(513)" in str(refused.value)
    assert len(hf.tokenizer(folder)) == odd.ROWS + 1  # what the sentence says is what transformers would do
    odd.pad_rows(folder, 64)
    checkpoint.check(folder)  # within the padding it is fine


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"pad_token_id": odd.ROWS}),
        ("generation_config.json", {"pad_token_id": odd.ROWS}),
        ("generation_config.json", {"eos_token_id": [2, odd.ROWS]}),
    ],
)
def test_an_id_that_a_configuration_names_beyond_the_embedding_is_refused(folder, file, changes):
    odd.edit(folder, file, **changes)
    with pytest.raises(BadInput, match=rf"{file} names the token 512 \({next(iter(changes))}\)"):
        checkpoint.check(folder)


def test_a_special_token_that_nothing_writes_may_lie_beyond(folder):
    odd.add_token(folder, "<image_soft_token>", odd.ROWS)  # as in Gemma 3's text model
    checkpoint.check(folder)
    model, tokens = hf.load(folder, "cpu", torch.float32)
    ids = tokens("a <image_soft_token>")["input_ids"]
    with pytest.raises(BadInput, match="'<image_soft_token>' with the id 512, but the model's embedding has 512 rows"):
        hf.generate(model, tokens, [ids], max_new_tokens=1, batch_size=1)


@pytest.mark.parametrize("pad", [-1, None])
def test_no_pad_token_is_no_fault(folder, pad):
    for file in ("config.json", "generation_config.json"):
        odd.edit(folder, file, pad_token_id=pad)
    checkpoint.check(folder)
    loaded = [hf.load(path, "cpu", torch.float32) for path in (folder, tiny.PATH)]
    prompts = [tokens("What is 1 + 1?")["input_ids"] * n for n, (_, tokens) in enumerate(loaded, 1)]
    answers = [hf.generate(*each, prompts, max_new_tokens=8, batch_size=2) for each in loaded]
    assert answers[0] == answers[1]


def test_a_vocabulary_in_other_files_is_read_too(folder):
    tokens = checkpoint.tokens(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 511}')
    (folder / "added_tokens.json").write_text('{"<|pad|>": 512}')
    odd.edit(folder, "tokenizer_config.json", pad_token=odd.PAD, eos_token="a")
    assert len(tokens) == odd.ROWS and checkpoint.tokens(folder)[odd.PAD] == odd.ROWS
    with pytest.raises(BadInput, match="tokens beyond the embedding"):
        checkpoint.check(folder)


COMMANDS = {
    "train": "train --model {model}",
    "quantize": "quantize --model {model} --scheme nf4",
    "evaluate": "evaluate --model {model}",
    "merge": "merge --model {model} --adapter {model}",
    "diagnose": "diagnose --base {model} --trained {model} --out {model}-out",
    "benchmark": "benchmark --models base:full={model}",
    "study": "study --model {model}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_before_a_run_opens(store, folder, name):
    import mlflow

    BEYOND["pad in tokenizer.json"](folder)
    line = COMMANDS[name].format(model=folder).split()
    task = [] if name == "diagnose" else ["--recipe", "tiny"]
    with pytest.raises(BadInput, match="the embedding has 512 rows"):
        cli.cli.main([*line, *task], standalone_mode=False)
    assert mlflow.search_runs(output_format="list") == []
