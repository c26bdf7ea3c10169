"""Benchmark stages, versions or checkpoints side by side: a nested run for each, a table and a figure for all.

There are three measurements: all models in this process, in rounds that alternate; a server that runs already, with
rising numbers of clients; and the requests a second that a server of each model holds.
"""

import contextlib
import http.client
import json
import os
import socket
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import click
from tqdm import tqdm
from transformers import AutoConfig

from qrl import benchmark as bench
from qrl import checkpoint, figures, names, process, registry
from qrl.benchmark import Subject, capacity, local, summary
from qrl.benchmark import http as load
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.evaluate import check_kv
from qrl.recipe import Recipe, lists
from qrl.registry import signing, versions
from qrl.serve import engines, server
from qrl.serve.engines import ServedModel
from qrl.serve.process import Engine
from qrl.steps import endings
from qrl.tasks import prompt, question_sets
from qrl.tracking import addresses, contents, runs, store
from qrl.tracking import models as store_models
from qrl.workspace import workspace

TABLE = "benchmark.md"
ROWS = "benchmark.parquet"
FIGURE = "benchmark.png"
CAPACITY = "capacity.md"
CAPACITY_FIGURE = "capacity.png"
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
    measured_subjects = check_subjects(recipe, stages, models)
    questions = question_sets.load(recipe, "heldout", max(recipe.benchmark.requests, *recipe.benchmark.batches))
    template = prompt.of_recipe(recipe)
    prompts = []  # of each subject, since tokenizers and chat templates may differ
    for subject in measured_subjects:
        question_sets.check_chat(recipe, subject.path)
        tokenizer = hf.tokenizer(subject.path)
        prompts.append([prompt.render(tokenizer, question.question, template) for question in questions])

    params = {"device": device, "models": ", ".join(subject.label for subject in measured_subjects)}
    with (
        workspace("benchmark") as work,
        runs.step("benchmark", recipe, sections=("benchmark",), params=params, system_metrics=True),
    ):
        endings.tell(subject.path for subject in measured_subjects)
        if rates:
            _capacities(recipe, measured_subjects, prompts, device, work)
        elif url:
            _server(recipe, url, measured_subjects[0], prompts[0], work)
        else:
            _side_by_side(recipe, measured_subjects, prompts, device, work)


def check_subjects(recipe: Recipe, stages: str | None, models: str | None) -> list[Subject]:
    """Return the models to measure, verified; raise BadInput if one does not exist, or if there are none."""
    store.prepare()
    if not models:
        return _stages(recipe, stages)
    # All names are checked before the first model is looked for.
    cells = [
        (lists.parse_cell(name), model)
        for name, model in lists.parse_pairs("The list of cells", models, "MODEL").items()
    ]
    return [Subject(*cell, addresses.stored_as(cell, model).path) for cell, model in cells]


def _side_by_side(recipe: Recipe, subjects: list[Subject], prompts: list, device: str, work: Path) -> None:
    """Load all models, measure them in rounds that alternate, and log the table."""
    settings = recipe.benchmark
    evaluation = recipe.evaluate
    check_kv((subject.scheme for subject in subjects), evaluation.engine)
    longest_prompt = max(max(map(len, subject_prompts)) for subject_prompts in prompts)

    def open_engine(subject: Subject) -> bench.Engine:  # as evaluation loads it
        if evaluation.engine == hf.NAME:
            return local.Transformers(subject.path, device, evaluation.dtype)
        return local.Vllm(
            subject.path,
            device,
            evaluation.dtype,
            kv_fp8=subject.scheme.endswith(names.KV_FP8),
            max_tokens=longest_prompt + settings.new_tokens,
            sequences=max(settings.batches),
            memory=evaluation.gpu_memory_utilization / len(subjects),  # all are loaded at once
            cache_gib=evaluation.kv_cache_gib,
        )

    turns = len(subjects) * settings.rounds * len(settings.batches)
    with tqdm(total=turns, desc="benchmark", unit="turn", leave=False) as bar:
        frame = bench.run(subjects, prompts, open_engine, settings, bar.update)
    frame.to_parquet(work / ROWS)
    note = ""
    if evaluation.engine == hf.NAME:
        note = "This engine unpacks every scheme's codes: it shows the saving on disk, not a kernel's speed."
    _log(summary.lines(frame), note, work, ROWS)


def _log(lines: list[summary.Line], note: str, work: Path, rows: str, at_once: str = "batch") -> None:
    """Log the folder, which has the file `rows`, with a table and a figure, and a nested run for each model."""
    figures.speeds(lines, work / names.FIGURES / FIGURE, "clients" if at_once == "clients" else "prompts")
    _publish(summary.markdown(lines, note, at_once), work, TABLE, rows, FIGURE)
    contents.log_params({names.ENGINE: lines[0].engine})
    for (variant, scheme), by_batch in summary.metrics(lines).items():
        with _child(variant, scheme):
            log = contents.live_log()
            for batch, values in by_batch.items():
                log(values, batch)


def _child(variant: str, scheme: str) -> contextlib.AbstractContextManager:
    params = {"variant": variant, "scheme": scheme}
    tags = {names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme}
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
    """Measure a running server with rising numbers of clients, and log the table."""
    url = url.removesuffix("/").removesuffix("/v1")
    tokenizer = hf.tokenizer(subject.path)
    model = _served_model(url)
    texts = [tokenizer.decode(token_ids, skip_special_tokens=False) for token_ids in prompts]
    with load.Client(url, model, texts, subject.path, recipe.benchmark, os.environ.get(API_KEY)) as clients:
        results = clients.measure()
    (work / SERVER_ROWS).write_text(json.dumps(results, indent=1), encoding="utf-8")
    note = f"Requests over HTTP to {model}, by `vllm bench serve`."
    _log(load.lines(results, subject, _engine(url)), note, work, SERVER_ROWS, at_once="clients")


