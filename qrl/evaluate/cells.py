"""A cell: one variant under one scheme, asked every held-out question; a row per question."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import tasks
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.tasks import prompt

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Cell:
    """Which weights are asked, and what they are called in the table."""

    variant: str
    scheme: str
    path: Path


@dataclass(frozen=True)
class Asked:
    """A cell's answers: a row per question, or per sample of one, and how fast they were written."""

    # variant, scheme, question, correct, correct_flexible, parsed, answer, completion, leaked, n_tokens, finish_reason, fault;
    # subject and level where the questions have them; sample where there are several
    frame: pd.DataFrame
    tokens_per_s: float  # generated tokens over the wall time of decoding, batches padded
    seconds: float  # decoding alone; loading apart
    dtype: str  # of activations


def ask(
    cell: Cell,
    questions: Sequence[tasks.Question],
    *,
    task: str,
    template: str,
    device: str,
    dtype: str = "auto",
    max_new_tokens: int,
    batch_size: int,
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    render: Callable = prompt.render,
    progress: Callable[[int], object] = lambda n: None,
) -> Asked:
    """Asks a cell every question, greedily or several times, and grades the answers.

    Args:
        cell: the checkpoint to ask.
        questions: N held-out questions.
        samples: answers to each, S; 1 is greedy, more are drawn.
        temperature, seed: of the draws, where there are several.
        render: (tokenizer, question text, template) → prompt ids; the one renderer, unless a test breaks it on purpose.
        progress: called with the number of answers that each batch finished.

    Returns:
        N × S rows in the order of `questions`, a question's samples together, with the decoding speed.
    """
    import pandas as pd

    compute = devices.compute_dtype(dtype, device)
    model, tokens = hf.load(cell.path, device, compute)
    prompts = [ids for question in questions for ids in [render(tokens, question.question, template)] * samples]
    asked = [question for question in questions for _ in range(samples)]
    hf.generate(model, tokens, prompts[:batch_size], max_new_tokens=2, batch_size=batch_size)  # libraries set themselves up
    began = time.perf_counter()
    completions = hf.generate(
        model,
        tokens,
        prompts,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        temperature=temperature if samples > 1 else 0.0,
        seed=seed,
        progress=progress,
    )
    seconds = time.perf_counter() - began
    markers = [token for token in tokens.all_special_tokens if token]
    verdicts = tasks.grade_many(task, [each.text for each in completions], [each.answer for each in asked])
    rows = [_row(cell, markers, *each) for each in zip(asked, completions, verdicts, strict=True)]
    if samples > 1:
        rows = [row | {"sample": number % samples} for number, row in enumerate(rows)]
    written = sum(completion.n_tokens for completion in completions)
    return Asked(pd.DataFrame(rows), written / seconds, seconds, str(model.dtype).removeprefix("torch."))


def _row(
    cell: Cell, markers: list[str], question: tasks.Question, completion: hf.Completion, verdict: tasks.Verdict
) -> dict:
    groups = {"subject": question.subject, "level": question.level}
    return {
        "variant": cell.variant,
        "scheme": cell.scheme,
        "question": question.id,
        "correct": int(verdict.strict),
        "correct_flexible": int(verdict.flexible),
        "parsed": verdict.parsed,
        "answer": question.answer,
        "completion": completion.text,
        "leaked": int(_leaked(question.question, completion, markers)),
        "n_tokens": completion.n_tokens,
        "finish_reason": completion.finish_reason,
        "fault": verdict.fault,
        **{name: value for name, value in groups.items() if value is not None},
    }


def _leaked(question: str, completion: hf.Completion, markers: list[str]) -> bool:
    """Whether the answer holds chat markers or says the question again: signs of a prompt that was not rendered right."""
    return any(marker in completion.raw for marker in markers) or question.strip() in completion.text
