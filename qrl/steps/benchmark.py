"""Benchmark stages, versions or checkpoints side by side: a nested run for each, a table and a figure for all."""

from __future__ import annotations

import http.client
import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

import click
from tqdm import tqdm

from qrl import benchmark as room
from qrl import figures, names, process, registry
from qrl.benchmark import http as load
from qrl.benchmark import local, summary
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
SERVER_ROWS = "server.json"  # what `vllm bench serve` found
API_KEY = "QRL_API_KEY"  # of the server that is measured, as `serve` takes it


def benchmark(recipe: Recipe, *, stages: str | None, models: str | None, url: str | None) -> None:
    """Measures and logs; prints the table.

    Args:
        recipe: the section `benchmark`; prompts are held-out questions of its task.
        stages: stages or versions, by comma; None with no models: what there is of base, grpo, awq.
        models: `variant:scheme=model`, by comma, instead of stages.
        url: of a running server, which is measured instead; the first subject names its model and tokenizer.

    Raises:
        BadInput: no such stage or model, or nothing to measure.
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
        asked = [
            [prompt.render(hf.tokenizer(each.path), one.question, recipe.prompt) for one in questions]
            for each in chosen
        ]
        if url:
            _server(recipe, url, chosen[0], asked[0], work)
        else:
            _side_by_side(recipe, chosen, asked, device, work)


def subjects(recipe: Recipe, stages: str | None, models: str | None) -> list[room.Subject]:
    """What is measured, checked.

    Raises:
        BadInput: no such stage or model, or nothing to measure.
    """
    store.prepare()
    return _given(models) if models else _stages(recipe, stages)


def _side_by_side(recipe: Recipe, subjects: list[room.Subject], asked: list, device: str, work: Path) -> None:
    settings = recipe.benchmark
    with tqdm(
        total=len(subjects) * settings.rounds * len(settings.batches), desc="benchmark", unit="turn", leave=False
    ) as bar:
        frame = room.run(subjects, asked, _opener(recipe, asked, device), settings, bar.update)
    frame.to_parquet(work / ROWS)
    unpacked = recipe.evaluate.engine == hf.NAME
    note = (
        "This engine unpacks every scheme's codes: it shows what the disk saves, not what a kernel would."
        if unpacked
        else ""
    )
    _log(summary.lines(frame), note, work, ROWS)


def _log(found: list[summary.Line], note: str, work: Path, rows: str, at_once: str = "batch") -> None:
    """A table, a figure, and a nested run for each model; what was measured lies in the folder already, as `rows`."""
    table = summary.markdown(found, note, at_once)
    (work / TABLE).write_text(table, encoding="utf-8")
    figures.speeds(found, work / names.FIGURES / FIGURE, "clients" if at_once == "clients" else "prompts")
    contents.log_folder(work)
    contents.log_params({names.ENGINE: found[0].engine})
    for (variant, scheme), by_batch in summary.metrics(found).items():
        with runs.child(
            names.cell_name(variant, scheme),
            params={"variant": variant, "scheme": scheme},
            tags={names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme},
        ):
            log = contents.live_log()
            for batch, values in by_batch.items():
                log(values, batch)
    contents.describe(table)
    if not runs.is_launched():
        click.echo(table)
        click.echo(f"Logged to run {runs.active_id()}: {TABLE}, {rows}, {names.FIGURES}/{FIGURE}.", err=True)


def _opener(recipe: Recipe, asked: list, device: str) -> Callable[[room.Subject], room.Engine]:
    """How a subject is loaded: as evaluation loads it."""
    if recipe.evaluate.engine == hf.NAME:
        return lambda subject: local.Transformers(subject.path, device, recipe.evaluate.dtype)
    longest = max(len(prompt) for own in asked for prompt in own) + recipe.benchmark.new_tokens
    sizes = {
        "max_tokens": longest,
        "sequences": max(recipe.benchmark.batches),
        "memory": recipe.evaluate.gpu_memory_utilization / len(asked),
    }
    return lambda subject: local.Vllm(subject.path, device, recipe.evaluate.dtype, **sizes)


def _server(recipe: Recipe, url: str, subject: room.Subject, prompts: list[list[int]], work: Path) -> None:
    tokens = hf.tokenizer(subject.path)
    url = url.removesuffix("/").removesuffix("/v1")
    served = _served(url)
    texts = [tokens.decode(ids, skip_special_tokens=False) for ids in prompts]
    found = load.run(url, served, texts, subject.path, recipe.benchmark, os.environ.get(API_KEY))
    (work / SERVER_ROWS).write_text(json.dumps(found, indent=1), encoding="utf-8")
    note = f"Requests over HTTP to {served}, by `vllm bench serve`."
    _log(load.lines(found, subject, _engine(url)), note, work, SERVER_ROWS, at_once="clients")


def _served(url: str) -> str:
    """The one model that a server lists."""
    address = f"{url}/v1/models"
    try:
        return _asked(address)["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise BadInput(
            f"{address} lists no model ({error}): start a server with `serve` first, and give its address; its key, if it has one, in {API_KEY}."
        ) from None


def _engine(url: str) -> str:
    """The server's name and version, as vLLM tells it."""
    try:
        return f"vllm {_asked(f'{url}/version')['version']}"
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return "a server that does not tell its version"


def _asked(address: str) -> dict:
    key = os.environ.get(API_KEY)
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return json.load(answer)


def _given(models: str) -> list[room.Subject]:
    found = []
    for cell, address in inputs.pairs(models, "a cell and its model").items():
        variant, scheme = inputs.cell(cell)
        found.append(room.Subject(variant, scheme, inputs.stored_as((variant, scheme), address).path))
    return found


def _stages(recipe: Recipe, stages: str | None) -> list[room.Subject]:
    """The versions behind stages, verified; by default seed 000's four rows, as far as they are there."""
    name = registry.registered_name(recipe)
    if stages:
        chosen = [registry.resolve(name, stage.strip()) for stage in stages.split(",")]
    else:
        chosen = [version for version in (_version(name, stage) for stage in names.STAGES) if version]
    if not chosen:
        raise BadInput(
            f"{name} has no version at any of {', '.join(names.STAGES)} yet: run a study, or give --models variant:scheme=MODEL."
        )
    found = {
        (each.variant, each.scheme): room.Subject(each.variant, each.scheme, versions.verify(each)) for each in chosen
    }
    if len(found) < len(chosen):
        raise BadInput(
            f"Two of {', '.join(map(str, chosen))} are the same cell, which the table could not tell apart: name each cell once."
        )
    if not stages and (base := next((each for each in chosen if each.stage == "base"), None)) is not None:
        uri = store_models.child(base.digest, names.BASE, names.AWQ)
        if uri:
            found[names.BASE, names.AWQ] = room.Subject(names.BASE, names.AWQ, store_models.local_path(uri))
    return list(found.values())


def _version(name: str, stage: str) -> versions.Version | None:
    try:
        return registry.resolve(name, stage)
    except BadInput:
        return None