def _capacities(recipe: Recipe, subjects: list[Subject], prompts: list, device: str, work: Path) -> None:
    """Serve each model by itself, ask it at rising rates, and log a curve, its limit and the cache of a request."""
    capacities = []
    results: dict[str, dict[float, list[dict]]] = {}  # model → rate → rounds
    for subject, subject_prompts in zip(subjects, prompts, strict=True):
        results[subject.label] = {}
        capacities.append(_capacity(recipe, subject, subject_prompts, device, results[subject.label]))

    (work / SERVER_ROWS).write_text(json.dumps(results, indent=1), encoding="utf-8")
    figures.capacities(capacities, work / names.FIGURES / CAPACITY_FIGURE)
    _publish(capacity.markdown(capacities), work, CAPACITY, SERVER_ROWS, CAPACITY_FIGURE)
    contents.log_params({names.ENGINE: capacities[0].engine})
    for measured in capacities:
        with _child(measured.variant, measured.scheme):
            contents.log_scores(capacity.metrics(measured))


def _capacity(
    recipe: Recipe, subject: Subject, prompts: list[list[int]], device: str, results: dict[float, list[dict]]
) -> capacity.Capacity:
    """Serve one model and find the rate that it holds; the rounds at each rate are added to `results`."""
    settings = recipe.benchmark
    kv_fp8 = subject.scheme.endswith(names.KV_FP8)
    model = ServedModel(
        subject.variant,
        subject.scheme,
        subject.path,
        device=device,
        dtype=recipe.evaluate.dtype,
        kv_fp8=kv_fp8,
        chat=recipe.chat.template_kwargs,
        cache_gib=recipe.evaluate.kv_cache_gib,
    )
    tokenizer = hf.tokenizer(subject.path)
    texts = [tokenizer.decode(token_ids, skip_special_tokens=False) for token_ids in prompts]
    with _serving(model) as url, load.Client(url, model.id, texts, subject.path, settings) as clients:
        measure = partial(_at_rate, clients.measure, results, subject.label)
        points = capacity.search(measure, settings.latency_limit_s)
        engine = _engine(url)

    token_bytes = local.token_bytes(AutoConfig.from_pretrained(subject.path), _cache_dtype(model, kv_fp8))
    mean_prompt_tokens = sum(map(len, prompts)) / len(prompts)
    return capacity.Capacity(
        subject.variant,
        subject.scheme,
        engine,
        settings.latency_limit_s,
        tuple(points),
        request_cache_bytes=token_bytes * (mean_prompt_tokens + settings.new_tokens),
    )


def _cache_dtype(model: ServedModel, kv_fp8: bool) -> str:
    """Return the dtype of vLLM's key-value cache."""
    if kv_fp8:
        return "float8_e4m3fn"
    computes_in_fp32 = model.dtype == "auto" and engines.unpacks(engines.VLLM, model.path, model.device)
    if model.dtype == "fp32" or computes_in_fp32:
        return "float32"
    return "bfloat16"


@contextlib.contextmanager
def _serving(model: ServedModel) -> Iterator[str]:
    """Serve a model with vLLM on a free port; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # only to learn a free port
        host, port = listening.getsockname()
    with Engine(engines.VLLM) as child:
        child.load(model, (host, port))
        server.wait(child, f"loading {model.id}")
        yield server.url(host, port)


def _at_rate(
    ask: Callable[..., list[dict]], results: dict[float, list[dict]], label: str, rate: float
) -> capacity.Point:
    """Return the point at one rate, whose rounds are added to `results`."""
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
    api_key = os.environ.get(API_KEY)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(address, headers=headers)
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with without_proxy.open(request, timeout=10) as response:
        return json.load(response)


def _stages(recipe: Recipe, stages: str | None) -> list[Subject]:
    """Return the versions at stages, verified; by default those that exist, and base's AWQ."""
    name = registry.registered_name(recipe)
    declared_stages = registry.stages_of(name)
    if stages:
        chosen = [registry.resolve(name, stage.strip()) for stage in stages.split(",")]
    else:
        chosen = _existing(name, declared_stages)
    if not chosen:
        problem = f"{name} has no version at any of {', '.join(declared_stages)} yet"
        raise BadInput(f"{problem}: run a study, or give --models variant:scheme=MODEL.")
    by_cell = {(version.variant, version.scheme): version for version in chosen}
    if len(by_cell) < len(chosen):
        raise BadInput(f"Two of {', '.join(map(str, chosen))} are the same cell: give each cell once.")

    public_keys = signing.load_public_key(recipe.promote.require_signature)
    paths = {cell: versions.verify(version, public_keys) for cell, version in by_cell.items()}

    # A study's stages hold the trained model's AWQ; the base's shows whether its speed differs.
    base = next((version for version in chosen if version.stage == "base"), None)
    if not stages and base:
        base_awq = store_models.child(base.digest, names.BASE, names.AWQ)
        if base_awq:
            paths[names.BASE, names.AWQ] = store_models.local_path(base_awq)
    for path in paths.values():
        checkpoint.check(path)
    return [Subject(*cell, path) for cell, path in paths.items()]


def _existing(name: str, stages: Iterable[str]) -> list[versions.Version]:
    """Return the versions at those stages that have one; of several stages with the same cell, the first."""
    by_cell: dict[tuple[str, str], versions.Version] = {}
    for stage in stages:
        with contextlib.suppress(BadInput):  # no version there yet
            version = registry.resolve(name, stage)
            by_cell.setdefault((version.variant, version.scheme), version)
    return list(by_cell.values())
