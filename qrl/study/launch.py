"""Launch a step as a project run of its own, below the study's run, unless its result is in the store already."""

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
from typing import TYPE_CHECKING

import click

from qrl import cluster, process
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.study import build
from qrl.tracking import claims, contents, projects, reuse, runs, signals
from qrl.tracking.keys import ROOT

if TYPE_CHECKING:
    from mlflow.entities import Run

Failed = Callable[[list[str], QrlError], None]  # gets the labels left without a result, and the error
ERRORS = {2: BadInput, 3: GateRefused}  # exit code of a launched step → the error to raise here
STOPPED = 128  # a signal ended a step with an exit code above it, and not with a sentence of the step's own


@dataclass(frozen=True)
class Result:
    """The run that holds a step's result, and what it left for later steps."""

    run_id: str
    outputs: reuse.Outputs
    reused: bool


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
        self.overrides, self.run_id, self.steps = overrides, run_id, steps
        self.results: list[tuple[str, Result]] = []  # linked in the study's description
        self.seconds = 0.0  # in launched steps; the rest of the study's time is overhead
        self._numbers = itertools.count(1)

    def below(self, overrides: dict[str, str]) -> Launcher:
        """Return a launcher of steps with other overrides, below the same run; both count steps and results together.

        Seconds in launched steps are counted apart.
        """
        other = copy.copy(self)
        other.overrides = overrides
        return other

    def lacking(self, step: str, keys: dict[str, str]) -> list[str]:
        """Return the labels whose results of a step are not in the store; `keys` are by label."""
        return [label for label, key in keys.items() if reuse.find(step, key) is None]

    def obtain(self, step: Step, failed: Failed | None = None) -> dict[str, Result]:
        """Return results by label; one launch of the step makes all that are missing.

        Args:
            step: what is wanted.
            failed: called if the step fails, and the other results are returned; default: raise the error.

        Raises:
            QrlError: the step failed; it carries the step's own sentence and exit code.
        """
        runs = self._found(step, step.keys)
        missing = [label for label, run in runs.items() if run is None]
        self._announce(step.name, step.title, "" if missing else " (reused)")
        if reused := [f"{label} from run {run.info.run_id[:8]}" for label, run in runs.items() if run]:
            click.echo(f"      reused: {', '.join(reused)}", err=True)
        for label in missing:
            if changed := reuse.changes(step.name, step.keys[label]):
                click.echo(f"      {label} is not reused: {', '.join(changed)}", err=True)
        if missing:
            waiting = f"      Another study on this store makes {step.name} ({', '.join(missing)}) now: waiting for it."
            with claims.claimed((f"{step.name} {step.keys[label]}" for label in missing), lambda: _say(waiting)):
                runs |= self._found(step, missing)
                if made := [f"{label} from run {runs[label].info.run_id[:8]}" for label in missing if runs[label]]:
                    _say(f"      reused, as another study made it: {', '.join(made)}")
                missing = [label for label in missing if not runs[label]]
                try:
                    runs |= self._made(step, missing, failed, alone=len(missing) == len(runs))
                except QrlError:  # what it has made all the same is there for the study's last words
                    runs |= self._found(step, missing)
                    self._note(step.name, runs, missing)
                    raise
        return self._note(step.name, runs, missing)

    def _note(self, step: str, runs: dict[str, Run | None], made: list[str]) -> dict[str, Result]:
        """Return the results among a step's runs, and keep them; those not just `made` were reused."""
        results = {label: _result(run, reused=label not in made) for label, run in runs.items() if run}
        self.results += [(f"{step} {label}", result) for label, result in results.items()]
        return results

    def _found(self, step: Step, labels: Iterable[str]) -> dict[str, Run | None]:
        return {label: reuse.find(step.name, step.keys[label]) for label in labels}

    def _made(self, step: Step, missing: list[str], failed: Failed | None, *, alone: bool) -> dict[str, Run | None]:
        """Launch a step once for all missing results, and return their runs; `alone`: the step wants no others."""
        error = None
        try:
            if missing:
                self._launch(step.folder, step.name, step.parameters(missing))
        except QrlError as failure:
            error = failure
        runs = self._found(step, missing)
        lost = [label for label, run in runs.items() if run is None]
        if error and (failed is None or (alone and lost == missing)):
            raise error
        if error:
            failed(lost, error)
        elif lost:
            raise QrlError(
                f"Step {step.name} ended well, but the store has no result '{lost[0]}' under the expected key: "
                "sources, data or settings changed while it ran. Run the study again."
            )
        return runs

    def promote(self, title: str, parameters: dict[str, str]) -> None:
        """Launch `promote`, never reused; a study's stages move as a whole, so studies of one model take turns."""
        self._announce("promote", title)
        name = parameters["registered_name"]
        waiting = f"      Another study on this store promotes to {name} now: waiting for it."
        with claims.claimed([f"promote {name}"], lambda: _say(waiting)):
            self._launch(None, "promote", parameters)

    def result(self, step: str) -> Result:
        """Return the result of a step that has one, such as train or compare."""
        return dict(self.results)[f"{step} {step}"]

    def _launch(self, folder: Path | None, step: str, parameters: dict[str, str]) -> None:
        began = time.monotonic()
        try:
            launch(folder or ROOT, step, self.overrides | parameters, parent=self.run_id)
        finally:
            self.seconds += time.monotonic() - began  # of a refused promotion too

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
        """Return the labels whose results are to be made, as `Launcher.lacking` does."""
        return list(keys) if self.empty else super().lacking(step, keys)

    def obtain(self, step: Step, failed: Failed | None = None) -> dict[str, Result]:
        """Return results as `Launcher.obtain` does."""
        runs = {label: None if self.empty else reuse.find(step.name, key) for label, key in step.keys.items()}
        if lost := [label for label, run in runs.items() if run is None]:
            self.missing.setdefault(step.name, []).extend(lost)
            self.folders.append(step.folder or ROOT)
        unmade = Result("", reuse.Outputs({"model": ""}, values={"digest": ""}), reused=False)
        return {label: _result(run, reused=True) if run else unmade for label, run in runs.items()}


