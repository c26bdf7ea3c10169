"""A sweep over models: its tables, a model that fails, the gates of the best cell; and a whole one, run twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest

import qrl
from qrl import names, recipe, source, tiny
from qrl.compare.answers import SHOWN
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.study import arms, sweep
from qrl.study.launch import DryRun, Launcher, Result
from qrl.study.pipeline import Model, StudySteps, Training
from qrl.tracking import addresses
from qrl.train.qat import prepare

ROOT = Path(qrl.__file__).parents[1]
RATES = {"base:full": 0.4, "grpo:full": 0.8, "grpo:nf4": 0.7, "base:rtn-int4": 0.35, "grpo:rtn-int4": 0.6}
RATES |= {"base:nf4": 0.35, "sft:full": 0.7, "sft:nf4": 0.65}
RATES |= {"qat-int4:rtn-int4": 0.75, "qad-int4:rtn-int4": 0.78, "distilled:full": 0.8}
LONGER = ("qad-int8:rtn-int8", "distilled-qad-int4+qad-nvfp4-a4:full", "distilled-qad-int8:full")
RATES |= dict.fromkeys(LONGER, 0.79)
RATES |= {f"{variant}:rtn-{form}": 0.6 for variant in ("base", "grpo", "qad-nvfp4-a4") for form in ("int8", "nvfp4-a4")}
TYPED = {"quantize.schemes": "nf4", "device": "cpu", "evaluate.n": "60"}


def deeper(folder: Path, layers: int) -> Path:
    """Write qrl-tiny with more layers, which change nothing, so that a larger model answers as well."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)
    settings = small.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    large = type(small)(type(small.config).from_dict(settings))
    large.load_state_dict(small.state_dict(), strict=False)
    for layer in large.model.layers[small.config.num_hidden_layers :]:
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(matrix.weight)
    large.tie_weights()
    large.generation_config = small.generation_config
    large.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.PATH).save_pretrained(folder)
    return folder


@pytest.fixture
def steps(store, monkeypatch, tmp_path):
    """Replace the steps of a sweep with some that only answer; note what is launched, and fail where `broken` says."""
    made, broken = [], set()

    def train(self, base, teacher):
        where = self.recipe.train.teacher or self.recipe.model
        made.append((Path(self.recipe.model).name, self.recipe.train.variant, self.recipe.seed, where))
        if (Path(self.recipe.model).name, self.recipe.train.variant) in broken:
            raise QrlError("It ran out of memory.")
        run_id = _run("train", pd.DataFrame({"reward": [0.5, 0.6], "loss": [0.2, 0.1]}), names.HISTORY)
        return Training(Model(f"models:/{self.recipe.train.variant}", "digest"), run_id)

    def evaluate(self, models, failed=None):
        draw = np.random.default_rng(self.recipe.seed)
        results = {}
        for cell in models:
            variant, scheme = cell.split(":")
            right = (draw.random(60) < RATES[cell]).astype(int)
            rows = {"question": [f"q{i}" for i in range(60)], "correct": right, "parsed": "7", "answer": "7"}
            rows |= {"n_tokens": draw.integers(20, 40, 60), "finish_reason": "stop"}
            labels = {"variant": variant, "scheme": scheme, "seed": self.recipe.seed, "completion": "#### 7"}
            results[cell] = Result(_run("evaluate", pd.DataFrame(rows | labels), names.QUESTIONS), None, False)
        return results

    def _run(step: str, frame: pd.DataFrame, name: str) -> str:
        with mlflow.start_run(nested=True) as run:
            frame.to_parquet(tmp_path / name)
            mlflow.log_artifact(str(tmp_path / name))
        return run.info.run_id

    def promote(self, title, parameters):
        made.append((title, parameters))
        if "refuse" in broken:
            raise GateRefused("Stage int4 is refused: it lost.")

    monkeypatch.setattr(StudySteps, "train", train)
    monkeypatch.setattr(StudySteps, "evaluate", evaluate)
    monkeypatch.setattr(StudySteps, "quantize", lambda self, models: {
        f"{variant}:{scheme}": model
        for variant, model in models.items()
        for scheme in ("full", *self.recipe.quantize.schemes)
    })  # fmt: skip
    monkeypatch.setattr(Launcher, "promote", promote)
    monkeypatch.setattr(
        addresses,
        "folder",
        lambda address: tmp_path / "trained" if address.startswith("models:/") else source.locate(address),
    )
    monkeypatch.setattr(sweep, "look_ahead", lambda step, walk: DryRun(empty=True))
    monkeypatch.setattr(sweep.preflight, "rehearse", lambda *_, **__: None)
    return made, broken


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    return deeper(tmp_path_factory.mktemp("models") / "large", 6)


