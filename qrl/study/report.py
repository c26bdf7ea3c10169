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
from qrl.recipe.training import REWARDS
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


@dataclass(frozen=True)
class RankedCells:
    """The healthy cells of one model in a sweep, ranked."""

    rows: pd.DataFrame  # a row per cell and question
    methods: Methods
    left_out: list[str]  # a sentence for each cell that does not count


@dataclass
class SweepOutcome:
    """The runs that a sweep's arms made of one model under all seeds, and what failed."""

    model: str = ""  # its name in tables; empty if the sweep has one model only
    parameters: int = 0
    cells: dict[str, dict[int, str]] = field(default_factory=dict)  # variant:scheme → seed → run of its evaluation
    trained: dict[str, dict[int, str]] = field(default_factory=dict)  # variant → seed → run of its training
    schemes: dict[str, str] = field(default_factory=dict)  # variant → the scheme of its own codes
    failed: list[str] = field(default_factory=list)  # sentences
    ranked: RankedCells | None = None  # None: the model has no results
    error: str = ""  # why it has none
    unregistered: QrlError | None = None  # why its best cell was not registered


def warn(sentences: list[str]) -> None:
    """Print warnings about settings that have no effect, unless a study or the same command has launched this one."""
    if PLACE not in os.environ and not runs.is_launched():
        for sentence in sentences:
            click.secho(f"qrl: {sentence}", fg="yellow", err=True)


def show(recipe: Recipe, launcher: Launcher) -> None:
    """Gather the study's artifacts from its steps' runs, and print the table and the verdict."""
    comparison = launcher.result("compare")
    with workspace("study", shared=True) as folder:
        for file in (names.TABLE_MD, names.TABLE_JSON, names.QUESTIONS):
            shutil.copy(contents.artifact(comparison.run_id, file), folder / file)
        for step in ("compare", "diagnose", "train"):
            source = contents.artifact(launcher.result(step).run_id, names.FIGURES)
            pictures_only = shutil.ignore_patterns("*.html")
            shutil.copytree(source, folder / names.FIGURES, dirs_exist_ok=True, ignore=pictures_only)
        figures = sorted(path.name for path in (folder / names.FIGURES).iterdir())
        page.write(folder / names.REPORT, recipe, launcher, [])
        table = (folder / names.TABLE_MD).read_text()
        contents.log_folder(folder)
    contents.log_scores(comparison.outputs.values["metrics"])

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
    run_ids = {obtained.label: obtained.result.run_id for obtained in launcher.results if obtained.step == "evaluate"}
    comparable = outcome.comparable_cells(run_ids)
    if comparable:
        command = process.command("compare", {"cells": ",".join(comparable.values())})
        click.echo(f"The finished cells, {', '.join(comparable)}, can be compared all the same:\n{command}", err=True)


def close(recipe: Recipe, launcher: Launcher, seconds: float, *, stage: str | None = None, refused: str = "") -> None:
    """Complete the page with gates and versions; print where everything is, what to run next, and how long it took.

    Args:
        stage: the last one that a version earned; None if none did, so that nothing can be loaded.
        refused: the gate's reason, if it refused a stage.
    """
    from qrl import registry

    gates = page.gates(recipe, launcher, refused)
    with workspace("study", shared=True) as folder:
        page.write(folder / names.REPORT, recipe, launcher, gates)
        contents.log_folder(folder)
    contents.log_scores({"study/seconds": seconds, "study/outside_steps_s": seconds - launcher.seconds})

    if sys.prefix == sys.base_prefix:
        environment = f"{sys.executable}, for the commands below"
    else:
        activate = Path(sys.prefix) / "bin" / "activate"
        environment = f"source {shlex.quote(str(activate))}, before the commands below"
    artifacts = projects.artifact_location(launcher.run_id)
    lines = [
        f"Answer      {page.headline(launcher)}",
        f"Artifacts   {artifacts}: {', '.join(page.LINKED)}, {names.FIGURES}/",
        f"Environment {environment}",
        *look(os.environ["MLFLOW_TRACKING_URI"], runs.page_of(launcher.run_id)),
    ]
    if stage:
        name = registry.registered_name(recipe)
        lines += [
            f'Load        python -c \'import qrl; model, tokenizer = qrl.load("{name}", stage="{stage}")\'',
            f"Serve       {process.command('serve', outcome.serve_options(name, stage))}",
        ]
    lines.append(f"Took        {seconds:.0f} s, {launcher.seconds:.0f} s of it in the steps that ran")
    passed = [gate.stage for gate in gates if gate.decision == "passed"]
    if passed:
        lines.append(f"Passed      {', '.join(passed)}: the reasons are above and on the page")
    lines += [f"Decided     {gate.stage} {gate.decision}: {gate.reason}" for gate in gates if gate.stage not in passed]
    if refused:
        lines.append(
            "The study is complete, and its results stand. Since a gate refused a stage, it ends with exit code 3, "
            "which MLflow calls failed."
        )
    click.echo("\n".join(lines))


