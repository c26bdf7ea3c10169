"""Serve a registered stage: resolved once, checked, and then handed to an engine."""

from __future__ import annotations

import click

from qrl import names, registry
from qrl.engine import device as devices
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.serve import engines, process, server
from qrl.tracking import runs, store

ENGINES = ("auto", engines.TRANSFORMERS, engines.VLLM)


def serve(recipe: Recipe, stage: str, *, host: str, port: int, engine: str, api_key: str | None = None) -> None:
    """Serves the version behind a stage until it is told to stop; says version, digest and address once it answers.

    The engine is started first: it imports its libraries while the stage is looked up, and loads weights while they are hashed.

    Args:
        recipe: names the registered model.
        stage: base, grpo, awq, Staging, Production or a version number.
        host: address to listen on.
        port: port to listen on.
        engine: auto takes vLLM where it is installed, and transformers elsewhere.
        api_key: what clients must send; never logged. None asks for none.

    Raises:
        GateRefused: no gate let the version in.
        QrlError: its files are not those that were evaluated.
    """
    check_engine(engine)
    if engine == "auto":
        engine = engines.default(recipe.device)
    with process.Engine(engine, api_key) as child:
        version, what = check(recipe, stage, host=host, port=port)
        params = {"stage": stage, "registered": version.name, "version": version.version, "engine": engine, "device": what.device}

        def ready(address: str) -> None:
            click.echo(f"Serving {version} with {engine} at {address} as model '{what.served}'; Ctrl-C stops it.")
            question = '{"model": "' + what.served + '", "messages": [{"role": "user", "content": "…"}]}'
            click.echo(f"Ask it    curl {address}/chat/completions -H 'Content-Type: application/json' -d '{question}'")

        with runs.step("serve", params=params, tags={names.TAG_DIGEST: version.digest}):
            server.run(child, what, host, port, on_ready=ready)


def check(recipe: Recipe, stage: str, *, host: str, port: int) -> tuple[registry.Version, process.Load]:
    """The version behind a stage and how to load it, if its gate let it in and the port is free.

    Raises:
        BadInput: no such stage, or a port in use.
        GateRefused: no gate let the version in.
        QrlError: its files are gone.
    """
    store.prepare()
    version = registry.resolve(registry.registered_name(recipe), stage)
    path = registry.admit(version)
    server.check_port(host, port)
    what = process.Load(
        version.name, version.version, path, lambda: registry.whole(version, path), devices.choose(recipe.device), recipe.evaluate.dtype
    )
    return version, what


def check_engine(engine: str) -> None:
    """Refuses an engine that nobody here knows."""
    if engine not in ENGINES:
        raise BadInput(f"There is no engine '{engine}': expected one of {', '.join(ENGINES)}.")
