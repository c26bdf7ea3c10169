"""Launching a step as a project run of its own, below the study's run, unless its result is there already."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from qrl import process
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.tracking import projects, reuse
from qrl.tracking.keys import ROOT

ERRORS = {2: BadInput, 3: GateRefused}


@dataclass(frozen=True)
class Result:
    """What a step made: the run that holds it, and what it left for later steps."""

    run_id: str
    outputs: reuse.Outputs
    reused: bool


class Launcher:
    """Obtains results step by step: found by cache key, or made by launching the step."""

    def __init__(self, overrides: dict[str, str], run_id: str, steps: int) -> None:
        self.overrides, self.run_id, self.steps = overrides, run_id, steps
        self.results: list[tuple[str, Result]] = []  # what the study's description links
        self.seconds = 0.0  # in launched steps; the rest of the study's time is overhead
        self._numbers = itertools.count(1)

    def with_overrides(self, overrides: dict[str, str]) -> Launcher:
        """The same study's launcher of steps with other settings: it counts on, and adds to the same results."""
        other = copy.copy(self)
        other.overrides = overrides
        return other

    def obtain(
        self,
        title: str,
        step: str,
        wanted: dict[str, str],
        parameters: Callable[[list[str]], dict[str, str]],
        folder: Path = ROOT,
        failed: Callable[[list[str], QrlError], None] | None = None,
    ) -> dict[str, Result]:
        """Results by label; what has no finished run is made by one launch of the step.

        Args:
            title: what the step does, for the reader of the terminal.
            step: entry point.
            wanted: label → cache key.
            parameters: the labels still to make → the step's inputs, beside the recipe.
            folder: the project to run it in.
            failed: takes the labels that a failing step left without a result, and its error, and the others are returned;
                default: the error is raised.

        Raises:
            QrlError: the step failed, with its reason and its exit code.
        """
        found = {label: reuse.find(step, key) for label, key in wanted.items()}
        missing = [label for label, run in found.items() if run is None]
        self._say(title, [label for label in wanted if label not in missing], missing)
        for label in missing:
            if changed := reuse.changes(step, wanted[label]):
                click.echo(f"      {label} is not reused: {', '.join(changed)} changed", err=True)
        if missing:
            error = self._try(folder, step, parameters(missing))
            found |= {label: reuse.find(step, wanted[label]) for label in missing}
            lost = [label for label in missing if found[label] is None]
            if error and (failed is None or len(lost) == len(wanted)):
                raise error
            if error:
                failed(lost, error)
                found = {label: run for label, run in found.items() if run is not None}
        results = {}
        for label, run in found.items():
            if run is None:
                raise QrlError(
                    f"Step {step} ended well, but its result '{label}' is not in the store under the key that was looked for: "
                    "sources, data or settings changed while it ran. Run the study again."
                )
            results[label] = Result(run.info.run_id, reuse.outputs(run), label not in missing)
            self.results.append((f"{step} {label}", results[label]))
        return results

    def run(self, title: str, step: str, parameters: dict[str, str]) -> None:
        """Launches a step that is never reused."""
        self._say(title, [], [step])
        self._launch(ROOT, step, parameters)

    def _try(self, folder: Path, step: str, parameters: dict[str, str]) -> QrlError | None:
        try:
            self._launch(folder, step, parameters)
        except QrlError as error:
            return error
        return None

    def _launch(self, folder: Path, step: str, parameters: dict[str, str]) -> None:
        began = time.monotonic()
        try:
            launch(folder, step, self.overrides | parameters, parent=self.run_id, name=step)
        finally:
            self.seconds += time.monotonic() - began  # of a refused promotion too

    def _say(self, title: str, reused: list[str], missing: list[str]) -> None:
        notes = f" (reused: {', '.join(reused)})" if reused and missing else " (reused)" if reused else ""
        click.secho(f"[{next(self._numbers)}/{self.steps}] {title}{notes}", bold=True, err=True)


class DryRun(Launcher):
    """Goes through a study's steps before it begins and launches none: what is finished is found, the rest is told to `missing`.

    What is missing stands as a result without a model, and so nothing that builds on it is found either.
    """

    def __init__(self, missing: Callable[[Path], None]) -> None:
        super().__init__({}, "", 0)
        self.missing = missing

    def obtain(self, title, step, wanted, parameters, folder=ROOT, failed=None) -> dict[str, Result]:
        """As `Launcher.obtain`; `missing` gets the folder of a step that would be launched, and may raise."""
        found = {label: reuse.find(step, key) for label, key in wanted.items()}
        if None in found.values():
            self.missing(folder)
        unmade = Result("", reuse.Outputs({"model": ""}, values={"digest": ""}), reused=False)
        return {
            label: Result(run.info.run_id, reuse.outputs(run), reused=True) if run else unmade
            for label, run in found.items()
        }


def launch(
    folder: Path, step: str, parameters: dict[str, str], *, run_id: str | None = None, parent: str = "", name: str = ""
) -> str:
    """Runs an entry point of a project as MLflow does, with the environment manager that we ran under, and waits.

    Args:
        folder: with an MLproject file.
        step: entry point.
        parameters: as `-P` takes them.
        run_id: the run to work under; None begins one below `parent`.
        parent: id of the study's run.
        name: of a run that is begun here.

    Returns:
        The run's id.

    Raises:
        QrlError: it failed; the kind of error, its sentence and its exit code are the step's own.
    """
    import mlflow
    from mlflow.exceptions import ExecutionException

    if not (folder / "MLproject").is_file():
        raise BadInput(
            f"{folder} has no MLproject file: run from a checkout of the project, where its environments are."
        )
    logging.getLogger("mlflow.projects").setLevel(logging.WARNING)
    logging.getLogger("mlflow.utils.virtualenv").addFilter(lambda line: "already exists" not in line.getMessage())
    manager = projects.env_manager(parent or run_id)
    run_id = run_id or projects.open_child(parent, name)
    if manager == "local":  # a step runs `python`, which is this one only where its environment was activated
        os.environ["PATH"] = local_path()
    try:
        with uv_overrides(folder), from_here():
            mlflow.projects.run(
                str(folder), entry_point=step, parameters=parameters, env_manager=manager, run_id=run_id
            )
    except KeyboardInterrupt as stopped:
        if projects.mark_stopped(run_id, stopped) and not parent:
            return run_id  # a server that was told to stop has done its work, handed over or not
        raise
    except ExecutionException as error:
        reason, exit_code = projects.failure(run_id)
        failed = ERRORS.get(exit_code, QrlError)(
            reason or f"Step {step} failed ({error}); its output above says where."
        )
        failed.told = bool(reason)
        raise failed from None
    return run_id


def local_path() -> str:
    """PATH with this Python's folder first: where a step that shares its environment finds `python`."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


@contextmanager
def from_here() -> Iterator[None]:
    """Has launched steps work in our folder, which relative paths are counted from."""
    os.environ[process.FOLDER] = os.getcwd()
    try:
        yield
    finally:
        del os.environ[process.FOLDER]


@contextmanager
def uv_overrides(folder: Path) -> Iterator[None]:
    """Tells uv what a project's environment replaces or leaves out, by its overrides.txt; a user's own UV_OVERRIDE goes first."""
    file = folder / "overrides.txt"
    if not file.is_file() or "UV_OVERRIDE" in os.environ:
        yield
        return
    os.environ["UV_OVERRIDE"] = str(file.resolve())
    try:
        yield
    finally:
        del os.environ["UV_OVERRIDE"]