def artifacts() -> Path:
    runs = mlflow.search_runs(output_format="list", filter_string=f"tags.`{names.TAG_STEP}` = 'sweep'")
    return Path(runs[0].info.artifact_uri.removeprefix("file://"))


def run(large: Path, others=("qat-int4", "qad-int4"), seeds=(0, 1), **options) -> None:
    models = arms.parse_models(["qrl-tiny", str(large)])
    sweep.study("tiny-ptq", others, seeds, TYPED, models=models, **options)


def test_supervised_fine_tuning_and_base_are_quantized_as_grpo_is(steps, large):
    made, _ = steps
    sweep.study("tiny-ptq", ("sft", "qat-int4"), (0, 1), TYPED)
    assert [entry[1] for entry in made] == ["grpo", "sft", "qat-int4"] * 2
    written = json.loads((artifacts() / "methods.json").read_text())
    cells = {(row["variant"], row["scheme"]) for row in written["methods"]}
    assert {("base", "nf4"), ("grpo", "nf4"), ("sft", "nf4"), ("sft", "full")} <= cells
    assert [(row["variant"], row["scheme"]) for row in written["damages"][:3]] == [
        (variant, "nf4") for variant in ("grpo", "base", "sft")
    ]


@pytest.mark.slow
def test_every_method_runs_on_every_model_and_the_losses_stand_by_size(steps, large, capsys):
    made, _ = steps
    run(large, register=True)
    trained = [entry[:3] for entry in made if len(entry) == 4]
    per_seed = ["grpo", "qat-int4", "distilled", "qad-int4"]
    assert [entry[1] for entry in trained] == per_seed * 4 and [entry[2] for entry in trained[::4]] == [0, 1, 0, 1]
    assert {entry[0] for entry in trained if entry[1] == "qat-int4"} == {"qrl-tiny", "large"}
    assert {entry[0] for entry in trained if entry[1] in ("distilled", "qad-int4")} == {"trained"}  # from grpo's model
    (first, given), (second, _) = (entry for entry in made if len(entry) == 2)
    assert first.endswith("the best of qrl-tiny") and second.endswith("the best of large")
    assert given["stage"].startswith("base,grpo,") and given["cell"].count(",") == 2
    folder = artifacts()
    found = json.loads((folder / "sizes.json").read_text())
    assert found["parameters"]["large"] > found["parameters"]["qrl-tiny"] and found["runs"] == 2
    methods = {f"{row['variant']}:{row['scheme']}": row for row in found["methods"]}
    assert set(methods) == {
        "grpo:full",
        "grpo:nf4",
        "grpo:rtn-int4",
        "qat-int4:rtn-int4",
        "qad-int4:rtn-int4",
        "distilled:full",
    }
    assert set(methods["grpo:nf4"]["loss"]) == {"qrl-tiny", "large"} and methods["grpo:nf4"]["trend"]
    for part in ("sizes.md", "figures/sizes.png", "qrl-tiny/methods.md", "large/figures/methods.png"):
        assert (folder / part).stat().st_size > 0
    rows = pd.read_parquet(folder / names.QUESTIONS)
    assert set(rows["model"]) == {"qrl-tiny", "large"}
    changed = pd.DataFrame(**json.loads((folder / names.CHANGED_JSON).read_text()))
    assert set(changed["model"]) == {"qrl-tiny", "large"} and set(changed["seed"]) == {"", "0", "1"}  # base has none
    assert changed.groupby(["model", "method", "scheme", "change"]).size().max() <= SHOWN
    assert {"grpo · full"} == set(changed.loc[changed["method"] == "qad-int4", "reference"])
    (sweep_run,) = mlflow.search_runs(filter_string=f"tags.`{names.TAG_STEP}` = 'sweep'", output_format="list")
    tables = json.loads(sweep_run.data.tags["mlflow.loggedArtifacts"])
    assert {"path": names.CHANGED_JSON, "type": "table"} in tables
    told = capsys.readouterr().out
    assert "Does the loss grow with size?" in told and "# large" in told


