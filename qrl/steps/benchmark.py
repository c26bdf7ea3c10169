"""Benchmark stages, versions or checkpoints side by side: a nested run for each, a table and a figure for all."""

import contextlib
import http.client
import json
import os
import urllib.request
from pathlib import Path

import click
from tqdm import tqdm

from qrl import benchmark as bench
from qrl import figures, names, process, registry
from qrl.benchmark import Subject, local, summary
from qrl.benchmark import http as load
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.registry import versions
from qrl.steps import inputs
from qrl.tasks import prompt
from qrl.tracking import contents, runs, store
from qrl.tracking import models as store_models
from qrl.workspace import workspace

TABLE, ROWS, FIGURE = "benchmark.md", "benchmark.parquet", "benchmark.png"
SERVER_ROWS = "server.json"  # the results of `vllm bench serve`
_UNANSWERED = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)
API_KEY = "QRL_API_KEY"  # of the measured server, the same variable as for `serve`


def benchmark(recipe: Recipe, *, stages: str | None, models: str | None, url: str | None) -> None:
    """Measure and log; print the table.

    Args:
        recipe: its section `benchmark`; the prompts are held-out questions of its task.
        stages: stages or versions, by comma; None without `models`: those that the model has.
        models: `variant:scheme=model`, by comma, instead of stages.
        url: of a running server to measure instead; the first subject gives its model and tokenizer.

    Raises:
        BadInput: a stage or model does not exist, or there is nothing to measure.
    """
    process.hush_transformers()
    device = devices.choose(recipe.device)
    chosen = subjects(recipe, stages, models)
    questions = inputs.questions(recipe, "heldout", max(recipe.benchmark.requests, *recipe.benchmark.batches))
    params = {"device": device, "models": ", ".join(subject.label for subject in chosen)}
    with (
        workspace("benchmark") as work,
        runs.step("benchmark", recipe, sections=("benchmark",), params=params, system_metrics=True),
    ):
        prompts = [
            [prompt.render(hf.tokenizer(subject.path), question.question, recipe.prompt) for question in questions]
            for subject in chosen
        ]
        if url:
            _server(recipe, url, chosen[0], prompts[0], work)
        else:
            _side_by_side(recipe, chosen, prompts, device, work)


def subjects(recipe: Recipe, stages: str | None, models: str | None) -> list[Subject]:
    """Return the models to measure, verified; raise BadInput if one does not exist, or if there are none."""
    store.prepare()
    if not models:
        return _stages(recipe, stages)
    cells = [(inputs.cell(name), model) for name, model in inputs.pairs(models, "a cell and its model").items()]
    return [Subject(*cell, inputs.stored_as(cell, model).path) for cell, model in cells]


def _side_by_side(recipe: Recipe, subjects: list[Subject], prompts: list, device: str, work: Path) -> None:
    settings, engine, dtype = recipe.benchmark, recipe.evaluate.engine, recipe.evaluate.dtype
    longest = max(len(ids) for own in prompts for ids in own) + settings.new_tokens
    memory = recipe.evaluate.gpu_memory_utilization / len(prompts)
    sizes = {"max_tokens": longest, "sequences": max(settings.batches), "memory": memory}

    def load(subject: Subject) -> bench.Engine:  # as evaluation loads it
        if engine == hf.NAME:
            return local.Transformers(subject.path, device, dtype)
        return local.Vllm(subject.path, device, dtype, **sizes)

    turns = len(subjects) * settings.rounds * len(settings.batches)
    with tqdm(total=turns, desc="benchmark", unit="turn", leave=False) as bar:
        frame = bench.run(subjects, prompts, load, settings, bar.update)
    frame.to_parquet(work / ROWS)
    unpacks = "This engine unpacks every scheme's codes: it shows the saving on disk, not a kernel's speed."
    _log(summary.lines(frame), unpacks if engine == hf.NAME else "", work, ROWS)


def _log(lines: list[summary.Line], note: str, work: Path, rows: str, at_once: str = "batch") -> None:
    """Log the folder, which has the file `rows`, with a table and a figure; log a nested run for each model."""
    table = summary.markdown(lines, note, at_once)
    (work / TABLE).write_text(table, encoding="utf-8")
    figures.speeds(lines, work / names.FIGURES / FIGURE, "clients" if at_once == "clients" else "prompts")
    contents.log_folder(work)
    contents.log_params({names.ENGINE: lines[0].engine})
    for (variant, scheme), by_batch in summary.metrics(lines).items():
        params, tags = {"variant": variant, "scheme": scheme}, {names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme}
        with runs.child(names.cell_name(variant, scheme), params=params, tags=tags):
            log = contents.live_log()
            for batch, values in by_batch.items():
                log(values, batch)
    contents.describe(table)
    if not runs.is_launched():
        click.echo(table)
        click.echo(f"Logged to run {runs.active_id()}: {TABLE}, {rows}, {names.FIGURES}/{FIGURE}.", err=True)


def _server(recipe: Recipe, url: str, subject: Subject, prompts: list[list[int]], work: Path) -> None:
    tokens = hf.tokenizer(subject.path)
    url = url.removesuffix("/").removesuffix("/v1")
    model = _served_model(url)
    texts = [tokens.decode(ids, skip_special_tokens=False) for ids in prompts]
    results = load.run(url, model, texts, subject.path, recipe.benchmark, os.environ.get(API_KEY))
    (work / SERVER_ROWS).write_text(json.dumps(results, indent=1), encoding="utf-8")
    note = f"Requests over HTTP to {model}, by `vllm bench serve`."
    _log(load.lines(results, subject, _engine(url)), note, work, SERVER_ROWS, at_once="clients")


def _served_model(url: str) -> str:
    address = f"{url}/v1/models"
    try:
        return _get(address)["data"][0]["id"]
    except _UNANSWERED as error:
        raise BadInput(
            f"{address} lists no model ({error}): start a server with `serve` first, and give its address; put its "
            f"key, if it has one, in {API_KEY}."
        ) from None


def _engine(url: str) -> str:
    try:
        return f"vllm {_get(f'{url}/version')['version']}"
    except _UNANSWERED:
        return "a server of unknown version"


def _get(address: str) -> dict:
    key = os.environ.get(API_KEY)
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return json.load(answer)


def _stages(recipe: Recipe, stages: str | None) -> list[Subject]:
    """Return the versions at stages, verified; by default those that exist, and base's AWQ."""
    name = registry.registered_name(recipe)
    chosen = [registry.resolve(name, stage.strip()) for stage in stages.split(",")] if stages else []
    has = registry.known(name)
    for stage in () if stages else has:
        with contextlib.suppress(BadInput):  # no version there yet
            chosen.append(registry.resolve(name, stage))
    if not chosen:
        lacks = f"{name} has no version at any of {', '.join(has)} yet"
        raise BadInput(f"{lacks}: run a study, or give --models variant:scheme=MODEL.")
    by_cell = {(version.variant, version.scheme): version for version in chosen}
    if len(by_cell) < len(chosen):
        raise BadInput(f"Two of {', '.join(map(str, chosen))} are the same cell: give each cell once.")
    paths = {cell: versions.verify(version) for cell, version in by_cell.items()}
    base = next((version for version in chosen if version.stage == "base"), None)
    if not stages and base and (uri := store_models.child(base.digest, names.BASE, names.AWQ)):
        paths[names.BASE, names.AWQ] = store_models.local_path(uri)
    return [Subject(*cell, path) for cell, path in paths.items()]
