"""Cells whose limits break: void at full precision, an outcome under a scheme; and judged again without an answer."""

import shutil

import mlflow
import pandas as pd
import pytest
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from qrl import checkpoint, names, recipe, tiny
from qrl.engine import hf
from qrl.errors import BadInput, UnhealthyCell
from qrl.evaluate import cells
from qrl.steps import evaluate, quantize, record
from qrl.tracking import addresses, contents, runs
from qrl.tracking import cells as evaluated

pytestmark = pytest.mark.process
SMALL = {"device": "cpu", "evaluate.n": "40", "evaluate.batch_size": "40"}


def settings(**changes: str) -> recipe.Recipe:
    return recipe.load("tiny", SMALL | changes)


def of_cells() -> dict[str, mlflow.entities.Run]:
    """Return the newest run of each cell."""
    found = mlflow.search_runs(["0"], output_format="list", order_by=["attributes.start_time ASC"])
    return {run.info.run_name: run for run in found if " · " in run.info.run_name}


@pytest.fixture
def running_on(store, capsys, tmp_path) -> str:
    """Return the address of the shipped model in 2 bits, which has lost its end token: every answer runs on."""
    quantize.quantize(settings(), ("rtn-int2",), None)
    made = capsys.readouterr().out.partition("base:rtn-int2=")[2].split()[0]
    folder = shutil.copytree(addresses.folder(made), tmp_path / "running-on")
    weights = load_file(folder / checkpoint.WEIGHTS)
    for end in hf.end_tokens(GenerationConfig.from_pretrained(folder), folder):
        weights["model.embed_tokens.weight"][end] = 0
    save_file(weights, folder / checkpoint.WEIGHTS, metadata={"format": "pt"})
    with runs.step("quantize", settings()):
        address, _ = record.log_own(settings(), folder, "base", "rtn-int2", parent=checkpoint.digest(tiny.PATH))
    return address


@pytest.fixture
def never_asked(monkeypatch):
    """Let every answer raise."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("A cell was answered.")

    return lambda: monkeypatch.setattr(cells, "answer_questions", refuse)


@pytest.mark.slow
def test_a_scheme_that_breaks_a_limit_counts_beside_a_healthy_full_precision(running_on, capsys):
    model = running_on
    with pytest.raises(UnhealthyCell, match=r"base · rtn-int2 is void.*not known to be healthy at full precision"):
        evaluate.evaluate(settings(), f"base:rtn-int2={model}")
    evaluate.evaluate(settings(), f"base:rtn-int2={model},base:full=qrl-tiny")  # in either order
    run = of_cells()["base · rtn-int2"]
    note = run.data.tags[names.TAG_UNHEALTHY]
    assert run.info.status == "FINISHED" and "unfinished, 0 % at full precision" in note
    rows = pd.read_parquet(contents.artifact(run.info.run_id, names.QUESTIONS))
    assert not rows.loc[rows["finish_reason"] != "stop", "correct"].any() and set(rows[names.UNHEALTHY]) == {note}
    assert run.data.metrics[names.ACCURACY] == rows["correct"].mean()
    assert evaluated.read(run.info.run_id).unhealthy == note
    assert f"base · rtn-int2: {note}. Quantization did that" in capsys.readouterr().err
    evaluate.evaluate(settings(), f"base:rtn-int2={model}")  # the store knows the variant at full precision now
    assert of_cells()["base · rtn-int2"].data.tags[names.TAG_UNHEALTHY] == note


def test_other_limits_judge_the_answers_again_and_ask_for_none(store, never_asked, capsys):
    short = {"evaluate.max_new_tokens": "24"}
    given = "base:full=qrl-tiny,grpo:full=qrl-tiny"
    with pytest.raises(UnhealthyCell, match="base · full is void") as void:
        evaluate.evaluate(settings(**short), given)
    assert names.TRUNCATION_RATE in str(void.value) and "unfinished" in capsys.readouterr().err
    first = of_cells()["base · full"]
    assert first.info.status == "FAILED" and "grpo · full" not in of_cells()  # nothing is measured against a void base
    never_asked()
    lax = {"evaluate.min_eos_rate": "0", "evaluate.max_truncation_rate": "1", "evaluate.min_parse_rate": "0"}
    evaluate.evaluate(settings(**short, **lax), "base:full=qrl-tiny")
    again = of_cells()["base · full"]
    assert again.info.status == "FINISHED" and again.info.run_id != first.info.run_id
    same = (names.ACCURACY, names.TRUNCATION_RATE, names.TOKENS_PER_S)
    assert [again.data.metrics[name] for name in same] == [first.data.metrics[name] for name in same]
    assert "judged again" in capsys.readouterr().err
    with pytest.raises(UnhealthyCell, match="base · full is void"):
        evaluate.evaluate(settings(**short), "base:full=qrl-tiny")  # and back


def test_a_scheme_of_a_void_variant_is_void_and_not_answered(running_on, capsys):
    given = f"base:full=qrl-tiny,grpo:full=qrl-tiny,grpo:rtn-int2={running_on}"
    with pytest.raises(UnhealthyCell, match="base · full is void"):
        evaluate.evaluate(settings(**{"evaluate.max_new_tokens": "24"}), given)
    alone = f"grpo:full=qrl-tiny,grpo:rtn-int2={running_on}"
    with pytest.raises(UnhealthyCell, match="grpo · rtn-int2 is void, as grpo at full precision is"):
        evaluate.evaluate(settings(**{"evaluate.max_new_tokens": "24"}), alone)
    assert "grpo · rtn-int2" not in of_cells() and "2 of 2 cells are void" in capsys.readouterr().err


def test_all_that_is_wrong_with_cells_is_told_at_once(store):
    given = "base:full=qrl-tiny,base:nf4=qrl-tiny,grpo:none=qrl-tiny,grpo:awq=nowhere,base:full+kv-fp8=qrl-tiny"
    with pytest.raises(BadInput) as refused:
        evaluate.check_cells(settings(), given)
    said = str(refused.value)
    assert said.startswith("4 things to correct:")
    for words in ("Cell base:nf4 was given qrl-tiny", "no scheme 'none'", "nowhere", "full+kv-fp8 needs vLLM"):
        assert words in said
