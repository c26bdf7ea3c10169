"""Steps run one by one: the last line of each is the command for the next, whole, pasted as it is."""

import shlex

import mlflow
import pytest

from qrl import cli, mlflow_run, process
from qrl.errors import GateRefused
from qrl.tracking import contents

SMALL = {
    "recipe": "tiny-lora",
    "device": "cpu",
    "seed": "3",
    "train.steps": "1",
    "train.prompts_per_step": "2",
    "train.questions": "8",
    "train.micro_batch": "16",
    "evaluate.n": "20",
}


@pytest.fixture
def paste(store, monkeypatch, capsys):
    """Run a command as it was printed; return its last line, and what it said of settings."""
    monkeypatch.setenv(process.CALLER, "python -m qrl {}")

    def run(line: str) -> tuple[str, str]:
        words = shlex.split(line)
        assert words[:3] == ["python", "-m", "qrl"]
        cli.cli.main(words[3:], standalone_mode=False)
        said = capsys.readouterr()
        return said.out.splitlines()[-1], said.err

    return run


@pytest.mark.slow
@pytest.mark.process
def test_from_an_adapter_to_a_stage_by_pasting_what_each_step_prints(paste):
    line, said = paste(process.command("train", SMALL))
    assert "Settings of run" not in said
    for step, settings in (
        ("merge", "seed=3"),
        ("quantize", "seed=3"),
        ("evaluate", "seed=3, device=cpu, evaluate.n=20"),
        ("compare", "seed=3"),
    ):
        assert line.startswith(f"python -m qrl {step} --")
        line, said = paste(line)
        assert said.count("Settings of run") == 1 and settings in said
    promote = shlex.split(line)
    assert promote[3:6] == ["promote", "--stage", "base,grpo"] and line.count(",") == 2
    with pytest.raises(GateRefused, match=r"Stage grpo is refused.* n = 20"):  # a step on two questions teaches nothing
        paste(line)
    assert int(mlflow.MlflowClient().get_model_version_by_alias("qrl-tiny", "base").version) == 1
    (train,) = mlflow.search_runs(filter_string="tags.`qrl.step` = 'train'", output_format="list")
    assert "method: lora" in contents.artifact(train.info.run_id, "recipe.yaml").read_text()
    cell = promote[-1].split(",")[0]
    line, said = paste(f"python -m qrl promote --stage base --cell {cell} --seed 3 --device cpu")
    assert line == "python -m qrl serve --stage base" and "those of recipe tiny" in said

    # A version starts the next line with the task of its own run, not with that of a model from elsewhere.
    line, said = paste("python -m qrl train --model models:/qrl-tiny@base --device cpu")
    assert said.count("Settings of run") == 1 and "train.steps=1" in said
    assert line.startswith("python -m qrl merge --adapter runs:/")  # as the run's recipe has an adapter


@pytest.mark.parametrize(
    ("caller", "command"),
    [
        ("python -m qrl {}", "`mlflow run . -e train … --env-manager uv`"),
        ("mlflow run . -e {} --env-manager local", "`mlflow run . -e train … --env-manager uv`"),
        (
            "mlflow run https://host/qrl.git -v v1 -e {} --experiment-name e",
            "`mlflow run https://host/qrl.git -v v1 -e train … --experiment-name e --env-manager uv`",
        ),
    ],
)
def test_a_missing_package_is_answered_by_the_project_that_was_run(caller, command, monkeypatch):
    monkeypatch.setenv(process.CALLER, caller)
    assert process.environment_command("train") == command


@pytest.mark.parametrize(
    ("caller", "line"),
    [
        ("python -m qrl {}", "python -m qrl serve --stage awq --model 'a b'"),
        ("mlflow run . -e {} --env-manager uv", "mlflow run . -e serve --env-manager uv -P stage=awq -P model='a b'"),
    ],
)
def test_a_next_line_is_typed_as_this_command_was(caller, line, monkeypatch):
    monkeypatch.setenv(process.CALLER, caller)
    assert process.command("serve", {"stage": "awq", "model": "a b"}) == line


MLFLOW = ["/x/bin/python", "/x/bin/mlflow", "run", "..", "-e", "train"]


@pytest.mark.parametrize(
    ("words", "above", "folder", "typed"),
    [
        (MLFLOW, [], str(process.ROOT), "mlflow run . -e {}"),
        ([*MLFLOW, "--env-manager=local"], ["bash"], str(process.ROOT), "mlflow run . -e {} --env-manager local"),
        (
            [*MLFLOW, "--env-manager", "uv"],
            ["/b/uv", "tool", "uvx", "--from", "mlflow==3", "mlflow", *MLFLOW[2:]],
            str(process.ROOT),
            "uvx --from mlflow==3 mlflow run . -e {} --env-manager uv",
        ),
        (MLFLOW, [], "/elsewhere", f"mlflow run {process.ROOT} -e {{}}"),
        (
            ["/x/bin/python", "-m", "mlflow", "run", "-v", "v1.2", "-P", "train.steps=2", "git@host:a/qrl.git"],
            [],
            "/elsewhere",
            "/x/bin/python -m mlflow run git@host:a/qrl.git -v v1.2 -e {}",
        ),
        (
            [
                *MLFLOW[:3],
                "https://host/qrl#part",
                "--experiment-name",
                "my {sums}",
                "-e",
                "train",
                "--run-name",
                "one",
            ],
            [],
            "/elsewhere",
            "mlflow run 'https://host/qrl#part' -e {} --experiment-name 'my {{sums}}'",
        ),
        ([*MLFLOW, "--experiment-id=7"], [], str(process.ROOT), "mlflow run . -e {} --experiment-id 7"),
        (
            ["/x/bin/mlflow", "--env-file", ".env", "run", "https://host/qrl.zip"],
            [],
            "/elsewhere",
            "mlflow --env-file .env run https://host/qrl.zip -e {}",
        ),
        (["bash"], [], "/elsewhere", "/y/python -m qrl {}"),
        ([], [], "", "/y/python -m qrl {}"),
    ],
)
def test_how_a_command_was_typed_is_read_from_the_processes_above(words, above, folder, typed, monkeypatch):
    monkeypatch.delenv(process.CALLER, raising=False)
    monkeypatch.setattr(process, "_launchers", lambda: (words, above, folder))
    monkeypatch.setattr(process.sys, "orig_argv", ["/y/python", "-m", "qrl", "train"])
    assert process.caller() == typed


@pytest.mark.parametrize(
    ("project", "is_fetched"),
    [
        (".", False),
        ("checkout", False),
        ("file://{folder}/checkout", False),
        ("checkout#part", False),
        ("archive.zip", True),  # which MLflow unpacks into a temporary folder
        ("file:///nowhere/qrl", True),
        ("https://host/qrl.git", True),
        ("git@host:a/qrl.git", True),
    ],
)
def test_a_project_that_is_no_folder_here_is_fetched_into_a_temporary_one(project, is_fetched, tmp_path):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "archive.zip").touch()
    words = [*MLFLOW[:3], project.format(folder=tmp_path)]
    assert mlflow_run.read(words, [], str(tmp_path)).is_fetched == is_fetched
