"""Serve a registered stage: resolved once, checked, and then handed to an engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import click

from qrl import names, registry
from qrl.engine import device as devices
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.registry import versions
from qrl.serve import engines, follow, process, server
from qrl.tracking import contents, runs, signals, store

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
) -> None:
    """Serves the version behind a stage until it is told to stop; says version, digest and address once it answers.

    The engine is started first: it imports its libraries while the stage is looked up, and loads weights while they are hashed.

    Args:
        recipe: names the registered model.
        stage: base, grpo, awq, Staging, Production or a version number.
        host: address to listen on.
        port: port to listen on.
        engine: auto takes vLLM where it is installed, and transformers elsewhere.
        api_key: what clients must send; never logged. None asks for none.
        memory: share of the GPU's memory that vLLM may take; None: its default.
        follow_s: how often to look whether the stage moved, in seconds; None serves the version that is there now.
        drain_s: how long an engine whose version was replaced may go on answering, in seconds; None: `follow.DRAIN_S`.

    Raises:
        GateRefused: no gate let the version in.
        QrlError: its files are not those that were evaluated.
    """
    check_engine(engine)
    if engine == "auto":
        engine = engines.default(recipe.device)
    memory = check_options(engine, stage, memory, follow_s, drain_s)
    start = partial(process.Engine, engine, api_key, shares=follow_s is not None)
    with start() as child:
        version, what = check(recipe, stage, host=host, port=port)
        what = replace(what, memory=memory, also=_names(version, stage) if follow_s is not None else ())
        unpacked = engines.unpacks(engine, what.path, what.device)
        params = {
            "stage": stage,
            "registered": version.name,
            "version": version.version,
            "engine": engine,
            "device": what.device,
            "unpacked": unpacked,
        }

        def ready(address: str) -> None:
            took = {f"serve/{key}_s": value for key, value in child.seconds().items()}
            took[names.SERVE_READY] = time.time() - signals.started()
            click.echo(f"Serving {version} with {engine} at {address} as model '{what.served}'; Ctrl-C stops it.")
            if unpacked:
                click.echo(
                    "Unpacked  vLLM's 4-bit kernel for CPUs needs AVX512, which this one lacks: it computes with what the codes stand for, in float32."
                )
            if what.also:
                click.echo(
                    f"Follows   stage {stage}, looked at every {follow_s:g} s; '{what.also[0]}' is whatever stands there."
                )
            question = (
                '{"model": "' + (*what.also, what.served)[0] + '", "messages": [{"role": "user", "content": "…"}]}'
            )
            click.echo(f"Ask it    curl {address}/chat/completions -H 'Content-Type: application/json' -d '{question}'")
            contents.note({}, took, step=0)

        with runs.step("serve", params=params, tags={names.TAG_DIGEST: version.digest}):
            if follow_s is None:
                server.run(child, what, host, port, on_ready=ready)
            else:
                following = _following(version, what, start, follow_s, follow.DRAIN_S if drain_s is None else drain_s)
                follow.run(child, what, host, port, following, on_ready=ready)


def _names(version: versions.Version, stage: str) -> tuple[str, ...]:
    """Ids that stay when the stage moves: `qrl-tiny@awq`, and as it was asked for, `qrl-tiny@Production` say."""
    return tuple(dict.fromkeys(engines.served_id(version.name, each) for each in (version.stage, stage)))


def _following(
    first: versions.Version, what: process.Load, start: Callable[[], process.Engine], every_s: float, drain_s: float
) -> follow.Following:
    """The stage as the registry knows it, and the run that keeps what became of it."""
    switches, digests = itertools.count(1), {first.version: first.digest}

    def admit(number: int) -> process.Load:
        version = replace(registry.resolve(first.name, number), stage=first.stage)  # this stage's gate, and no other's
        path = versions.admit(version)
        digests[number] = version.digest
        return replace(what, version=number, path=path, verify=lambda: versions.whole(version, path))

    def turned(now: process.Load, sentence: str) -> None:
        click.echo(sentence)
        contents.note(
            {names.TAG_SERVING: now.served, names.TAG_DIGEST: digests[now.version]},
            {names.SERVE_VERSION: now.version},
            step=next(switches),
        )

    def refused(number: int, sentence: str) -> None:
        click.echo(f"qrl: {sentence}", err=True)
        contents.note({names.TAG_REFUSED: sentence}, {names.SERVE_REFUSED: number}, step=next(switches))

    def said(sentence: str) -> None:
        click.echo(f"qrl: {sentence}", err=True)

    return follow.Following(
        start, lambda: registry.resolve(first.name, first.stage).version, admit, turned, refused, said, every_s, drain_s
    )


def check_options(
    engine: str, stage: str, memory: float | None, follow_s: float | None, drain_s: float | None
) -> float | None:
    """The share of a GPU's memory that an engine gets, if what was asked for can be had together; None: vLLM's default.

    Raises:
        BadInput: an option that nothing would heed, or to follow what no promotion moves; or `follow.check` refuses.
    """
    if memory is not None and engine != engines.VLLM:
        raise BadInput(
            f"--gpu-memory-utilization is vLLM's, and the engine is {engine}: add --engine vllm, or leave it out."
        )
    if follow_s is None:
        if drain_s is not None:
            raise BadInput(
                "--drain says how long a version that --follow replaced may go on answering: add --follow, or leave it out."
            )
        return memory
    if stage.isdigit() or stage.endswith("-previous"):
        raise BadInput(
            f"--follow follows a stage that promotions move, and {stage} is none: name base, grpo, awq, Staging or Production."
        )
    return follow.check(engine, memory)


def check(recipe: Recipe, stage: str, *, host: str, port: int) -> tuple[versions.Version, process.Load]:
    """The version behind a stage and how to load it, if its gate let it in and the port is free.

    Raises:
        BadInput: no such stage, or a port in use.
        GateRefused: no gate let the version in.
        QrlError: its files are gone.
    """
    store.prepare()
    version = registry.resolve(registry.registered_name(recipe), stage)
    path = versions.admit(version)
    server.check_port(host, port)
    what = process.Load(
        version.name,
        version.version,
        path,
        lambda: versions.whole(version, path),
        devices.choose(recipe.device),
        recipe.evaluate.dtype,
    )
    return version, what


def check_engine(engine: str) -> None:
    """Refuses an engine that nobody here knows."""
    if engine not in ENGINES:
        raise BadInput(f"There is no engine '{engine}': expected one of {', '.join(ENGINES)}.")
