"""The recipe behind a result of ours: a step that is given one takes its settings from the run that made it."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow.entities import Run
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

from qrl import names, recipe
from qrl.errors import BadInput
from qrl.tasks import own
from qrl.tracking import contents, runs, store

_ADDRESS = re.compile(r"models:/(m-[0-9a-f]+)|models:/([^/,\s]+)/(\d+)|(?:runs:/|\b)([0-9a-f]{32})\b")


@dataclass(frozen=True)
class Origin:
    """A step's run that made a result, and the recipe that it ran under."""

    run_id: str
    step: str
    values: Mapping[str, str]  # by dotted key, as `-P` takes them
    files: Collection[str] = ()  # labels of the user's own files that it read

    def edited(self, values: Mapping[str, str]) -> list[str]:
        """Return the user's files in settings that differ from those which the run read; one that is gone does not."""
        edited = []
        for path in own.files(values.get("task", ""), values.get("train.rewards", "").split(",")):
            is_present = os.path.isfile(path)  # a step that needs one that is gone refuses itself
            if is_present and own.read_source(path) and own.label(path) not in self.files:
                edited.append(path)
        return edited


def find(text: str) -> list[Origin]:
    """Return the steps that made the models and runs named in an option's text, the newest first.

    What the store does not hold is left out: the step that is given it reports it.
    """
    matches = list(_ADDRESS.finditer(text))
    if not matches or not store.is_there():
        return []
    store.prepare()
    steps = {}
    for match in matches:
        try:
            run = _step_of(match)
        except mlflow.MlflowException:
            continue
        steps[run.info.run_id] = run
    newest_first = sorted(steps.values(), key=lambda run: run.info.start_time, reverse=True)
    origins = [_origin(run) for run in newest_first]
    return [origin for origin in origins if origin.values]


def _origin(run: Run) -> Origin:
    files = [name.removeprefix(contents.FILE) for name in run.data.params if name.startswith(contents.FILE)]
    return Origin(run.info.run_id, run.data.tags.get(names.TAG_STEP, ""), values(run), files)


def _step_of(match: re.Match) -> Run:
    """Return the step's run that made what an address names: a model, a version, a run or a cell's run."""
    model, name, number, run_id = match.groups()
    if name:
        run_id = mlflow.MlflowClient().get_model_version(name, number).run_id
    elif model:
        run_id = mlflow.get_logged_model(model).source_run_id
    run = mlflow.get_run(run_id or "")  # a model that no run made is nowhere to be found
    while "seed" not in run.data.params and runs.PARENT in run.data.tags:  # a cell's run, below its step's
        run = mlflow.get_run(run.data.tags[runs.PARENT])
    return run


def values(run: Run) -> dict[str, str]:
    """Return the recipe that a run recorded, its params before its file; without the file, the part in its params."""
    params = run.data.params
    version = run.data.tags.get(names.TAG_MODEL_VERSION)
    if version:  # the param may hold a stage, as it was typed, which has another version now
        params = {**params, "model": version}
    uncut = {key: text for key, text in params.items() if len(text) < MAX_PARAM_VAL_LENGTH}  # MLflow cuts longer ones
    try:
        return recipe.stored(Path(contents.artifact(run.info.run_id, names.RECIPE)), uncut).flat()
    except BadInput:
        present = {recipe.RENAMED.get(key, key): value for key, value in params.items()}
        return {key: value for key, value in present.items() if key in recipe.fields()}
