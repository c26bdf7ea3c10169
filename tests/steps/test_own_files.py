"""Steps on a task file of the user: what they leave names the file by its digest."""

import mlflow
import pandas as pd
import pytest

from qrl import cli, names, tasks
from qrl.tasks import own
from qrl.tracking import contents

SUMS = """
import dataclasses
from qrl import tasks
def load(split, n, seed):
    found = tasks.load("arithmetic", split, n or 60, seed)
    return [dataclasses.replace(each, id=str(i)) for i, each in enumerate(found)]
def grade(completion, answer):
    return completion.endswith(f"#### {answer}")
def short(completions, answers):
    return [-0.001 * len(completion) for completion in completions]
"""
TRAIN = ["--train.steps", "1", "--train.prompts_per_step", "2", "--train.questions", "8", "--train.micro_batch", "16"]


def run(words: list[str]) -> mlflow.entities.Run:
    """Run a command; return its step's run."""
    cli.cli.main([*words, "--device", "cpu", "--prompt", "plain"], standalone_mode=False)
    query = f"tags.`{names.TAG_STEP}` = '{words[0]}'"
    return mlflow.search_runs(filter_string=query, output_format="list", order_by=["attributes.start_time"])[0]


@pytest.mark.slow
@pytest.mark.process
def test_training_and_evaluation_on_a_users_task_with_a_users_reward(store, tmp_path, capsys):
    (tmp_path / "sums.py").write_text(SUMS)
    task = str(tmp_path / "sums.py")
    label = tasks.label(task)
    trained = run(["train", "--task", task, "--train.rewards", f"correct,{task}:short", *TRAIN])
    assert trained.data.tags[names.TAG_TASK] == label and trained.data.params["task"] == task
    assert trained.data.params[f"file {label}"] == own.digest(task)
    assert contents.artifact(trained.info.run_id, f"{names.FILES}/{label}/sums.py").read_text() == SUMS
    assert trained.data.metrics["train/reward_short"] < 0
    (model,) = mlflow.search_logged_models(output_format="list")
    assert model.tags[names.TAG_TASK] == label
    run(["evaluate", "--task", task, "--cells", "base:full=qrl-tiny", "--evaluate.n", "20"])
    (cell,) = mlflow.search_runs(filter_string=f"tags.`{names.TAG_DIGEST}` != ''", output_format="list")
    assert cell.data.tags[names.TAG_TASK] == cell.data.params["task"] == label
    assert {each.dataset.name for each in cell.inputs.dataset_inputs} == {f"{label}-heldout"}
    rows = pd.read_parquet(contents.artifact(cell.info.run_id, names.QUESTIONS))
    assert rows["question"].tolist() == [f"{label}-heldout-{i}" for i in range(20)] and rows["correct"].sum() > 4
    (tmp_path / "sums.py").write_text(SUMS + "# edited\n")
    capsys.readouterr()
    run(["evaluate", "--cells", f"grpo:full=models:/{model.model_id}", "--evaluate.n", "20"])
    said = capsys.readouterr().err
    assert f"task={task}" in said and "is not what that run read" in said
