"""The base's answers to 20 questions before anything is trained: readable? one right? how slow?

A study of hours ends with nothing if the base answers in another form than the grader reads, or gets no question right,
so that GRPO has nothing to reinforce. Twenty answers show that in seconds, and give the speed for `forecast`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from qrl import process, stats
from qrl.errors import BadInput, QrlError, first_line
from qrl.recipe import Recipe
from qrl.study import forecast
from qrl.study.forecast import Trial

N = 20  # questions
FEW = 2  # prompts of the smaller batch that is timed
STEPS = 9  # tokens that it writes


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
    from qrl.engine import hf, memory
    from qrl.evaluate import cells
    from qrl.tasks import prompt, question_sets

    heldout = question_sets.load_evaluated(recipe, max(N, recipe.evaluate.n))
    questions = heldout[:N]
    free_bytes = memory.free_bytes(device)
    _check_memory(path, device, free_bytes)
    model, tokenizer = hf.load(path, device, devices.compute_dtype(recipe.evaluate.dtype, device))
    prompts = [prompt.render(tokenizer, question.question, prompt.of_recipe(recipe)) for question in questions]
    cells.check_lengths(path, questions, prompts)

    def answer(batch: list, max_tokens: int) -> tuple[float, list]:
        """Return the seconds that a batch takes, and its answers."""
        start = time.perf_counter()
        answers = hf.generate(model, tokenizer, batch, max_new_tokens=max_tokens, batch_size=len(batch))
        return time.perf_counter() - start, answers

    few_prompts = prompts[:FEW]
    answer(few_prompts, 2)  # warm-up: libraries initialize themselves
    start_s = time.process_time()
    if device != "cpu":
        answer(prompts, 1)  # a GPU's libraries choose their kernels by the size of the batch

    # Two batch sizes give the two parts of a decoding step: what it costs at all, and what each answer adds.
    few_read_s, _ = answer(few_prompts, 1)
    few_answers_s, few_answers = answer(few_prompts, STEPS)
    few_step_s = _per_step(few_read_s, few_answers_s, few_answers)
    read_s, _ = answer(prompts, 1)
    answers_s, answers = answer(prompts, recipe.evaluate.max_new_tokens)
    step_s = _per_step(read_s, answers_s, answers)
    per_answer_s = max(0.0, (step_s - few_step_s) / max(1, len(prompts) - FEW))
    fixed_s = max(0.0, few_step_s - FEW * per_answer_s)

    prompt_tokens = [len(ids) for ids in prompts]
    tags = prompt.thinking_tags(tokenizer, prompt.of_recipe(recipe))
    frame = cells.graded_frame({}, questions, answers, recipe.task, tokenizer, tags)
    return Trial(
        heldout=min(len(heldout), recipe.evaluate.n),
        frame=frame.assign(prompt_tokens=prompt_tokens),
        free=free_bytes,
        start_s=start_s,
        answers_s=answers_s,
        forward_s=read_s / sum(prompt_tokens),
        step_s=(fixed_s, per_answer_s),
    )


def _check_memory(path: Path, device: str, free_bytes: int) -> None:
    """Raise BadInput if not even the weights fit, in two bytes a parameter."""
    needed_bytes = forecast.Shape.of(path).parameters * 2
    if needed_bytes > free_bytes:
        weights = (
            f"{forecast.size(needed_bytes)} of weights in bf16, but {forecast.size(free_bytes)} of memory are free"
        )
        raise BadInput(f"{path} has {weights} on this {device}: use a smaller model or a larger machine.")


def _per_step(read_s: float, total_s: float, answers: list) -> float:
    """Return the seconds a batch takes for each token after the first; `read_s` is the time for the prompts."""
    steps = max(answer.n_tokens for answer in answers) - 1
    return max(0.0, total_s - read_s) / max(1, steps)


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
