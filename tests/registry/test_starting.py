"""A registered model as a recipe's model: one version, checked, in every record; and a name that is two models'."""

import json
import shutil
from pathlib import Path

import mlflow
import pytest

from qrl import checkpoint, names, recipe, registry, tiny
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.registry import starting, versions
from qrl.steps import quantize
from qrl.tracking import lineage, models, origin, runs
from tests.registry.made import NAME

WHY = {"run": "r", "reasons": ["it was better."], "bounds": {"gain": 0.1}}
NUMBERS = {"accuracy": 0.6, "stderr": 0.01, "n": 2000}


def model(address: str) -> str:
    """Return what a recipe's model is resolved to."""
    return starting.with_version(recipe.load(overrides={"model": address})).model


@pytest.fixture
def promoted(version):
    """Two versions of qrl-tiny; the second one is base, and the first was."""
    version(weights="a"), version(weights="b")
    registry.promote(NAME, "base", 1, record=WHY)
    registry.promote(NAME, "base", 2, record=WHY)


@pytest.mark.parametrize(
    ("address", "resolved"),
    [
        (f"models:/{NAME}@base", f"models:/{NAME}/2"),
        (f"models:/{NAME}/base", f"models:/{NAME}/2"),
        (f"models:/{NAME}/2", f"models:/{NAME}/2"),
        (f"models:/{NAME}@base-previous", f"models:/{NAME}/1"),
        ("models:/m-0123", "models:/m-0123"),
        ("owner/model", "owner/model"),
        ("/a/folder", "/a/folder"),
    ],
)
def test_a_stage_becomes_a_version(promoted, address, resolved):
    assert model(address) == resolved


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("models:/qrl-other@base", r"no registered model 'qrl-other' .*: registered are qrl-tiny\. Give one of them"),
        *(
            (f"models:/{rest}", r"expected models:/NAME@STAGE")
            for rest in (NAME, f"{NAME}/", "", f"{NAME}/base/x", "m-")
        ),
        (f"models:/{NAME}@bas", "no stage 'bas': expected one of base"),
        (f"models:/{NAME}/9", "no version 9: registered are 1, 2"),
    ],
)
def test_what_there_is_not_is_a_sentence_that_lists_what_there_is(promoted, address, sentence):
    with pytest.raises(BadInput, match=sentence):
        model(address)


def test_a_version_that_no_gate_let_in_or_whose_files_changed_starts_nothing(version):
    made = version(weights="a")
    registry.refuse(NAME, "base", 1, record={"reasons": ["it was unhealthy."]})
    with pytest.raises(GateRefused, match="it was unhealthy"):
        model(f"models:/{NAME}/1")
    registry.promote(NAME, "base", 1, record=WHY)
    assert model(f"models:/{NAME}/1") == made.uri
    (models.local_path(made.uri) / checkpoint.WEIGHTS).write_text("other")
    with pytest.raises(QrlError, match="have changed"):
        model(f"models:/{NAME}@base")


def test_a_model_of_another_program_has_mlflows_own_aliases(store, version):
    version(weights="a")  # of which no gate has decided
    client = mlflow.MlflowClient()
    client.set_registered_model_alias(NAME, "champion", "1")
    assert model(f"models:/{NAME}@champion") == model(f"models:/{NAME}/1") == f"models:/{NAME}/1"
    with pytest.raises(BadInput, match=r"'qrl-tiny' has no 'other' .*models:/qrl-tiny@ALIAS"):
        model(f"models:/{NAME}@other")


def register_shipped() -> versions.Version:
    digest = checkpoint.digest(tiny.PATH)
    with runs.step("evaluate"):
        uri, _ = models.log_checkpoint(
            tiny.PATH, name="base", digest=digest, variant="base", scheme="full", task="arithmetic", move=False
        )
    version = registry.register(NAME, uri, digest=digest, variant="base", scheme="full", **NUMBERS)
    return registry.promote(NAME, "base", version.version, record=WHY)


def test_what_is_made_from_a_version_names_it_though_the_stage_was_typed(store, monkeypatch):
    register_shipped()
    settings = starting.with_version(recipe.load("tiny", {"model": f"models:/{NAME}@base", "device": "cpu"}))
    opened = mlflow.MlflowClient().create_run("0").info.run_id
    mlflow.MlflowClient().log_param(opened, "model", f"models:/{NAME}@base")  # as `mlflow run -P model=…` does
    monkeypatch.setenv("MLFLOW_RUN_ID", opened)
    quantize.quantize(settings, ("fp8",), None)

    step = mlflow.get_run(opened)
    assert step.data.params["model"].endswith("@base")
    assert step.data.tags[names.TAG_MODEL_VERSION] == origin.values(step)["model"] == f"models:/{NAME}/1"
    (made,) = [model for model in mlflow.search_logged_models(output_format="list") if model.name == "base-fp8"]
    assert made.params["parent"] == checkpoint.digest(tiny.PATH)
    assert lineage.line(f"models:/{made.model_id}")[-1].digest == checkpoint.digest(tiny.PATH)


def test_what_starts_from_a_version_is_registered_apart_from_it():
    def name(address: str) -> str:
        return registry.registered_name(recipe.load(overrides={"model": address}))

    assert name("models:/qrl-tiny/2") == "qrl-tiny-v2"
    assert name("models:/My Model/12") == "qrl-my-model-v12"


def folder(parent: Path, source: Path, note: str) -> Path:
    """Return a checkpoint in `parent`/final; another note makes other weights."""
    path = parent / "final"
    shutil.copytree(source, path)
    (path / "generation_config.json").write_text(json.dumps({"note": note}))
    return path


def base_of(path: Path, name: str) -> None:
    """Register a folder's checkpoint, and promote it to base."""
    digest = checkpoint.digest(path)
    with runs.step("evaluate"):
        uri, _ = models.log_checkpoint(
            path, name="base", digest=digest, variant="base", scheme="full", task="arithmetic", move=False,
            metadata={"source": str(path)},
        )  # fmt: skip
    version = registry.register(name, uri, digest=digest, variant="base", scheme="full", **NUMBERS)
    registry.promote(name, "base", version.version, record=WHY)


def check(path: Path, **overrides: str) -> str:
    settings = recipe.load(overrides={"model": str(path), **overrides})
    return registry.check_base(settings, checkpoint.digest(path))


def test_two_folders_of_one_name_with_other_weights_do_not_share_a_registered_model(store, tiny_checkpoint, tmp_path):
    first = folder(tmp_path / "monday", tiny_checkpoint, "a")
    assert check(first) == ""  # there is no such model yet
    base_of(first, "qrl-final")
    assert check(first) == ""
    assert check(folder(tmp_path / "moved", tiny_checkpoint, "a")) == ""  # the same weights

    second = folder(tmp_path / "tuesday", tiny_checkpoint, "b")
    with pytest.raises(BadInput, match=rf"of {first}, and .*tuesday.*other weights.*registered_name=qrl-tuesday-final"):
        check(second)
    assert check(second, registered_name="qrl-final") == ""  # whoever says so means it
    assert check(second, registered_name="qrl-tuesday-final") == ""

    (first / "generation_config.json").write_text("{}")  # it was trained further
    assert "replaces it" in check(first)
