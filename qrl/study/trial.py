"""The base's answers to 20 questions before anything is trained: readable? one right? how slow?

A study of hours ends with nothing if the base answers in another form than the grader reads, or gets no question right,
so that GRPO has nothing to reinforce. Twenty answers show that in seconds. How long a study will take they do not
say: their speed is not that of thousands in larger batches, other engines and several processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import process, stats
from qrl.engine import memory
from qrl.errors import BadInput, QrlError, first_line
from qrl.recipe import Recipe
from qrl.train.footprint import Shape

if TYPE_CHECKING:
    import pandas as pd

N = 20  # questions


@dataclass(frozen=True)
class Trial:
    """The base's answers to a few questions."""

    frame: pd.DataFrame  # a row per question, as `evaluate.cells.graded_frame` returns them, and `prompt_tokens`
    free: int  # bytes of memory on the device, before the model was loaded
    answers_s: float  # seconds of all answers


def run(recipe: Recipe, path: Path, device: str) -> Trial:
    """Return the greedy answers of a checkpoint to the first held-out questions, by transformers.

    On a GPU a process of its own computes them, so that the study holds none of the GPU's memory afterwards.

    Args:
        recipe: its task, prompt and `evaluate` section.
        path: the base's checkpoint folder.
        device: "cpu" or "cuda".

    Raises:
        BadInput: the model cannot be loaded, or a prompt cannot be rendered.
        QrlError: memory ran out on a GPU.
    """
    if device == "cpu":
        return _run(recipe, path, device)
    context = process.context("spawn")  # a process that has used a GPU cannot fork
    try:
        other_children = multiprocessing.active_children()  # a notebook's own
        with ProcessPoolExecutor(1, context, _begin, (os.getpid(),)) as pool:
            try:
                return pool.submit(_run, recipe, path, device).result()
            finally:  # the pool would wait for answers that nobody needs after Ctrl-C, and for the child to end
                for child in set(multiprocessing.active_children()).difference(other_children):
                    child.kill()
    except RuntimeError as error:  # torch's OutOfMemoryError, or BrokenProcessPool if the process was killed
        if type(error).__name__ not in ("OutOfMemoryError", "BrokenProcessPool"):
            raise
        raise QrlError(
            f"The base could not answer {N} questions on this {device} ({first_line(error)}): "
            "free its memory, or use a smaller model or evaluate.max_new_tokens."
        ) from None


def _begin(parent: int) -> None:
    process.die_with_parent(parent, signal.SIGKILL)
    process.prepare_process()


def _run(recipe: Recipe, path: Path, device: str) -> Trial:
    from qrl.engine import device as devices
    from qrl.engine import hf
    from qrl.evaluate import cells
    from qrl.tasks import prompt, question_sets

    questions = question_sets.load_evaluated(recipe, max(N, recipe.evaluate.n))[:N]
    free_bytes = memory.free_bytes(device)
    _check_memory(path, device, free_bytes)
    model, tokenizer = hf.load(path, device, devices.compute_dtype(recipe.evaluate.dtype, device))
    prompts = [prompt.render(tokenizer, question.question, prompt.of_recipe(recipe)) for question in questions]
    cells.check_lengths(path, questions, prompts)

    start = time.perf_counter()
    answers = hf.generate(
        model, tokenizer, prompts, max_new_tokens=recipe.evaluate.max_new_tokens, batch_size=len(prompts)
    )
    answers_s = time.perf_counter() - start

    prompt_tokens = [len(ids) for ids in prompts]
    tags = prompt.thinking_tags(tokenizer, prompt.of_recipe(recipe))
    frame = cells.graded_frame({}, questions, answers, recipe.task, tokenizer, tags)
    return Trial(frame.assign(prompt_tokens=prompt_tokens), free_bytes, answers_s)


def _check_memory(path: Path, device: str, free_bytes: int) -> None:
    """Raise BadInput if not even the weights fit, in two bytes a parameter."""
    needed_bytes = Shape.of(path).parameters * 2
    if needed_bytes > free_bytes:
        weights = (
            f"{memory.in_gib(needed_bytes)} of weights in bf16, but {memory.in_gib(free_bytes)} of memory are free"
        )
        raise BadInput(f"{path} has {weights} on this {device}: use a smaller model or a larger machine.")


def objections(trial: Trial, recipe: Recipe) -> list[str]:
    """Return a sentence for each reason not to start: no right answer, or a health limit that is surely broken."""
    from qrl.evaluate import health

    frame = trial.frame
    n = len(frame)
    sentences = [f"In this trial {problem}" for problem in health.problems(health.rates(frame), recipe.evaluate, n)]
    if frame["correct"].any() or recipe.train.teacher:
        return sentences

    counts = f"{frame['parsed'].isna().sum()} are not in the form that the task {recipe.task} grades"
    right_elsewhere = frame["correct_flexible"].sum()
    if right_elsewhere:
        counts += f", {right_elsewhere} have the right number elsewhere"
    no_right_answer = (
        f"The base answers none of {n} held-out questions correctly ({counts}), so GRPO has no right answer to "
        "reinforce: use a stronger model, easier questions, another prompt or a larger evaluate.max_new_tokens."
    )
    if right_elsewhere:
        no_right_answer += (
            " A chat model that answers in a form of its own, such as 26 + 13 = 39, needs a task that reads this form: "
            'a file of 15 lines with a prompt of its own ("A model that answers in its own form" in qrl/tasks/own.md).'
        )
    return [no_right_answer, *sentences]


def text(trial: Trial, recipe: Recipe) -> str:
    """Return the trial's rates and some of its answers, for the terminal: those that broke a limit, or any two."""
    from qrl.evaluate import health

    frame = trial.frame
    n = len(frame)
    right = int(frame["correct"].sum())
    accuracy = stats.accuracy(right, n)
    rate = f"{right} right ({accuracy.estimate:.2f}, 95 % interval {accuracy.low:.2f} to {accuracy.high:.2f})"
    finished = (frame["finish_reason"] == "stop").sum()
    form = f"{frame['parsed'].notna().sum()} in the required form, {finished} ended by themselves"
    summary = f"[trial] base answers {n} held-out questions: {rate}, {form}; {trial.answers_s / n:.2g} s an answer"
    broken_limits = health.broken_metrics(health.rates(frame), recipe.evaluate, n)
    examples = health.lines_of_broken(frame, broken_limits) or health.lines_of_answers(frame)
    return "\n      ".join([summary, *examples])
