"""Which linears a plan stores in few bits: its spelling, what it matches in a model, and what is refused."""

import re

import pytest

from qrl import recipe
from qrl.engine import pretrained
from qrl.errors import BadInput
from qrl.formats import layers
from qrl.recipe import Quantize, Train
from qrl.recipe import layers as spelling

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
QWEN2 = {"model_type": "qwen2", "num_hidden_layers": 12, "num_key_value_heads": 2, **SHAPE}
OPT = {"model_type": "opt", "num_hidden_layers": 3, "ffn_dim": 128, "word_embed_proj_dim": 64, **SHAPE}
OPT.pop("intermediate_size")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def qwen2():
    return pretrained.skeleton(QWEN2)


def covered(model, *terms, own="gptq"):
    """Return (block, leaf) of every linear in few bits, with its format."""
    plan = layers.plan_of(model, own, terms)
    assert set(plan.formats).isdisjoint(plan.left_out)
    everything = layers.plan_of(model, own)
    assert {*plan.formats, *plan.left_out} == set(everything.formats) and not everything.left_out
    return {(int(path.split(".")[2]), path.rpartition(".")[2]): name for path, name in plan.formats.items()}


@pytest.mark.parametrize(
    "terms, blocks, leaves",
    [
        ((), range(12), ATTENTION + MLP),
        (("mlp",), range(12), MLP),
        (("attention",), range(12), ATTENTION),
        (("mlp", "attention"), range(12), ATTENTION + MLP),
        (("-attention",), range(12), MLP),
        (("-first:2", "-last:2"), range(2, 10), ATTENTION + MLP),
        (("mlp", "-first:2", "-last:2"), range(2, 10), MLP),
        (("-last:1", "mlp", "-first:1"), range(1, 11), MLP),  # the order of what is left out decides nothing
        (("first:1",), range(1), ATTENTION + MLP),
        (("down_proj",), range(12), ("down_proj",)),
        (("mlp.down_proj",), range(12), ("down_proj",)),
        (("layers.1",), (1,), ATTENTION + MLP),  # not layers.10 and layers.11
        (("-layers.1",), (0, *range(2, 12)), ATTENTION + MLP),
        (("re:.*down_proj",), range(12), ("down_proj",)),
        (("re:.*layers\\.(3|11)\\.mlp",), (3, 11), MLP),
        (("-re:.*(up|gate)_proj$",), range(12), (*ATTENTION, "down_proj")),
    ],
)
def test_a_plan_covers_what_its_terms_say(qwen2, terms, blocks, leaves):
    assert covered(qwen2, *terms) == {(block, leaf): "gptq" for block in blocks for leaf in leaves}


def test_terms_give_formats_and_what_is_left_out_stays_left_out(qwen2):
    found = covered(qwen2, "down_proj=int8", "mlp=fp8", "-first:11", own="rtn-int4")
    assert found == {(11, leaf): "rtn-int4" for leaf in ATTENTION} | {
        (11, "down_proj"): "int8",  # the first term that matches decides
        (11, "gate_proj"): "fp8",
        (11, "up_proj"): "fp8",
    }
    only = covered(qwen2, "attention", "down_proj=int8", own="int4")
    assert set(only.values()) == {"int4", "int8"} and {leaf for _, leaf in only} == {*ATTENTION, "down_proj"}


def test_every_linear_of_a_block_is_attention_or_mlp_whatever_it_is_called():
    model = pretrained.skeleton(OPT)
    mlp = layers.plan_of(model, "int8", ("mlp",))
    attention = layers.plan_of(model, "int8", ("attention",))
    assert {path.rpartition(".")[2] for path in mlp.formats} == {"fc1", "fc2"}
    assert {path.rpartition(".")[2] for path in attention.formats} == {"q_proj", "k_proj", "v_proj", "out_proj"}
    assert set(mlp.formats) == set(attention.left_out)


@pytest.mark.parametrize(
    "terms, sentence",
    [
        (("mpl",), "'mpl', which matches no linear .*mlp, attention, first:N.* 12 blocks hold q_proj, k_proj"),
        (("-re:.*experts.*",), "matches no linear"),
        (("re:mlp",), r"from the start of the path: re:\.\*mlp\."),
        (("lm_head",), "matches no linear"),  # it stays in full precision under every scheme
        (("-first:13",), "the model has 12 blocks"),
        (("-first:6", "-last:6"), "leaves none of 84 linears in gptq"),
        (("mlp=int8", "attention=fp8"), "none of 84 linears in gptq"),
    ],
)
def test_terms_that_match_nothing_are_refused_with_what_there_is(qwen2, terms, sentence):
    with pytest.raises(BadInput, match=sentence) as caught:
        layers.plan_of(qwen2, "gptq", terms)
    assert caught.value.field == "quantize.layers"


