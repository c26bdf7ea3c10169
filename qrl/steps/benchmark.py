"""Benchmark stages, versions or checkpoints side by side: a nested run for each, a table and a figure for all."""

import contextlib
import http.client
import json
import os
import socket
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
from tqdm import tqdm
from transformers import AutoConfig

from qrl import benchmark as bench
from qrl import figures, names, process, registry
from qrl.benchmark import Subject, capacity, local, summary
from qrl.benchmark import http as load
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.evaluate import check_kv
from qrl.recipe import Recipe
from qrl.registry import signing, versions
from qrl.serve import engines, server
from qrl.serve.engines import ServedModel
from qrl.serve.process import Engine
from qrl.steps import inputs
from qrl.tasks import prompt
from qrl.tracking import contents, runs, store
from qrl.tracking import models as store_models
from qrl.workspace import workspace

TABLE, ROWS, FIGURE = "benchmark.md", "benchmark.parquet", "benchmark.png"
CAPACITY, CAPACITY_FIGURE = "capacity.md", "capacity.png"
SERVER_ROWS = "server.json"  # the results of `vllm bench serve`
_UNANSWERED = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)
API_KEY = "QRL_API_KEY"  # of the measured server, the same variable as for `serve`


def benchmark(recipe: Recipe, *, stages: str | None, models: str | None, url: str | None, rates: bool = False) -> None:
    """Measure and log; print the table.

    Args:
        recipe: its section `benchmark`; the prompts are held-out questions of its task.
        stages: stages or versions, by comma; None without `models`: those that the model has.
        models: `variant:scheme=model`, by comma, instead of stages.
        url: of a running server to measure instead; the first subject gives its model and tokenizer.
        rates: serve each model with vLLM, and find the requests a second that it holds.

    Raises:
        BadInput: a stage or model does not exist, or there is nothing to measure.
    """
    process.hush_transformers()
    device = devices.choose(recipe.device)
    chosen = subjects(recipe, stages, models)
    questions = inputs.questions(recipe, "heldout", max(recipe.benchmark.requests, *recipe.benchmark.batches))
    template = prompt.of(recipe)
    prompts = [
        [prompt.render(tokens, question.question, template) for question in questions]
        for tokens in (hf.tokenizer(subject.path) for subject in chosen)
    ]
    params = {"device": device, "models": ", ".join(subject.label for subject in chosen)}
    with (
        workspace("benchmark") as work,
        runs.step("benchmark", recipe, sections=("benchmark",), params=params, system_metrics=True),
    ):
        if rates:
            _capacities(recipe, chosen, prompts, device, work)
        elif url:
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
    check_kv((subject.scheme for subject in subjects), engine)
    longest = max(len(ids) for own in prompts for ids in own) + settings.new_tokens
    memory = recipe.evaluate.gpu_memory_utilization / len(prompts)
    sizes = {"max_tokens": longest, "sequences": max(settings.batches), "memory": memory}
    sizes |= {"cache_gib": recipe.evaluate.kv_cache_gib}

    def load(subject: Subject) -> bench.Engine:  # as evaluation loads it
        if engine == hf.NAME:
            return local.Transformers(subject.path, device, dtype)
        return local.Vllm(subject.path, device, dtype, kv_fp8=subject.scheme.endswith(names.KV_FP8), **sizes)

    turns = len(subjects) * settings.rounds * len(settings.batches)
    with tqdm(total=turns, desc="benchmark", unit="turn", leave=False) as bar:
        frame = bench.run(subjects, prompts, load, settings, bar.update)
    frame.to_parquet(work / ROWS)
    unpacks = "This engine unpacks every scheme's codes: it shows the saving on disk, not a kernel's speed."
    _log(summary.lines(frame), unpacks if engine == hf.NAME else "", work, ROWS)


def _log(lines: list[summary.Line], note: str, work: Path, rows: str, at_once: str = "batch") -> None:
    """Log the folder, which has the file `rows`, with a table and a figure, and a nested run for each model."""
    figures.speeds(lines, work / names.FIGURES / FIGURE, "clients" if at_once == "clients" else "prompts")
    _publish(summary.markdown(lines, note, at_once), work, TABLE, rows, FIGURE)
    contents.log_params({names.ENGINE: lines[0].engine})
    for cell, by_batch in summary.metrics(lines).items():
        with _child(*cell):
            log = contents.live_log()
            for batch, values in by_batch.items():
                log(values, batch)


def _child(variant: str, scheme: str) -> contextlib.AbstractContextManager:
    params, tags = {"variant": variant, "scheme": scheme}, {names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme}
    return runs.child(names.cell_name(variant, scheme), params=params, tags=tags)


def _publish(table: str, work: Path, name: str, rows: str, figure: str) -> None:
    """Log the folder, which has the rows and the figure, with the table; show the table."""
    (work / name).write_text(table, encoding="utf-8")
    contents.log_folder(work)
    contents.describe(table)
    if not runs.is_launched():
        click.echo(table)
        click.echo(f"Logged to run {runs.active_id()}: {name}, {rows}, {names.FIGURES}/{figure}.", err=True)


