"""The questions of a recipe: which ones train, probe and evaluate a model, and the digest that tells sets apart."""

import random
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qrl import tasks
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.tasks import own, prompt
from qrl.tasks.question import Question, normalized_text

if TYPE_CHECKING:
    from qrl.recipe import Recipe


def load_training(recipe: "Recipe") -> list[Question]:
    """Return the questions to train on; errors as in `load`."""
    return load(recipe, "train", recipe.train.questions, recipe.train.selection)


def load_evaluated(recipe: "Recipe", n: int | None = None) -> list[Question]:
    """Return the first `n` of the held-out questions that cells answer, by default `evaluate.n`; see `load`."""
    return load(recipe, "heldout", recipe.evaluate.n if n is None else n, recipe.evaluate.selection)


def load_all_heldout(recipe: "Recipe") -> list[Question]:
    """Return every held-out question, whatever `evaluate.n` is; of an endless task, the first `evaluate.n`."""
    return load(recipe, "heldout", recipe.evaluate.n if is_endless(recipe) else None)


def load_probe(recipe: "Recipe", training: Sequence[Question], heldout: Sequence[Question]) -> list[Question]:
    """Return questions of the training split that are neither trained on nor, word for word, held out.

    Raises:
        BadInput: there are fewer than `watch.probe_n`.
    """
    required = recipe.watch.probe_n
    pool = load(recipe, "train", len(training) + required if is_endless(recipe) else None)
    used_texts = {normalized_text(question.question) for question in (*training, *heldout)}
    unused = [question for question in pool if normalized_text(question.question) not in used_texts]
    if len(unused) < required:
        raise BadInput(
            f"The training split has {len(unused)} questions that are neither trained on nor held out, but "
            f"watch.probe_n asks for {required}: lower train.questions or watch.probe_n, or set watch.probe_every=0."
        )
    if len(unused) == required:
        return unused
    return random.Random(recipe.seed).sample(unused, required)


def load(
    recipe: "Recipe", split: tasks.Split, n: int | None, selection: Literal["random", "first"] = "random"
) -> list[Question]:
    """Return `n` questions of a split, for the recipe's prompt; None: all.

    Raises:
        BadInput: they cannot be read, the prompt elicits another form than the task grades, or only one is held out.
    """
    prompt.check_task(recipe.task, recipe.prompt)
    questions = tasks.load(recipe.task, split, n, recipe.seed, recipe.data, selection)
    if split == "heldout" and len(questions) < 2 and n != 1:
        raise BadInput(
            f"There is {len(questions)} held-out question in {describe_source(recipe)}, which supports no error bar: "
            "put at least 2 into test.jsonl, and hundreds for a verdict."
        )
    return questions


def check_chat(recipe: "Recipe", folder: Path) -> None:
    """Raise BadInput if the chat template in a checkpoint's folder does not fit the recipe.

    It has no variable that `chat.template_kwargs` sets, or no system role, which the prompt needs.
    """
    template = prompt.of_recipe(recipe)
    # Other templates are rendered with the first question; a tokenizer takes a second to load.
    if template.kwargs or template.system is not None:
        prompt.check_chat(hf.tokenizer(folder), template)


def digest(questions: Sequence[Question]) -> str:
    """Return the sha256 over questions and gold answers, in order; cells are comparable if theirs are equal."""
    content = sha256()
    for question in questions:
        content.update(f"{question.id}\0{question.question}\0{question.answer}\0".encode())
    return content.hexdigest()


def describe_source(recipe: "Recipe") -> str:
    """Return where the questions come from, for MLflow's record of a data set."""
    if recipe.data:
        return str(Path(recipe.data).resolve())
    if own.is_file(recipe.task):
        return f"{recipe.task}, sha256 {own.digest(recipe.task)}"
    if recipe.task == "arithmetic":
        return f"generated, seed {recipe.seed}"
    return "the hub's data set of the task"


def describe_repeated(questions: Sequence[Question]) -> str:
    """Return a warning if questions are repeated, up to spaces and case; empty if none is."""
    counts = Counter(normalized_text(question.question) for question in questions)
    copies = len(questions) - len(counts)
    if not copies:
        return ""
    example = next(question for question in questions if counts[normalized_text(question.question)] > 1)
    return (
        f"Of {len(questions)} held-out questions {copies} repeat others, such as '{example.question[:60]}': each copy "
        "counts, so intervals are narrower than they should be. Remove the copies from the data."
    )


def is_endless(recipe: "Recipe") -> bool:
    """Return whether the recipe's task makes as many questions as are asked for."""
    return recipe.task == "arithmetic" and recipe.data is None
