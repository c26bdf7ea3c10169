"""A step that is given a result of ours finds the recipe that it was made under."""

from pathlib import Path

import mlflow
import pytest
from mlflow.entities import LoggedModelInput

from qrl import checkpoint, names, recipe, registry, tiny
from qrl.errors import BadInput
from qrl.tasks import own
from qrl.tracking import cells, contents, models, origin, runs
from tests.registry.made import log_rows


def logged() -> str:
    about = {"variant": "grpo", "scheme": "full", "task": "arithmetic", "digest": checkpoint.digest(tiny.PATH)}
    return models.log_checkpoint(tiny.PATH, name="made", move=False, **about)[0]


@pytest.fixture
def made(store) -> tuple[recipe.Recipe, str, str, str]:
    """A recipe, the run of a training under it, its model, and the run of a cell below another step."""
    settings = recipe.load("tiny-lora", {"seed": "3", "evaluate.n": "40", "data": "a folder", "train.steps": "7"})
    with runs.step("train", settings, sections=("train",)) as trained:
        address = logged()
    with (
        runs.step("evaluate", settings.model_copy(update={"seed": 4}), sections=("evaluate",)),
        runs.child("c") as cell,
    ):
        pass
    return settings, trained.info.run_id, address, cell.info.run_id


def test_settings_come_from_the_step_that_made_a_model_an_adapter_or_a_cell(made):
    settings, run_id, address, cell = made
    for text in (f"base=qrl-tiny,grpo={address}", f"runs:/{run_id}/adapter", run_id):
        (found,) = origin.find(text)
        assert (found.run_id, found.step, found.values) == (run_id, "train", settings.flat())
        assert recipe.load("auto", found.values) == settings
    both = origin.find(f"grpo:full={address},{cell}")
    assert [(each.step, each.values["seed"]) for each in both] == [
        ("evaluate", "4"),
        ("train", "3"),
    ]  # the newest first
    assert origin.find(f"qrl-tiny,models:/m-{'0' * 32},{'0' * 32},./models,nf4") == []


def test_settings_come_from_the_run_behind_a_registered_version(made):
    _, run_id, address, _ = made
    facts = {"digest": checkpoint.digest(tiny.PATH), "variant": "base", "scheme": "full"}
    version = registry.register("own", address, **facts, accuracy=0.5, stderr=0.1, n=10)
    assert [found.run_id for found in origin.find(f"models:/own/{version.version}")] == [run_id]


def test_of_a_run_without_a_recorded_recipe_the_params_count(made):
    settings, run_id, address, _ = made
    contents.artifact(run_id, names.RECIPE).unlink()
    mlflow.MlflowClient().log_param(run_id, "train.clip", "0.3")  # as it was called once
    (found,) = origin.find(address)
    loaded = recipe.load("auto", found.values)
    assert (loaded.seed, loaded.train.steps, loaded.data) == (3, 7, "a folder") and found.values[
        "train.epsilon"
    ] == "0.3"
    assert loaded.evaluate.n == recipe.load("tiny").evaluate.n != settings.evaluate.n


def test_an_edited_recipe_does_not_change_what_a_run_used(made):
    settings, run_id, _, cell = made
    above = mlflow.get_run(cell).data.tags[runs.PARENT]
    for each in (run_id, above):
        file = contents.artifact(each, names.RECIPE)
        forged = settings.model_copy(update={"registered_name": "another", "seed": 5, "data": None})
        file.write_text(forged.dump())
    (trained,), (evaluated,) = origin.find(run_id), origin.find(cell)
    assert trained.values == settings.flat()
    assert (evaluated.values["seed"], evaluated.values["registered_name"]) == ("4", "null")


def test_a_cells_model_and_step_are_those_that_its_end_recorded(made, tmp_path):
    settings, _, address, _ = made
    about = {names.TAG_STEP: "evaluate", names.TAG_DIGEST: "d", names.TAG_VARIANT: "grpo", names.TAG_SCHEME: "full"}
    with runs.step("evaluate", settings, sections=("evaluate",)) as above, runs.child("c", tags=about) as cell:
        contents.log_scores({names.ACCURACY: 0.5}, model_uri=address)
        log_rows(tmp_path, "grpo", "full", model=address, step=above.info.run_id, questions="q")
    client = mlflow.MlflowClient()
    for _ in range(8):  # MLflow sorts a run's models by their ids
        other = mlflow.initialize_logged_model(params={"parent": "forged"})
        client.log_inputs(cell.info.run_id, models=[LoggedModelInput(other.model_id)])
    client.set_tag(cell.info.run_id, runs.PARENT, mlflow.start_run().info.run_id)
    mlflow.end_run()
    read = cells.read(cell.info.run_id)
    assert (read.model, read.settings["seed"], read.questions) == (address, "3", "q")


def test_a_run_keeps_the_users_files_and_knows_them_from_edited_ones(store, tmp_path):
    (tmp_path / "mine.py").write_text("def load(): ...\n")
    (tmp_path / "reward.py").write_bytes(b"# \xe9\r\n")  # kept to the byte
    task, reward = str(tmp_path / "mine.py"), f"{tmp_path}/reward.py:f"
    settings = recipe.load("tiny", {"task": task, "train.rewards": f"correct,{reward}"})
    with runs.step("train", settings) as run:
        pass
    for path in (task, str(tmp_path / "reward.py")):
        kept = contents.artifact(run.info.run_id, f"{names.FILES}/{own.label(path)}/{Path(path).name}")
        assert kept.read_bytes() == Path(path).read_bytes()
        assert mlflow.get_run(run.info.run_id).data.params[f"file {own.label(path)}"] == own.digest(path)
    (found,) = origin.find(run.info.run_id)
    assert found.values["task"] == task and found.edited(found.values) == []
    (tmp_path / "mine.py").write_text("def load(): return []\n")
    assert found.edited(found.values) == [task] and found.edited(found.values | {"task": "gsm8k"}) == []
    (tmp_path / "reward.py").unlink()
    assert found.edited(found.values) == [task]  # a step that needs the one that is gone refuses itself
    with pytest.raises(BadInput, match=r"reward\.py cannot be read .*below files/"):
        own.read_source(str(tmp_path / "reward.py"))
