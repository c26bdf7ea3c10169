"""The command line: `python -m qrl <step>`, which is also what the MLproject's entry points call.

Options of a step are its recipe's fields, made by `options.py`, and the few inputs below. Nothing heavy is imported
before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from qrl import names
from qrl.cli import ending
from qrl.cli.options import Finite, RecipeCommand
from qrl.errors import BadInput


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option("0.1.0", prog_name="qrl")
def cli() -> None:
    """Does RL post-training change how cleanly a model quantizes?

    `study` answers for one model: GRPO, 4-bit quantization, evaluation of every variant × scheme on the same held-out
    questions, and a verdict with an interval. Every other command is one of its steps, alone.

    Exit codes: 0 done; 1 a step failed; 2 bad input; 3 refused by a gate.
    """


def step(name: str, *sections: str, auto: str = "tiny") -> Callable:
    """A command that reads a recipe and shows the options of these sections."""
    return cli.command(name, cls=RecipeCommand, sections=sections, auto=auto)


ALL = ("train", "rollout", "watch", "merge", "quantize", "evaluate", "diagnose", "compare", "promote")


@step("study", *ALL)
@click.pass_context
def study_command(ctx: click.Context, settings) -> None:
    """The whole study: train, quantize, evaluate, diagnose, compare, promote. A finished step is reused."""
    from qrl.study import pipeline

    pipeline.study(settings, overrides=ctx.obj)


@step("sweep", *ALL, auto="tiny-ptq")
@click.option(
    "--arms",
    metavar="NAME|FILE.yaml,…",
    help="Recipes of the methods beside --recipe's; default: QLoRA, QAT and distillation for qrl-tiny.",
)
@click.option(
    "--seeds",
    default="0",
    show_default=True,
    metavar="N,…",
    help="Seeds of training and questions, a study each; what is done is reused.",
)
@click.pass_context
def sweep_command(ctx: click.Context, settings, arms: str | None, seeds: str) -> None:
    """Ways to a small model side by side: GRPO quantized afterwards, QLoRA, training and distillation with quantized weights.

    --recipe is GRPO in full precision with the schemes to quantize it to afterwards. Other options hold for every arm.
    """
    from qrl.study import sweep

    given = {key: text for key, text in ctx.obj.items() if key not in ("recipe", "seed")}
    first = sweep.FIRST if ctx.obj["recipe"] == "auto" else ctx.obj["recipe"]
    chosen = sweep.ARMS if arms is None else tuple(_listed("--arms", arms))
    sweep.study(first, chosen, sweep.numbers(seeds, ctx.obj.get("seed")), given)


@step("train", "train", "rollout", "watch")
@click.pass_context
def train_command(ctx: click.Context, settings) -> None:
    """GRPO on the recipe's model, or a teacher's distillation into it; resumes from its last checkpoint if it was killed."""
    from qrl.steps import train
    from qrl.study import pipeline

    if (folder := pipeline.environment_for("train", settings.rollout.engine)) is not None:
        train.check_rollouts(settings)  # told before an environment of some GB is built for it
        pipeline.hand_over(folder, "train", ctx.obj)
    else:
        train.train(settings)


@step("merge", "merge")
@click.option("--adapter", required=True, metavar="DIR|MODEL", help="PEFT adapter to fold into the recipe's model.")
def merge_command(settings, adapter: str) -> None:
    """Folds an adapter into its full-precision base, and measures what the merge lost."""
    from qrl.steps import train

    train.merge(settings, adapter)


@step("quantize", "quantize")
@click.option(
    "--scheme",
    default="nf4",
    show_default=True,
    metavar="SCHEME",
    help=f"How to store the weights: {', '.join(names.QUANTIZED_SCHEMES)}.",
)
@click.option("--models", metavar="VARIANT=MODEL,…", help="What to quantize; default: base=<model>.")
@click.pass_context
def quantize_command(ctx: click.Context, settings, scheme: str, models: str | None) -> None:
    """Quantizes checkpoints under one scheme, all with the same settings and calibration texts."""
    from qrl.quantize import settings as choices
    from qrl.steps import quantize
    from qrl.study import pipeline, report

    choices.of(scheme, settings.quantize, settings.seed)  # told before an environment is built for it
    if not _sent():  # a study has said it of all its schemes
        report.warn(choices.unheeded(settings.quantize, (scheme,), {*ctx.obj, "quantize.schemes"}))
    if (folder := pipeline.environment_for("quantize", scheme)) is not None:
        quantize.sources(settings, models)  # so is this
        pipeline.hand_over(folder, "quantize", ctx.obj | {"scheme": scheme} | ({"models": models} if models else {}))
    else:
        quantize.quantize(settings, scheme, models)


@step("evaluate", "evaluate")
@click.option("--cells", metavar="VARIANT:SCHEME=MODEL,…", help="What to ask; default: base:full=<model>.")
@click.pass_context
def evaluate_command(ctx: click.Context, settings, cells: str | None) -> None:
    """Asks every cell the same held-out questions; a run a cell, a row a question. Unhealthy cells fail."""
    from qrl import evaluate as room
    from qrl.steps import evaluate
    from qrl.study import pipeline, report

    if not _sent():
        report.warn(room.unheeded(settings.evaluate))
    if (folder := pipeline.environment_for("evaluate", settings.evaluate.engine, settings.device)) is not None:
        evaluate.check(settings, cells)  # told before an environment of some GB is built for it
        pipeline.hand_over(folder, "evaluate", ctx.obj | ({"cells": cells} if cells else {}))
    else:
        evaluate.evaluate(settings, cells)


@step("diagnose", "diagnose")
@click.option("--base", metavar="DIR|MODEL", help="Checkpoint before training; default: the recipe's model.")
@click.option("--trained", required=True, metavar="DIR|MODEL", help="Checkpoint after training.")
@click.option(
    "--quantized",
    metavar="VARIANT:SCHEME=MODEL,…",
    help="The same two, base and grpo, quantized: what do they store of the update?",
)
@click.option("--out", metavar="DIR", help="Write files there, and leave MLflow alone.")
def diagnose_command(settings, base: str | None, trained: str, quantized: str | None, out: str | None) -> None:
    """Measures two checkpoints' weights layer by layer: outliers, 4-bit error, what training moved and what quantization keeps of it."""
    from qrl.steps import diagnose

    diagnose.diagnose(settings, base or settings.model, trained, quantized=quantized, out=out)


