"""Commands that need no store: `plan`, `grade`, and the lists of recipes and schemes."""

import re
from pathlib import Path

import click
from click import option

from qrl import names
from qrl.cli.options import SWITCH, parse_pairs
from qrl.errors import BadInput

SCHEMES = Path(__file__).parents[1] / "quantize" / "README.md"  # its first table


@click.command("plan")
@option("--base-accuracy", type=float, metavar="P", help="Accuracy before training. [default: 0.68]")
@option("--gain", type=float, metavar="G", help="Expected gain in accuracy from training. [default: 0.05]")
@option("--drop", type=float, metavar="D", help="Accuracy that quantization takes from the gain. [default: 0]")
@option("--correlation", type=float, metavar="R", help="Correlation, before and after training. [default: 0.2]")
@option("--scheme-correlation", type=float, metavar="R", help="Correlation, full against quantized. [default: 0.7]")
@option("--margin", type=float, metavar="M", help="Loss that still counts as survival. [default: gain/10, ≥ 0.01]")
@option("--power", default=0.8, metavar="P", help="Power: chance of detecting a true effect.")
@option("--n", type=int, metavar="N", help="Number of questions that you have: show what they can detect.")
@option("--effect", type=float, metavar="E", help="A gain, or a change in gain: show how many questions detect it.")
@option("--seeds", type=int, metavar="S", help="Training runs. [default: 1; several with --between-seed-sd]")
@option("--between-seed-sd", type=float, metavar="SD", help="Standard deviation of gain survival between seeds.")
@option("--between-seed-sd-gain", type=float, metavar="SD", help="The same of the gain. [default: as above]")
@option("--own-questions", **SWITCH, help="Seeds draw their own questions, as in the task arithmetic, and share none.")
@option("--pilot", metavar="FILE", help="questions.parquet of an earlier study, to estimate the numbers above.")
@option("--scheme", metavar="SCHEME", help="Scheme of the pilot. [default: the one that loses most of the gain]")
@option("--reference", metavar="SCHEME", help="The pilot's name for full precision, such as bf16. [default: full]")
@option("--out", metavar="DIR", help="Write table.md, table.json and a figure there.")
def plan_command(between_seed_sd: float | None, between_seed_sd_gain: float | None, **options) -> None:
    """Compute how many questions and training seeds a study needs.

    \b
    qrl plan --gain 0.2 --drop 0.01             n for a verdict, and n to show the gain itself
    qrl plan --n 1000                           what 1,000 questions can detect
    qrl plan --effect 0.03                      n that detects a gain, or a change in gain, of 0.03
    qrl plan --pilot questions.parquet          the same, with the numbers of an earlier study
    qrl plan --gain 0.1 --between-seed-sd 0.01  training seeds too, if their results differ

    Every cell answers the same questions. The more two cells agree on them (correlation), the fewer are needed.
    Studies are simulated and judged by the verdict's own rule, which takes a few seconds. No store is needed.
    """
    from qrl.steps import plan

    question = {
        key: options.pop(key) for key in ("pilot", "scheme", "reference", "n", "effect", "power", "seeds", "out")
    }
    assumptions = {key: value for key, value in options.items() if value is not None}
    if between_seed_sd is not None:
        assumptions["between_survival"] = between_seed_sd
    sd_of_gain = between_seed_sd if between_seed_sd_gain is None else between_seed_sd_gain
    if sd_of_gain is not None:
        assumptions["between_gain"] = sd_of_gain
    plan.make(assumptions, **question)


@click.command("grade")
@option("--task", required=True, metavar="TASK", help="Grader to use: arithmetic, gsm8k, math, deepmath, or FILE.py.")
@option("--out", required=True, metavar="OUT.jsonl", help="File for the graded rows.")
@option("--columns", metavar="OURS=THEIRS,…", help="Other names of columns, such as completion=output,answer=target.")
@option(
    "--max-grader-fault-rate",
    type=float,
    metavar="P",
    help="Largest share of completions on which the grader may fail. [default: 0.01, as in `evaluate`]",
)
@option("--file", "file_option", metavar="FILE", help="The same as the argument, for `mlflow run … -P file=…`.")
@click.argument("file", metavar="FILE", required=False)
def grade_command(
    task: str,
    out: str,
    columns: str | None,
    max_grader_fault_rate: float | None,
    file_option: str | None,
    file: str | None,
) -> None:
    """Grade your own completions, for `compare` to judge.

    \b
    qrl grade --task gsm8k answers.jsonl --out graded.jsonl     rows of all cells
    qrl grade --task gsm8k base:full=a.jsonl,grpo:full=b.jsonl,base:nf4=c.jsonl,grpo:nf4=d.jsonl --out graded.jsonl
    qrl compare --questions graded.jsonl --out report

    FILE is parquet, CSV, JSON or JSONL. Rows with `completion` and `answer` get `parsed`, `strict`, `flexible` and
    `correct`, which is `strict` as 0 or 1. Where the grader failed on more than a share P of them, the rows are
    written and the exit code is 1.
    """
    from qrl.tasks import files

    if (file is None) == (file_option is None):
        raise BadInput("grade reads one file of completions: give it as FILE.jsonl or as --file FILE.jsonl.")
    column_names = parse_pairs("--columns", columns)
    click.echo(files.grade_file(task, file or file_option, out, column_names, max_grader_fault_rate))


@click.command("recipes")
@click.argument("name", metavar="[NAME|FILE.yaml]", required=False)
def recipes_command(name: str | None) -> None:
    """List the recipes, or show all settings of one.

    \b
    qrl recipes                               what each is for
    qrl recipes tiny-qlora > mine.yaml        a file to change: --recipe mine.yaml
    """
    from qrl import recipe

    if name is not None:
        comment = "\n".join(f"# {line}" for line in recipe.about(name).splitlines())
        click.echo(f"{comment}\n{recipe.load(name).dump()}", nl=False)
        return
    for recipe_name in recipe.names():
        description = " ".join(recipe.about(recipe_name).split())
        first_sentence = description.partition(". ")[0].rstrip(".")
        untried = " Not run on real weights yet." if "not run" in description.lower() else ""
        click.echo(f"{recipe_name:24} {first_sentence}.{untried}")


@click.command("schemes")
def schemes_command() -> None:
    """List the schemes, with what each stores and needs.

    The figures were measured on the shipped model.
    """
    heads, rows = _table_of_schemes()
    bits_head, cost_head = heads[-2:]
    for scheme, weights, activations, library, calibrated, fields, bits, cost in rows:
        texts = {"no": "", "yes": ", calibration texts"}.get(calibrated, f", calibration texts for {calibrated}")
        settings = f"; uses quantize.{fields}" if fields else ""
        click.echo(f"{scheme:10} {weights}; activations {activations}")
        click.echo(f"{'':10} needs {library}{texts}{settings}")
        if bits:
            measured = f", {cost_head} {cost}, n = 1,000" if cost else ""
            click.echo(f"{'':10} measured on qrl-tiny: {bits} {bits_head}{measured}")
    kv_fp8 = "a cell of its own for a scheme that vLLM runs with key-value cache in FP8, such as awq+kv-fp8"
    click.echo(f"{names.KV_FP8:10} {kv_fp8}; uses evaluate.kv_fp8")


def _table_of_schemes() -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of the table in the README of the schemes, without links and code marks."""
    text = SCHEMES.read_text(encoding="utf-8")
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("`", "")
    table = text[text.index("| scheme |") :].partition("\n\n")[0]
    heads, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return heads, rows


COMMANDS = (plan_command, grade_command, recipes_command, schemes_command)