def test_a_sweep_of_one_model_tells_its_answers_in_table_json_metrics_and_figure(steps):
    sweep.study("tiny-ptq", ("qat-int4",), (0, 1), TYPED)
    folder = artifacts()
    section = (folder / "methods.md").read_text().partition("## Answers")[2]
    assert "| qat-int4 · rtn-int4 | grpo · full |" in section and "tokens an answer (n = 60)" in section
    row = next(r for r in json.loads((folder / "methods.json").read_text())["methods"] if r["variant"] == "qat-int4")
    change, counts = row["answers"]["tokens"]["change"], row["answers"]
    assert change["low"] < change["estimate"] < change["high"] and counts["compared"] == 120
    (sweep_run,) = mlflow.search_runs(filter_string=f"tags.`{names.TAG_STEP}` = 'sweep'", output_format="list")
    logged = sweep_run.data.metrics
    assert logged["methods/tokens_change_qat-int4_rtn-int4_low"] == change["low"]
    assert logged["methods/right_to_wrong_qat-int4_rtn-int4"] == counts["right_to_wrong"] > 0
    assert (folder / "figures" / "lengths.png").stat().st_size > 0 and (folder / names.CHANGED_JSON).is_file()


def test_distilled_methods_of_different_training_each_have_a_control_of_their_own(steps, tmp_path, capsys, monkeypatch):
    trained, train = [], StudySteps.train

    def keep(self, base, teacher):
        trained.append(self.recipe.train)
        return train(self, base, teacher)

    monkeypatch.setattr(StudySteps, "train", keep)
    texts, longer = tmp_path / "texts.jsonl", tmp_path / "longer.yaml"
    texts.write_text('{"text": "Sam has 2 stones."}\n')
    distils = f"teacher: qrl-tiny, generations: 2, learning_rate: 2.0e-5, qat_calibration: {texts}"
    longer.write_text(f"train: {{qat: int8, {distils}, steps: 7}}\n")
    sweep.study("tiny-ptq", ("qad-int4", str(longer), "qad-nvfp4-a4"), (0, 1), TYPED)
    per_seed = ["grpo", "distilled", "qad-int4", "distilled", "qad-int8", "qad-nvfp4-a4"]
    assert [each.variant for each in trained] == per_seed * 2
    control, own = trained[3:5]
    assert (control.steps, control.qat_calibration, own.qat_calibration) == (7, "task", str(texts))
    prepare.check(control, tiny.PATH)
    written = json.loads((artifacts() / "methods.json").read_text())
    controls = {row["variant"]: row["control"] for row in written["methods"] if row["over_control"]}
    assert controls == {
        "qad-int4": ["distilled-qad-int4+qad-nvfp4-a4", "full"],
        "qad-nvfp4-a4": ["distilled-qad-int4+qad-nvfp4-a4", "full"],
        "qad-int8": ["distilled-qad-int8", "full"],
    }
    assert "qad-int8 · rtn-int8 − its control, distilled-qad-int8 · full" in capsys.readouterr().out


def test_an_option_that_replaces_a_methods_own_training_is_told(capsys):
    typed = TYPED | {"train.learning_rate": "2e-5", "train.lora_rank": "16"}
    methods = arms.load("tiny-ptq", ("tiny-qlora", "qat-int4"), typed, 0)
    sweep._print_changes("tiny-ptq", methods, typed)
    said = [line.strip() for line in capsys.readouterr().err.splitlines() if "holds for every method" in line]
    assert said == [
        "tiny-qlora would train with train.learning_rate=0.001, but train.learning_rate=2e-5 holds for every method: "
        "leave the option out, or write it into --recipe."
    ]


def test_a_model_that_fails_is_named_and_loses_no_other(steps, large):
    _, broken = steps
    broken |= {("large", "grpo"), ("qrl-tiny", "qat-int4")}
    with pytest.raises(QrlError, match=r"no results for 1 of 2 models: large \(It ran out of memory") as error:
        run(large)
    assert error.value.exit_code == 1
    table = (artifacts() / "qrl-tiny" / "methods.md").read_text()
    assert "grpo | nf4" in table and "qat-int4, seed 0: It ran out of memory." in table
    assert not (artifacts() / "sizes.md").exists()


def test_a_model_whose_base_was_unhealthy_is_named_too(steps, large, monkeypatch):
    answer = StudySteps.evaluate

    def evaluate(self, models, failed=None):
        found = answer(self, models, failed)
        return {cell: run for cell, run in found.items() if cell != "base:full" or self.recipe.model == "qrl-tiny"}

    monkeypatch.setattr(StudySteps, "evaluate", evaluate)
    with pytest.raises(QrlError, match=r"large \(Cell base · full is missing"):
        run(large, others=(), seeds=(0,))
    assert (artifacts() / "qrl-tiny" / "methods.md").is_file()