@step("compare", "compare")
@click.option(
    "--questions",
    metavar="FILE",
    help="Parquet, CSV, JSON or JSONL with variant, scheme, question, correct (0/1); optionally seed, sample, cluster.",
)
@click.option("--counts", metavar="FILE.json", help='{"n": 100, "base": {"full": 68, …}, "grpo": {…}}')
@click.option("--cells", metavar="RUN,…", help="Evaluation runs of cells, of one training seed or several.")
@click.option(
    "--rank",
    "methods",
    is_flag=True,
    help="One row a cell, best first, against base and grpo in full precision; no common schemes needed.",
)
@click.option(
    "--out", metavar="DIR", help="Write files there, and leave MLflow alone; needed with --questions, --counts."
)
def compare_command(
    settings, questions: str | None, counts: str | None, cells: str | None, methods: bool, out: str | None
) -> None:
    """Deltas and gain survival with paired intervals, and the verdict.

    Several values of `seed` are training runs: a random effect, never pooled. Several values of `sample` are answers to the
    same question: averaged per question, and pass@k beside. `cluster` names groups of questions that belong together.
    """
    from qrl.steps import compare

    given = [name for name, value in (("--questions", questions), ("--counts", counts), ("--cells", cells)) if value]
    if len(given) != 1:
        raise BadInput(
            f"compare reads one of --questions, --counts or --cells, but got {' and '.join(given) or 'none'}."
        )
    if methods and counts:
        raise BadInput("compare --rank pairs answers question by question: give --questions or --cells, not --counts.")
    run_ids = _listed("--cells", cells) if cells else []
    if cells and not out:
        (compare.methods if methods else compare.compare)(settings, run_ids)
    elif not out:
        raise BadInput(
            f"compare {given[0]} needs --out DIR: the folder to write {'methods' if methods else 'table'}.md, .json and figures to."
        )
    elif methods:
        compare.methods_files(questions, run_ids, out)
    else:
        compare.compare_files(settings, questions=questions, counts=counts, cells=run_ids, out=out)


@step("promote", "promote")
@click.option(
    "--stage", required=True, metavar="base|grpo|awq", help="Stage to promote to; several in order, by comma."
)
@click.option("--cell", metavar="RUN", help="The candidate's evaluation run; one a stage, by comma.")
@click.option("--rollback", is_flag=True, help="Return the stage to the version before its last promotion.")
def promote_command(settings, stage: str, cell: str | None, rollback: bool) -> None:
    """Moves a stage to an evaluated checkpoint, if its gate agrees. A refusal moves nothing and says why."""
    from qrl.steps import promote

    if rollback and cell:
        raise BadInput(
            "promote --rollback returns a stage to the version it had before and takes no --cell: leave one of the two out."
        )
    if rollback:
        promote.rollback(settings, stage)
    elif cell is None:
        raise BadInput("promote needs --cell RUN: the id of the candidate's evaluation run (a cell of `evaluate`).")
    else:
        promote.promote(settings, _listed("--stage", stage), _listed("--cell", cell))


