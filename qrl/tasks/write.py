r"""Write `arithmetic` as the data sets that it stands for: `python -m qrl.tasks.write --as math --out DIR`.

A small model made by `qrl.tiny.make` can answer these questions, and a study on them runs the loaders, prompts and
graders of GSM8K, MATH and DeepMath: later, only `model` and `data` change. The folder holds train.jsonl and test.jsonl,
or, with `--layout hub`, copies of the hub's repositories with their paths, configurations, splits and columns.

The questions are `arithmetic`'s, of its own two splits, so no model made here was trained on a held-out one, and no
held-out one shares 13 words in a row with a training one (`train.max_ngram_share`). What they lack of the originals is
filled in: MATH's seven subjects stand for the seven kinds of a last step, a level is a number of steps, and DeepMath's
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
from qrl.workspace import written_whole

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
        return (p for p in arithmetic.problems(split, seed) if keep(p.question) == split)

    parts = {"train": list(islice(problems("train"), n))}
    trained = {gram for problem in parts["train"] for gram in contamination.grams(problem.question)}
    others = (p for p in problems("heldout") if trained.isdisjoint(contamination.grams(p.question)))
    parts["heldout"] = list(islice(others, heldout))
    with written_whole(out) as folder:
        if layout == "hub":
            HUB[form](folder, parts)
            return
        for split, name in rows.FILES.items():
            _jsonl(folder / name, (ROWS[form](i, split, problem) for i, problem in enumerate(parts[split])))


def _gsm8k(index: int, split: str, problem: Problem) -> Fields:
    return {"question": problem.question, "answer": arithmetic.solve(problem, form="gsm8k")[0]}


def _math(index: int, split: str, problem: Problem) -> Fields:
    """Return a row with MATH's columns, or with MATH-500's for the held-out split."""
    solution, answer = arithmetic.solve(problem, form="math")
    texts, subject, level = {"problem": problem.question}, _subject(problem), len(problem.steps)
    if split == "train":
        return texts | {"level": f"Level {level}", "type": _title(subject), "solution": solution}
    texts |= {"solution": solution, "answer": str(answer), "subject": _title(subject)}
    return texts | {"level": level, "unique_id": f"test/{subject}/{index}.json"}


def _deepmath(index: int, split: str, problem: Problem) -> Fields:
    solution, answer = arithmetic.solve(problem, form="math")
    topic = f"Mathematics -> {_title(_subject(problem))} -> Word Problems"
    fields = {"question": problem.question, "final_answer": str(answer), "difficulty": float(len(problem.steps))}
    return fields | {"topic": topic} | {f"r1_solution_{i}": solution for i in (1, 2, 3)}


ROWS: dict[str, Callable[[int, str, Problem], Fields]] = {"gsm8k": _gsm8k, "math": _math, "deepmath": _deepmath}


def _hub_gsm8k(mirror: Path, parts: dict[str, list[Problem]]) -> None:
    own = {split: [_gsm8k(i, split, problem) for i, problem in enumerate(parts[split])] for split in parts}
    _repository(mirror / gsm8k.HUB, {gsm8k.CONFIG: {"train": own["train"], "test": own["heldout"]}})


def _hub_math(mirror: Path, parts: dict[str, list[Problem]]) -> None:
    """Write MATH-500, and MATH by subject, where the test files hold MATH-500's problems and others."""
    heldout = [_math(i, "heldout", problem) for i, problem in enumerate(parts["heldout"])]
    _jsonl(mirror / dataset.HELDOUT / "test.jsonl", heldout)
    (mirror / dataset.HELDOUT / "README.md").write_text("---\nlanguage:\n- en\n---\n")
    whole = {subject: {"train": [], "test": []} for subject in dataset.SUBJECTS}
    for i, problem in enumerate([*parts["train"], *parts["heldout"]]):
        is_test = i >= len(parts["train"]) or i % 3 == 0
        whole[_subject(problem)]["test" if is_test else "train"].append(_math(i, "train", problem))
    if not all(part for splits in whole.values() for part in splits.values()):
        few = f"{len(parts['train'])} training questions are too few to have each of MATH's subjects in both its parts"
        raise BadInput(f"{few}: give --n 500 or more.")
    _repository(mirror / dataset.WHOLE, whole)


def _hub_deepmath(mirror: Path, parts: dict[str, list[Problem]]) -> None:
    own = [_deepmath(i, "train", problem) for i, problem in enumerate([*parts["train"], *parts["heldout"]])]
    _repository(mirror / deepmath.HUB, {"default": {"train": own}}, beneath="data")


HUB = {"gsm8k": _hub_gsm8k, "math": _hub_math, "deepmath": _hub_deepmath}


def _repository(folder: Path, configs: dict[str, dict[str, list[Fields]]], beneath: str | None = None) -> None:
    """Write a data set's repository: a folder per configuration, a parquet file per split, the card that lists them."""
    import pyarrow
    from pyarrow import parquet

    card = []
    for config, splits in configs.items():
        card.append({"config_name": config, "data_files": []})
        for split, own in splits.items():
            file = folder / (beneath or config) / PARQUET.format(split)
            file.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist(own), file)
            card[-1]["data_files"].append({"split": split, "path": f"{file.parent.name}/{split}-*"})
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': card}, indent=1)}\n---\n")


def _jsonl(file: Path, own: Iterable[Fields]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own), encoding="utf-8")


def _subject(problem: Problem) -> str:
    return dataset.SUBJECTS[KINDS.index(problem.steps[-1].kind)]


def _title(subject: str) -> str:
    return subject.replace("_", " ").title().replace("And", "&")


if __name__ == "__main__":
    main()
