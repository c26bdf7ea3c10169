"""MLflow's project backend `qrl`, which submits an entry point to a cluster."""

import os
from pathlib import Path

import click
from mlflow.projects import utils
from mlflow.projects.backend.abstract_backend import AbstractBackend
from mlflow.tracking.fluent import _get_experiment_id

from qrl.cluster import config, jobs
from qrl.errors import BadInput, QrlError
from qrl.tracking import contents, store

OF_MLFLOW = tuple(value for name, value in vars(utils).items() if name.startswith("PROJECT_"))  # in each configuration
STEPS = ("train", "merge", "quantize", "evaluate", "diagnose", "compare", "promote")  # of a study, in its order


class QrlBackend(AbstractBackend):
    """Submits an entry point to a cluster; its configuration is cluster.yaml's, or names the file in the key `file`."""

    def run(self, project_uri, entry_point, params, version, backend_config, tracking_uri, experiment_id):
        """Submit it, and return at once; `"dry_run": true` prints the scripts instead, and ends the process."""
        given = {key: value for key, value in backend_config.items() if key not in OF_MLFLOW}
        manager = backend_config.get(utils.PROJECT_ENV_MANAGER) or "local"
        try:
            dry, file = given.pop("dry_run", False), given.pop("file", None)
            if file and given:
                raise BadInput(f"The configuration has `file` and '{next(iter(given))}': put all keys into {file}.")
            if version or not Path(project_uri).is_dir():
                raise BadInput(
                    f"A job runs a checkout that its nodes see, not {project_uri}: clone it, and give its folder."
                )
            cluster = config.load(given or Path(file or config.FILE))
            submitted = start(cluster, Path(project_uri), entry_point, params, manager, experiment_id, dry=bool(dry))
        except QrlError as error:
            refused = click.ClickException(str(error))
            refused.exit_code = error.exit_code
            raise refused from None
        if submitted is None:
            raise SystemExit(0)
        return submitted


def start(
    cluster: config.Cluster,
    folder: Path,
    entry: str,
    parameters: dict[str, str],
    manager: str,
    experiment: str | None = None,
    *,
    dry: bool = False,
) -> jobs.Submitted | None:
    """Submit an entry point under a new run; `dry` prints the scripts, its steps' too, and submits nothing.

    Raises:
        BadInput: a setting or a place is wrong, or the cluster refuses the job.
    """
    folder = folder.resolve()
    if not (folder / "MLproject").is_file():
        raise BadInput(f"{folder} is no MLflow project: give a folder with an MLproject.")
    known = utils.load_project(str(folder))._entry_points
    if entry not in known:
        raise BadInput(f"{folder} has no entry point '{entry}': expected one of {', '.join(sorted(known))}.")
    cluster.check(known, entry)
    if dry:
        recipe = {key: value for key, value in parameters.items() if key != "yes"}
        for name in (entry, *(STEPS if cluster.submits(entry) else ())):
            job = jobs.prepared(cluster, folder, name, parameters if name == entry else recipe)
            click.echo(f"# ---- {name}\n{jobs.DRIVERS[cluster.driver]().script(job)}")
        return None
    os.environ["MLFLOW_TRACKING_URI"] = store.prepare()
    jobs.prepared(cluster, folder, entry, parameters)  # before a run is opened
    experiment = experiment or _get_experiment_id() or "0"
    run_id = utils.get_or_create_run(None, str(folder), experiment, str(folder), None, entry, parameters).info.run_id
    contents.tag_run(run_id, {"mlflow.runName": entry, jobs.MANAGER: manager})
    return jobs.submit(jobs.prepared(cluster, folder, entry, parameters, run_id))
