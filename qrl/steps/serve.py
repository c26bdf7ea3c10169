"""Serve a registered stage: resolve it once, check it, and hand it to an engine.

With `--follow` a stage is resolved again every few seconds. The engine of a newer version starts next to the old one
and takes over once it answers. `qrl.serve` knows neither the registry nor MLflow, so callbacks resolve versions here,
and print and log each move.
"""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from qrl import checkpoint, names, registry
from qrl.engine import device as devices
from qrl.errors import BadInput
from qrl.evaluate import check_gpus, check_kv
from qrl.recipe import Recipe
from qrl.registry import signing, versions
from qrl.serve import engines, follow, process, server
from qrl.serve.engines import ServedModel
from qrl.serve.log import rotating_writer
from qrl.steps import endings
from qrl.tracking import contents, fetched, owners, runs, signals, store

ENGINES = ("auto", engines.TRANSFORMERS, engines.VLLM)


def serve(
    recipe: Recipe,
    stage: str,
    *,
    host: str,
    port: int,
    engine: str,
    api_key: str | None = None,
    memory: float | None = None,
    follow_s: float | None = None,
    drain_s: float | None = None,
    log: str | None = None,
) -> None:
    """Serve the version at a stage until Ctrl-C; print version and address once it answers.

    The engine starts first: it imports its libraries while the stage is resolved, and loads weights while they are
    hashed, so that a check of every byte costs no time.

    Args:
        recipe: gives the registered model, the device and the dtype.
        stage: one of the registered model, such as base, grpo or awq, Staging, Production or a version number.
        host, port: the address to listen on.
        engine: auto is vLLM where it is installed, and transformers elsewhere.
        api_key: the key that clients must send, never logged; None serves without a key.
        memory: largest share of the GPU's memory for vLLM; None: its default.
        follow_s: how often to check whether the stage moved, in seconds; None serves the present version only.
        drain_s: how long the engine of a replaced version may finish its answers, in seconds; None: `follow.DRAIN_S`.
        log: file for the engine's output, which rotates; None: the terminal, once the engine serves.

    Raises:
        BadInput: an option is wrong, the stage has no version, or the port is in use.
        GateRefused: the version did not pass its gate.
        QrlError: its files are not those that were evaluated.
    """
    if engine not in ENGINES:
        raise BadInput(f"There is no engine '{engine}': expected one of {', '.join(ENGINES)}.")
    signals.allow_longer(forever=True)  # an engine that was told to stop finishes its answers, and has its own limit
    if engine == "auto":
        engine = engines.default_engine(recipe.device)
    memory = check_options(engine, stage, memory, follow_s, drain_s)
    write = rotating_writer(Path(log)) if log else None
    follows = follow_s is not None
    start = partial(process.Engine, engine, api_key, shares=follows, write=write)

    with start() as child:
        version, model = check_stage(recipe, stage, host=host, port=port)
        check_kv([version.scheme], engine)
        check_gpus(recipe.evaluate.tensor_parallel, engine, model.device)
        model = replace(
            model, gpus=recipe.evaluate.tensor_parallel, memory=memory, cache_gib=recipe.evaluate.kv_cache_gib
        )
        if follows:
            # Clients keep an id that stays when the stage moves, such as `qrl-tiny@awq` or `qrl-tiny@Production`.
            aliases = dict.fromkeys(engines.served_id(version.name, alias) for alias in (version.stage, stage))
            model = replace(model, aliases=tuple(aliases))

        is_unpacked = engines.unpacks(engine, model.path, model.device)
        params = {
            "stage": stage,
            "registered": version.name,
            "version": version.version,
            "engine": engine,
            "device": model.device,
            "unpacked": is_unpacked,
        }

        def announce(address: str) -> None:
            seconds = {f"serve/{key}_s": value for key, value in child.seconds().items()}
            seconds[names.SERVE_READY] = time.time() - owners.started_at()
            click.echo(f"Serving {version} with {engine} at {address} as model '{model.id}'; Ctrl-C stops it.")
            _print_notes(address, model, stage, follow_s, is_unpacked)
            contents.note({}, seconds, step=0)

        with runs.step("serve", params=params, tags={names.TAG_DIGEST: version.digest}):
            endings.tell([model.path])
            if not follows:
                server.run(child, model, host, port, on_ready=announce)
                return
            followed = _followed(version, model, start, recipe.promote.require_signature)
            followed = replace(followed, every_s=follow_s)
            if drain_s is not None:
                followed = replace(followed, drain_s=drain_s)
            follow.run(child, model, host, port, followed, on_ready=announce)


