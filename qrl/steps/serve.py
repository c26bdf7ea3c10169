"""Serve a registered stage: resolved once, checked, and then handed to an engine."""

from __future__ import annotations

from pathlib import Path

import click

from qrl import names, registry
from qrl.engine import device as devices
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.serve import engines, server
from qrl.tracking import runs, store

ENGINES = ("auto", engines.TRANSFORMERS, engines.VLLM)


def serve(recipe: Recipe, stage: str, *, host: str, port: int, engine: str, api_key: str | None = None) -> None:
    """Serves the version behind a stage until it is told to stop; says version, digest and address once it answers.

    Args:
        recipe: names the registered model.
        stage: base, grpo, awq, Staging, Production or a version number.
        host: address to listen on.
        port: port to listen on.
        engine: auto takes vLLM on a GPU and transformers on a CPU.
        api_key: what clients must send; never logged. None asks for none.

    Raises:
        GateRefused: no gate let the version in.
        QrlError: its files are not those that were evaluated.
    """
    check_engine(engine)
    version, path = check(recipe, stage, host=host, port=port)
    device = devices.choose(recipe.device)
    if engine == "auto":
        engine = engines.VLLM if device == "cuda" else engines.TRANSFORMERS
    engines.check_key(engine, api_key)
    name = version.name
    params = {"stage": stage, "registered": name, "version": version.version, "engine": engine, "device": device}

    def ready(address: str) -> None:
        served = engines.served_id(name, version.version)
        click.echo(f"Serving {version} with {engine} at {address} as model '{served}'; Ctrl-C stops it.")
        question = '{"model": "' + served + '", "messages": [{"role": "user", "content": "…"}]}'
        click.echo(f"Ask it    curl {address}/chat/completions -H 'Content-Type: application/json' -d '{question}'")

    with runs.step("serve", params=params, tags={names.TAG_DIGEST: version.digest}):
        server.run(
            path,
            name=name,
            version=version.version,
            on_ready=ready,
            engine=engine,
            host=host,
            port=port,
            device=device,
            dtype=recipe.evaluate.dtype,
            api_key=api_key,
        )


def check(recipe: Recipe, stage: str, *, host: str, port: int) -> tuple[registry.Version, Path]:
    """The version behind a stage and its folder, if both may be served and the port is free.

    Raises:
        BadInput: no such stage, or a port in use.
        GateRefused: no gate let the version in.
        QrlError: its files are not those that were evaluated.
    """
    store.prepare()
    version = registry.resolve(registry.registered_name(recipe), stage)
    path = registry.verify(version)
    server.check_port(host, port)
    return version, path


def check_engine(engine: str) -> None:
    """Refuses an engine that nobody here knows."""
    if engine not in ENGINES:
        raise BadInput(f"There is no engine '{engine}': expected one of {', '.join(ENGINES)}.")