@step("serve")
@click.option("--stage", required=True, metavar="base|grpo|awq|N", help="Stage or version number to serve.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option(
    "--engine", default="auto", show_default=True, metavar="auto|transformers|vllm", help="auto: vllm on a GPU."
)
@click.option(
    "--api-key",
    envvar="QRL_API_KEY",
    metavar="KEY",
    help="What clients must send, with vLLM; better in the variable QRL_API_KEY, for MLflow logs what is given by -P.",
)
@click.option(
    "--gpu-memory-utilization",
    "memory",
    type=Finite(0, 1, min_open=True),
    metavar="SHARE",
    help="Of the GPU's memory, for vLLM. [default: vLLM's own; 0.45 with --follow]",
)
@click.option(
    "--follow",
    "follow_s",
    is_flag=False,
    flag_value=5.0,
    type=Finite(0, min_open=True),
    metavar="[SECONDS]",
    help="With vLLM: look every so often whether the stage moved, and turn to its new version without losing a request. [alone: 5]",
)
@click.option(
    "--drain",
    "drain_s",
    type=Finite(0),
    metavar="SECONDS",
    help="With --follow: how long a replaced version may go on answering. [default: 300]",
)
@click.pass_context
def serve_command(ctx: click.Context, settings, engine: str, api_key: str | None, **given) -> None:
    """An OpenAI-compatible server of a registered stage, its gate and digest checked first."""
    from qrl.steps import serve
    from qrl.study import pipeline

    if (folder := pipeline.environment_for("serve", engine, settings.device)) is not None:
        serve.check_options("vllm", *(given[key] for key in ("stage", "memory", "follow_s", "drain_s")))
        serve.check(
            settings, given["stage"], host=given["host"], port=given["port"]
        )  # told before an environment of some GB is built for it
        if api_key:
            os.environ["QRL_API_KEY"] = api_key  # not a parameter, which the store would keep
        named = {"memory": "gpu-memory-utilization", "follow_s": "follow", "drain_s": "drain"}
        pipeline.hand_over(
            folder,
            "serve",
            ctx.obj
            | {"engine": engine}
            | {named.get(key, key): str(value) for key, value in given.items() if value is not None},
        )
    else:
        serve.serve(settings, engine=engine, api_key=api_key, **given)


@step("benchmark", "benchmark")
@click.option(
    "--stages",
    metavar="STAGE|N,…",
    help="Stages or versions; default: base, grpo, awq, and base under AWQ, as far as there are any.",
)
@click.option("--models", metavar="VARIANT:SCHEME=MODEL,…", help="Checkpoints instead of stages.")
@click.option(
    "--url", metavar="URL", help="Measure a running server of the first model with `vllm bench serve` instead."
)
@click.pass_context
def benchmark_command(ctx: click.Context, settings, stages: str | None, models: str | None, url: str | None) -> None:
    """Speed, latency and memory of stages side by side: one prompt at a time, and in batches.

    Models answer by evaluate.engine; a server is asked by vLLM's own `bench serve`, in vLLM's environment.
    """
    from qrl.steps import benchmark
    from qrl.study import pipeline

    if stages and models:
        raise BadInput("benchmark measures stages or models, but got both: give --stages or --models.")
    given = {"stages": stages, "models": models, "url": url}
    if (
        folder := pipeline.environment_for("benchmark", "vllm" if url else settings.evaluate.engine, settings.device)
    ) is not None:
        benchmark.subjects(settings, stages, models)  # told before an environment of some GB is built for it
        pipeline.hand_over(folder, "benchmark", ctx.obj | {key: value for key, value in given.items() if value})
    else:
        benchmark.benchmark(settings, **given)


@cli.command("grade")
@click.option("--task", required=True, metavar="TASK", help="Whose grader: arithmetic, gsm8k, math, deepmath.")
@click.option("--out", required=True, metavar="OUT.jsonl", help="Where the graded rows go.")
@click.option("--file", "named", metavar="FILE.jsonl", help="The same as the argument, for `mlflow run`'s -P file=….")
@click.argument("file", metavar="FILE.jsonl", required=False)
def grade_command(task: str, out: str, named: str | None, file: str | None) -> None:
    """Grades your own completions: rows with `completion` and `answer` in; `parsed`, `strict`, `flexible` added."""
    from qrl.tasks import files

    if (file is None) == (named is None):
        raise BadInput(
            "grade reads one file of completions: give FILE.jsonl, or --file FILE.jsonl, which is -P file=… of `mlflow run`."
        )
    click.echo(files.grade(task, file or named, out))


