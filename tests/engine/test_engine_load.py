"""A checkpoint is loaded completely and as config.json describes it, or refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qrl import quantize as quantization
from qrl import tiny
from qrl.engine import hf, pretrained
from qrl.errors import BadInput


@pytest.fixture
def spoilt(tiny_checkpoint, tmp_path) -> Path:
    """A copy of a checkpoint for a test to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "spoilt"))


def test_a_missing_weight_is_never_made_up(spoilt):
    """transformers fills it with random numbers and logs a warning."""
    weights = load_file(spoilt / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"lacks model\.layers\.1\.self_attn\.q_proj\.weight, .*random"):
        hf.load(spoilt, "cpu", torch.float32)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.extra", "model.layers.2.mlp.up_proj.weight"])
def test_a_weight_is_never_left_out(spoilt, name):
    weights = load_file(spoilt / "model.safetensors")
    save_file(weights | {name: torch.zeros(4)}, spoilt / "model.safetensors", {"format": "pt"})
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": int("2" in name)}))
    with pytest.raises(BadInput, match=f"holds {name}, which a model of its config.json lacks"):
        hf.load(spoilt, "cpu", torch.float32)


def test_a_model_under_another_name_does_not_lose_its_biases(spoilt):
    """A Qwen2 that calls itself a Llama: transformers and vLLM would both drop the biases of its attention."""
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(
        json.dumps(config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    for read in (pretrained.check_fit, lambda path: hf.load(path, "cpu", torch.float32)):
        with pytest.raises(BadInput, match=r"holds model\.layers\.0\.self_attn\.k_proj\.bias, which .* lacks"):
            read(spoilt)


@pytest.mark.parametrize("named", [["LlamaForCausalLM"], ["LlamaForCausalLM", "Qwen2ForCausalLM"]])
def test_transformers_and_vllm_make_the_same_class(spoilt, named):
    """vLLM takes the class from `architectures`, transformers from `model_type`."""
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps(config | {"architectures": named}))
    with pytest.raises(BadInput, match=r"loads as Qwen2ForCausalLM, but its architectures are .*Llama"):
        pretrained.check_fit(spoilt)


def test_gptq_may_store_zeros_as_biases_and_nothing_else(spoilt):
    weights, config = load_file(spoilt / "model.safetensors"), json.loads((spoilt / "config.json").read_text())
    name = "model.layers.0.mlp.up_proj.bias"
    (spoilt / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    save_file(weights | {name: torch.zeros(4)}, spoilt / "model.safetensors", {"format": "pt"})
    pretrained.check_fit(spoilt)
    save_file(weights | {name: torch.ones(4)}, spoilt / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=f"holds {name}, which"):
        pretrained.check_fit(spoilt)


@pytest.mark.process
@pytest.mark.parametrize("scheme", ["rtn-int2", "rtn-int4"])
def test_codes_of_few_bits_hold_as_many_weights_as_they_do(tmp_path, scheme):
    """4 M parameters in two bits take a third of a byte each: a bound of two a byte refused them."""
    sizes = {"hidden_size": 256, "intermediate_size": 2816, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.PATH / file, tmp_path / "base")
    quantization.run(scheme, tmp_path / "base", tmp_path / "codes")
    pretrained.check_fit(tmp_path / "codes")


@pytest.mark.parametrize("changes", [{"intermediate_size": 2**23}, {"head_dim": 2**16}])
def test_a_config_allocates_no_more_than_the_files_hold(spoilt, changes):
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInput, match=r"makes a model of .* parameters, which"):
        hf.load(spoilt, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            r"model\.layers\.0\.self_attn\.k_proj\.\w+ as .*config\.json",
        ),
        ({"model_type": "foo"}, "`foo`"),
        ({"pad_token_id": 10**9}, r"names the token 1000000000 \(pad_token_id\), but the embedding"),
        ({"hidden_act": "banana"}, "transformers: .*banana"),
        ({"rms_norm_eps": "small"}, r"config\.json .*transformers: .*rms_norm_eps"),
    ],
)
def test_a_config_that_transformers_cannot_build_is_refused_on_one_line(spoilt, changes, says):
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInput, match=says) as refused:
        hf.load(spoilt, "cpu", torch.float32)
    assert "\n" not in str(refused.value)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["mistral3", "qwen2_vl", "only_vllm_knows_it"])
def test_an_architecture_that_transformers_has_no_language_model_for_is_left_to_an_engine_that_has(spoilt, kind):
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(BadInput, match="cannot be loaded by transformers"):
        pretrained.check_fit(spoilt)
    pretrained.check_fit(spoilt, for_transformers=False)


def test_a_tokenizer_that_cannot_be_read_is_named(spoilt):
    (spoilt / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=r"tokenizer of .*spoilt cannot be read"):
        hf.tokenizer(spoilt)


def test_a_tokenizer_that_cannot_be_used_is_named(spoilt):
    config = json.loads((spoilt / "tokenizer_config.json").read_text())
    (spoilt / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": "x"}))
    with pytest.raises(BadInput, match=r"tokenizer of .*spoilt cannot be read"):
        hf.tokenizer(spoilt)
