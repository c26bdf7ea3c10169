"""Adapters as PEFT writes them merge exactly, tied heads and embeddings too, or are refused by their files alone."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrl import checkpoint, cli, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.tasks import prompt
from qrl.train import adapter, merge
from tests import odd

pytestmark = pytest.mark.process

LINEARS = ["q_proj", "down_proj"]
BOTH = ["embed_tokens", "lm_head"]
TOKENS = [5, 6, 7]


@pytest.fixture(scope="module")
def prompts():
    tokens = hf.tokenizer(tiny.PATH)
    return [prompt.render(tokens, each.question, "plain") for each in tasks.load("arithmetic", "train", 4, 0)]


@pytest.fixture
def make(tmp_path):
    """Return a function that writes an adapter over the shipped model, every trained number of it moved."""

    def write(*, targets=(), moved=True, rows=odd.ROWS, own=None, **settings):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)
        if rows != odd.ROWS:
            model.resize_token_embeddings(rows, mean_resizing=False)
            model.save_pretrained(tmp_path / "resized")
        config = own or LoraConfig(r=4, target_modules=[*LINEARS, *targets], task_type="CAUSAL_LM", **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the head is tied
            adapted = get_peft_model(model, config)
            torch.manual_seed(0)
            for weight in adapted.parameters():
                if weight.requires_grad and moved:
                    weight.data += 0.02 * torch.randn_like(weight)
            adapted.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return write


UNTYING = {
    "lora of the head": {"targets": ["lm_head"]},
    "lora of the embedding": {"targets": ["embed_tokens"]},
    "lora of both": {"targets": BOTH},
    "a copy of the head": {"modules_to_save": ["lm_head"]},
    "a copy of the embedding": {"modules_to_save": ["embed_tokens"]},
}
TIED = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "a copy of a norm": {"modules_to_save": ["norm"]},
    "lora of both, tied": {"targets": BOTH, "ensure_weight_tying": True},
    "a copy of both, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": TOKENS},
    "ranks by pattern": {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"down_proj": 32}},
}


@pytest.mark.parametrize("case", [*UNTYING, *TIED])
def test_an_adapter_merges_exactly_and_the_head_is_stored_apart_only_where_it_must_be(make, prompts, tmp_path, case):
    path = make(**(UNTYING | TIED)[case])
    merged = merge.run(tiny.PATH, path, tmp_path / "out", prompts, max_kl=1e-9, store_dtype="fp32")
    assert merged.changes and merged.kl < 1e-9 and merged.kl < 1e-3 * merged.update_kl
    assert merged.kept is not None and merged.kept.share == pytest.approx(1, abs=1e-3)
    assert merged.untied == (case in UNTYING)
    assert checkpoint.config(merged.path)["tie_word_embeddings"] == (case in TIED)
    assert (odd.HEAD in checkpoint.entries(merged.path)) == (case in UNTYING)
    checkpoint.check(merged.path)


def test_a_method_with_modules_of_its_own_merges(make, prompts, tmp_path):
    from peft import OFTConfig

    path = make(own=OFTConfig(r=0, oft_block_size=32, target_modules=LINEARS, task_type="CAUSAL_LM"))
    merged = merge.run(tiny.PATH, path, tmp_path / "out", prompts, max_kl=1e-9, store_dtype="fp32")
    assert merged.changes and merged.kl < 1e-9 < merged.update_kl


def test_biases_of_lora_merge_only_where_the_base_has_them(make, prompts, tmp_path):
    from peft import LoraConfig

    def adapter_of(linears):
        return make(own=LoraConfig(r=4, target_modules=linears, task_type="CAUSAL_LM", lora_bias=True))

    merged = merge.run(tiny.PATH, adapter_of(["q_proj"]), tmp_path / "out", prompts, max_kl=1e-9, store_dtype="fp32")
    assert merged.changes and merged.kl < 1e-9 < merged.update_kl
    with pytest.raises(BadInput, match=r"has a bias for .*down_proj \(lora_bias\), but that linear"):
        adapter.check(adapter_of(LINEARS), checkpoint.check(tiny.PATH))


def test_lora_of_a_tied_head_of_which_single_tokens_are_trained_is_refused(make):
    path = make(targets=["lm_head"], trainable_token_indices=TOKENS)
    with pytest.raises(BadInput, match="the same matrix, by LoRA: PEFT cannot merge both") as refused:
        adapter.check(path, checkpoint.check(tiny.PATH))
    assert refused.value.field == "trainable_token_indices"


def test_what_the_head_and_the_embedding_become_is_as_defined(make, prompts, tmp_path):
    path = make(targets=["lm_head"])
    merged = odd.weights(merge.run(tiny.PATH, path, tmp_path / "out", prompts, max_kl=1, store_dtype="fp32").path)
    parts = load_file(path / adapter.WEIGHTS)
    a, b = (parts[f"base_model.model.lm_head.lora_{letter}.weight"] for letter in "AB")
    embedding = odd.weights(tiny.PATH)[odd.EMBEDDING].float()
    scale = json.loads((path / adapter.CONFIG).read_text())["lora_alpha"] / 4
    assert merged[odd.EMBEDDING].equal(embedding)
    assert torch.allclose(merged[odd.HEAD], embedding + scale * b @ a, atol=1e-6)


def test_an_adapter_that_changes_nothing_is_no_loss(make, prompts, tmp_path, store, capsys):
    path = make(moved=False)
    merged = merge.run(tiny.PATH, path, tmp_path / "out", prompts, max_kl=1e-3, into="nf4")
    assert not merged.changes and merged.update_kl == 0 < merged.kl + merged.base_shift
    cli.cli.main(["merge", "--recipe", "tiny", "--adapter", str(path), "--merge.into", "nf4"], standalone_mode=False)
    said = capsys.readouterr().err
    assert "Training changed no weight." in said and "Merging lost" not in said


def test_an_adapter_of_a_larger_vocabulary_names_both_sizes(make, tmp_path, store):
    import mlflow

    path = make(rows=516, targets=["lm_head"])
    with pytest.raises(BadInput, match=r"another vocabulary than that of .* has 516 .*, but the base's has 512"):
        cli.cli.main(["merge", "--recipe", "tiny", "--adapter", str(path)], standalone_mode=False)
    assert mlflow.search_runs(output_format="list") == []


def test_an_adapter_of_a_resized_base_merges_into_that(make, prompts, tmp_path):
    path = make(rows=516, modules_to_save=BOTH)
    base = odd.copied(tmp_path / "base")
    odd.write(base, odd.weights(tmp_path / "resized"))
    odd.edit(base, "config.json", vocab_size=516)
    merged = merge.run(base, path, tmp_path / "out", prompts, max_kl=1e-9)
    assert merged.kl < 1e-9 < merged.update_kl and checkpoint.entries(merged.path)[odd.EMBEDDING].shape == (516, 256)


def test_a_tokenizer_of_other_tokens_beside_the_adapter_is_named(make, tmp_path):
    path = make()
    shutil.copy(tiny.PATH / "tokenizer.json", path / "tokenizer.json")
    adapter.check(path, checkpoint.check(tiny.PATH))  # the same tokens
    base = odd.copied(tmp_path / "base")
    odd.pad_rows(base, 64)
    odd.add_token(path, "<think>", 512)
    with pytest.raises(BadInput, match="has 513 tokens, '<think>' with the id 512, but the base's has no such token"):
        adapter.check(path, checkpoint.check(base))
    odd.add_token(base, "<answer>", 512)
    odd.add_token(base, "<think>", 513)
    with pytest.raises(BadInput, match="'<think>' with the id 512, but the base's has it as 513"):
        adapter.check(path, checkpoint.check(base))


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 128), "q_proj has 128 columns, but that model's has 256"),
        ("model.layers.9.self_attn.q_proj.lora_A.weight", (4, 256), r"extends model\.layers\.9\.self_attn\.q_proj"),
        ("model.embed_tokens.weight", (516, 256), "embed_tokens has 516 × 256, but the base's has 512 × 256"),
        ("model.embed_tokens.lora_embedding_A", (4, 516), "embed_tokens has 516 rows, but the base's has 512 rows"),
        ("lm_head.modules_to_save.weight", (516, 256), "lm_head has 516 × 256, but the base's has 512 × 256"),
        ("model.norm.weight", (128,), "norm has 128, but that model's has 256"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_both_sizes(make, name, shape, says):
    path = make()
    save_file({f"base_model.model.{name}": torch.zeros(shape)}, path / adapter.WEIGHTS)
    with pytest.raises(BadInput, match=says):
        adapter.check(path, checkpoint.check(tiny.PATH))


def test_a_trained_token_beyond_the_embedding_and_a_soft_prompt_are_refused(make):
    from peft import PromptTuningConfig

    path = make(own=PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(BadInput, match="4 vectors before the prompt"):
        adapter.check(path, checkpoint.check(tiny.PATH))
    path = make()
    odd.edit(path, adapter.CONFIG, trainable_token_indices={"embed_tokens": [5, 600]}, num_virtual_tokens=None)
    with pytest.raises(BadInput, match=r"trained the token 600 .* has 512 rows"):
        adapter.check(path, checkpoint.check(tiny.PATH))
