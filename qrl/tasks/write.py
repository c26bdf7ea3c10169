r"""Write `arithmetic` in the form of larger data sets: `python -m qrl.tasks.write --as math --out DIR`.

A small model made by `qrl.tiny.make` can answer these questions, and a study on them runs the loaders, prompts and
graders of GSM8K, MATH and DeepMath: later, only `model` and `data` change. The folder holds train.jsonl and test.jsonl,
or, with `--layout hub`, copies of the hub's repositories with their paths, configurations, splits and columns.

The questions are `arithmetic`'s, of its own two splits, so no model made here was trained on a held-out one, and no
held-out one shares 13 words in a row with a training one (`train.max_ngram_share`). What they lack of the originals is
filled in: MATH's seven subjects are the seven kinds of a last step, a level is a number of steps, and DeepMath's
three solutions are the same worked one.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import click

from qrl import process
from qrl.errors import BadInput
from qrl.tasks import arithmetic, contamination, deepmath, gsm8k, rows
from qrl.tasks.arithmetic import Problem
from qrl.tasks.math import dataset
from qrl.workspace import write_atomically

KINDS = (*arithmetic.KINDS, "together")
PARQUET = "{}-00000-of-00001.parquet"
Fields = dict[str, str | int | float]


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--as", "form", type=click.Choice(["gsm8k", "math", "deepmath"]), required=True, help="The data set.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make; pass it as data=DIR.")
@click.option("--n", default=4000, show_default=True, type=click.IntRange(1), help="Training questions.")
@click.option("--heldout", default=1000, show_default=True, type=click.IntRange(2), help="Held-out questions.")
@click.option("--seed", default=0, show_default=True, help="Which questions are generated.")
@click.option("--layout", type=click.Choice(["files", "hub"]), default="files", show_default=True,
              help="train.jsonl and test.jsonl, or the hub's repositories, mostly in parquet.")  # fmt: skip
def main(form: str, out: Path, n: int, heldout: int, seed: int, layout: str) -> None:
    with process.sentences():
        write(form, out, n, heldout, seed, layout)
        print(f"{out} holds {n:,} training and {heldout:,} held-out questions as {form}: use task={form} data={out}")


def write(form: str, out: Path, n: int, heldout: int, seed: int = 0, layout: str = "files") -> None:
    """Write a folder that `data=OUT` loads for the task `form`; the folder appears whole or not at all.

    Args:
        form: "gsm8k", "math" or "deepmath".
        n: training questions.
        heldout: held-out questions.
        layout: "files" (train.jsonl, test.jsonl) or "hub" (OWNER/NAME/… as the hub has it).

    Raises:
        BadInput: the folder exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} exists and is not empty: give a new folder.")
    # DeepMath has one split, which its loader divides by a hash of its own: keep what both divide alike.
    keep = deepmath.split_of if form == "deepmath" and layout == "hub" else arithmetic.split_of

    def problems(split: str) -> Iterator[Problem]:
        return (problem for problem in arithmetic.problems(split, seed) if keep(problem.question) == split)

    training = list(islice(problems("train"), n))
    training_grams: set[tuple[str, ...]] = set()
    for problem in training:
        training_grams.update(contamination.grams(problem.question))
    without_overlap = (
        problem for problem in problems("heldout") if training_grams.isdisjoint(contamination.grams(problem.question))
    )
    parts = {"train": training, "heldout": list(islice(without_overlap, heldout))}
    with write_atomically(out) as folder:
        if layout == "hub":
            HUB[form](folder, parts)
            return
        for split, name in rows.FILES.items():
            to_row = ROWS[form]
            _jsonl(folder / name, [to_row(index, split, problem) for index, problem in enumerate(parts[split])])


def _gsm8k(index: int, split: str, problem: Problem) -> Fields:
    return {"question": problem.question, "answer": arithmetic.solve(problem, form="gsm8k")[0]}


def _math(index: int, split: str, problem: Problem) -> Fields:
    """Return a row with MATH's columns, or with MATH-500's for the held-out split."""
    solution, answer = arithmetic.solve(problem, form="math")
    subject = _subject(problem)
    level = len(problem.steps)
    if split == "train":
        return {"problem": problem.question, "level": f"Level {level}", "type": _title(subject), "solution": solution}
    return {
        "problem": problem.question,
        "solution": solution,
        "answer": str(answer),
        "subject": _title(subject),
        "level": level,
        "unique_id": f"test/{subject}/{index}.json",
    }


