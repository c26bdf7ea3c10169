"""Commands for the models that a study has made: `promote`, `history`, `serve` and `benchmark`."""

import re
from functools import partial

import click
from click import option

from qrl.cli.options import SWITCH, Finite, RecipeCommand, Typed, parse_list
from qrl.errors import BadInput

# Fields that `--help` shows first.
GATES = ("model", "registered_name", "promote.stages", "promote.min_gain", "promote.max_loss")
SPEED = ("model", "device", "evaluate.engine", "benchmark.batches", "benchmark.rounds", "benchmark.new_tokens")
ENGINE = ("evaluate.dtype", "evaluate.kv_cache_gib", "promote.require_signature")  # of other sections, to load a model
POSITIVE = Finite(0, min_open=True)
# What `serve --help` says of the options for vLLM.
KEY = "Key that clients must send. Prefer the variable QRL_API_KEY: MLflow logs what -P passes."
MEMORY = "Share of the GPU's memory for vLLM. [default: vLLM's own; 0.45 with --follow]"
FOLLOW = "With vLLM: seconds between checks of the stage; when it moves, no request is lost. [no value: 5]"
DRAIN = "With --follow: how long a replaced version may finish its requests. [default: 300]"


@click.command("promote", cls=RecipeCommand, sections=("promote",), first=GATES)
@option("--stage", required=True, metavar="base|grpo|awq", help="Stage of promote.stages; several by comma.")
@option("--cell", metavar="RUN", help="Evaluation run of the candidate; one per stage, by comma.")
@option("--rollback", **SWITCH, help="Return the stage to the version before its last promotion.")
@click.pass_obj
def promote_command(typed: Typed, settings, stage: str, cell: str | None, rollback: bool | None) -> None:
    """Move a stage to an evaluated model, if its gate admits it. A refusal moves nothing and gives the reason."""
    from qrl.steps import promote

    if rollback and cell:
        raise BadInput("promote --rollback takes no --cell: it returns to the version that the stage had before.")
    if rollback:
        promote.rollback(settings, stage)
    elif cell is None:
        raise BadInput("promote needs --cell RUN: the id of the candidate's evaluation run (a cell of `evaluate`).")
    else:
        promote.promote(settings, parse_list("--stage", stage), parse_list("--cell", cell), typed.overrides)


@click.command(
    "serve",
    cls=RecipeCommand,
    sections=(*ENGINE, "evaluate.tensor_parallel"),
    first=("model", "registered_name", "device"),
)
@option("--stage", required=True, metavar="base|grpo|awq|N", help="Stage or version number to serve.")
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", default=8000, type=click.IntRange(1, 65535), help="Port to listen on.")
@option("--engine", default="auto", metavar="auto|transformers|vllm", help="auto: vllm on a GPU")
@option("--api-key", envvar="QRL_API_KEY", metavar="KEY", help=KEY)
@option("--gpu-memory-utilization", "memory", type=Finite(0, 1, min_open=True), metavar="SHARE", help=MEMORY)
@option("--follow", "follow_s", type=POSITIVE, is_flag=False, flag_value=5.0, metavar="[SECONDS]", help=FOLLOW)
@option("--drain", "drain_s", type=Finite(0), metavar="SECONDS", help=DRAIN)
@option("--log", metavar="FILE", help="File for the engine's output, instead of this terminal; it rotates at 10 MB.")
@click.pass_obj
def serve_command(typed: Typed, settings, **options) -> None:
    """Serve a registered stage with an OpenAI-compatible API. Its gate and its digest are checked first."""
    from qrl.steps import serve

    if {"prompt", "chat.template_kwargs"} & typed.overrides.keys():
        raise BadInput(
            "serve renders chats as the version was evaluated: leave --prompt and --chat.template_kwargs out."
        )

    def check() -> None:
        serve.check_options("vllm", options["stage"], options["memory"], options["follow_s"], options["drain_s"])
        serve.check_stage(settings, options["stage"], host=options["host"], port=options["port"])

    typed.run("serve", options["engine"], check, partial(serve.serve, settings, **options))


@click.command(
    "benchmark",
    cls=RecipeCommand,
    sections=("benchmark", *ENGINE, "evaluate.engine", "evaluate.gpu_memory_utilization"),
    first=SPEED,
)
@option("--stages", metavar="STAGE|N,…", help="Stages or versions. [default: all that exist, and base under AWQ]")
@option("--models", metavar="VARIANT:SCHEME=MODEL,…", help="Models to measure instead of stages.")
@option("--url", metavar="URL", help="Measure a running server of the first model with `vllm bench serve`.")
@option("--capacity", "rates", **SWITCH, help="Find the requests a second that each model holds when vLLM serves it.")
@click.pass_obj
def benchmark_command(
    typed: Typed, settings, stages: str | None, models: str | None, url: str | None, rates: bool | None
) -> None:
    """Measure speed, latency and memory of models side by side.

    Models run in evaluate.engine, one prompt at a time and in batches. A server is measured by vLLM's own
    `bench serve`, in vLLM's environment. With --capacity, vLLM serves each model in turn, and requests arrive at rising
    rates until the 95th percentile of latency breaks benchmark.latency_limit_s.
    """
    if stages and models:
        raise BadInput("benchmark measures stages or models, but got both: give --stages or --models.")
    if url is not None and not re.fullmatch(r"https?://[^\s/]+(/[^\s?#]*)?", url[:2000]):
        raise BadInput(f"--url is '{url}': expected the address of a server, such as http://127.0.0.1:8000.")
    if url and rates:
        raise BadInput("benchmark --capacity starts servers of its own: remove --url, or leave out --capacity.")
    from qrl.steps import benchmark

    engine = "vllm" if url or rates else settings.evaluate.engine  # servers are vLLM's
    check = partial(benchmark.check_subjects, settings, stages, models)
    work = partial(benchmark.benchmark, settings, stages=stages, models=models, url=url, rates=bool(rates))
    typed.run("benchmark", engine, check, work)


@click.command("history", cls=RecipeCommand, first=("model", "registered_name"))
@option("--stage", metavar="base|grpo|awq", help="A stage of the model, Staging or Production. [default: all]")
@option("--at", metavar="DATE", help="Show which version held it at the end of that day, or at a time, in UTC.")
@click.pass_obj
def history_command(typed: Typed, settings, stage: str | None, at: str | None) -> None:
    """Show every decision on a model's stages, or what held them on a day.

    A decision has who made it, when, on which run and with which bounds.
    """
    from qrl import recipe
    from qrl.steps import history

    names_model = {"model", "registered_name"} & typed.overrides.keys()
    names_recipe = typed.overrides["recipe"] != recipe.DEFAULT
    history.show(settings, stage, at, is_chosen=bool(names_model or names_recipe))


COMMANDS = (promote_command, history_command, serve_command, benchmark_command)