def test_a_training_that_changed_no_weight_is_told_instead_of_compared(steps, large, monkeypatch):
    train = StudySteps.train

    def unchanged(self, base, teacher):
        training = train(self, base, teacher)
        return training._replace(model=Model(training.model.address, base))

    monkeypatch.setattr(StudySteps, "train", unchanged)
    with pytest.raises(QrlError, match=r"GRPO under seed 0 changed no weight.*use questions"):
        run(large, others=(), seeds=(0,))


def test_a_best_cell_that_its_gate_refuses_is_reported_after_the_tables(steps, large):
    _, broken = steps
    broken.add("refuse")
    with pytest.raises(GateRefused, match="it lost"):
        run(large, others=(), seeds=(0,), register=True)
    assert "it lost" in (artifacts() / "sizes.md").read_text()


def test_the_mean_reward_is_that_of_trainings_rewards(steps, large):
    models = arms.parse_models(["qrl-tiny", str(large)])
    typed = TYPED | {"train.rewards": "correct,format", "train.reward_weights": "1,0.5"}
    sweep.study("tiny-ptq", (), (0,), typed, models=models)
    found = json.loads((artifacts() / "sizes.json").read_text())["methods"][0]
    for model, accuracy in found["accuracy"].items():  # every answer has the required form here
        assert found["reward"][model]["estimate"] == pytest.approx(accuracy["estimate"] + 0.5)


def test_wrong_models_are_refused_before_anything_runs(steps, large, tmp_path):
    made, _ = steps
    with pytest.raises(BadInput, match="no model"):
        sweep.study("tiny-ptq", (), (0,), TYPED, models={"qrl-tiny": "qrl-tiny", "none": str(tmp_path / "none")})
    other = deeper(tmp_path / "large", 5)
    with pytest.raises(BadInput, match="both as 'qrl-large'"):
        sweep.study("tiny-ptq", (), (0,), TYPED, models={"a": str(large), "b": str(other)}, register=True)
    assert made == []


@pytest.mark.study
@pytest.mark.slow
def test_a_whole_sweep_of_two_models_resumes_and_registers_the_best_cells(tmp_path):
    large = deeper(tmp_path / "large", 6)
    settings = {"quantize.schemes": "nf4", "train.steps": "2", "evaluate.n": "60", "promote.min_gain": "-1"}
    settings |= {"promote.max_loss": "1", "device": "cpu", "models": f"qrl-tiny,{large}", "arms": "qad-int4"}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "qrl", "sweep", *words, "--register"]
    address = f"sqlite:///{tmp_path}/mlflow.db"
    environment = os.environ | {"MLFLOW_TRACKING_URI": address}

    def sweep_once() -> str:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout + done.stderr

    told = sweep_once()
    assert "Does the loss grow with size?" in told and "distilled" in told
    again = sweep_once()
    assert again.count("(reused)") >= 12 and "is not reused" not in again
    client = mlflow.MlflowClient(address)
    for name in ("qrl-tiny", "qrl-large"):
        aliases = client.get_registered_model(name).aliases
        assert {"base", "grpo"} < set(aliases) and len(aliases) == 3


def test_methods_that_store_other_linears_in_one_scheme_are_refused_before_they_train():
    def method(qat, layers, schemes="nf4"):
        typed = {"train.qat": qat, "quantize.schemes": schemes}
        if layers:
            typed |= {"train.qat_layers": layers, "quantize.layers": layers}
        return recipe.load("tiny", typed)

    first = method("none", "")
    sweep._check_layers([first, method("int4", "mlp"), method("int8", "attention"), method("nvfp4-a16", "")])
    for others in ([method("int4", "mlp"), method("int4", "")], [method("int4", "mlp"), method("int4", "-first:1")]):
        with pytest.raises(BadInput, match="different linears in the one scheme rtn-int4"):
            sweep._check_layers([first, *others])
    with pytest.raises(BadInput, match="one scheme rtn-int4"):
        sweep._check_layers([method("none", "", "rtn-int4"), method("int4", "mlp")])


def test_the_steps_of_a_seed_are_counted():
    first = recipe.load("tiny", {"quantize.schemes": "nf4,gptq"})
    assert sweep._steps_per_seed([first]) == 3  # train, quantize in one environment, evaluate
    two_environments = recipe.load("tiny", {"quantize.schemes": "nf4,awq"})
    assert sweep._steps_per_seed([two_environments]) == 4
    lora = recipe.load("tiny-lora", {"quantize.schemes": "nf4,gptq"})
    assert sweep._steps_per_seed([first, lora]) == 5