def _deepmath(index: int, split: str, problem: Problem) -> Fields:
    solution, answer = arithmetic.solve(problem, form="math")
    return {
        "question": problem.question,
        "final_answer": str(answer),
        "difficulty": float(len(problem.steps)),
        "topic": f"Mathematics -> {_title(_subject(problem))} -> Word Problems",
        "r1_solution_1": solution,
        "r1_solution_2": solution,
        "r1_solution_3": solution,
    }


ROWS: dict[str, Callable[[int, str, Problem], Fields]] = {"gsm8k": _gsm8k, "math": _math, "deepmath": _deepmath}


def _hub_gsm8k(mirror: Path, parts: dict[str, list[Problem]]) -> None:
    train = [_gsm8k(index, "train", problem) for index, problem in enumerate(parts["train"])]
    test = [_gsm8k(index, "heldout", problem) for index, problem in enumerate(parts["heldout"])]
    _repository(mirror / gsm8k.HUB, {gsm8k.CONFIG: {"train": train, "test": test}})


def _hub_math(mirror: Path, parts: dict[str, list[Problem]]) -> None:
    """Write MATH-500, and MATH by subject, where the test files hold MATH-500's problems and others."""
    heldout = [_math(index, "heldout", problem) for index, problem in enumerate(parts["heldout"])]
    _jsonl(mirror / dataset.HELDOUT / "test.jsonl", heldout)
    (mirror / dataset.HELDOUT / "README.md").write_text("---\nlanguage:\n- en\n---\n")

    by_subject = {subject: {"train": [], "test": []} for subject in dataset.SUBJECTS}
    for index, problem in enumerate([*parts["train"], *parts["heldout"]]):
        # As in MATH, the test files also hold problems that are not held out: the loader must tell them apart.
        is_test = index >= len(parts["train"]) or index % 3 == 0
        by_subject[_subject(problem)]["test" if is_test else "train"].append(_math(index, "train", problem))
    if not all(splits["train"] and splits["test"] for splits in by_subject.values()):
        shortage = (
            f"{len(parts['train'])} training questions are too few to have each of MATH's subjects in both its parts"
        )
        raise BadInput(f"{shortage}: give --n 500 or more.")
    _repository(mirror / dataset.WHOLE, by_subject)


def _hub_deepmath(mirror: Path, parts: dict[str, list[Problem]]) -> None:
    problems = [*parts["train"], *parts["heldout"]]
    rows = [_deepmath(index, "train", problem) for index, problem in enumerate(problems)]
    _repository(mirror / deepmath.HUB, {"default": {"train": rows}}, subfolder="data")


HUB = {"gsm8k": _hub_gsm8k, "math": _hub_math, "deepmath": _hub_deepmath}


def _repository(folder: Path, configs: dict[str, dict[str, list[Fields]]], subfolder: str | None = None) -> None:
    """Write a data set's repository: a folder per configuration, a parquet file per split, the card that lists them.

    Args:
        configs: configuration → split → rows.
        subfolder: the folder of the files; None: one with the name of the configuration.
    """
    import pyarrow
    from pyarrow import parquet

    card = []
    for config, splits in configs.items():
        data_folder = folder / (subfolder or config)
        data_folder.mkdir(parents=True, exist_ok=True)
        data_files = []
        for split, split_rows in splits.items():
            parquet.write_table(pyarrow.Table.from_pylist(split_rows), data_folder / PARQUET.format(split))
            data_files.append({"split": split, "path": f"{data_folder.name}/{split}-*"})
        card.append({"config_name": config, "data_files": data_files})
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': card}, indent=1)}\n---\n")


def _jsonl(file: Path, rows: Iterable[Fields]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _subject(problem: Problem) -> str:
    return dataset.SUBJECTS[KINDS.index(problem.steps[-1].kind)]


def _title(subject: str) -> str:
    return subject.replace("_", " ").title().replace("And", "&")


if __name__ == "__main__":
    main()
