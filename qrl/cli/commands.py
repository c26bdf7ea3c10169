"""The command line: `python -m qrl <step>`, which the MLproject's entry points call too.

A step's options are the recipe's fields, made by `options.py`, and the few inputs below. Nothing heavy is imported
before a command runs, so that `--help` answers at once.
"""

from functools import partial

import click
from click import option

import qrl
from qrl import names
from qrl.cli import doctor, jobs, models, standalone
from qrl.cli.options import SWITCH, RecipeCommand, Typed, parse_list, parse_pairs
from qrl.errors import BadInput

ALL = ("train", "rollout", "watch", "merge", "quantize", "evaluate", "diagnose", "compare", "promote")
DATA = ("model", "task", "data", "seed", "device")  # fields that `--help` shows first
STUDY = (*DATA, "train.steps", "train.method", "quantize.schemes", "evaluate.n")
TRAIN_READS = ("train", "rollout", "watch", "quantize.group_size", "quantize.layers")  # the last two are train.qat's
TRAIN = (*DATA, "train.steps", "train.method", "train.learning_rate", "train.qat", "rollout.engine")
CALIBRATION = ("quantize.calibration", "quantize.calibration_samples")
QUANTIZE = (*DATA, "quantize.group_size", "quantize.layers", "quantize.bits", *CALIBRATION)
EVALUATE = (*DATA, "evaluate.n", "evaluate.max_new_tokens", "evaluate.samples", "evaluate.engine")
DIAGNOSE = (*DATA, "diagnose.bits", "diagnose.group_size", "diagnose.behaviour")
ROWS = "Parquet, CSV, JSON or JSONL with variant, scheme, question, correct (0..1); optionally seed, sample, cluster. "
ROWS += "VARIANT:SCHEME=FILE,… for a file per cell."
LOGS = "Logs of lm-evaluation-harness (samples_*.jsonl) or inspect_ai (.eval, .json): a file, or a folder with one."
SCHEMES = ", ".join(names.QUANTIZED_SCHEMES)
YES = option("--yes", **SWITCH, help="Start even if the check of machine, memory or the base's trial fails.")
FAILING = ("lost", "reduced", "inconclusive")  # verdicts of --fail-on
APPLIES_TO = {  # option of `compare` → the inputs that it is about
    "columns": ("--questions",),
    "where": ("--questions",),
    "metric": ("--logs",),
    "filter": ("--logs",),
    "reference": ("--questions", "--logs", "--counts"),
    "missing": ("--questions", "--logs"),
}
WARM = "qrl.warm processes"  # of a study, in the context of its command
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}


class Commands(click.Group):
    """The commands, in the order in which data passes through them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of their definition, not of the alphabet."""
        return list(self.commands)


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(qrl.__version__, prog_name="qrl")
def cli() -> None:
    """Does RL post-training change how cleanly a model quantizes?

    `study` answers this for one model. It trains with GRPO, quantizes the model before and after training, evaluates
    every variant under every scheme on the same held-out questions, and reports what share of the gain is kept,
    with an interval. Other commands run one step of it, or work on your own files.

    Exit codes: 0 done; 1 a step failed; 2 bad input; 3 refused by a gate, or by --fail-on; 130 Ctrl-C.
    """


class StudyCommand(RecipeCommand):
    """`study`: a warm process imports what the last steps need while the study makes its own imports."""

    def invoke(self, ctx: click.Context):
        """Start the warm process, which ends with the command, and run the command."""
        from qrl.study.warming import WarmProcesses

        ctx.meta[WARM] = ctx.with_resource(WarmProcesses())
        ctx.meta[WARM].begin()
        return super().invoke(ctx)


