"""What steps are given as text: lists of models, cells, questions."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from qrl import checkpoint, names, tasks
from qrl.errors import BadInput
from qrl.formats import kind
from qrl.recipe import Recipe
from qrl.tasks import prompt
from qrl.tracking import addresses


def pairs(text: str, what: str) -> dict[str, str]:
    """`a=x,b=y` as a mapping.

    Raises:
        BadInput: no item at all, one without `=`, or a name given twice.
    """
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise BadInput(f"'{item}' is not {what}: expected NAME=MODEL, several by comma.")
        if name.strip() in found:
            raise BadInput(f"'{name.strip()}' is given twice in '{text}': expected each once.")
        found[name.strip()] = value.strip()
    if not found:
        raise BadInput(f"'{text}' names nothing: expected {what} as NAME=MODEL, several by comma.")
    return found


def cell(text: str) -> tuple[str, str]:
    """`variant:scheme`, checked.

    Raises:
        BadInput: no scheme, an unknown one, or a variant that cannot be a name.
    """
    variant, colon, scheme = text.partition(":")
    if not colon:
        raise BadInput(f"'{text}' is no cell: expected VARIANT:SCHEME, such as base:full or grpo:awq.")
    scheme = names.scheme(scheme)
    check_scheme(scheme, names.SCHEMES)
    return check_variant(variant), scheme


def stored_as(cell: tuple[str, str], address: str) -> checkpoint.Checkpoint:
    """A cell's checkpoint, if it is stored as the cell's scheme says.

    Raises:
        BadInput: it is not, or no such model.
    """
    found = checkpoint.check(addresses.folder(address))
    scheme = cell[1]
    if found.quantization != names.STORED_AS[scheme]:
        raise _mislabelled(
            cell, address, found.quantization or "full precision", names.STORED_AS[scheme] or "full precision"
        )
    kinds = kind.of(checkpoint.config(found.path).get("quantization_config") or {})
    if not kinds <= set(kind.KINDS.get(scheme, ())):
        raise _mislabelled(cell, address, " and ".join(sorted(kinds)), " or ".join(kind.KINDS[scheme]))
    if (made := addresses.scheme(address)) not in (None, scheme):
        raise _mislabelled(cell, address, made, scheme)
    return found


def _mislabelled(cell: tuple[str, str], address: str, stored: str, expected: str) -> BadInput:
    return BadInput(
        f"Cell {':'.join(cell)} was given {address}, which is stored as {stored}: expected {expected}; correct the label or the model."
    )


def check_variant(variant: str) -> str:
    """The variant, if it can be part of a metric's name, a table's column and a folder's name."""
    if not re.fullmatch(r"\w[\w.+-]*", variant):
        raise BadInput(
            f"'{variant}' is no name for a variant: expected letters, digits and . _ + -, such as base or grpo."
        )
    return variant


def check_scheme(scheme: str, known: Sequence[str]) -> None:
    """Refuses an unknown scheme with the list of known ones."""
    if scheme not in known:
        raise BadInput(f"There is no scheme '{scheme}': expected one of {', '.join(known)}.")


def questions(recipe: Recipe, split: tasks.Split, n: int) -> list[tasks.Question]:
    """The recipe's questions of a split, to be asked through the recipe's prompt.

    Raises:
        BadInput: they cannot be read, the prompt asks for another form than the task grades, or one held-out question is all there is.
    """
    prompt.check(recipe.task, recipe.prompt)
    found = tasks.load(recipe.task, split, n, recipe.seed, recipe.data)
    return found if split == "train" or n < 2 else _enough(found, recipe)


def digest(asked: Sequence[tasks.Question]) -> str:
    """sha256 over questions and gold answers, in order: what two cells must share to be compared."""
    found = sha256()
    for question in asked:
        found.update(f"{question.id}\0{question.question}\0{question.answer}\0".encode())
    return found.hexdigest()


def source_of(recipe: Recipe) -> str:
    """Where the questions come from, in words, for MLflow's record of a data set."""
    if recipe.data:
        return str(Path(recipe.data).resolve())
    return f"generated, seed {recipe.seed}" if recipe.task == "arithmetic" else "the hub's data set of the task"


def all_heldout(recipe: Recipe) -> list[tasks.Question]:
    """Every question that the recipe's cells could be asked, whatever `evaluate.n` says; of an endless task, those that they are."""
    endless = recipe.task == "arithmetic" and recipe.data is None
    return _enough(
        tasks.load(recipe.task, "heldout", recipe.evaluate.n if endless else None, recipe.seed, recipe.data), recipe
    )


def _enough(heldout: list[tasks.Question], recipe: Recipe) -> list[tasks.Question]:
    if len(heldout) < 2:  # told before a training, not after it
        raise BadInput(
            f"There is {len(heldout)} held-out question in {source_of(recipe)}, which supports no error bar: give at least 2 in test.jsonl, and hundreds for a verdict."
        )
    return heldout


def probe(recipe: Recipe, trained: Sequence[tasks.Question], heldout: Sequence[tasks.Question]) -> list[tasks.Question]:
    """Questions of the training split that are neither prompts of the training nor, word for word, held out.

    Raises:
        BadInput: fewer than `watch.probe_n` are left.
    """
    wanted = recipe.watch.probe_n
    endless = recipe.task == "arithmetic" and recipe.data is None
    pool = tasks.load(recipe.task, "train", len(trained) + wanted if endless else None, recipe.seed, recipe.data)
    taken = {_bare(question) for question in (*trained, *heldout)}
    left = [question for question in pool if _bare(question) not in taken]
    if len(left) < wanted:
        raise BadInput(
            f"The training split has {len(left)} questions that are neither trained on nor held out, but watch.probe_n asks for "
            f"{wanted}: lower train.questions or watch.probe_n, or set watch.probe_every=0."
        )
    return left if len(left) == wanted else random.Random(recipe.seed).sample(left, wanted)


def repeated(asked: Sequence[tasks.Question]) -> str:
    """A sentence on questions that stand more than once, but for spaces and case; empty where none does."""
    found = Counter(map(_bare, asked))
    more = len(asked) - len(found)
    if not more:
        return ""
    first = next(question for question in asked if found[_bare(question)] > 1)
    return (
        f"Of {len(asked)} held-out questions {more} repeat others, such as '{first.question[:60]}': each counts as a question of its own, so that "
        "intervals are narrower than they should be. Take the copies out of the data."
    )


def _bare(question: tasks.Question) -> str:
    return "".join(question.question.casefold().split())