def check_options(
    engine: str, stage: str, memory: float | None, follow_s: float | None, drain_s: float | None
) -> float | None:
    """Return the share of a GPU's memory for an engine, if the options fit together; None: vLLM's default.

    Raises:
        BadInput: an option would have no effect, the stage cannot move, the engine cannot follow it, or two engines
            cannot both have this share.
    """
    if memory is not None and engine != engines.VLLM:
        needs = f"--gpu-memory-utilization needs vLLM, but the engine is {engine}"
        raise BadInput(f"{needs}: add --engine vllm, or remove it.")
    if follow_s is None:
        if drain_s is not None:
            raise BadInput("--drain limits how long a replaced version may finish: add --follow, or remove it.")
        return memory
    if stage.isdigit() or stage.endswith("-previous"):
        needs = f"--follow needs a stage that promotions move, not {stage}"
        raise BadInput(f"{needs}: give a stage such as base, grpo or awq.")
    if engine != engines.VLLM:
        raise BadInput("--follow loads the next version beside the old one under vLLM: add --engine vllm.")
    if memory is not None and memory > follow.MEMORY:
        limit = f"each with at most {follow.MEMORY} of its memory, but --gpu-memory-utilization is {memory}"
        raise BadInput(f"--follow keeps two engines on one GPU for a while, {limit}: give {follow.MEMORY} or less.")
    return memory or follow.MEMORY


def check_stage(recipe: Recipe, stage: str, *, host: str, port: int) -> tuple[versions.Version, ServedModel]:
    """Return the version at a stage and how to load it, if it passed its gate and the port is free.

    Raises:
        BadInput: the stage is unknown or has no version, its checkpoint is odd, or the port is in use.
        GateRefused, QrlError: the version did not pass its gate, or its files are gone.
    """
    public_keys = signing.load_public_key(recipe.promote.require_signature)
    store.prepare()
    version = registry.resolve(registry.registered_name(recipe), stage)
    path = versions.check_gate(version)
    checkpoint.check(path)
    server.check_port(host, port)
    verify = partial(versions.check_files, version, path, public_keys)
    device = devices.choose(recipe.device)
    model = ServedModel(version.name, version.version, path, verify, device, recipe.evaluate.dtype)
    return version, replace(model, **_rendering(version))


def _rendering(version: versions.Version) -> dict[str, Any]:
    """Return what an engine needs besides the checkpoint to answer as it did in the evaluation."""
    return {"chat": version.chat, "kv_fp8": version.scheme.endswith(names.KV_FP8)}


def _print_notes(address: str, model: ServedModel, stage: str, follow_s: float | None, is_unpacked: bool) -> None:
    if is_unpacked:
        click.echo("Unpacked  vLLM's 4-bit CPU kernel needs AVX512, which this CPU lacks: it computes in float32.")
    if model.aliases:
        click.echo(f"Follows   stage {stage}, checked every {follow_s:g} s; '{model.aliases[0]}' is its version now.")
    messages = [{"role": "user", "content": "…"}]
    model_id = model.aliases[0] if model.aliases else model.id
    request = {"model": model_id, "messages": messages, "temperature": 0}
    body = json.dumps(request, ensure_ascii=False)
    click.echo(f"Try it    curl {address}/chat/completions -H 'Content-Type: application/json' -d '{body}'")


def _followed(
    first: versions.Version, model: ServedModel, start: Callable[[], process.Engine], required_signature: str
) -> follow.FollowedStage:
    """Return the stage as the registry knows it, with callbacks that print and log its moves."""
    public_keys = signing.load_public_key(required_signature)
    log_steps = itertools.count(1)
    digests = {first.version: first.digest}
    serving_path = model.path

    def present_version() -> int:
        return registry.resolve(first.name, first.stage).version

    def admit(number: int) -> ServedModel:
        fetched.release(besides=serving_path)  # no engine drains while a version is admitted
        version = replace(registry.resolve(first.name, number), stage=first.stage)  # checks the gate of this stage only
        path = versions.check_gate(version)
        digests[number] = version.digest
        verify = partial(versions.check_files, version, path, public_keys)
        return replace(model, version=number, path=path, verify=verify, **_rendering(version))

    def on_switch(new_model: ServedModel, sentence: str) -> None:
        nonlocal serving_path
        serving_path = new_model.path
        click.echo(sentence)
        tags = {names.TAG_SERVING: new_model.id, names.TAG_DIGEST: digests[new_model.version]}
        contents.note(tags, {names.SERVE_VERSION: new_model.version}, step=next(log_steps))

    def on_notice(sentence: str) -> None:
        click.echo(f"qrl: {sentence}", err=True)

    def on_refusal(number: int, sentence: str) -> None:
        on_notice(sentence)
        contents.note({names.TAG_REFUSED: sentence}, {names.SERVE_REFUSED: number}, step=next(log_steps))

    return follow.FollowedStage(start, present_version, admit, on_switch, on_refusal, on_notice)
