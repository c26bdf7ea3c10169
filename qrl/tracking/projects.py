"""MLflow Projects: runs opened for steps that are about to be launched, and how those steps ended."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import mlflow
from filelock import FileLock
from mlflow.tracking.fluent import _get_experiment_id

from qrl import names
from qrl.errors import first_line
from qrl.tracking import contents, dead_runs, model_files, models, owners, runs, signals

NOT_BEGUN = "Its process ended before it began: it was killed, or its environment is broken; see the output above."
_MANAGER = "mlflow.project.env"
_LAST_OWN_CODE = 128  # a higher exit code is a signal's


def open_child(parent: str, name: str) -> str:
    """Open a run for a step to join, below the parent if there is one; return its id, known before the step begins."""
    tags = {names.TAG_PID: owners.this_process()}
    if parent:
        experiment = runs.opened(parent).info.experiment_id
        tags[runs.PARENT] = parent
    else:
        experiment = _get_experiment_id() or "0"
    return mlflow.MlflowClient().create_run(experiment, tags=tags, run_name=name).info.run_id


def env_manager(run_id: str | None) -> str:
    """Return the environment manager that a run was started under; `local` if `mlflow run` did not start it."""
    return runs.opened(run_id).data.tags.get(_MANAGER, "local") if run_id else "local"


def environment(folder: Path) -> Path:
    """Return the folder of the virtual environment that MLflow keeps for a project, built or not."""
    from mlflow.utils import virtualenv

    return Path(virtualenv._get_mlflow_virtualenv_root()) / virtualenv._get_virtualenv_name(_python(folder), folder)


def is_built(folder: Path, package: str) -> bool:
    """Return whether a project's environment holds its package, and no build of it was killed."""
    environment_folder = environment(folder)
    if _unfinished(environment_folder).exists():
        return False
    return any(environment_folder.glob(f"lib/python*/site-packages/{package}"))


def _unfinished(environment_folder: Path) -> Path:
    """Return the file that says, from before the first package to after the last, that an environment is incomplete."""
    return environment_folder.with_name(f"{environment_folder.name}.unfinished")


def build(folder: str, manager: Literal["uv", "virtualenv"], package: str) -> None:
    """Build a project's environment as MLflow does, and import a package of it once, which compiles it.

    Args:
        folder: of the project.
        manager: as in `mlflow run --env-manager`.
        package: that the environment is for.

    Raises:
        SystemExit: 1, after the installer's own message.
    """
    from mlflow.utils import virtualenv
    from mlflow.utils.process import ShellCommandException

    signals.guard()
    signals.die_with_parent()
    os.nice(10)  # what runs meanwhile has precedence
    logging.getLogger("mlflow").setLevel(logging.ERROR)  # the installer says what is wrong, and should say it last
    project = Path(folder)
    environment_folder = environment(project)
    environment_folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{environment_folder}.lock"):  # of two first studies at once, one builds
        if is_built(project, package):
            return
        shutil.rmtree(environment_folder, ignore_errors=True)  # a build that was killed
        _unfinished(environment_folder).touch()
        try:
            virtualenv._create_virtualenv(project, _python(project), environment_folder, env_manager=manager)
        except ShellCommandException:
            raise SystemExit(1) from None
        except BaseException:
            signals.kill_children()  # the installer, which MLflow leaves behind
            shutil.rmtree(environment_folder, ignore_errors=True)
            raise
        subprocess.run([environment_folder / "bin" / "python", "-c", f"import {package}"], check=False)
        _unfinished(environment_folder).unlink()


def _python(folder: Path):
    from mlflow.utils.environment import _PythonEnv

    return _PythonEnv.from_conda_yaml(str(folder / "conda.yaml"))


def mark_stopped(run_id: str, error: KeyboardInterrupt) -> bool:
    """Give a launched run its true end after a signal: MLflow calls every run that it interrupted FAILED.

    What fails meanwhile is printed: whoever waited for the run was stopped all the same.

    Returns:
        Whether its step finished all the same, as a server does that is stopped; else it was KILLED.
    """
    try:
        return _marked_stopped(run_id, error)
    except Exception as failure:
        print(f"Run {run_id} was not told that it was stopped: {first_line(failure)}", file=sys.stderr)
        return False


def _marked_stopped(run_id: str, error: KeyboardInterrupt) -> bool:
    client = mlflow.MlflowClient()
    signals.take_note(run_id)  # forgets the step's note: `error` says the reason
    run = client.get_run(run_id)
    reason = str(error) or "Stopped by Ctrl-C."
    is_job = dead_runs.TAG_JOB in run.data.tags  # then the cluster knows the reason
    if names.SECONDS in run.data.metrics:
        client.set_terminated(run_id, "FINISHED")
        return True

    if names.TAG_REASON not in run.data.tags:  # the signal came before the step could write it
        if not is_job:
            tags = {names.TAG_REASON: reason, names.TAG_EXIT_CODE: str(signals.exit_code(error))}
            contents.tag_run(run_id, tags)
    elif int(run.data.tags.get(names.TAG_EXIT_CODE, 1)) <= _LAST_OWN_CODE:
        return False  # it had failed by itself
    client.set_terminated(run_id, "KILLED")
    if not is_job:  # the step may have been ended at once, with its cells
        models.abandon(run_id)
        _end_below(run_id, reason)
    return False


def _end_below(run_id: str, reason: str) -> None:
    for run in contents.find_runs(f"tags.`{runs.PARENT}` = '{run_id}'"):
        dead_runs.end_run(run.info, reason=reason)
        _end_below(run.info.run_id, reason)


def failure(run_id: str) -> tuple[str, int | None]:
    """Return the reason that a failed step left in its run, and its exit code: None if it left no report.

    MLflow calls all of them FAILED. One that a gate refused becomes FINISHED, and one with a dead process KILLED.
    """
    stopped = signals.take_note(run_id)
    if stopped:
        mark_stopped(run_id, stopped)
    run = mlflow.get_run(run_id)
    tags = run.data.tags
    if names.TAG_VERDICT in tags:
        mlflow.MlflowClient().set_terminated(run_id, "FINISHED")
    if names.TAG_EXIT_CODE in tags:
        return tags.get(names.TAG_REASON, ""), int(tags[names.TAG_EXIT_CODE])
    if names.TAG_STEP not in tags:
        contents.tag_run(run_id, {names.TAG_REASON: NOT_BEGUN})
        return NOT_BEGUN, None
    dead_runs.end_run(run.info)
    dead_runs.sweep()  # its cells
    return dead_runs.DIED, None


def artifact_location(run_id: str) -> str:
    """Return where a run's artifacts are: a path if the store is local, else an address."""
    uri = mlflow.get_run(run_id).info.artifact_uri
    path = model_files.local(uri)
    if path is None:
        return str(uri)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)
