"""One real study with small numbers, launched once by `mlflow run`: everything here looks at what it left behind.

Three GRPO steps move nothing that could be measured, so no test asserts an effect, and the gates are set wide open.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import qrl
from qrl import names

pytestmark = pytest.mark.study

ROOT = Path(qrl.__file__).parents[1]
SMALL = {
    "train.steps": "3",
    "train.prompts_per_step": "8",
    "train.micro_batch": "64",
    "train.save_every": "1",
    "evaluate.n": "100",
    "quantize.calibration_samples": "16",
    "promote.min_gain": "-1",
    "promote.max_loss": "1",
}
QUESTIONS = int(SMALL["evaluate.n"])
CELLS = {(variant, scheme) for variant in ("base", "grpo") for scheme in ("full", "nf4", "awq")}


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}


def mlflow_run(folder: Path) -> subprocess.CompletedProcess:
    """`mlflow run .` as a user types it, with uv where there is one, so that AutoAWQ gets its own environment."""
    given = [word for key, value in SMALL.items() for word in ("-P", f"{key}={value}")]
    command = [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", "uv", *given]
    return subprocess.run(command, env=environment(folder), cwd=ROOT, capture_output=True, text=True, check=False)


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "qrl", *words]


def python_m_qrl(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(folder, *words), env=environment(folder), cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def studied(tmp_path_factory) -> Path:
    """The folder of a store that holds one finished study."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not on the PATH, and AutoAWQ needs an environment of its own: pip install uv")
    folder = tmp_path_factory.mktemp("study")
    done = mlflow_run(folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (folder / "terminal.txt").write_text(done.stdout + done.stderr)
    return folder


@pytest.fixture
def client(studied, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{studied}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{studied}/mlflow.db")
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(None)


def runs_of(client, **tags: str) -> list:
    wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    return client.search_runs(["0"], wanted, max_results=1000)


def study_run(client):
    return min(runs_of(client, **{names.TAG_STEP: "study"}), key=lambda run: run.info.start_time)


def artifact(run, *parts: str) -> Path:
    return Path(run.info.artifact_uri.removeprefix("file://"), *parts)


def test_it_says_what_it_does_and_what_came_out(studied):
    told = (studied / "terminal.txt").read_text()
    for number in range(1, 8):
        assert f"[{number}/7]" in told
    assert "gain survival" in told and "mlflow ui" in told and "qrl.load(" in told and "-e serve" in told


def test_every_run_ended_and_hangs_below_the_study(client):
    study = study_run(client)
    everything = client.search_runs(["0"], max_results=1000)
    parents = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in everything}
    for run in everything:
        assert run.info.status != "RUNNING"
    steps = [run for run in everything if parents[run.info.run_id] == study.info.run_id]
    assert {run.data.tags[names.TAG_STEP] for run in steps} == {
        "train", "quantize", "evaluate", "diagnose", "compare", "promote",
    }  # fmt: skip


def test_the_study_holds_its_artifacts(client):
    study = study_run(client)
    for name in (names.TABLE_MD, names.TABLE_JSON, names.QUESTIONS, names.RECIPE):
        assert artifact(study, name).stat().st_size > 0
    figures = {path.name for path in artifact(study, names.FIGURES).iterdir()}
    assert {"matrix.png", "survival.png", "layer_error.png", "training.png"} <= figures
    report = artifact(study, names.REPORT).read_text()
    assert "<h2>Schemes</h2>" in report
    kept = "The stored weights of grpo (bf16) keep"  # in the table and on the page
    assert kept in report and kept in artifact(study, names.TABLE_MD).read_text()
    from qrl import recipe

    assert recipe.load(str(artifact(study, names.RECIPE))).train.steps == 3


def test_the_table_has_the_contracts_shape(client):
    table = json.loads(artifact(study_run(client), names.TABLE_JSON).read_text())
    for scheme in ("nf4", "awq"):
        for key in ("delta", "gain_survival"):
            assert set(table[scheme][key]) == {"estimate", "stderr", "low", "high"}
            assert table[scheme][key]["low"] <= table[scheme][key]["estimate"] <= table[scheme][key]["high"]
        assert table[scheme]["verdict"] in ("survives", "lost", "inconclusive")
        for variant in ("base", "grpo"):
            assert table[scheme]["cells"][variant]["n"] == QUESTIONS


def test_the_table_follows_from_the_questions(client):
    study = study_run(client)
    frame = pd.read_parquet(artifact(study, names.QUESTIONS))
    assert set(map(tuple, frame[["variant", "scheme"]].drop_duplicates().to_numpy())) == CELLS
    assert frame.groupby(["variant", "scheme"])["question"].nunique().eq(QUESTIONS).all()
    table = json.loads(artifact(study, names.TABLE_JSON).read_text())
    accuracy = frame.groupby(["variant", "scheme"])["correct"].mean()
    for scheme in ("nf4", "awq"):
        delta = accuracy["grpo", scheme] - accuracy["base", scheme]
        survival = delta - (accuracy["grpo", "full"] - accuracy["base", "full"])
        assert table[scheme]["delta"]["estimate"] == pytest.approx(delta)
        assert table[scheme]["gain_survival"]["estimate"] == pytest.approx(survival)


def test_metrics_carry_their_intervals(client):
    metrics = study_run(client).data.metrics
    for name in ("delta_full", "delta_nf4", "delta_awq", "gain_survival_nf4", "gain_survival_awq"):
        for suffix in ("", "_stderr", "_low", "_high"):
            assert f"compare/{name}{suffix}" in metrics


def test_every_cell_is_a_run_of_its_own_with_model_and_data(client):
    cells = [run for run in runs_of(client, **{names.TAG_STEP: "evaluate"}) if names.TAG_SCHEME in run.data.tags]
    assert {(run.data.params["variant"], run.data.params["scheme"]) for run in cells} == CELLS
    for run in cells:
        assert run.info.run_name == names.cell_name(run.data.params["variant"], run.data.params["scheme"])
        for metric in (
            names.ACCURACY, names.ACCURACY_STDERR, names.ACCURACY_FLEXIBLE, names.N, names.PARSE_RATE, names.EOS_RATE,
            names.TRUNCATION_RATE, names.PROMPT_LEAK_RATE, names.TOKENS_PER_S,
        ):  # fmt: skip
            assert metric in run.data.metrics
        assert client.get_run(run.info.run_id).inputs.model_inputs
        assert {tag.value for data in run.inputs.dataset_inputs for tag in data.tags if "context" in tag.key} == {
            "heldout"
        }


def test_training_logged_its_health_live_and_a_table_of_completions(client):
    (train,) = runs_of(client, **{names.TAG_STEP: "train"})
    for name in ("reward", "reward_std", "frac_reward_zero_std", "entropy", "completions_per_s"):
        assert [point.step for point in client.get_metric_history(train.info.run_id, f"train/{name}")] == [1, 2, 3]
    assert len(json.loads(artifact(train, "completions.json").read_text())["data"]) == 3 * 8
    assert artifact(train, "arguments.json").is_file()


def test_calibration_saw_training_questions_only(client):
    from qrl import tasks

    heldout = {question.question for question in tasks.load("arithmetic", "heldout", QUESTIONS, 0)}
    calibration = {question.question for question in tasks.load("arithmetic", "train", 16, 0)}
    assert not heldout & calibration
    made = [run for run in runs_of(client, **{names.TAG_STEP: "quantize"}) if run.inputs.dataset_inputs]
    contexts = {
        tag.value for run in made for data in run.inputs.dataset_inputs for tag in data.tags if "context" in tag.key
    }
    assert contexts == {"calibration"}


def test_quantized_models_carry_size_bits_and_time(client):
    made = [run for run in runs_of(client, **{names.TAG_STEP: "quantize"}) if names.TAG_VARIANT in run.data.tags]
    assert {(run.data.tags[names.TAG_VARIANT], run.data.tags[names.TAG_SCHEME]) for run in made} == {
        cell for cell in CELLS if cell[1] != "full"
    }
    for run in made:
        assert 4 <= run.data.metrics["quantize/bits_per_weight"] < 5
        assert run.data.metrics["quantize/bytes"] > 1e6 and run.data.metrics["quantize/seconds"] > 0
        assert run.outputs.model_outputs


def test_three_versions_stand_at_their_stages(client):
    versions = {stage: client.get_model_version_by_alias("qrl-tiny", stage) for stage in names.STAGES}
    assert [int(version.version) for version in versions.values()] == [1, 2, 3]
    assert [version.current_stage for version in versions.values()] == ["None", "Staging", "Production"]
    for stage, version in versions.items():
        gate = json.loads(version.tags[names.gate_record_tag(stage)])
        assert version.tags[names.gate_tag(stage)] == "passed" and gate["digest"] == version.tags[names.TAG_DIGEST]
    assert versions["awq"].tags[names.TAG_PARENT_VERSION] == "2"


def test_a_digest_that_is_registered_is_never_registered_again(studied, client):
    base = client.get_model_version_by_alias("qrl-tiny", "base")
    cell = json.loads(base.tags[names.gate_record_tag("base")])["run"]
    done = python_m_qrl(studied, "promote", "--stage", "base", "--cell", cell)
    assert done.returncode == 0, done.stderr
    assert len(client.search_model_versions("name = 'qrl-tiny'")) == 3


def test_what_is_served_is_what_was_evaluated(client):
    from qrl import checkpoint, registry
    from qrl.registry import versions

    cells = {
        run.data.tags[names.TAG_DIGEST]
        for run in runs_of(client, **{names.TAG_STEP: "evaluate"})
        if names.TAG_DIGEST in run.data.tags
    }
    for stage in names.STAGES:
        version = registry.resolve("qrl-tiny", stage)
        assert version.digest in cells
        assert checkpoint.digest(versions.verify(version)) == version.digest


def test_stages_load_through_mlflow_and_through_qrl(client):
    import mlflow
    import torch

    question = [{"role": "user", "content": "Tom has 3 apples and buys 4 more apples. How many apples does Tom have?"}]
    for stage in ("Staging", "Production"):
        pipeline = mlflow.transformers.load_model(f"models:/qrl-tiny/{stage}")
        assert isinstance(pipeline(question, max_new_tokens=8, do_sample=False)[0]["generated_text"], list)
    model, tokenizer = qrl.load("qrl-tiny", stage="awq", device="cpu")
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model.dtype == torch.float32 and model(**ids).logits.isfinite().all()


def test_the_second_run_reuses_every_step(studied, client):
    before = {
        step: len(runs_of(client, **{names.TAG_STEP: step})) for step in ("train", "quantize", "evaluate", "compare")
    }
    began = time.monotonic()
    done = mlflow_run(studied)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout + done.stderr).count("(reused)") >= 6
    assert {step: len(runs_of(client, **{names.TAG_STEP: step})) for step in before} == before
    print(f"reused study: {time.monotonic() - began:.1f} s")