@pytest.mark.parametrize(
    "terms, sentence",
    [
        (("first:0",), "a term must be"),
        (("first",), None),  # a name like any other: the model refuses it
        (("mlp", "mlp"), "once"),
        (("-mlp=int8",), "choose one"),
        (("mlp=int5",), "must be one of int8, int4"),
        (("mlp=nvfp4-a4",), "calibrates"),
        (("mlp=int8-attention",), "must be one of"),
        (("re:(",), "no regular expression"),
        (("re:",), "without a pattern"),
        (("re:a{1,2}",), "comma"),
        (("down proj",), "a term must be"),
        (("*.down_proj",), r"not '\*\.down_proj'; as a regular expression it is re:\.\*\\\.down_proj "),
        (("-layers.[0-3]",), r"it is re:\.\*layers\\\.\[0-3\] "),
    ],
)
def test_what_cannot_be_a_term_is_refused_as_the_recipe_is_read(terms, sentence):
    if sentence is None:
        assert Quantize(layers=terms).layers == terms
        return
    for section, field in ((Quantize, "layers"), (Train, "qat_layers")):
        with pytest.raises(ValueError, match=sentence):
            section(**{field: terms})


def test_a_mapping_is_a_plan_too():
    plan = Quantize(layers={"mlp": "own", "attention": "fp8", "first:2": "full"})
    assert plan.layers == ("mlp", "attention=fp8", "-first:2")
    assert Quantize(layers=("mlp=own", "attention=fp8", "first:2=full")).layers == plan.layers


def test_a_recipe_holds_a_plan_as_a_text_a_list_or_a_mapping(tmp_path):
    text, listed, mapped = (
        "mlp,attention=fp8,-first:1",
        '["mlp", "attention=fp8", "-first:1"]',
        "{mlp: own, attention: fp8, 'first:1': full}",
    )
    for number, written in enumerate((f'"{text}"', listed, mapped)):
        file = tmp_path / f"{number}.yaml"
        file.write_text(f"extends: tiny\nquantize: {{schemes: rtn-int4, layers: {written}}}\n")
        loaded = recipe.load(str(file))
        assert loaded.quantize.layers == ("mlp", "attention=fp8", "-first:1")
        assert recipe.change(str(file))["quantize.layers"] == text
        assert loaded.flat("quantize")["quantize.layers"] == text
        (tmp_path / "again.yaml").write_text(loaded.dump())
        assert recipe.load(str(tmp_path / "again.yaml")) == loaded
    typed = recipe.load("tiny", {"quantize.schemes": "gptq", "quantize.layers": "-first:1, -last:1"})
    assert typed.quantize.layers == ("-first:1", "-last:1")
    with pytest.raises(BadInput, match=r"'quantize\.layers' is 'mlp=int5', but .*int8, int4"):
        recipe.load("tiny", {"quantize.layers": "mlp=int5"})


def test_a_long_plan_is_named_by_its_digest():
    short, long = (tuple(f"layer{i}" for i in range(count)) for count in (2, 12))
    assert spelling.slug(short) == "layer0.layer1"
    assert re.fullmatch("layers-[0-9a-f]{8}", spelling.slug(long))


def test_variants_of_other_plans_have_other_names():
    plans = [(), ("mlp",), ("-mlp",), ("mlp", "-first:2"), ("mlp", "-first:2", "-last:2"), ("down_proj=int8",)]
    plans += [("re:.*down_proj",), ("re:.*up_proj",)]
    variants = [Train(qat="int4", qat_layers=plan).variant for plan in plans]
    assert len(set(variants)) == len(plans)
    assert variants[0] == "qat-int4" and variants[4] == "qat-int4+mlp.no-first2.no-last2"
    from qrl.recipe import lists

    assert [lists.check_variant(variant) for variant in variants] == variants


def test_linears_that_an_engine_fuses_are_found_where_they_differ(qwen2):
    assert layers.split_set(layers.plan_of(qwen2, "gptq", ("mlp", "-first:2"))) == []
    for terms in (("q_proj",), ("-up_proj",), ("q_proj=int8",)):
        assert layers.split_set(layers.plan_of(qwen2, "rtn-int4", terms))[0].startswith("model.layers.0.")
    assert layers.split_set(layers.plan_of(qwen2, "rtn-int4", ("o_proj", "down_proj"))) == []


def test_bitsandbytes_is_told_whole_modules_and_never_whole_blocks(qwen2):
    plan = layers.plan_of(qwen2, "nf4", ("-layers.1", "-layers.3.mlp.down_proj"))
    assert layers.skipped_modules(plan) == [
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
        "model.layers.3.mlp.down_proj",
    ]


def test_a_fused_linear_of_which_bitsandbytes_skips_a_part_is_found(qwen2):
    for terms, split in [
        (("-q_proj",), ["q_proj", "k_proj", "v_proj"]),
        (("-mlp", "-first:2"), []),
        (("-layers.1.mlp.up_proj",), ["up_proj", "gate_proj"]),
    ]:
        skipped = layers.skipped_modules(layers.plan_of(qwen2, "nf4", terms))
        stored = layers.stored_plan({"llm_int8_skip_modules": ["lm_head", *skipped]})
        assert sorted(path.rpartition(".")[2] for path in layers.split_set(stored)) == sorted(split)


def test_text_is_what_is_typed():
    assert spelling.text_of(("mlp", "-first:2")) == "mlp,-first:2"
