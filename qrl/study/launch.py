"""Launch a step as a project run of its own, below the study's run, unless its result is in the store already.

`Launcher.obtain` is the whole rule of reuse: look a result up by its cache key; if it is missing, claim it, so that
another study on this store does not make it too; look again; launch the step; look once more. `launch` is what happens
to one step: MLflow runs the entry point, here or as a job of a cluster, and its error becomes ours.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from qrl import cluster, process
from qrl.errors import BadInput, GateRefused, QrlError, StopReported
from qrl.study import build
from qrl.tracking import claims, contents, projects, reuse, runs, signals
from qrl.tracking.keys import ROOT

if TYPE_CHECKING:
    from mlflow.entities import Run

    from qrl.cluster.config import Cluster

Failed = Callable[[list[str], QrlError], None]  # gets the labels left without a result, and the error
ERRORS = {2: BadInput, 3: GateRefused}  # exit code of a launched step → the error to raise here
STOPPED = 128  # a signal ended a step with an exit code above it, and not with a sentence of the step's own


@dataclass(frozen=True)
class Result:
    """The run that holds a step's result, and what it left for later steps."""

    run_id: str
    outputs: reuse.Outputs
    reused: bool


class Obtained(NamedTuple):
    """A result of a study, as its description lists it."""

    step: str  # entry point
    label: str  # among the step's results; the step's name, if it has only one
    result: Result


@dataclass(frozen=True)
class Step:
    """A step of a study, and the results that are wanted from it."""

    name: str  # entry point
    title: str  # for the reader of the terminal
    keys: dict[str, str]  # label of a result → cache key
    parameters: Callable[[list[str]], dict[str, str]]  # labels still to make → the step's inputs, beside the recipe
    folder: Path | None = None  # the project to run it in, from `environment_for`; None: the checkout itself