def test_a_refused_gate_moves_nothing_and_says_why(studied, client):
    before = {stage: client.get_model_version_by_alias("qrl-tiny", stage).version for stage in names.STAGES}
    cell = json.loads(client.get_model_version_by_alias("qrl-tiny", "grpo").tags[names.gate_record_tag("grpo")])["run"]
    done = python_m_qrl(studied, "promote", "--stage", "grpo", "--cell", cell, "--promote.min_gain", "0.99")
    assert done.returncode == 3
    assert "lower 95 % bound is not above" in done.stderr and "Traceback" not in done.stderr
    assert {stage: client.get_model_version_by_alias("qrl-tiny", stage).version for stage in names.STAGES} == before
    newest = runs_of(client, **{names.TAG_STEP: "promote"})[0]
    assert newest.info.status == "FINISHED" and newest.data.tags[names.TAG_VERDICT] == "refused"
    assert "0.990" in newest.data.tags[names.TAG_REASON]


def test_raw_text_prompts_trip_the_gate_instead_of_giving_a_number(store):
    """Study 000's own accident: a chat model asked without its chat template never stops."""
    from qrl import tasks, tiny
    from qrl.evaluate import cells, health
    from qrl.recipe import Evaluate, Recipe

    asked = cells.answer_questions(
        cells.Cell("base", "full", tiny.PATH),
        tasks.load("arithmetic", "heldout", 64, 0),
        Recipe(task="arithmetic", prompt="plain", evaluate=Evaluate(max_new_tokens=96, batch_size=64)),
        "cpu",
        render=lambda tokenizer, question, template: tokenizer(question)["input_ids"],
    )
    problems = health.problems(health.rates(asked.frame), Evaluate(), 64)
    assert any("chat template" in problem for problem in problems)