@cli.command("study", cls=StudyCommand, sections=ALL, first=STUDY, checkout=True)
@YES
@click.pass_obj
def study_command(typed: Typed, settings, yes: bool | None) -> None:
    """Run the whole study and print the verdict.

    Its steps are train, quantize, evaluate, diagnose, compare and promote. Finished steps are reused.

    \b
    qrl study                                                 the shipped model: minutes on two cores
    qrl study --model FOLDER --task gsm8k --data FOLDER       your model, your questions
    qrl study --recipe tiny-qlora --train.steps 8 --seed 1    a recipe, with changes
    """
    from qrl import recipe
    from qrl.study import build

    name = typed.overrides["recipe"]
    if name == recipe.DEFAULT:
        name = recipe.default(typed.overrides)
    build.announce(settings, name)
    from qrl.study import pipeline  # takes seconds, during which the announcement can be read

    warm_processes = click.get_current_context().meta[WARM]
    pipeline.study(settings, typed.overrides, yes=bool(yes), begun=warm_processes)


@cli.command("sweep", cls=RecipeCommand, sections=ALL, first=STUDY, auto="tiny-ptq", checkout=True)
@option(
    "--models",
    "addresses",
    metavar="MODEL,…",
    help="Models, each with every method; adds a table of the losses by size.",
)
@option(
    "--arms",
    "arm_names",
    metavar="NAME|FILE.yaml,…",
    help="Recipes or changes of --recipe: the other methods. [default: qrl-tiny's, in qrl/study/README.md]",
)
@option("--seeds", default="0", metavar="N,…", help="Seeds; every method runs under each.")
@option("--register", **SWITCH, help="Promote the best quantized cell of each model, through its gates.")
@YES
@click.pass_obj
def sweep_command(
    typed: Typed, settings, addresses: str | None, arm_names: str | None, seeds: str, register, yes: bool | None
) -> None:
    """Train several methods under several seeds, and rank them.

    --recipe is GRPO in full precision, quantized afterwards (PTQ). --arms are the other methods, by default QLoRA,
    quantization-aware training (QAT) and distillation. All other options apply to every method.

    \b
    qrl sweep --seeds 0,1,2
    qrl sweep --arms qat-int4,tiny-qlora --evaluate.n 1000
    qrl sweep --models FOLDER,FOLDER --recipe my.yaml --arms qat-int4
    """
    from qrl.study import arms, sweep

    overrides = {key: text for key, text in typed.overrides.items() if key not in ("recipe", "seed")}
    first_recipe = arms.FIRST if typed.overrides["recipe"] == "auto" else typed.overrides["recipe"]
    other_recipes = arms.ARMS if arm_names is None else tuple(parse_list("--arms", arm_names))
    if addresses and "model" in overrides:
        raise BadInput("sweep got both --model and --models: give --models alone.")
    models = {} if addresses is None else arms.parse_models(parse_list("--models", addresses))
    sweep.study(
        first_recipe,
        other_recipes,
        arms.parse_seeds(seeds, typed.overrides.get("seed")),
        overrides,
        models=models,
        register=bool(register),
        yes=bool(yes),
    )


@cli.command("train", cls=RecipeCommand, sections=TRAIN_READS, first=TRAIN, checkout=True)
@click.pass_obj
def train_command(typed: Typed, settings) -> None:
    """Train with GRPO, or distil from a teacher.

    A training that was killed resumes from its last checkpoint when the same command runs again.

    \b
    qrl train --train.steps 50 --train.learning_rate 1e-5
    qrl train --recipe tiny-lora               an adapter, to be merged next
    qrl train --train.teacher models:/m-…      distil from a logged model, or from a folder
    """
    from qrl.steps import train
    from qrl.tracking import places

    check = partial(train.check, settings)
    work = partial(train.train, settings)
    typed.run("train", places.trained_by(settings), check, work)


@cli.command("merge", cls=RecipeCommand, sections=("merge",), first=(*DATA, "merge.into"), checkout=True)
@option("--adapter", required=True, metavar="DIR|MODEL", help="PEFT adapter to merge into the recipe's model.")
def merge_command(settings, adapter: str) -> None:
    """Merge an adapter into its full-precision base. The KL from the trained model is measured, and limited."""
    from qrl.steps import train

    train.merge(settings, adapter)


