"""Parse and check what steps get as text: lists of models, cells, questions."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

from qrl import checkpoint, names, process, tasks
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import kind
from qrl.recipe import Recipe
from qrl.tasks import own, prompt
from qrl.tasks.question import bare
from qrl.tracking import addresses


def pairs(text: str, what: str) -> dict[str, str]:
    """Return `a=x,b=y` as a mapping; an error says that items should be `what`.

    Raises:
        BadInput: there is no item, an item has no `=`, or a name is repeated.
    """
    models: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, value = (part.strip() for part in item.partition("=")[::2])
        if not (name and value):
            raise BadInput(f"'{item}' is not {what}: expected NAME=MODEL, several by comma.")
        if name in models:
            raise BadInput(f"'{name}' is repeated in '{text}': expected each name once.")
        models[name] = value
    if not models:
        raise BadInput(f"'{text}' names nothing: expected {what} as NAME=MODEL, several by comma.")
    return models


def cell(text: str) -> tuple[str, str]:
    """Return variant and scheme of `variant:scheme`.

    Raises:
        BadInput: the scheme is missing or unknown, or the variant cannot be a name.
    """
    variant, colon, scheme = text.partition(":")
    if not colon:
        raise BadInput(f"'{text}' is not a cell: expected VARIANT:SCHEME, such as base:full or grpo:awq.")
    if names.stored(present := names.scheme(scheme)) not in names.SCHEMES:
        known = f"expected one of {', '.join(names.SCHEMES)}, under vLLM perhaps with {names.KV_FP8} at its end"
        raise BadInput(f"There is no scheme '{scheme}': {known}.")
    return check_variant(variant), present


def stored_as(cell: tuple[str, str], address: str) -> checkpoint.Checkpoint:
    """Return a cell's checkpoint, after checking that it is stored under the cell's scheme.

    Raises:
        BadInput: it is stored otherwise, or there is no such model.
    """
    weights, scheme = checkpoint.check(addresses.folder(address)), names.stored(cell[1])
    kinds = kind.of(checkpoint.config(weights.path).get("quantization_config") or {})
    full, expected = "full precision", kind.KINDS.get(scheme, ())
    if weights.quantization != names.STORED_AS[scheme]:
        actual, wanted = weights.quantization or full, names.STORED_AS[scheme] or full
    elif not kinds <= set(expected):
        actual, wanted = " and ".join(sorted(kinds)), " or ".join(expected)
    elif (quantized_to := addresses.scheme(address)) not in (None, scheme):
        actual, wanted = quantized_to, scheme
    else:
        return weights
    raise BadInput(
        f"Cell {':'.join(cell)} was given {address}, which is stored as {actual}: expected {wanted}; correct the label "
        f"or the model (`{process.command('quantize', {})}` stores a model under a scheme)."
    )


def check_variant(variant: str) -> str:
    """Return the variant; raise BadInput if it cannot be part of a metric's, a column's and a folder's name."""
    if not re.fullmatch(r"\w[\w.+-]{0,99}", variant):
        raise BadInput(
            f"'{variant}' is no name for a variant: expected up to 100 letters, digits and . _ + -, as in base."
        )
    return variant


def trained(recipe: Recipe) -> list[tasks.Question]:
    """Return the questions to train on; errors as in `questions`."""
    return questions(recipe, "train", recipe.train.questions, recipe.train.selection)


def evaluated(recipe: Recipe, n: int | None = None) -> list[tasks.Question]:
    """Return the first `n` of the held-out questions that cells answer, by default `evaluate.n`; see `questions`."""
    return questions(recipe, "heldout", recipe.evaluate.n if n is None else n, recipe.evaluate.selection)


def questions(
    recipe: Recipe, split: tasks.Split, n: int | None, selection: Literal["random", "first"] = "random"
) -> list[tasks.Question]:
    """Return `n` questions of a split, for the recipe's prompt; None: all.

    Raises:
        BadInput: they cannot be read, the prompt elicits another form than the task grades, or only one is held out.
    """
    prompt.check(recipe.task, recipe.prompt)
    chosen = tasks.load(recipe.task, split, n, recipe.seed, recipe.data, selection)
    if split == "heldout" and len(chosen) < 2 and n != 1:
        raise BadInput(
            f"There is {len(chosen)} held-out question in {source_of(recipe)}, which supports no error bar: put at "
            "least 2 into test.jsonl, and hundreds for a verdict."
        )
    return chosen


def check_chat(recipe: Recipe, folder: Path) -> None:
    """Raise BadInput if the chat template in a checkpoint's folder has no variable that `chat.template_kwargs` sets."""
    if recipe.chat.template_kwargs:
        prompt.check_kwargs(hf.tokenizer(folder), prompt.of(recipe))


def digest(questions: Sequence[tasks.Question]) -> str:
    """Return the sha256 over questions and gold answers, in order; cells are comparable if theirs are equal."""
    content = sha256()
    for question in questions:
        content.update(f"{question.id}\0{question.question}\0{question.answer}\0".encode())
    return content.hexdigest()


def source_of(recipe: Recipe) -> str:
    """Return where the questions come from, for MLflow's record of a data set."""
    if recipe.data:
        return str(Path(recipe.data).resolve())
    if own.is_file(recipe.task):
        return f"{recipe.task}, sha256 {own.digest(recipe.task)}"
    return f"generated, seed {recipe.seed}" if recipe.task == "arithmetic" else "the hub's data set of the task"


def all_heldout(recipe: Recipe) -> list[tasks.Question]:
    """Return every held-out question, whatever `evaluate.n` is; of an endless task, the first `evaluate.n`."""
    return questions(recipe, "heldout", recipe.evaluate.n if _is_endless(recipe) else None)


def _is_endless(recipe: Recipe) -> bool:
    return recipe.task == "arithmetic" and recipe.data is None


def probe(recipe: Recipe, trained: Sequence[tasks.Question], heldout: Sequence[tasks.Question]) -> list[tasks.Question]:
    """Return questions of the training split that are neither trained on nor, word for word, held out.

    Raises:
        BadInput: fewer than `watch.probe_n` are left.
    """
    wanted = recipe.watch.probe_n
    pool = questions(recipe, "train", len(trained) + wanted if _is_endless(recipe) else None)
    used = {bare(question.question) for question in (*trained, *heldout)}
    left = [question for question in pool if bare(question.question) not in used]
    if len(left) < wanted:
        raise BadInput(
            f"The training split has {len(left)} questions that are neither trained on nor held out, but watch.probe_n "
            f"asks for {wanted}: lower train.questions or watch.probe_n, or set watch.probe_every=0."
        )
    return left if len(left) == wanted else random.Random(recipe.seed).sample(left, wanted)


def repeated(questions: Sequence[tasks.Question]) -> str:
    """Return a warning if questions are repeated, up to spaces and case; empty if none is."""
    counts = Counter(bare(question.question) for question in questions)
    copies = len(questions) - len(counts)
    if not copies:
        return ""
    first = next(question for question in questions if counts[bare(question.question)] > 1)
    return (
        f"Of {len(questions)} held-out questions {copies} repeat others, such as '{first.question[:60]}': each copy "
        "counts, so intervals are narrower than they should be. Remove the copies from the data."
    )
