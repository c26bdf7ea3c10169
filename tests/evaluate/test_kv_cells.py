"""Cells with the key-value cache in FP8: their own name and key, the plain scheme's checkpoint, vLLM alone."""

from pathlib import Path

import pandas as pd
import pytest

from qrl import compare, evaluate, names, recipe, tiny
from qrl.errors import BadInput
from qrl.recipe import lists, rules
from qrl.serve import engines
from qrl.steps import evaluate as steps
from qrl.study import pipeline
from qrl.study.launch import Step
from qrl.tracking import keys

VLLM = {"evaluate.engine": "vllm", "device": "cpu"}


def test_it_is_the_plain_schemes_checkpoint_under_a_key_of_its_own(store):
    cells = steps.check_cells(recipe.load("tiny", VLLM), f"base:full+kv-fp8={tiny.PATH},base:full={tiny.PATH}")
    (in_fp8, plain) = cells.values()
    assert list(cells) == [("base", "full+kv-fp8"), ("base", "full")] and in_fp8 == plain
    settings = recipe.load("tiny", VLLM)
    first, second = (keys.cell(settings, *cell, plain[1].digest, "cpu") for cell in cells)
    assert first != second
    with pytest.raises(BadInput, match="stored as full precision: expected awq"):
        steps.check_cells(settings, f"base:awq+kv-fp8={tiny.PATH}")
    with pytest.raises(BadInput, match=r"no scheme 'awq\+kv' .*: expected one of"):
        lists.parse_cell("grpo:awq+kv")


@pytest.mark.parametrize("cell", ["base:full+kv-fp8", "grpo:awq+kv-fp8"])
def test_transformers_is_refused_before_the_weights_are_looked_at(cell):
    with pytest.raises(BadInput, match=r"\+kv-fp8 needs vLLM.* the engine is transformers"):
        steps.check_cells(recipe.load("tiny"), f"{cell}=no such folder")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluate.kv_fp8": "awq"}, "awq\\+kv-fp8 needs vLLM"),
        (VLLM | {"evaluate.kv_fp8": "gptq"}, "names gptq, but the study makes full, nf4, awq"),
    ],
)
def test_a_study_refuses_what_it_cannot_evaluate(changes, words):
    with pytest.raises(BadInput, match=words):
        rules.check(recipe.load("tiny", changes))
    with pytest.raises(BadInput, match="kv_fp8"):
        recipe.load("tiny", {"evaluate.kv_fp8": "awq+kv-fp8"})


class Recorded:
    """A launcher that notes the step it was asked for."""

    def obtain(self, step: Step, _failed=None):
        self.step = step
        return {}


def test_a_study_evaluates_the_same_models_twice_and_quantizes_them_once():
    settings = recipe.load("tiny", VLLM | {"evaluate.kv_fp8": "full,awq"})
    models = {
        f"{variant}:{scheme}": pipeline.Model(f"models:/{variant}-{scheme}", "d")
        for variant in "ab"
        for scheme in ("full", "awq", "nf4")
    }
    launcher = Recorded()
    pipeline.StudySteps(settings, launcher, "cpu").evaluate(models)
    assert len(launcher.step.keys) == 10 == len(set(launcher.step.keys.values()))
    parameters = launcher.step.parameters(["a:awq", "a:awq+kv-fp8"])
    assert parameters == {"cells": "a:awq=models:/a-awq,a:awq+kv-fp8=models:/a-awq"}
    assert "nf4+kv-fp8" not in str(list(launcher.step.keys)) and "6 cells" not in launcher.step.title


def test_it_is_compared_with_bases_own_cell_and_its_metrics_have_names_that_mlflow_takes(store):
    import mlflow

    cells = [(variant, scheme) for variant in ("base", "grpo") for scheme in ("full", "awq", "awq+kv-fp8")]
    rows = [
        {
            "variant": variant,
            "scheme": scheme,
            "question": i,
            "correct": int((i + len(scheme)) % 10 < 5 + 2 * (variant == "grpo")),
        }
        for variant, scheme in cells
        for i in range(100)
    ]
    found = compare.from_questions(pd.DataFrame(rows))
    assert found.schemes == ("full", "awq", "awq+kv-fp8")
    assert found.row("awq+kv-fp8").delta == found.difference(("grpo", "awq+kv-fp8"), ("base", "awq+kv-fp8"))
    with mlflow.start_run():
        mlflow.log_metrics(found.metrics())
    assert {"compare/gain_survival_awq", "compare/gain_survival_awq_kv-fp8"} <= set(found.metrics())
    assert compare.from_questions(pd.DataFrame([row for row in rows if row["scheme"] != "awq"])).schemes[1:] == (
        "awq+kv-fp8",
    )


def test_serving_passes_it_to_vllm_and_refuses_transformers():
    model = engines.ServedModel("qrl-tiny", 3, tiny.PATH)
    in_fp8 = engines.ServedModel("qrl-tiny", 4, tiny.PATH, kv_fp8=True)
    plain, options = (engines.arguments("vllm", each, ("127.0.0.1", 1), Path()) for each in (model, in_fp8))
    assert options[options.index("--kv-cache-dtype") + 1] == "fp8" and "--kv-cache-dtype" not in plain
    with pytest.raises(BadInput, match="needs vLLM"):
        evaluate.check_kv(["awq+kv-fp8"], "transformers")
    evaluate.check_kv(["awq+kv-fp8"], "vllm")
    evaluate.check_kv(["awq"], "transformers")
    assert names.stored("awq+kv-fp8") == "awq"
