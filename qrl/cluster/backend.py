"""MLflow's project backend `qrl`, which submits an entry point to a cluster."""

import os
from pathlib import Path

import click
from mlflow.projects import utils
from mlflow.projects.backend.abstract_backend import AbstractBackend
from mlflow.tracking.fluent import _get_experiment_id

from qrl import process
from qrl import recipe as recipes
from qrl.cluster import config, jobs
from qrl.errors import BadInput, QrlError
from qrl.tracking import contents, places, store

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
    is_ours = project == process.ROOT
    if is_ours and entry in ("train", *config.STUDY):
        _warn_of_idle_gpus(cluster, parameters)
    if is_ours and entry == "train":  # with the project that a study would submit
        ((_, project),) = _places(cluster, entry, parameters)
    if dry:
        _print_scripts(cluster, project, entry, parameters, manager, with_steps=is_ours)
        return None

    os.environ["MLFLOW_TRACKING_URI"] = store.prepare()
    # Refuses what the nodes cannot reach before a run is opened.
    jobs.prepared(cluster, project, entry, parameters, manager=manager)
    experiment = experiment or _get_experiment_id() or "0"
    run = utils.get_or_create_run(None, str(project), experiment, str(project), None, entry, parameters)
    run_id = run.info.run_id
    contents.tag_run(run_id, {"mlflow.runName": entry, jobs.MANAGER: manager})
    return jobs.submit(jobs.prepared(cluster, project, entry, parameters, run_id, manager))


def _places(cluster: config.Cluster, step: str, parameters: dict[str, str]) -> list[tuple[str, Path]]:
    """Return the jobs that a study makes of a step, as `places.of_step`, from the parameters that it is given."""
    return places.of_step(step, *_recipe(cluster, parameters))


def _recipe(cluster: config.Cluster, parameters: dict[str, str]) -> tuple[recipes.Recipe, str]:
    """Return the recipe that parameters name, and the device that its steps will find."""
    typed = {key: text for key, text in parameters.items() if key in recipes.fields()}
    device = typed.get("device", "auto")
    if device == "auto":
        device = cluster.device()
    name = parameters.get("recipe", recipes.DEFAULT)
    if name == recipes.DEFAULT:
        name = recipes.default(typed, device=device)
    return recipes.load(name, typed), device


def _warn_of_idle_gpus(cluster: config.Cluster, parameters: dict[str, str]) -> None:
    """Say that a training on one node would leave GPUs idle that it asks for."""
    requested = cluster.resources("train")
    recipe, _ = _recipe(cluster, parameters)
    if requested.nodes > 1 or requested.gpus <= 1 or recipe.train.parallel != "none":
        return
    click.echo(
        f"steps.train asks for {requested.gpus} GPUs, but this recipe trains on one: set train.parallel to ddp or "
        "fsdp2, or gpus to 1.",
        err=True,
    )


def _print_scripts(
    cluster: config.Cluster, project: Path, entry: str, parameters: dict[str, str], manager: str, *, with_steps: bool
) -> None:
    """Print the script of an entry point and, if it submits steps, theirs: a script for each job."""
    _print_script(jobs.prepared(cluster, project, entry, parameters, manager=manager), manager)
    if not (cluster.submits(entry) and with_steps):
        return
    own_options = parameters.keys() - recipes.fields().keys() - {"recipe"}  # `yes`, and those of a sweep
    recipe_parameters = {key: text for key, text in parameters.items() if key not in own_options}
    if entry == "sweep":
        click.echo("# A sweep submits these steps for its first recipe, and those of other methods with their recipes.")
    click.echo("# Models and cells that a step makes are added to the parameters of later ones.")
    for step in STEPS:
        for part, folder in _places(cluster, step, recipe_parameters):
            step_parameters = recipe_parameters | ({"scheme": part} if part else {})
            _print_script(jobs.prepared(cluster, folder, step, step_parameters, manager=manager), manager, part)


def _print_script(job: jobs.Job, manager: str, part: str = "") -> None:
    """Print a job's script below a line that names the step, its part, and the environment that it runs in."""
    title = f"{job.entry} {part}".strip()
    where = ""
    if job.project != process.ROOT:
        relation = "with the packages" if manager == "local" else "in the environment"  # `local` builds none
        where = f", {relation} of projects/{job.project.name}"
    click.echo(f"# ---- {title}{where} (--env-manager {manager})")
    click.echo(jobs.DRIVERS[job.cluster.driver]().script(job))
