"""A missing environment matters only if a step is still to run in it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

from qrl import checkpoint, names, process, recipe, tiny
from qrl.errors import BadInput, QrlError
from qrl.steps import compare, evaluate
from qrl.study import environments, pipeline, preflight, report
from qrl.study.launch import DryRun, Launcher, Step, launch
from qrl.tracking import keys, models, reuse, runs

DIGEST = checkpoint.digest(tiny.PATH)


def finished(step: str, key: str, **tags: str) -> str:
    """Record a finished run with this key and the shipped model, and return its id."""
    with runs.step(step, tags={names.TAG_CACHE_KEY: key, **tags}) as run:
        stored = {"variant": "grpo", "scheme": "full", "task": "arithmetic"}
        uri, _ = models.log_checkpoint(tiny.PATH, name="made", digest=DIGEST, move=False, **stored)
        reuse.record_outputs(models={"model": uri}, values={"digest": DIGEST})
        return run.info.run_id


@pytest.fixture
def small() -> recipe.Recipe:
    return recipe.load("tiny", {"device": "cpu", "quantize.schemes": "nf4,awq"})


def study_of(small: recipe.Recipe):
    return lambda ahead: pipeline.StudySteps(small, ahead, "cpu").cells(DIGEST, None)


def test_a_study_needs_awqs_environment_only_while_something_is_to_be_quantized_in_it(store, small):
    def check() -> None:
        environments.look_ahead("study", study_of(small))

    with pytest.raises(BadInput, match="needs the environment of projects/awq"):
        check()
    finished("train", keys.trained(small, DIGEST, "cpu"))
    with pytest.raises(BadInput, match="needs the environment of projects/awq"):
        check()
    stored = finished("quantize", keys.quantized(small, names.AWQ, DIGEST, "cpu"))  # of base and grpo, alike here
    check()  # nf4 and every cell are still to be made, here
    mlflow.delete_run(stored)
    with pytest.raises(BadInput, match="needs the environment of projects/awq"):
        check()


def test_a_dry_run_reports_the_folder_of_each_missing_step_and_finds_nothing_that_builds_on_it(store, small):
    finished("quantize", keys.quantized(small, names.AWQ, DIGEST, "cpu"))
    ahead = DryRun()
    study_of(small)(ahead)
    core = keys.ROOT.name
    assert [folder.name for folder in ahead.folders] == [core, core, "awq", core]  # train, nf4, grpo's awq, cells
    assert ahead.missing["quantize"] == ["base:nf4", "grpo:nf4", "grpo:awq"] and len(ahead.missing["evaluate"]) == 6


def test_a_scheme_of_which_one_variant_is_stored_is_a_step_of_its_own(store):
    chosen = recipe.load("tiny", {"device": "cpu", "quantize.schemes": "nf4,int8,gptq"})
    finished("quantize", keys.quantized(chosen, "int8", "b" * 64, "cpu"))
    steps, asked = pipeline.StudySteps(chosen, DryRun(), "cpu"), []
    obtain = steps.launcher.obtain
    steps.launcher.obtain = lambda step, failed=None: (asked.append(step), obtain(step, failed))[1]
    steps.quantize({"base": pipeline.Model("base", "a" * 64), "grpo": pipeline.Model("grpo", "b" * 64)})
    assert [list(step.keys) for step in asked] == [
        ["base:nf4", "grpo:nf4", "base:gptq", "grpo:gptq"], ["base:int8", "grpo:int8"],
    ]  # fmt: skip
    assert asked[0].parameters(list(asked[0].keys)) == {"scheme": "nf4,gptq", "models": "base=base,grpo=grpo"}
    assert asked[1].parameters(["base:int8"]) == {"scheme": "int8", "models": "base=base"}


@pytest.mark.process
def test_without_a_store_everything_is_missing_and_none_is_made(small, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/none/mlflow.db")
    monkeypatch.setattr(environments, "check_reachable", lambda *_: None)
    ahead = environments.look_ahead("study", study_of(small))
    assert {step: len(labels) for step, labels in ahead.missing.items()} == {"train": 1, "quantize": 4, "evaluate": 6}
    assert not list(tmp_path.iterdir())
    mlflow.set_tracking_uri(None)


def test_a_study_prints_what_it_reuses_and_why_it_does_not(store, small, capsys, monkeypatch):
    key = keys.trained(small, DIGEST, "cpu")
    longer = keys.trained(
        small.model_copy(update={"train": small.train.model_copy(update={"steps": 20})}), DIGEST, "cpu"
    )
    first, launcher = finished("train", key), Launcher({}, "", 2)
    launcher.obtain(Step("train", "GRPO", {"train": key}, lambda missing: {}))
    printed = capsys.readouterr().err
    assert "[1/2] train: GRPO (reused)" in printed and f"train from run {first[:8]}" in printed
    monkeypatch.setattr(launcher, "_launch", lambda *launched: finished("train", longer))
    launcher.obtain(Step("train", "GRPO", {"train": longer}, lambda missing: {}))
    assert "train is not reused: train.steps 16 → 20\n" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_a_refused_study_makes_no_store(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(keys.ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    done = subprocess.run(
        [sys.executable, "-m", "qrl", "study", "--device", "cpu"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "projects/awq" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_launched_step_counts_relative_paths_and_types_commands_as_the_study_was_started(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr(process, "caller", lambda: "mlflow run . -e {}")
    project = tmp_path / "project"
    project.mkdir()
    program = (
        "import pathlib; from qrl import process; process.prepare_process(); "
        "pathlib.Path('here').write_text(process.caller())"
    )
    command = f'PYTHONPATH={keys.ROOT} python -c \\"{program}\\"'
    (project / "MLproject").write_text(f'name: one\nentry_points:\n  step:\n    command: "{command}"\n')
    with runs.step("study") as run:
        launch(project, "step", {}, parent=run.info.run_id)
    assert Path("here").read_text() == "mlflow run . -e {}" and not (project / "here").exists()
    assert {process.FOLDER, process.CALLER}.isdisjoint(os.environ)


def test_what_is_told_of_a_killed_step_begins_a_line_below_its_progress_bar(store, tmp_path, capfd):
    (tmp_path / "MLproject").write_text(
        "name: one\nentry_points:\n  step:\n    command: \"printf '\\rhalf a bar' >&2; kill -9 $$\"\n"
    )
    with runs.step("study") as run, pytest.raises(QrlError, match=r"^Step step: "):
        launch(tmp_path, "step", {}, parent=run.info.run_id)
    assert "half a bar\n" in capfd.readouterr().err


def test_a_model_that_a_scheme_does_not_fit_is_refused_before_it_is_trained(store, tmp_path):
    odd = shutil.copytree(tiny.PATH, tmp_path / "odd")
    settings = json.loads((odd / "config.json").read_text()) | {"intermediate_size": 200}
    (odd / "config.json").write_text(json.dumps(settings))
    for scheme in ("gptq", "nvfp4"):
        overrides = {"device": "cpu", "model": str(odd), "quantize.schemes": f"nf4,{scheme}"}
        with pytest.raises(BadInput, match="down_proj has 200 inputs"):
            preflight.check_schemes(recipe.load("tiny", overrides), odd)


@pytest.mark.slow
@pytest.mark.process
def test_a_study_that_ends_before_its_table_prints_a_command_that_compares_the_finished_cells(
    store, monkeypatch, capsys, tmp_path
):
    own = recipe.load("tiny", {"device": "cpu", "evaluate.n": "20", "evaluate.batch_size": "20"})
    monkeypatch.chdir(tmp_path)
    evaluate.evaluate(own, "base:full=qrl-tiny,grpo:full=qrl-tiny")
    wanted = {cell: keys.cell(own, *cell.split(":"), DIGEST, "cpu") for cell in ("base:full", "grpo:full", "grpo:nf4")}
    launcher = Launcher({}, "", 1)

    def fail(*_: object) -> None:
        raise QrlError("The step failed.")

    monkeypatch.setattr(launcher, "_launch", fail)
    with pytest.raises(QrlError, match="failed"):
        launcher.obtain(Step("evaluate", "cells", wanted, lambda missing: {"cells": ",".join(missing)}))
    capsys.readouterr()
    report.leave(launcher)
    said, command = capsys.readouterr().err.splitlines()
    assert "base:full, grpo:full" in said and " compare " in command
    compare.compare(own, command.rpartition(" ")[2].split(","))
    assert "gain of grpo" in capsys.readouterr().out
    report.leave(Launcher({}, "", 1))
    assert capsys.readouterr().err == ""