@cli.command("quantize", cls=RecipeCommand, sections=("quantize",), first=QUANTIZE, checkout=True)
@option("--scheme", default="nf4", metavar="SCHEME,…", help=f"One or more, separated by commas, of {SCHEMES}.")
@option("--models", metavar="VARIANT=MODEL,…", help="Models to quantize. [default: base=<model>]")
@click.pass_obj
def quantize_command(typed: Typed, settings, scheme: str, models: str | None) -> None:
    """Quantize models under one scheme or several. All get the same settings and calibration set.

    \b
    qrl quantize --scheme nf4 --models base=FOLDER,grpo=FOLDER
    qrl quantize --scheme gptq,w8a16 --quantize.group_size 64
    qrl schemes                                what each scheme stores and needs
    """
    from qrl.quantize import settings as scheme_settings
    from qrl.steps import quantize
    from qrl.study import build, report

    schemes = build.together(scheme)
    for scheme_name in schemes:
        # Refuses bad input before the warnings.
        scheme_settings.settings_of(scheme_name, settings.quantize, settings.seed)
    report.warn(scheme_settings.unheeded(settings.quantize, schemes, {*typed.overrides, "quantize.schemes"}))
    check = partial(quantize.check_sources, settings, models)
    work = partial(quantize.quantize, settings, schemes, models)
    typed.run("quantize", schemes[0], check, work)


@cli.command("evaluate", cls=RecipeCommand, sections=("evaluate",), first=EVALUATE, checkout=True)
@option("--cells", metavar="VARIANT:SCHEME=MODEL,…", help="Cells to evaluate. [default: base:full=<model>]")
@click.pass_obj
def evaluate_command(typed: Typed, settings, cells: str | None) -> None:
    """Evaluate cells on the same held-out questions.

    Every cell gets a run of its own, with a row per question. A cell that breaks a health limit fails.

    \b
    qrl evaluate --cells base:full=FOLDER,base:nf4=FOLDER
    qrl evaluate --model FOLDER --task gsm8k --evaluate.n 500
    """
    from qrl.recipe import rules
    from qrl.steps import evaluate
    from qrl.study import report

    report.warn(rules.warnings(settings, rules.EVALUATING))
    check = partial(evaluate.check_cells, settings, cells)
    work = partial(evaluate.evaluate, settings, cells)
    typed.run("evaluate", settings.evaluate.engine, check, work)


@cli.command("diagnose", cls=RecipeCommand, sections=("diagnose",), first=DIAGNOSE, checkout=True)
@option("--base", metavar="DIR|MODEL", help="Checkpoint before training. [default: the recipe's model]")
@option("--trained", required=True, metavar="DIR|MODEL", help="Checkpoint after training, as train or merge print it.")
@option("--quantized", metavar="VARIANT:SCHEME=MODEL,…", help="The same two, as base and grpo, quantized.")
@option("--out", metavar="DIR", help="Write files there, without MLflow.")
def diagnose_command(settings, base: str | None, trained: str, quantized: str | None, out: str | None) -> None:
    """Measure how training moved the weights, layer by layer.

    The report has outliers, the 4-bit error and the update; with --quantized, also what quantization keeps of it.
    """
    from qrl.steps import diagnose

    diagnose.diagnose(settings, base or settings.model, trained, quantized=quantized, out=out)