def _server(recipe: Recipe, url: str, subject: Subject, prompts: list[list[int]], work: Path) -> None:
    tokens = hf.tokenizer(subject.path)
    url = url.removesuffix("/").removesuffix("/v1")
    model = _served_model(url)
    texts = [tokens.decode(ids, skip_special_tokens=False) for ids in prompts]
    with load.Client(url, model, texts, subject.path, recipe.benchmark, os.environ.get(API_KEY)) as clients:
        results = clients.measure()
    (work / SERVER_ROWS).write_text(json.dumps(results, indent=1), encoding="utf-8")
    note = f"Requests over HTTP to {model}, by `vllm bench serve`."
    _log(load.lines(results, subject, _engine(url)), note, work, SERVER_ROWS, at_once="clients")


def _capacities(recipe: Recipe, subjects: list[Subject], prompts: list, device: str, work: Path) -> None:
    """Serve each model by itself, ask it at rising rates, and log a curve, its limit and the cache of a request."""
    settings, measured, results = recipe.benchmark, [], {}
    for subject, own in zip(subjects, prompts, strict=True):
        fp8 = subject.scheme.endswith(names.KV_FP8)
        how = {"device": device, "dtype": recipe.evaluate.dtype, "kv_fp8": fp8, "chat": recipe.chat.template_kwargs}
        how |= {"cache_gib": recipe.evaluate.kv_cache_gib}
        model = ServedModel(subject.variant, subject.scheme, subject.path, **how)
        tokens, by_rate = hf.tokenizer(subject.path), results.setdefault(subject.label, {})
        texts = [tokens.decode(ids, skip_special_tokens=False) for ids in own]
        with _serving(model) as url, load.Client(url, model.id, texts, subject.path, settings) as clients:
            at_rate = partial(_at_rate, clients.measure, by_rate, subject.label)
            points = capacity.search(at_rate, settings.latency_limit_s)
            engine = _engine(url)
        wide = model.dtype == "fp32" or (model.dtype == "auto" and engines.unpacks(engines.VLLM, subject.path, device))
        kept = "float8_e4m3fn" if fp8 else "float32" if wide else "bfloat16"
        each = local.token_bytes(AutoConfig.from_pretrained(subject.path), kept)
        size = each * (sum(map(len, own)) / len(own) + settings.new_tokens)
        cell = (subject.variant, subject.scheme, engine, settings.latency_limit_s)
        measured.append(capacity.Capacity(*cell, tuple(points), size))
    (work / SERVER_ROWS).write_text(json.dumps(results, indent=1), encoding="utf-8")
    figures.capacities(measured, work / names.FIGURES / CAPACITY_FIGURE)
    _publish(capacity.markdown(measured), work, CAPACITY, SERVER_ROWS, CAPACITY_FIGURE)
    contents.log_params({names.ENGINE: measured[0].engine})
    for each in measured:
        with _child(each.variant, each.scheme):
            contents.log_scores(capacity.metrics(each))


@contextlib.contextmanager
def _serving(model: ServedModel) -> Iterator[str]:
    """Serve a model with vLLM on a free port; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    with Engine(engines.VLLM) as child:
        child.load(model, (host, port))
        server.wait(child, f"loading {model.id}")
        yield server.url(host, port)


def _at_rate(
    ask: Callable[..., list[dict]], results: dict[float, list[dict]], label: str, rate: float
) -> capacity.Point:
    results[rate] = ask(rate=rate)
    point = capacity.point(rate, results[rate])
    p95 = summary.text(point.latency_p95_s, 3)
    click.echo(f"      {label} at {rate:.3g} requests/s: latency p95 {p95} s, n = {point.requests}", err=True)
    return point


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
            version = registry.resolve(name, stage)
            if (version.variant, version.scheme) not in {(other.variant, other.scheme) for other in chosen}:
                chosen.append(version)  # one stage of two that hold the same cell
    if not chosen:
        lacks = f"{name} has no version at any of {', '.join(has)} yet"
        raise BadInput(f"{lacks}: run a study, or give --models variant:scheme=MODEL.")
    by_cell = {(version.variant, version.scheme): version for version in chosen}
    if len(by_cell) < len(chosen):
        raise BadInput(f"Two of {', '.join(map(str, chosen))} are the same cell: give each cell once.")
    public = signing.trusted(recipe.promote.require_signature)
    paths = {cell: versions.verify(version, public) for cell, version in by_cell.items()}
    base = next((version for version in chosen if version.stage == "base"), None)
    if not stages and base and (uri := store_models.child(base.digest, names.BASE, names.AWQ)):
        paths[names.BASE, names.AWQ] = store_models.local_path(uri)
    return [Subject(*cell, path) for cell, path in paths.items()]