def _say(line: str) -> None:
    click.echo(line, err=True)


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
    import mlflow
    from mlflow.exceptions import ExecutionException

    if not (folder / "MLproject").is_file():
        raise BadInput(f"{folder} has no MLproject file: run from a checkout of the project, which has one.")
    logging.getLogger("mlflow.projects").setLevel(logging.CRITICAL)  # that a run was interrupted is said once, here
    logging.getLogger("mlflow.utils.virtualenv").addFilter(lambda line: "already exists" not in line.getMessage())
    manager = projects.env_manager(parent or run_id)
    own, nodes = not (run_id or parent), cluster.chosen() if parent else None  # a study's steps can be jobs
    signals.patient(forever=step == "serve")
    signals.note_run()
    if nodes:
        from qrl.cluster import jobs

        run_id = jobs.adopted(parent, step, parameters)
    run_id = run_id or projects.open_child(parent, step)
    if manager == "local":  # a step runs `python`, which is this one only where its environment was activated
        os.environ["PATH"] = local_path()
    how = {"entry_point": step, "parameters": parameters, "env_manager": manager, "run_id": run_id}
    try:
        with variables(folder):
            build.wait(folder, manager)
            if nodes:
                contents.tag_run(run_id, {jobs.MANAGER: manager})
                jobs.run(nodes, folder, step, parameters, run_id)
            else:
                mlflow.projects.run(str(folder), **how)
    except KeyboardInterrupt as stopped:
        if not projects.mark_stopped(run_id, stopped) or parent:
            stopped.printed = not parent  # by the step
            raise  # otherwise a server was stopped, and has done its work, handed over or not
    except ExecutionException:
        reason, exit_code = projects.failure(run_id)
        if exit_code is None:
            click.echo(err=True)  # whoever was killed may have left a progress bar without a line end
        failure = QrlError(f"Step {step}: {reason}")
        if exit_code is not None and exit_code < STOPPED:  # the step has printed its sentence
            failure = ERRORS.get(exit_code, QrlError)(reason)
            failure.printed = True
        raise failure from None
    finally:
        if own:
            runs.show_page(run_id)


def local_path() -> str:
    """Return PATH with this Python's folder first, where a step that shares its environment finds `python`."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def variables(folder: Path) -> AbstractContextManager[None]:
    """Set our working folder, how commands are typed, and what uv reads: pins to replace, and the lock with hashes."""
    ours, overrides = {process.FOLDER: os.getcwd(), process.CALLER: process.caller()}, folder / "overrides.txt"
    ours[signals.LAUNCHER] = str(os.getpid())
    if overrides.is_file() and "UV_OVERRIDE" not in os.environ:  # a user's own has precedence
        ours["UV_OVERRIDE"] = str(overrides.resolve())
    lock = process.ROOT / ".github" / "supply" / f"{folder.name}.lock"
    if "UV_REQUIRE_HASHES" in os.environ and lock.is_file():  # the user's own is of the core environment
        ours["UV_CONSTRAINT"] = str(lock)
    return process.variables(**ours)
