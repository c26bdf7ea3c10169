"""The base's answers to 20 questions before anything is trained: readable? one right? how slow?"""

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
from qrl.errors import BadInput, QrlError, first_line
from qrl.recipe import Recipe
from qrl.study import forecast

if TYPE_CHECKING:
    import pandas as pd

N = 20  # questions
FEW = 2  # prompts of the smaller batch that is timed
STEPS = 9  # tokens that it writes


@dataclass(frozen=True)
class Trial:
    """The answers of the base, and how fast they came; times in seconds."""

    heldout: int  # questions that a cell answers: `evaluate.n`, or all there are
    frame: pd.DataFrame  # a row per question, as `evaluate.cells.ask` returns them, and `prompt_tokens`
    free: int  # bytes of memory on the device, before the model was loaded
    start_s: float  # of CPU time until the first answer: what a step needs to start
    answers_s: float  # of all answers
    forward_s: float  # per token of a prompt
    step_s: tuple[float, float]  # per token that every answer of a batch gets: fixed part, and part per answer


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
        before = multiprocessing.active_children()  # a notebook's own
        with ProcessPoolExecutor(1, context, _begin, (os.getpid(),)) as pool:
            try:
                return pool.submit(_run, recipe, path, device).result()
            finally:  # nobody waits for answers after Ctrl-C, nor for its way of ending once they are there
                for child in set(multiprocessing.active_children()).difference(before):
                    child.kill()
    except RuntimeError as error:  # torch's OutOfMemoryError, or BrokenProcessPool where the process was killed
        if type(error).__name__ not in ("OutOfMemoryError", "BrokenProcessPool"):
            raise
        lacking = f"The base could not answer {N} questions on this {device} ({first_line(error)})"
        raise QrlError(f"{lacking}: free its memory, or use a smaller model or evaluate.max_new_tokens.") from None


def _begin(parent: int) -> None:
    process.die_with_parent(parent, signal.SIGKILL)
    process.settle()


def _run(recipe: Recipe, path: Path, device: str) -> Trial:
    from qrl.engine import device as devices
    from qrl.engine import hf
    from qrl.evaluate import cells
    from qrl.tasks import prompt, question_sets

    heldout = question_sets.load_evaluated(recipe, max(N, recipe.evaluate.n))
    questions = heldout[:N]
    free, needed = forecast.free_bytes(device), forecast.Shape.of(path).parameters * 2
    if needed > free:
        weights = f"{forecast.size(needed)} of weights in bf16, but {forecast.size(free)} of memory are free"
        raise BadInput(f"{path} has {weights} on this {device}: use a smaller model or a larger machine.")
    model, tokens = hf.load(path, device, devices.compute_dtype(recipe.evaluate.dtype, device))
    prompts = [prompt.render(tokens, question.question, prompt.of(recipe)) for question in questions]
    cells.check_lengths(path, questions, prompts)

    def timed(asked: list, longest: int) -> tuple[float, list]:
        start = time.perf_counter()
        answers = hf.generate(model, tokens, asked, max_new_tokens=longest, batch_size=len(asked))
        return time.perf_counter() - start, answers

    timed(prompts[:FEW], 2)  # warm-up: libraries initialize themselves
    start_s = time.process_time()
    if device != "cpu":
        timed(prompts, 1)  # a GPU's libraries choose their kernels by the size of the batch
    few_s = _per_step(timed(prompts[:FEW], 1)[0], *timed(prompts[:FEW], STEPS))
    read_s, _ = timed(prompts, 1)
    answers_s, answers = timed(prompts, recipe.evaluate.max_new_tokens)
    lengths = [len(ids) for ids in prompts]
    each = max(0.0, (_per_step(read_s, answers_s, answers) - few_s) / max(1, len(prompts) - FEW))
    frame = cells.graded({}, questions, answers, recipe.task, tokens)
    fixed = max(0.0, few_s - FEW * each)
    measured = (free, start_s, answers_s, read_s / sum(lengths), (fixed, each))
    return Trial(min(len(heldout), recipe.evaluate.n), frame.assign(prompt_tokens=lengths), *measured)


def _per_step(read_s: float, whole_s: float, answers: list) -> float:
    """Return the seconds per token of a batch: of its time beyond reading the prompts."""
    return max(0.0, whole_s - read_s) / max(1, max(answer.n_tokens for answer in answers) - 1)


def objections(trial: Trial, recipe: Recipe) -> list[str]:
    """Return a sentence for each reason not to start: no right answer, or a health limit that is surely broken."""
    from qrl.evaluate import health

    frame, n = trial.frame, len(trial.frame)
    sentences = [f"In this trial {line}" for line in health.problems(health.rates(frame), recipe.evaluate, n)]
    if not frame["correct"].any() and not recipe.train.teacher:
        unread = f"{frame['parsed'].isna().sum()} are not in the form that the task {recipe.task} grades"
        elsewhere = frame["correct_flexible"].sum()
        loose = f", {elsewhere} have the right number elsewhere" if elsewhere else ""
        none = f"The base answers none of {n} held-out questions correctly ({unread}{loose})"
        remedy = "use a stronger model, easier questions, another prompt or a larger evaluate.max_new_tokens"
        return [f"{none}, so GRPO has no right answer to reinforce: {remedy}.", *sentences]
    return sentences


def text(trial: Trial, recipe: Recipe) -> str:
    """Return the trial's rates and some of its answers, for the terminal: those that broke a limit, or any two."""
    from qrl.evaluate import health

    frame, n, right = trial.frame, len(trial.frame), int(trial.frame["correct"].sum())
    known, ended = stats.accuracy(right, n), (frame["finish_reason"] == "stop").sum()
    rate = f"{right} right ({known.estimate:.2f}, 95 % interval {known.low:.2f} to {known.high:.2f})"
    form = f"{frame['parsed'].notna().sum()} in the required form, {ended} ended by themselves"
    first = f"[trial] base answers {n} held-out questions: {rate}, {form}; {trial.answers_s / n:.2g} s an answer"
    beyond = health.broken(health.rates(frame), recipe.evaluate, n)
    shown = health.breaking(frame, beyond) or health.answers(frame)
    return "\n      ".join([first, *shown])
