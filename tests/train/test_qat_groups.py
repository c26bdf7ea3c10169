"""A model whose widths groups of 128 do not divide: one other size in training, storage and tables."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qrl import checkpoint, names, quantize, recipe
from qrl.compare import from_questions
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import groups
from qrl.quantize import settings as choices
from qrl.recipe import Quantize, Train
from qrl.tiny import tokenizer
from qrl.train.qat import linear, prepare
from qrl.train.rollout import codes, sync

pytestmark = pytest.mark.process

TEXTS = ["Tom has 3 apples and buys 4 more.", "How many does he have? #### 7"]
SIZES = {192: 64, 96: 32}  # hidden size → the group size that fits


def narrow(folder, width):
    """Write a random Llama with heads of 32."""
    words = tokenizer.make(["Tom has 3 apples and buys 4 more. How many does he have? #### 7"] * 20, folder)
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 32, "tie_word_embeddings": True}
    ends = {"bos_token_id": None, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=512, **shape, **heads, **ends)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=SIZES)
def model(request, tmp_path_factory):
    return narrow(tmp_path_factory.mktemp("narrow"), request.param), SIZES[request.param]


def stored(scheme, source, out, **chosen):
    given = Quantize(calibration_samples=2, calibration_max_tokens=64, **chosen)
    quantize.run(scheme, source, out, settings=choices.settings_of(scheme, given, 0), calibration=TEXTS)
    return groups.stored(checkpoint.config(out)["quantization_config"])


@pytest.mark.parametrize("name", names.GROUPED_FORMATS)
def test_codes_in_smaller_groups_are_bit_equal_to_what_training_computes(name, model, tmp_path):
    folder, size = model
    assert stored(f"rtn-{name}", folder, tmp_path / "out") == size
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert {fold.scheme.weights.group_size for fold in linear.attach(trained, name, group_size=size)} == {size}
    loaded, _ = hf.load(tmp_path / "out", "cpu", torch.float32)
    held = dict(loaded.named_parameters())
    for key, value in sync.named_weights(trained):
        assert torch.equal(held[key], value), key


@pytest.mark.parametrize("scheme", ["awq-ct", "gptq", "w8a16"])
def test_schemes_store_groups_that_divide_every_layer(scheme, model, tmp_path):
    folder, size = model
    assert stored(scheme, folder, tmp_path / "out") == size


def test_a_size_that_does_not_divide_is_refused_where_it_was_chosen(model):
    folder, size = model
    for scheme in ("awq", "gptq", "rtn-int4"):
        quantize.check_fit(folder, choices.settings_of(scheme, Quantize(), 0))
        with pytest.raises(BadInput, match=r"q_proj has \d+ inputs, which groups of 128 .*quantize\.group_size"):
            quantize.check_fit(folder, choices.settings_of(scheme, Quantize(group_size=128), 0))
    prepare.check(Train(qat="int4"), folder, size)
    with pytest.raises(BadInput, match=r"groups of 128 .*quantize\.group_size = auto"):
        prepare.check(Train(qat="int4"), folder, 128)


def test_a_rollout_engine_is_told_of_the_same_groups(model):
    folder, size = model
    config = codes.engine_config(folder, "int4", size)
    assert groups.stored(config) == size


@pytest.mark.slow
def test_training_storing_and_the_table_have_one_group_size(store, tmp_path_factory):
    import mlflow
    import pandas as pd

    from qrl.steps import evaluate as evaluating
    from qrl.steps import quantize as quantizing
    from qrl.steps import train as training
    from qrl.tracking import contents, models, reuse

    folder = narrow(tmp_path_factory.mktemp("narrow"), 192)
    fast = {"train.steps": "1", "train.prompts_per_step": "2", "train.generations": "2", "train.questions": "4"}
    fast |= {"train.max_completion_tokens": "8", "evaluate.max_new_tokens": "4", "evaluate.n": "4", "device": "cpu"}
    loose = {"min_eos_rate": "0", "max_truncation_rate": "1", "min_parse_rate": "0", "max_prompt_leak_rate": "1"}
    typed = fast | {f"evaluate.{name}": value for name, value in loose.items()}
    chosen = recipe.load("tiny", typed | {"model": str(folder), "train.qat": "int4"})
    training.train(chosen)

    def newest(step):
        query = f"tags.`{names.TAG_STEP}` = '{step}'"
        return mlflow.search_runs(filter_string=query, output_format="list")

    (run,) = newest("train")
    assert run.data.params["qat_group_size"] == "64"
    trained = reuse.outputs(run).models["model"]
    quantizing.quantize(chosen, ("rtn-int4",), f"base={folder},qat-int4={trained}")
    made = {run.data.params["variant"]: run for run in newest("quantize") if "variant" in run.data.params}
    for run in made.values():
        assert run.data.params["settings.group_size"] == run.data.params["group_size"] == "64"
    address = reuse.outputs(made["qat-int4"]).models["model"]
    assert models.params(address)["group_size"] == "64"
    masters = AutoModelForCausalLM.from_pretrained(models.local_path(trained), dtype=torch.float32)
    linear.attach(masters, "int4", group_size=64)
    loaded, _ = hf.load(models.local_path(address), "cpu", torch.float32)
    held = dict(loaded.named_parameters())
    assert all(torch.equal(held[key], value) for key, value in sync.named_weights(masters))

    cells = {"base:full": folder, "qat-int4:full": trained}
    cells |= {f"{variant}:rtn-int4": reuse.outputs(run).models["model"] for variant, run in made.items()}
    evaluating.evaluate(chosen, ",".join(f"{cell}={address}" for cell, address in cells.items()))
    evaluated = [run for run in newest("evaluate") if "variant" in run.data.params]
    rows = pd.concat([pd.read_parquet(contents.artifact(run.info.run_id, names.QUESTIONS)) for run in evaluated])
    assert from_questions(rows).scheme_label("rtn-int4") == "rtn-int4 (groups of 64)"