def sweep_tables(launcher: Launcher, outcomes: list[SweepOutcome], recipe: Recipe, seconds: float) -> None:
    """Log and print a sweep's tables: of its methods for each model, and of their losses by size if it has several.

    A model's methods.md, methods.json and figure are in a folder of its name, or at the top if there is one model only.
    """
    from qrl.compare import ranking, sizes
    from qrl.steps.compare import write_sizes

    with workspace("methods", shared=True) as folder:
        texts = []
        failures = []  # sentences, with the model's name where there are several
        ranked_by_model: dict[str, RankedCells] = {}
        for model_outcome in outcomes:
            prefix = f"{model_outcome.model}: " if model_outcome.model else ""
            ranked = model_outcome.ranked
            if ranked is None:
                failures.append(f"{prefix}{model_outcome.error}")
                continue
            ranked_by_model[model_outcome.model] = ranked
            not_counted = _not_counted(model_outcome, ranked)
            text = _write_methods(model_outcome, ranked, folder, not_counted)
            texts.append(f"# {model_outcome.model}\n\n{text}" if model_outcome.model else text)
            failures += [f"{prefix}{sentence}" for sentence in not_counted]

        rows_by_model = {model: _rewarded(ranked.rows, recipe) for model, ranked in ranked_by_model.items()}
        scores = {}
        if len(ranked_by_model) > 1:
            parameters = {model_outcome.model: model_outcome.parameters for model_outcome in outcomes}
            by_size = sizes.measure(rows_by_model, parameters)
            texts.append(write_sizes(by_size, folder, failures, recipe.train.rewards))
            scores = sizes.metrics(by_size)
        elif failures and outcomes[0].model:
            texts.append("\n".join(["## Did not count", "", *(f"- {sentence}" for sentence in failures), ""]))
        if len(ranked_by_model) == 1:
            (ranked,) = ranked_by_model.values()
            scores = ranking.metrics(ranked.methods)
        if ranked_by_model:
            _write_answers(ranked_by_model, rows_by_model, folder)
        contents.log_folder(folder)
        files = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())

    contents.log_scores(scores | {"study/seconds": seconds})
    text = "\n".join(texts)
    contents.describe(page.cut(text, page.steps(launcher)))
    click.echo(f"\n{text}\nArtifacts   {projects.artifact_location(launcher.run_id)}: {', '.join(files)}")
    click.echo(f"Took        {seconds:.0f} s")


def _not_counted(model_outcome: SweepOutcome, ranked: RankedCells) -> list[str]:
    """Return a sentence for each method and cell of a model that is in no table."""
    sentences = [*model_outcome.failed, *ranked.left_out]
    if model_outcome.unregistered:
        sentences.append(str(model_outcome.unregistered))
    return sentences


def _write_methods(model_outcome: SweepOutcome, ranked: RankedCells, folder: Path, not_counted: list[str]) -> str:
    """Write the table of a model's methods, and return its text."""
    from qrl.steps.compare import write_methods

    convergences = []
    for variant, scheme in model_outcome.schemes.items():
        convergence = _convergence(ranked.methods, model_outcome, variant, scheme)
        if convergence is not None:
            convergences.append(convergence)
    subfolder = re.sub(r"[^\w.+-]+", "-", model_outcome.model)
    return write_methods(ranked.methods, folder / subfolder, convergences, not_counted)