@cli.command("plan")
@click.option("--base-accuracy", type=float, metavar="P", help="Accuracy before training. [default: 0.68]")
@click.option("--gain", type=float, metavar="G", help="Accuracy that training will add. [default: 0.05]")
@click.option(
    "--drop",
    type=float,
    metavar="D",
    help="How much of the gain quantization will take: gain survival is −D. [default: 0.01]",
)
@click.option(
    "--correlation",
    type=float,
    metavar="R",
    help="Of a question's 0/1 outcomes before and after training. [default: 0.2]",
)
@click.option(
    "--scheme-correlation",
    type=float,
    metavar="R",
    help="Of its outcomes at full precision and quantized. [default: 0.7]",
)
@click.option(
    "--margin",
    type=float,
    metavar="M",
    help="Loss of gain that still counts as survival. [default: half the gain, at least 0.02]",
)
@click.option(
    "--power",
    type=float,
    default=0.8,
    show_default=True,
    metavar="P",
    help="Wanted chance that the study shows what is there.",
)
@click.option("--n", type=int, metavar="N", help="Questions that you have: what can they show?")
@click.option("--effect", type=float, metavar="E", help="A gain, or change of the gain: how many questions show it?")
@click.option(
    "--seeds", type=int, metavar="S", help="Training runs. [default: 1; several to choose from with --between-seed-sd]"
)
@click.option(
    "--between-seed-sd",
    type=float,
    metavar="SD",
    help="Of gain survival over training runs: what other seeds would differ by.",
)
@click.option(
    "--between-seed-sd-gain",
    type=float,
    metavar="SD",
    help="Of the gain over training runs. [default: --between-seed-sd]",
)
@click.option(
    "--own-questions",
    is_flag=False,
    flag_value=True,
    type=bool,
    metavar="[BOOL]",
    help="Each seed is asked questions of its own, as `arithmetic` does; else all the same.",
)
@click.option(
    "--pilot",
    metavar="FILE",
    help="questions.parquet of an earlier study: base accuracy, gain, drop and correlations from there.",
)
@click.option(
    "--scheme", metavar="SCHEME", help="Which scheme of the pilot. [default: the one that the gain survives least]"
)
@click.option("--out", metavar="DIR", help="Write table.md, table.json and a figure there.")
def plan_command(
    between_seed_sd: float | None, between_seed_sd_gain: float | None, own_questions: bool | None, **given
) -> None:
    """How many questions, and seeds, before any GPU time.

    \b
    python -m qrl plan --gain 0.05 --drop 0.01           n for the verdict, and to show the gain itself
    python -m qrl plan --n 1000                          what 1,000 questions can show
    python -m qrl plan --effect 0.03                     n that shows a gain, or a change of the gain, of 0.03
    python -m qrl plan --pilot questions.parquet         the same, from what an earlier study found
    python -m qrl plan --gain 0.1 --between-seed-sd 0.01 training runs too, where seeds differ

    Correlation is what pairing lives on: the likelier a question is answered alike in two cells, the fewer are needed.
    Chances follow the verdict's own rule, margin and all; needs no store.
    """
    from qrl.steps import plan

    asked = {key: given.pop(key) for key in ("pilot", "scheme", "n", "effect", "power", "seeds", "out")}
    between_gain = between_seed_sd if between_seed_sd_gain is None else between_seed_sd_gain
    given |= {"between_survival": between_seed_sd, "between_gain": between_gain, "own_questions": own_questions}
    plan.make({key: value for key, value in given.items() if value is not None}, **asked)


def _listed(option: str, text: str) -> list[str]:
    """What an option lists by comma, without the spaces and the comma at its end that come with copying."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise BadInput(f"{option} is '{text}', which names nothing: name one, or several by comma.")
    return found


def _sent() -> bool:
    """Whether a study, or this step itself from another environment, sent us: it has said what there was to say of our settings."""
    from qrl.study import pipeline
    from qrl.tracking import runs

    return pipeline.PLACE in os.environ or runs.is_launched()


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and ends with its exit code; errors that a sentence can tell are told in one."""
    ending.run(cli, arguments)