class Launcher:
    """Obtain results step by step: find each one by its cache key, or launch the step that makes it."""

    def __init__(self, overrides: dict[str, str], run_id: str, steps: int) -> None:
        self.overrides = overrides
        self.run_id = run_id  # of the study
        self.steps = steps  # how many there will be
        self.results: list[Obtained] = []  # linked in the study's description
        self.seconds = 0.0  # in launched steps; the rest of the study's time is overhead
        self._numbers = itertools.count(1)

    def below(self, overrides: dict[str, str]) -> Launcher:
        """Return a launcher of steps with other overrides, below the same run; both count steps and results together.

        Seconds in launched steps are counted apart.
        """
        launcher = copy.copy(self)  # shares the list of results and the counter
        launcher.overrides = overrides
        return launcher

    def lacking(self, step: str, keys: dict[str, str]) -> list[str]:
        """Return the labels of a step's results that are not in the store; `keys` are by label."""
        return [label for label, key in keys.items() if reuse.find(step, key) is None]

    def obtain(self, step: Step, failed: Failed | None = None) -> dict[str, Result]:
        """Return results by label; one launch of the step makes all that are missing.

        Args:
            step: what is wanted.
            failed: called if the step fails, and the other results are returned; default: raise the error.

        Raises:
            QrlError: the step failed; it carries the step's own sentence and exit code.
        """
        runs_by_label = self._find(step, step.keys)
        missing = [label for label, run in runs_by_label.items() if run is None]
        self._announce(step.name, step.title, "" if missing else " (reused)")
        reused = [f"{label} from run {run.info.run_id[:8]}" for label, run in runs_by_label.items() if run]
        if reused:
            _print(f"reused: {', '.join(reused)}")
        for label in missing:
            changes = reuse.changes(step.name, step.keys[label])
            if changes:
                _print(f"{label} is not reused: {', '.join(changes)}")
        if not missing:
            return self._note(step.name, runs_by_label, new_labels=[])

        def say_waiting() -> None:
            _print(f"Another study on this store makes {step.name} ({', '.join(missing)}) now: waiting for it.")

        with claims.claimed([f"{step.name} {step.keys[label]}" for label in missing], say_waiting):
            # The study that had claimed them may have made them while this one waited.
            runs_by_label |= self._find(step, missing)
            made_elsewhere = [label for label in missing if runs_by_label[label]]
            if made_elsewhere:
                origins = [f"{label} from run {runs_by_label[label].info.run_id[:8]}" for label in made_elsewhere]
                _print(f"reused, as another study made it: {', '.join(origins)}")
            missing = [label for label in missing if not runs_by_label[label]]
            if missing:
                try:
                    runs_by_label |= self._make(step, missing, failed, lacks_all=len(missing) == len(runs_by_label))
                except QrlError:  # `report.leave` names what the step has made before it failed
                    runs_by_label |= self._find(step, missing)
                    self._note(step.name, runs_by_label, new_labels=missing)
                    raise
        return self._note(step.name, runs_by_label, new_labels=missing)

    def _note(self, step: str, runs_by_label: dict[str, Run | None], *, new_labels: list[str]) -> dict[str, Result]:
        """Return the results among a step's runs, and keep them; those that are not new were reused."""
        results = {label: _result(run, reused=label not in new_labels) for label, run in runs_by_label.items() if run}
        self.results += [Obtained(step, label, result) for label, result in results.items()]
        return results

    def _find(self, step: Step, labels: Iterable[str]) -> dict[str, Run | None]:
        return {label: reuse.find(step.name, step.keys[label]) for label in labels}

    def _make(self, step: Step, missing: list[str], failed: Failed | None, *, lacks_all: bool) -> dict[str, Run | None]:
        """Launch a step once for all missing results, and return their runs.

        `lacks_all` says that the step wants no other results, so that nothing is left if it fails.
        """
        error = None
        try:
            self._launch(step.folder, step.name, step.parameters(missing))
        except QrlError as failure:
            error = failure
        runs_by_label = self._find(step, missing)
        lost = [label for label, run in runs_by_label.items() if run is None]

        if error:
            has_no_result = lacks_all and lost == missing
            if failed is None or has_no_result:
                raise error
            failed(lost, error)
        elif lost:
            raise QrlError(
                f"Step {step.name} ended well, but the store has no result '{lost[0]}' under the expected key: "
                "sources, data or settings changed while it ran. Run the study again."
            )
        return runs_by_label

    def promote(self, title: str, parameters: dict[str, str]) -> None:
        """Launch `promote`, never reused; a study's stages move as a whole, so studies of one model take turns."""
        self._announce("promote", title)
        name = parameters["registered_name"]

        def say_waiting() -> None:
            _print(f"Another study on this store promotes to {name} now: waiting for it.")

        with claims.claimed([f"promote {name}"], say_waiting):
            self._launch(None, "promote", parameters)

    def result(self, step: str) -> Result:
        """Return the result of a step that has one, such as train or compare."""
        results = {obtained.step: obtained.result for obtained in self.results if obtained.label == obtained.step}
        return results[step]

    def _launch(self, folder: Path | None, step: str, parameters: dict[str, str]) -> None:
        start = time.monotonic()
        try:
            launch(folder or ROOT, step, self.overrides | parameters, parent=self.run_id)
        finally:
            self.seconds += time.monotonic() - start  # also if it failed, or a gate refused

    def _announce(self, step: str, title: str, note: str = "") -> None:
        number = next(self._numbers)
        click.secho(f"[{number}/{max(number, self.steps)}] {step}: {title}{note}", bold=True, err=True)


class DryRun(Launcher):
    """A launcher that launches nothing: it finds finished results and notes those that are still to be made.

    A missing result is replaced by one without a model, so nothing that builds on it is found either.
    """

    def __init__(self, *, empty: bool = False) -> None:
        """Start with nothing missing; `empty` says that there is no store yet, so that nothing can be found."""
        super().__init__({}, "", 0)
        self.empty = empty
        self.missing: dict[str, list[str]] = {}  # step → labels of results still to be made
        self.folders: list[Path] = []  # of the steps still to run, in their order

    def lacking(self, step: str, keys: dict[str, str]) -> list[str]:
        """Return the labels of results that are to be made, as `Launcher.lacking` does."""
        return list(keys) if self.empty else super().lacking(step, keys)

    def obtain(self, step: Step, failed: Failed | None = None) -> dict[str, Result]:
        """Return results as `Launcher.obtain` does."""
        runs_by_label = dict.fromkeys(step.keys) if self.empty else self._find(step, step.keys)
        missing = [label for label, run in runs_by_label.items() if run is None]
        if missing:
            self.missing.setdefault(step.name, []).extend(missing)
            self.folders.append(step.folder or ROOT)
        unmade = Result("", reuse.Outputs({"model": ""}, values={"digest": ""}), reused=False)
        return {label: _result(run, reused=True) if run else unmade for label, run in runs_by_label.items()}


