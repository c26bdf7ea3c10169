"""What a study tells at its end: in the terminal, in its run's artifacts, metrics and description."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qrl import names
from qrl.recipe import Recipe
from qrl.study.launch import Launcher, Result
from qrl.tracking import contents, projects, store
from qrl.workspace import workspace

if TYPE_CHECKING:
    from qrl.compare.convergence import Convergence
    from qrl.compare.ranking import Methods
    from qrl.study.sweep import Outcome


def warn(sentences: list[str]) -> None:
    """Says on the terminal what was asked for and is not quite what will be done."""
    for sentence in sentences:
        click.secho(f"qrl: {sentence}", fg="yellow", err=True)


def show(recipe: Recipe, launcher: Launcher, compared: Result, diagnosed: Result, trained: Result) -> None:
    """Gathers the study's artifacts from its steps' runs, and prints the table and the verdict."""
    with workspace(f"study-{launcher.run_id}") as work:
        _gather(work, compared, diagnosed, trained)
        _page(work, compared, diagnosed, trained)
        (work / names.RECIPE).write_text(recipe.dump())
        table = (work / names.TABLE_MD).read_text()
        contents.log_folder(work)
    contents.log_scores(compared.outputs.values["metrics"])
    told = f"{table}\n{_packed(recipe)}".rstrip()  # the verdicts are a section of the table
    contents.describe(f"{told}\n\n{_links(launcher)}")
    click.echo(f"\n{told}\n")


def methods(launcher: Launcher, outcome: Outcome, seeds: tuple[int, ...], seconds: float) -> None:
    """Logs and prints the table of methods: methods.md, methods.json, questions.parquet, a figure, metrics.

    Args:
        launcher: of the study's steps.
        outcome: what they left.
        seeds: that were to be run.
        seconds: that the study took.
    """
    from qrl.compare import ranking as room
    from qrl.steps.compare import write_methods
    from qrl.tracking import cells

    failed = list(outcome.failed)
    whole = {cell: runs_ for cell, runs_ in outcome.cells.items() if len(runs_) == len(seeds)}
    failed += [
        f"{cell} has no healthy evaluation under every seed, and is left out."
        for cell in outcome.cells
        if cell not in whole
    ]
    frame = cells.rows([run_id for by_seed in whole.values() for run_id in by_seed.values()])
    found = room.measure(frame)
    convergence = [
        each
        for each in (_convergence(found, outcome, variant, scheme) for variant, scheme in outcome.schemes.items())
        if each
    ]
    with workspace(f"methods-{launcher.run_id}") as work:
        text = write_methods(found, work, convergence, failed)
        frame.to_parquet(work / names.QUESTIONS)
        contents.log_folder(work)
    contents.log_scores(room.metrics(found) | {"study/seconds": seconds})
    contents.describe(f"{text}\n\n{_links(launcher)}")
    click.echo(
        f"\n{text}\nArtifacts   {projects.artifact_place(launcher.run_id)}: methods.md, methods.json, questions.parquet, figures/"
    )
    click.echo(f"Took        {seconds:.0f} s")


def _convergence(found: Methods, outcome: Outcome, variant: str, scheme: str) -> Convergence | None:
    """The rule's word on one method, where its cell and base's in its scheme were evaluated."""
    import pandas as pd

    from qrl.compare import convergence

    row = next((row for row in found.rows if (row.variant, row.scheme) == (variant, scheme)), None)
    if row is None or row.over_base is None:
        return None
    histories = [
        pd.read_parquet(contents.artifact(run_id, names.HISTORY)) for run_id in outcome.trained[variant].values()
    ]
    measure = "reward" if "reward" in histories[0] else "loss"
    return convergence.judge(variant, scheme, row.over_base, [each[measure].tolist() for each in histories], measure)


def close(recipe: Recipe, launcher: Launcher, seconds: float, *, stage: str | None) -> None:
    """Says where things lie, what to type next, and what the time went into.

    Args:
        recipe: names the registered model.
        launcher: of the study's steps.
        seconds: that the study took.
        stage: the last one that was earned; None where a gate refused one, so that nothing is there to load.
    """
    from qrl import registry

    name = registry.registered_name(recipe)
    overhead = seconds - launcher.seconds
    contents.log_scores({"study/seconds": seconds, "study/outside_steps_s": overhead})
    here = projects.artifact_place(launcher.run_id)
    lines = [
        f"Artifacts   {here}: table.md, table.json, questions.parquet, recipe.yaml, {names.REPORT}, figures/",
        f"Environment {_activate()}",
        f"Look        {look(os.environ['MLFLOW_TRACKING_URI'])}",
    ]
    if stage:
        lines += [
            f'Load        python -c \'import qrl; model, tokenizer = qrl.load("{name}", stage="{stage}")\'',
            f"Serve       {_serve(recipe, stage)}",
        ]
    click.echo(
        "\n".join([*lines, f"Took        {seconds:.0f} s, of which {launcher.seconds:.0f} s in the steps that it ran"])
    )


def _packed(recipe: Recipe) -> str:
    """What `base` means where the policy was trained over a packed one."""
    if not recipe.train.packed:
        return ""
    return (
        f"The adapter was trained over a base in {recipe.train.storage} and merged into what that unpacks to; `base` in every delta is "
        "the original model, so the gain includes what packing took from it."
    )


def _activate() -> str:
    """How to get a shell in which the commands below are found."""
    if sys.prefix == sys.base_prefix:
        return f"{sys.executable}, to run the commands below in"
    return f"source {shlex.quote(str(Path(sys.prefix) / 'bin' / 'activate'))}, to run the commands below in"


def look(address: str) -> str:
    """How to see the store at this absolute address; a bare `mlflow ui` knows its own default only."""
    if not address.startswith("sqlite:"):
        return address
    default = Path.cwd() / "mlflow.db"  # an address may spell its path with %20
    given = "" if store.database_of(address) == default else f" --backend-store-uri {shlex.quote(address)}"
    return f"mlflow ui{given}, then http://127.0.0.1:5000"


def _serve(recipe: Recipe, stage: str) -> str:
    model = "" if recipe.model == "qrl-tiny" else f" -P model={shlex.quote(recipe.model)}"
    name = f" -P registered_name={shlex.quote(recipe.registered_name)}" if recipe.registered_name else ""
    return f"mlflow run . -e serve -P stage={stage}{model}{name} --env-manager uv"


def _gather(work, compared: Result, diagnosed: Result, trained: Result) -> None:
    for file in (names.TABLE_MD, names.TABLE_JSON, names.QUESTIONS):
        shutil.copy(contents.artifact(compared.run_id, file), work / file)
    for result in (compared, diagnosed, trained):
        shutil.copytree(
            contents.artifact(result.run_id, names.FIGURES),
            work / names.FIGURES,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("*.html"),
        )


def _page(work: Path, compared: Result, diagnosed: Result, trained: Result) -> None:
    """The study as one page."""
    import pandas as pd

    from qrl import figures

    weights, stored, said = (
        pd.read_parquet(contents.artifact(diagnosed.run_id, name))
        if name in diagnosed.outputs.artifacts
        else pd.DataFrame()
        for name in (names.WEIGHTS, names.STORED, names.BEHAVIOUR)
    )
    history = pd.read_parquet(contents.artifact(trained.run_id, names.HISTORY))
    table = json.loads((work / names.TABLE_JSON).read_text(encoding="utf-8"))
    figures.report(table, compared.outputs.values["sentence"], history, weights, stored, said, work / names.REPORT)


def _links(launcher: Launcher) -> str:
    """A list of the steps' runs, the reused ones marked."""
    experiment = projects.experiment_id(launcher.run_id)
    lines = [
        f"- [{label}](#/experiments/{experiment}/runs/{result.run_id}){' (reused)' if result.reused else ''}"
        for label, result in launcher.results
    ]
    return "Steps:\n\n" + "\n".join(lines)
