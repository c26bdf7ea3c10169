"""The size of groups that a model's widths allow: read from headers, for common models and for odd ones."""

import json
import math

import pytest
import torch

from qrl import checkpoint, names, tiny
from qrl.engine import pretrained
from qrl.formats import groups
from qrl.formats.fakequant import linears, rounding

# Hidden size, intermediate size, query heads and key-value heads of published models with heads of 64 or 128.
COMMON = {
    "SmolLM2-135M": (576, 1536, 9, 3, 64),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64),
    "SmolLM2-360M": (960, 2560, 15, 5, 64),
    "Gemma-3-1B": (1152, 6912, 4, 1, 256),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64),
}
SIZES = {"SmolLM2-135M": 64, "SmolLM2-360M": 64}  # the others have groups of 128


def folder_of(shapes, folder):
    """Write a checkpoint's config and header; its weights are a hole in the file, which takes no space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.parametrize("model", COMMON)
def test_the_group_size_of_common_models_is_read_from_their_headers(model, tmp_path):
    hidden, intermediate, queries, keys, width = COMMON[model]
    layer = "model.layers.0"
    folder = folder_of(
        {
            "model.embed_tokens.weight": (49152, hidden + 1),  # neither this nor the head has any say
            "lm_head.weight": (49152, hidden + 1),
            "model.norm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries * width, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys * width, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries * width),
            f"{layer}.mlp.up_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, intermediate),
        },
        tmp_path,
    )
    assert groups.widths(folder) == {hidden, intermediate, queries * width}
    assert groups.of(folder, "auto") == SIZES.get(model, 128)
    assert groups.of(folder, 32) == 32  # one that is chosen stays, and is checked where it is used


@pytest.mark.parametrize(("inputs", "size"), [((576, 1536), 64), ((96,), 32), ((128, 200), None), ((1152, 6912), 128)])
def test_the_largest_size_that_divides_every_width_is_taken(inputs, size):
    assert groups.fitting(inputs) == size


def test_a_model_without_such_a_size_gets_the_usual_one_which_its_check_then_refuses(tmp_path):
    folder = folder_of({"model.layers.0.mlp.up_proj.weight": (64, 200)}, tmp_path)
    assert groups.of(folder, "auto") == 128


SMALL = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 64}
ARCHITECTURES = {
    "llama": SMALL | {"intermediate_size": 160},
    "qwen2": SMALL | {"intermediate_size": 160, "num_key_value_heads": 3},
    "gemma3_text": SMALL | {"intermediate_size": 160, "head_dim": 32, "num_key_value_heads": 1},
    "phi3": SMALL | {"intermediate_size": 160, "pad_token_id": 0},
    "gpt_neox": SMALL | {"intermediate_size": 160},
    "opt": SMALL | {"ffn_dim": 160, "word_embed_proj_dim": 64},  # which projects its embeddings
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_headers_tell_the_widths_of_exactly_the_linears_that_are_quantized(kind, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    covered = linears.covered(pretrained.skeleton(checkpoint.config(tmp_path)), "int4")
    assert groups.widths(tmp_path) == {linear.in_features for linear in covered.values()}
    assert groups.of(tmp_path, "auto") == 32


def test_the_shipped_model_keeps_groups_of_128():
    assert groups.of(tiny.PATH, "auto") == groups.USUAL == 128


@pytest.mark.parametrize("name", names.FORMATS)
def test_only_integer_formats_with_groups_have_the_size_that_is_chosen(name):
    usual, chosen = (rounding.scheme(name, size).weights for size in (128, 64))
    assert rounding.scheme(name).weights == usual
    assert (chosen.group_size, usual.group_size) == (64, 128) if name in names.GROUPED_FORMATS else chosen == usual


def test_the_size_of_stored_codes_is_read_where_they_are_integers_with_groups():
    def compressed(**weights):
        return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}

    assert groups.stored({"quant_method": "awq", "group_size": 64}) == 64
    assert groups.stored(compressed(type="int", strategy="group", group_size=32)) == 32
    assert groups.stored(compressed(type="float", strategy="tensor_group", group_size=16)) is None
    assert groups.stored(compressed(type="int", strategy="channel")) is None
    assert groups.stored({"load_in_4bit": True}) is groups.stored(None) is None
