"""Runs that a dead process left open: found by the tag of their owner, and given their end.

    RUNNING, owner dead                         killed outright            →  KILLED, with a reason
    RUNNING, no owner, opened by `mlflow run`   no step has joined it      →  KILLED, once no `mlflow run` is alive
    FAILED by `mlflow run`, without a reason    its step was killed        →  KILLED, with a reason
    FAILED by `mlflow run`, ended by a signal   the step reported it       →  FINISHED if its work was done, else KILLED

A run that is a job of a cluster is left alone: `qrl.cluster.jobs` asks the cluster.
"""

from contextlib import suppress
from pathlib import Path

import mlflow
from mlflow.entities import Run, RunInfo

from qrl import names
from qrl.tracking import contents, keys, models, owners

TAG_JOB = "qrl.job.id"  # of a run that is a job of a cluster, see qrl/cluster
DIED = "Its process died without a report: it was killed, or memory ran out."


def sweep() -> list[str]:
    """Give every run of a dead process of this host its end and its reason; return the runs that ended only now."""
    has_owner = f"tags.`{names.TAG_PID}` != ''"
    running = contents.find_runs()
    without_reason = contents.find_runs(f"{has_owner} and tags.`{names.TAG_REASON}` IS NULL", status="FAILED")
    signalled = f"{has_owner} and tags.`{names.TAG_EXIT_CODE}` LIKE '1__'"  # 130, 143
    ended_by_signal = contents.find_runs(signalled, status="FAILED")

    ended = []
    for run in (*running, *without_reason, *ended_by_signal):
        if not _is_abandoned(run):
            continue
        with suppress(mlflow.MlflowException):  # another user's, on a server that does not let us end it
            is_finished = names.SECONDS in run.data.metrics  # logged last
            is_reported = names.TAG_EXIT_CODE in run.data.tags
            if run.info.status == "FAILED" and (is_finished or is_reported):
                status = "FINISHED" if is_finished else "KILLED"
                mlflow.MlflowClient().set_terminated(run.info.run_id, status, run.info.end_time)
            else:
                end_run(run.info)
                ended.append(run.info.run_id)
    return ended


def end_run(run: RunInfo, reason: str = DIED, status: str = "KILLED") -> None:
    """End the run of a dead process, and discard the models that it left half-made."""
    contents.tag_run(run.run_id, {names.TAG_REASON: reason})
    mlflow.MlflowClient().set_terminated(run.run_id, status)
    models.abandon(run.run_id)


def _is_abandoned(run: Run) -> bool:
    """Return whether no process will end a run any more."""
    tags = run.data.tags
    if TAG_JOB in tags:  # the cluster knows
        return False
    owner = tags.get(names.TAG_PID)
    if owner:
        return owners.is_dead(owner)

    # `mlflow run` opened it for this project, and no step has joined it: the environment may still be being built.
    source = tags.get("mlflow.source.name", "").replace("#", "/").removeprefix("file://")
    is_of_this_project = Path(source).is_relative_to(keys.ROOT) and "mlflow.project.entryPoint" in tags
    return is_of_this_project and not owners.launcher_alive(run.info.start_time / 1000)