def _print(line: str) -> None:
    """Print a line below a step's title."""
    click.echo(f"      {line}", err=True)


def _result(run: Run, *, reused: bool) -> Result:
    return Result(run.info.run_id, reuse.outputs(run), reused)


def launch(folder: Path, step: str, parameters: dict[str, str], *, run_id: str | None = None, parent: str = "") -> None:
    """Run an entry point as MLflow does, with the environment manager that this process was started with, and wait.

    Args:
        folder: a folder with an MLproject file.
        step: entry point.
        parameters: as `-P` takes them.
        run_id: the run to work under; None starts one below `parent`, named like the step.
        parent: id of the study's run.

    Raises:
        BadInput: the folder has no MLproject file.
        QrlError: the step failed; the kind of error, its sentence and its exit code are the step's own.
    """
    from mlflow.exceptions import ExecutionException

    if not (folder / "MLproject").is_file():
        raise BadInput(f"{folder} has no MLproject file: run from a checkout of the project, which has one.")
    logging.getLogger("mlflow.projects").setLevel(logging.CRITICAL)  # that a run was interrupted is printed once, here
    logging.getLogger("mlflow.utils.virtualenv").addFilter(lambda line: "already exists" not in line.getMessage())
    manager = projects.env_manager(parent or run_id)
    signals.allow_longer(forever=step == "serve")
    signals.note_run()

    opens_run = not (run_id or parent)  # then no other process shows its page
    nodes = cluster.chosen() if parent else None  # a study's steps can be jobs
    if nodes:
        from qrl.cluster import jobs

        run_id = jobs.adopted(parent, step, parameters)
    run_id = run_id or projects.open_child(parent, step)
    if manager == "local":  # a step runs `python`, which is this one only if its environment was activated
        os.environ["PATH"] = local_path()
    try:
        _run(folder, step, parameters, run_id, manager, nodes)
    except KeyboardInterrupt as stop:
        finished = projects.mark_stopped(run_id, stop)
        if parent:
            raise
        if not finished:
            raise StopReported(stop) from stop
        # Otherwise a server was stopped, which is how its work ends.
    except ExecutionException:
        raise _failure(step, run_id) from None
    finally:
        if opens_run:
            runs.show_page(run_id)


def _run(folder: Path, step: str, parameters: dict[str, str], run_id: str, manager: str, nodes: Cluster | None) -> None:
    """Run an entry point under a run: here, once its environment is built, or as a job of a cluster."""
    import mlflow

    with variables(folder):
        build.wait(folder, manager)
        if nodes:
            from qrl.cluster import jobs

            contents.tag_run(run_id, {jobs.MANAGER: manager})
            jobs.run(nodes, folder, step, parameters, run_id)
        else:
            mlflow.projects.run(
                str(folder), entry_point=step, parameters=parameters, env_manager=manager, run_id=run_id
            )


def _failure(step: str, run_id: str) -> QrlError:
    """Return the error of a step that failed, of the step's own kind if it left a report in its run."""
    reason, exit_code = projects.failure(run_id)
    if exit_code is None:
        click.echo(err=True)  # a process that was killed may have left a progress bar without a line end
    if exit_code is None or exit_code >= STOPPED:
        return QrlError(f"Step {step}: {reason}")
    kind = ERRORS.get(exit_code, QrlError)
    return kind(reason, is_printed=True)  # by the step


def local_path() -> str:
    """Return PATH with this Python's folder first, so that a step that shares its environment finds `python` there."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def variables(folder: Path) -> AbstractContextManager[None]:
    """Set our working folder, how commands are typed, and what uv reads: pins to replace, and the lock with hashes."""
    settings = {process.FOLDER: os.getcwd(), process.CALLER: process.caller(), signals.LAUNCHER: str(os.getpid())}
    overrides = folder / "overrides.txt"
    if overrides.is_file() and "UV_OVERRIDE" not in os.environ:  # a user's own has precedence
        settings["UV_OVERRIDE"] = str(overrides.resolve())
    lock = process.ROOT / ".github" / "supply" / f"{folder.name}.lock"
    if "UV_REQUIRE_HASHES" in os.environ and lock.is_file():  # the user's own is of the core environment
        settings["UV_CONSTRAINT"] = str(lock)
    return process.variables(**settings)
