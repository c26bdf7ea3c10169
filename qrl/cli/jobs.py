"""`qrl submit` and `qrl jobs`: commands as jobs of a cluster."""

from pathlib import Path

import click
from click import argument, option

from qrl.cli.options import split_options
from qrl.errors import BadInput
from qrl.process import ROOT

# Options of `submit`; after the command they would be passed on to it.
_SUBMIT_OPTIONS = ("--cluster", "--env-manager", "--dry-run")
_PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("submit", context_settings=_PASSED_ON)
@option("--cluster", default="cluster.yaml", metavar="FILE", help="Driver, shared folder, and each step's resources.")
@option("--env-manager", default="local", metavar="NAME", help="As for `mlflow run`; local: the present environment.")
@option("--dry-run", is_flag=True, help="Print the scripts, and submit nothing.")
@option("--project", default=".", hidden=True)
@argument("entry", metavar="COMMAND")
@argument("words", nargs=-1, metavar="[OPTIONS OF COMMAND]…", type=click.UNPROCESSED)
def submit_command(cluster: str, env_manager: str, dry_run: bool, project: str, entry: str, words) -> None:
    """Submit a command to Slurm.

    It becomes a job, as with `mlflow run . --backend qrl`.

    \b
    qrl submit --dry-run main --recipe math    the scripts of a whole study
    qrl submit main --recipe math              a job for the study, which submits a job a step
    qrl submit train --train.steps 50          one step
    """
    from qrl.cluster import backend, load

    parameters = _parameters(words)
    if Path(project).resolve().is_relative_to(ROOT):
        _check_options(entry, words)
    submitted = backend.start(load(Path(cluster)), Path(project), entry, parameters, env_manager, dry=dry_run)
    if submitted:
        click.echo("It goes on without this terminal; `python -m qrl jobs` says how it stands.", err=True)


def _check_options(entry: str, words: tuple[str, ...]) -> None:
    """Raise click's error for an option that the job would refuse once it has waited in the queue."""
    group_context = click.get_current_context().parent
    name = "study" if entry == "main" else entry
    command = group_context.command.get_command(group_context, name)
    if command:
        command.make_context(name, list(words), parent=group_context)


@click.command("jobs")
@option("--cancel", metavar="RUN", help="Cancel the job of a run; of a study, also its steps' jobs.")
@option("--all", "include_ended", is_flag=True, help="Show jobs that ended, too.")
def jobs_command(cancel: str | None, include_ended: bool) -> None:
    """List the store's jobs, and end the runs of dead ones.

    A dead job is one that ended without a report.
    """
    from qrl.cluster import jobs
    from qrl.tracking import store

    store.check_there()
    store.prepare()
    for line in jobs.listed(cancel, include_ended=include_ended):
        click.echo(line)


@click.command("job", hidden=True)
@argument("run_id")
@option("--project", default=".")
@option("--entry", default="main")
@option("--gpus", type=int, default=0)
@option("-P", "parameters", multiple=True)
@argument("words", nargs=-1, type=click.UNPROCESSED)
def job_command(run_id: str, project: str, entry: str, gpus: int, parameters: tuple[str, ...], words) -> None:
    """Run an entry point on a node, under the run that was opened for it; scripts of jobs call this."""
    from qrl.study import job

    job.run(run_id, project, entry, dict(pair.split("=", 1) for pair in parameters), words, gpus=gpus)


def _parameters(words: tuple[str, ...]) -> dict[str, str]:
    """Return options of a command as the parameters of its entry point: `--a 1 --b=2 --c` gives a, b and c=true."""
    parameters: dict[str, str] = {}
    parts = split_options(words)
    while parts:
        name = parts.pop(0)
        if not name.startswith("--"):
            raise BadInput(f"'{name}' is no option of a command: write --KEY VALUE.")
        if name in _SUBMIT_OPTIONS:
            raise BadInput(
                f"{name} is an option of `submit`: write it before the command, as in qrl submit {name} … main."
            )
        has_value = parts and not parts[0].startswith("--")
        parameters[name.removeprefix("--")] = parts.pop(0) if has_value else "true"
    return parameters


COMMANDS = (submit_command, jobs_command, job_command)
