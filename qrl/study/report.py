"""What a study reports at its end: in the terminal, and in its run's artifacts, metrics and description."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qrl import names, process
from qrl.errors import QrlError
from qrl.recipe import Recipe
from qrl.steps import outcome
from qrl.study import page
from qrl.study.environments import PLACE
from qrl.study.launch import Launcher
from qrl.tracking import contents, projects, runs
from qrl.workspace import workspace

if TYPE_CHECKING:
    import pandas as pd

    from qrl.compare.convergence import Convergence
    from qrl.compare.ranking import Methods


@dataclass
class SweepOutcome:
    """The runs that a sweep's arms made of one model under all seeds, and what failed."""

    model: str = ""  # its name in tables; empty if the sweep has one model only
    parameters: int = 0
    cells: dict[str, dict[int, str]] = field(default_factory=dict)  # variant:scheme → seed → run of its evaluation
    trained: dict[str, dict[int, str]] = field(default_factory=dict)  # variant → seed → run of its training
    schemes: dict[str, str] = field(default_factory=dict)  # variant → the scheme of its own codes
    failed: list[str] = field(default_factory=list)  # sentences
    found: tuple[pd.DataFrame, Methods, list[str]] | None = None  # as `methods_of` returns it
    error: str = ""  # why the model has no results
    unregistered: QrlError | None = None  # why its best cell was not registered


def warn(sentences: list[str]) -> None:
    """Print warnings about settings that have no effect, unless a study or the same command has launched this one."""
    if PLACE not in os.environ and not runs.is_launched():
        for sentence in sentences:
            click.secho(f"qrl: {sentence}", fg="yellow", err=True)


def show(recipe: Recipe, launcher: Launcher) -> None:
    """Gather the study's artifacts from its steps' runs, and print the table and the verdict."""
    compared = launcher.result("compare")
    with workspace("study", shared=True) as work:
        for file in (names.TABLE_MD, names.TABLE_JSON, names.QUESTIONS):
            shutil.copy(contents.artifact(compared.run_id, file), work / file)
        for step in ("compare", "diagnose", "train"):
            source = contents.artifact(launcher.result(step).run_id, names.FIGURES)
            pictures = shutil.ignore_patterns("*.html")
            shutil.copytree(source, work / names.FIGURES, dirs_exist_ok=True, ignore=pictures)
        figures = sorted(path.name for path in (work / names.FIGURES).iterdir())
        page.write(work / names.REPORT, recipe, launcher, [])
        table = (work / names.TABLE_MD).read_text()
        contents.log_folder(work)
    contents.log_scores(compared.outputs.values["metrics"])
    text = table.rstrip()
    if recipe.train.packed:
        text += (
            f"\n\nThe adapter was trained over a base in {recipe.train.storage} and merged into the dequantized base. "
            "`base` is the original model in every gain, which therefore includes the cost of packing."
        )
    contents.describe(page.description(launcher, text, figures))
    click.echo(f"\n{text}\n")


def leave(launcher: Launcher) -> None:
    """Print the command that compares the finished cells of a study that ends before its table."""
    run_ids = {}
    for label, result in launcher.results:
        step, _, cell = label.partition(" ")
        if step == "evaluate":
            run_ids[cell] = result.run_id
    if together := outcome.comparable(run_ids):
        command = process.command("compare", {"cells": ",".join(together.values())})
        click.echo(f"The finished cells, {', '.join(together)}, can be compared all the same:\n{command}", err=True)


def close(recipe: Recipe, launcher: Launcher, seconds: float, *, stage: str | None = None, refused: str = "") -> None:
    """Complete the page with gates and versions; print where everything is, what to run next, and how long it took.

    Args:
        stage: the last one that a version earned; None where none did, so that nothing can be loaded.
        refused: the gate's reason, where it refused a stage.
    """
    from qrl import registry

    name = registry.registered_name(recipe)
    with workspace("study", shared=True) as work:
        page.write(work / names.REPORT, recipe, launcher, page.gates(recipe, launcher, refused))
        contents.log_folder(work)
    contents.log_scores({"study/seconds": seconds, "study/outside_steps_s": seconds - launcher.seconds})
    folder = projects.artifact_place(launcher.run_id)
    python = f"{sys.executable}, for the commands below"
    if sys.prefix != sys.base_prefix:
        python = f"source {shlex.quote(str(Path(sys.prefix) / 'bin' / 'activate'))}, before the commands below"
    lines = [
        f"Artifacts   {folder}: {', '.join(page.LINKED)}, {names.FIGURES}/",
        f"Environment {python}",
        *look(os.environ["MLFLOW_TRACKING_URI"], runs.page_of(launcher.run_id)),
    ]
    if stage:
        lines += [
            f'Load        python -c \'import qrl; model, tokenizer = qrl.load("{name}", stage="{stage}")\'',
            f"Serve       {process.command('serve', outcome.serving(name, stage))}",
        ]
    lines.append(f"Took        {seconds:.0f} s, {launcher.seconds:.0f} s of it in the steps that ran")
    click.echo("\n".join(lines))