def _write_answers(
    ranked_by_model: dict[str, RankedCells], rows_by_model: dict[str, pd.DataFrame], folder: Path
) -> None:
    """Write the rows of all models, and a table of the answers that a method turned right or wrong."""
    import pandas as pd

    rows = [_of_model(frame, model) for model, frame in rows_by_model.items()]
    pd.concat(rows, ignore_index=True).to_parquet(folder / names.QUESTIONS)
    changed = [_of_model(ranked.methods.changed_sample(), model) for model, ranked in ranked_by_model.items()]
    answers = pd.concat(changed, ignore_index=True)
    if len(answers):
        answers.to_json(folder / names.CHANGED_JSON, orient="split", index=False)
        contents.log_table(answers, Path(names.CHANGED_JSON).stem)  # marks the file as a table


def rank_cells(model_outcome: SweepOutcome, seeds: tuple[int, ...]) -> RankedCells:
    """Return the ranking of a model's cells; only those that are healthy under every seed count."""
    from qrl.compare import ranking
    from qrl.tracking import cells

    run_ids = []
    left_out = []
    for cell, run_by_seed in model_outcome.cells.items():
        if len(run_by_seed) == len(seeds):
            run_ids += run_by_seed.values()
        else:
            left_out.append(f"{cell} has no healthy evaluation under every seed, and is left out.")
    rows = cells.rows(run_ids)
    return RankedCells(rows, ranking.measure(rows), left_out)


def _of_model(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return rows with the name of their model; unchanged if the sweep has one model only."""
    return frame.assign(model=model) if model else frame


def _rewarded(frame: pd.DataFrame, recipe: Recipe) -> pd.DataFrame:
    """Return the rows with what training would have rewarded each answer; unchanged if that is the strict verdict."""
    import numpy as np

    from qrl.compare.sizes import REWARD

    reward_names = recipe.train.rewards
    if reward_names == ("correct",):
        return frame
    total = 0.0
    for name, weight in zip(reward_names, recipe.train.weights_of_rewards, strict=True):
        total = total + weight * np.asarray(_reward_values(frame, name, recipe), dtype=float)
    return frame.assign(**{REWARD: total})


def _reward_values(frame: pd.DataFrame, name: str, recipe: Recipe) -> pd.Series | list[float]:
    """Return what one of training's rewards gives to each row's answer."""
    from qrl.train import reward

    if name == "correct":
        return frame["correct"]
    if name == "format":
        return frame["parsed"].notna()
    if name == "leak":
        return reward.LEAK * frame["leaked"]
    # Token ids are not in the rows; soft_overlong looks at their number alone, and no other reward at them.
    token_ids = [range(length) for length in frame["n_tokens"]] if name == "soft_overlong" else None
    (reward_function,) = reward.functions(recipe.task, (name,), recipe.train)
    texts = frame["completion"].tolist()
    if name in REWARDS and names.ANSWER_START in frame:  # the tags are the model's; a user's reward reads whole texts
        starts = frame[names.ANSWER_START].fillna(0).astype(int)  # rows of older runs have none
        texts = [text[start:] for text, start in zip(texts, starts, strict=True)]
    return reward_function(completions=texts, answer=frame["answer"].tolist(), completion_ids=token_ids)


def _convergence(methods: Methods, model_outcome: SweepOutcome, variant: str, scheme: str) -> Convergence | None:
    """Judge whether one method converged; None unless its cell and base's in its scheme were evaluated."""
    from qrl.compare import convergence

    row = next((row for row in methods.rows if (row.variant, row.scheme) == (variant, scheme)), None)
    if row is None or row.over_base is None:
        return None
    histories = [page.frame(run_id, names.HISTORY) for run_id in model_outcome.trained[variant].values()]
    measure = "reward" if "reward" in histories[0] else "loss"
    curves = [history[measure].tolist() for history in histories]
    return convergence.judge(variant, scheme, row.over_base, curves, measure)


def look(address: str, page: str = "") -> list[str]:
    """Return the line that says how to see the store at this absolute address, from any folder, and a `page` of it.

    There is none for a server: the address of the run's page is printed at the command's end.
    """
    if address.startswith("http"):
        return []
    return [f"Look        mlflow ui --backend-store-uri {shlex.quote(address)}, then http://127.0.0.1:5000{page}"]