@pytest.mark.slow
def test_sigterm_ends_the_run_and_the_next_try_goes_on_from_the_last_checkpoint(store):
    import mlflow

    folder, client = Path(store.removeprefix("sqlite:///")).parent, mlflow.MlflowClient(store)
    words = [
        "train",
        "--train.steps",
        "6",
        "--train.prompts_per_step",
        "8",
        "--train.micro_batch",
        "64",
        "--train.save_every",
        "1",
    ]
    words += ["--seed", "11"]
    process = subprocess.Popen(
        command(folder, *words), env=environment(folder), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not _steps_done(client, "11") >= 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    first = _training(client, "11")
    assert first.info.status == "KILLED" and "SIGTERM" in first.data.tags[names.TAG_REASON]
    done = python_m_qrl(folder, *words)
    assert done.returncode == 0, done.stderr
    second = _training(client, "11")
    assert second.info.run_id != first.info.run_id and second.data.metrics["train/resumed_from"] >= 2
    steps = [point.step for point in client.get_metric_history(second.info.run_id, "train/reward")]
    assert steps == list(range(int(second.data.metrics["train/resumed_from"]) + 1, 7))


def test_a_tampered_version_is_not_served(studied, client, tmp_path):
    from qrl import registry
    from qrl.errors import QrlError
    from qrl.registry import versions

    version = registry.resolve("qrl-tiny", "base")
    config = versions.folder(version) / "generation_config.json"
    original = config.read_text()
    try:
        config.write_text(original.replace("{", "{ ", 1))
        with pytest.raises(QrlError, match="digest"):
            versions.verify(version)
    finally:
        config.write_text(original)
    versions.verify(version)


def _training(client, seed: str):
    return next(run for run in runs_of(client, **{names.TAG_STEP: "train"}) if run.data.params.get("seed") == seed)


def _steps_done(client, seed: str) -> int:
    try:
        return len(client.get_metric_history(_training(client, seed).info.run_id, "train/reward"))
    except StopIteration:
        return 0
