"""The task of the logs of inspect."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.scorer import match, pattern
from inspect_ai.solver import generate


@task
def words(scored: str = "line"):
    scorers = {"line": pattern(r"#### (-?[0-9.,]+)"), "end": match(location="end", numeric=True)}
    questions = json_dataset("questions.jsonl", _sample)
    return Task(questions, solver=generate(), scorer=[scorers[name] for name in scored.split("+")])


def _sample(row: dict) -> Sample:
    return Sample(id=row["id"], input=row["question"], target=row["answer"].rsplit("#### ")[-1])
