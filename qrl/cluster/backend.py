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

MLFLOW_KEYS = tuple(
    value for name, value in vars(utils).items() if name.startswith("PROJECT_")
)  # in every configuration
STEPS = ("train", "merge", "quantize", "evaluate", "diagnose", "compare", "promote")  # of a study, in its order


class QrlBackend(AbstractBackend):
    """Submits an entry point to a cluster; its configuration is cluster.yaml's, or names the file in the key `file`."""

    def run(self, project_uri, entry_point, params, version, backend_config, tracking_uri, experiment_id):
        """Submit it, and return at once; `"dry_run": true` prints the scripts instead, and ends the process."""
        settings = {key: value for key, value in backend_config.items() if key not in MLFLOW_KEYS}
        dry_run = settings.pop("dry_run", False)
        file = settings.pop("file", None)
        manager = backend_config.get(utils.PROJECT_ENV_MANAGER) or "local"
        try:
            if file and settings:
                raise BadInput(f"The configuration has `file` and '{next(iter(settings))}': put all keys into {file}.")
            if version or not Path(project_uri).is_dir():
                raise BadInput(
                    f"A job runs a checkout that its nodes see, not {project_uri}: clone it, and give its folder."
                )
            cluster = config.load(settings or Path(file or config.FILE))
            submitted = start(
                cluster, Path(project_uri), entry_point, params, manager, experiment_id, dry=bool(dry_run)
            )
        except QrlError as error:
            # MLflow's command prints click's errors as a sentence, and any other with a traceback.
            refusal = click.ClickException(str(error))
            refusal.exit_code = error.exit_code
            raise refusal from None
        if submitted is None:
            raise SystemExit(0)
        return submitted


def start(
    cluster: config.Cluster,
    project: Path,
    entry: str,
    parameters: dict[str, str],
    manager: str,
    experiment: str | None = None,
    *,
    dry: bool = False,
) -> jobs.Submitted | None:
    """Submit an entry point under a new run; `dry` prints the scripts, its steps' too, and submits nothing.

    Args:
        cluster: where it is submitted.
        project: folder with an MLproject file.
        entry: its entry point.
        parameters: as `-P` takes them.
        manager: of environments, as in `mlflow run --env-manager`.
        experiment: id of the experiment; None: the active one.
        dry: print, and return None.

    Raises:
        BadInput: a setting or a path is wrong, or the cluster refuses the job.
    """
    project = project.resolve()
    if not (project / "MLproject").is_file():
        raise BadInput(f"{project} is no MLflow project: give a folder with an MLproject.")
    entry_points = utils.load_project(str(project))._entry_points
    if entry not in entry_points:
        raise BadInput(f"{project} has no entry point '{entry}': expected one of {', '.join(sorted(entry_points))}.")
    cluster.check(entry_points, entry)
    if dry:
        _print_scripts(cluster, project, entry, parameters)
        return None

    os.environ["MLFLOW_TRACKING_URI"] = store.prepare()
    jobs.prepared(cluster, project, entry, parameters)  # refuses what the nodes cannot reach before a run is opened
    experiment = experiment or _get_experiment_id() or "0"
    run = utils.get_or_create_run(None, str(project), experiment, str(project), None, entry, parameters)
    run_id = run.info.run_id
    contents.tag_run(run_id, {"mlflow.runName": entry, jobs.MANAGER: manager})
    return jobs.submit(jobs.prepared(cluster, project, entry, parameters, run_id))


def _print_scripts(cluster: config.Cluster, project: Path, entry: str, parameters: dict[str, str]) -> None:
    """Print the script of an entry point and, if it submits steps, theirs."""
    driver = jobs.DRIVERS[cluster.driver]()
    recipe_parameters = {key: value for key, value in parameters.items() if key != "yes"}  # steps have no `yes`
    parameters_by_step = {entry: parameters}
    if cluster.submits(entry):
        parameters_by_step |= dict.fromkeys(STEPS, recipe_parameters)
    for step, step_parameters in parameters_by_step.items():
        job = jobs.prepared(cluster, project, step, step_parameters)
        click.echo(f"# ---- {step}\n{driver.script(job)}")