@cli.command("compare", cls=RecipeCommand, sections=("compare",), first=("compare.margin",))
@option("--questions", metavar="FILE", help=ROWS)
@option("--logs", metavar="VARIANT:SCHEME=LOG,…", help=LOGS)
@option("--metric", metavar="NAME", help="With --logs: the score to compare, from 0 to 1. [default: the only one]")
@option("--filter", metavar="NAME", help="With --logs of lm-eval: the filter, as strict-match. [default: the only one]")
@option("--counts", metavar="FILE.json", help='{"n": 100, "base": {"full": 68, …}, "grpo": {…}}')
@option(
    "--columns", metavar="OURS=THEIRS,…", help="Other names of columns, such as correct=exact_match,question=doc_id."
)
@option("--where", metavar="COLUMN=VALUE,…", help="Rows to keep, such as filter=strict-match; the others are ignored.")
@option("--reference", metavar="SCHEME", help="The files' name for full precision, such as bf16. [default: full]")
@option("--missing", metavar="wrong", help="Count answers that a cell lacks as wrong. [default: refuse the cell]")
@option("--cells", metavar="RUN,…", help="Evaluation runs of cells, under one training seed or several.")
@option("--rank", **SWITCH, help="Rank cells by accuracy, against base and grpo in full precision.")
@option(
    "--fail-on",
    metavar="VERDICT,…",
    help="End with exit code 3 if a scheme has this verdict: lost, reduced, inconclusive.",
)
@option("--out", metavar="DIR", help="Write files there, without MLflow; required unless --cells is given.")
def compare_command(settings, rank: bool | None, out: str | None, fail_on: str | None, **inputs: str | None) -> None:
    """Compute gains and gain survival with paired intervals.

    \b
    qrl compare --questions graded.jsonl --out report                   rows that `grade` wrote, or your own
    qrl compare --questions base:bf16=a.jsonl,grpo:bf16=b.jsonl,base:nf4=c.jsonl,grpo:nf4=d.jsonl \\
        --columns correct=right,question=id --reference bf16 --out report
    qrl compare --logs base:full=a.jsonl,grpo:full=b.jsonl,base:nf4=c.jsonl,grpo:nf4=d.jsonl \\
        --filter strict-match --fail-on lost --out report              lm-evaluation-harness or inspect_ai

    `seed` numbers training runs: a random effect, never pooled. `sample` numbers answers to the same question: averaged
    per question, with pass@k beside them. `cluster` names groups of questions that are not independent.
    """
    from qrl.steps import compare
    from qrl.study import environments

    source = _source_of_outcomes(inputs)
    if rank and source == "--counts":
        raise BadInput("compare --rank pairs answers question by question: give --questions or --cells, not --counts.")
    if not out and source != "--cells":
        raise BadInput(f"compare {source} needs --out DIR: the folder for the table and the figures.")
    failing = [] if fail_on is None else parse_list("--fail-on", fail_on)
    unknown_verdicts = sorted({*failing}.difference(FAILING))
    if unknown_verdicts:
        raise BadInput(f"--fail-on has '{unknown_verdicts[0]}': expected {' or '.join(FAILING)}, several by comma.")
    if rank and failing:
        raise BadInput("compare --rank gives no verdicts for --fail-on to read: omit one of them.")

    run_ids = parse_list("--cells", inputs["cells"]) if inputs["cells"] else []
    if out:
        parsed = {
            "cells": run_ids,
            "columns": parse_pairs("--columns", inputs["columns"]),
            "where": parse_pairs("--where", inputs["where"]),
        }
        compare.files(settings, **(inputs | parsed), rank=bool(rank), out=out, failing=failing)
    elif rank:
        compare.methods(settings, run_ids)
    else:
        environments.check_checkout("compare")
        compare.compare(settings, run_ids, failing)


def _source_of_outcomes(inputs: dict[str, str | None]) -> str:
    """Return the one option of `compare` that says what to compare; raise BadInput unless the others fit it."""
    sources = [f"--{name}" for name in ("questions", "logs", "counts", "cells") if inputs[name]]
    if len(sources) != 1:
        given = " and ".join(sources) or "none"
        raise BadInput(f"compare needs one of --questions, --logs, --counts or --cells, not {given}.")
    (source,) = sources
    for name, fitting in APPLIES_TO.items():
        if inputs[name] is not None and source not in fitting:
            raise BadInput(f"--{name} is about files of {' or '.join(fitting)}, not {source}: omit it.")
    return source


for command in (*models.COMMANDS, *doctor.COMMANDS, *jobs.COMMANDS, *standalone.COMMANDS):
    cli.add_command(command)