def sweep_tables(launcher: Launcher, outcomes: list[SweepOutcome], recipe: Recipe, seconds: float) -> None:
    """Log and print a sweep's tables: of its methods for each model, and of their losses by size if it has several.

    A model's methods.md, methods.json and figure are in a folder of its name, or at the top if there is one model only.
    """
    import pandas as pd

    from qrl.compare import ranking, sizes
    from qrl.steps.compare import write_methods, write_sizes

    texts, frames, changed, scores, failed = [], {}, [], {}, []
    with workspace("methods", shared=True) as work:
        for outcome in outcomes:
            prefix = f"{outcome.model}: " if outcome.model else ""
            if outcome.found is None:
                failed.append(f"{prefix}{outcome.error}")
                continue
            frame, measured, left_out = outcome.found
            judged = (_convergence(measured, outcome, variant, scheme) for variant, scheme in outcome.schemes.items())
            unregistered = [str(outcome.unregistered)] if outcome.unregistered else []
            not_counted = [*outcome.failed, *left_out, *unregistered]
            folder = work / re.sub(r"[^\w.+-]+", "-", outcome.model)
            text = write_methods(measured, folder, list(filter(None, judged)), not_counted)
            texts.append(f"# {outcome.model}\n\n{text}" if outcome.model else text)
            failed += [f"{prefix}{sentence}" for sentence in not_counted]
            frames[outcome.model] = _rewarded(frame, recipe)
            changed.append(_of_model(measured.changed_shown(), outcome.model))
            scores = scores or ranking.metrics(measured)  # of the first model; the tables have every one's
        if len(frames) > 1:
            counts = {outcome.model: outcome.parameters for outcome in outcomes}
            by_size = sizes.measure(frames, counts)
            texts.append(write_sizes(by_size, work, failed, recipe.train.rewards))
            scores = sizes.metrics(by_size)
        elif failed and outcomes[0].model:
            texts.append("\n".join(["## Did not count", "", *(f"- {sentence}" for sentence in failed), ""]))
        if frames:
            whole = [_of_model(frame, model) for model, frame in frames.items()]
            pd.concat(whole, ignore_index=True).to_parquet(work / names.QUESTIONS)
            if len(answers := pd.concat(changed, ignore_index=True)):
                answers.to_json(work / names.CHANGED_JSON, orient="split", index=False)
                contents.log_table(answers, Path(names.CHANGED_JSON).stem)  # marks the file as a table
        contents.log_folder(work)
        made = ", ".join(sorted(f"{path.name}/" if path.is_dir() else path.name for path in work.iterdir()))
    contents.log_scores(scores | {"study/seconds": seconds})
    text = "\n".join(texts)
    contents.describe(page.cut(text, page.steps(launcher)))
    click.echo(f"\n{text}\nArtifacts   {projects.artifact_place(launcher.run_id)}: {made}")
    click.echo(f"Took        {seconds:.0f} s")


def methods_of(outcome: SweepOutcome, seeds: tuple[int, ...]) -> tuple[pd.DataFrame, Methods, list[str]]:
    """Return the rows of a model's cells that are healthy under every seed, their ranking, and which were left out."""
    from qrl.compare import ranking
    from qrl.tracking import cells

    whole = {cell: by_seed for cell, by_seed in outcome.cells.items() if len(by_seed) == len(seeds)}
    left_out = [
        f"{cell} has no healthy evaluation under every seed, and is left out."
        for cell in outcome.cells
        if cell not in whole
    ]
    frame = cells.rows([run_id for by_seed in whole.values() for run_id in by_seed.values()])
    return frame, ranking.measure(frame), left_out


def _of_model(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return rows with the model that they are of; unchanged if the sweep has one model only."""
    return frame.assign(model=model) if model else frame


def _rewarded(frame: pd.DataFrame, recipe: Recipe) -> pd.DataFrame:
    """Return the rows with what training would have rewarded each answer; unchanged if that is the strict verdict."""
    import numpy as np

    from qrl.compare.sizes import REWARD
    from qrl.train import reward

    given = recipe.train.rewards
    if given == ("correct",):
        return frame
    values = {"correct": frame["correct"], "format": frame["parsed"].notna()}
    texts = {"completions": frame["completion"].tolist(), "answer": frame["answer"].tolist()}
    for name in set(given) - set(values):
        if name == "leak":
            values[name] = reward.LEAK * frame["leaked"]
        else:  # soft_overlong looks at the number of tokens alone
            tokens = [range(length) for length in frame["n_tokens"]] if name == "soft_overlong" else None
            values[name] = reward.functions(recipe.task, (name,), recipe.train)[0](**texts, completion_ids=tokens)
    weights = zip(given, recipe.train.weights_of_rewards, strict=True)
    total = sum(weight * np.asarray(values[name], dtype=float) for name, weight in weights)
    return frame.assign(**{REWARD: total})


def _convergence(methods: Methods, outcome: SweepOutcome, variant: str, scheme: str) -> Convergence | None:
    """Judge whether one method converged, where its cell and base's in its scheme were evaluated."""
    from qrl.compare import convergence

    row = next((row for row in methods.rows if (row.variant, row.scheme) == (variant, scheme)), None)
    if row is None or row.over_base is None:
        return None
    histories = [page.frame(run_id, names.HISTORY) for run_id in outcome.trained[variant].values()]
    measure = "reward" if "reward" in histories[0] else "loss"
    curves = [history[measure].tolist() for history in histories]
    return convergence.judge(variant, scheme, row.over_base, curves, measure)


def look(address: str, page: str = "") -> list[str]:
    """Return the line that says how to see the store at this absolute address, from any folder, and a `page` of it.

    There is none for a server: the address of the run's page is printed at the command's end.
    """
    ui = f"Look        mlflow ui --backend-store-uri {shlex.quote(address)}, then http://127.0.0.1:5000{page}"
    return [] if address.startswith("http") else [ui]
