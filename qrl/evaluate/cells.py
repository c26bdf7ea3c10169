"""A cell: one variant under one scheme, asked every held-out question; a row per question."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import checkpoint, tasks
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import BadInput
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
    receipt: dict[str, Any]  # which engine, of which version, wrote them, and how


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
    engine: str = hf.NAME,
    deterministic: bool = False,
    memory: float = 0.9,
    seed: int = 0,
    render: Callable = prompt.render,
    progress: Callable[[int], object] = lambda n: None,
) -> Asked:
    """Asks a cell every question, greedily or several times, and grades the answers.

    Args:
        cell: the checkpoint to ask.
        questions: N held-out questions.
        samples: answers to each, S; 1 is greedy, more are drawn.
        temperature: of the draws, where there are several.
        engine: "transformers", or "vllm" in its environment.
        deterministic: of vLLM: batch-invariant kernels, where the device has them.
        memory: of vLLM: the share of a GPU's memory that it may take.
        seed: of the draws, and of vLLM's engine.
        render: (tokenizer, question text, template) → prompt ids; the one renderer, unless a test breaks it on purpose.
        progress: called with the number of answers that each batch finished.

    Returns:
        N × S rows in the order of `questions`, a question's samples together, with the decoding speed.
    """
    import pandas as pd

    tokens = hf.tokenizer(cell.path)
    prompts = [ids for question in questions for ids in [render(tokens, question.question, template)] * samples]
    _check_lengths(cell.path, questions, prompts[::samples])
    asked = [question for question in questions for _ in range(samples)]
    lengths = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    drawn = {"temperature": temperature if samples > 1 else 0.0, "seed": seed}
    with _opened(
        engine, cell.path, device, dtype, prompts, **lengths, deterministic=deterministic, memory=memory, seed=seed
    ) as opened:
        generate, computed_in, receipt = opened
        generate(prompts[:batch_size], max_new_tokens=2)  # libraries set themselves up
        began = time.perf_counter()
        completions = generate(prompts, max_new_tokens=max_new_tokens, **drawn, progress=progress)
        seconds = time.perf_counter() - began
    receipt |= {"completions": _digest(completions)}
    markers = [token for token in tokens.all_special_tokens if token]
    verdicts = tasks.grade_many(task, [each.text for each in completions], [each.answer for each in asked])
    rows = [_row(cell, markers, *each) for each in zip(asked, completions, verdicts, strict=True)]
    if samples > 1:
        rows = [row | {"sample": number % samples} for number, row in enumerate(rows)]
    written = sum(completion.n_tokens for completion in completions)
    return Asked(pd.DataFrame(rows), written / seconds, seconds, computed_in, receipt)


def _check_lengths(path: Path, questions: Sequence, prompts: Sequence) -> None:
    """Refuses a prompt that fills all positions that a model was made for; it would answer, out of its depth."""
    config = checkpoint.config(path)
    positions = config.get("max_position_embeddings")
    scaled = "factor" in (config.get("rope_scaling") or config.get("rope_parameters") or {})
    if not positions or scaled:
        return
    for question, ids in zip(questions, prompts, strict=True):
        if len(ids) >= positions:
            raise BadInput(
                f"Question {question.id} ('{question.question[:40]}…') is a prompt of {len(ids):,} tokens, but the model was made for {positions:,}: "
                "take it out of the held-out questions."
            )


@contextmanager
def _opened(
    engine: str,
    path: Path,
    device: str,
    dtype: str,
    prompts: list,
    *,
    max_new_tokens: int,
    batch_size: int,
    deterministic: bool,
    memory: float,
    seed: int,
) -> Iterator[tuple[Callable, str, dict[str, Any]]]:
    """A loaded engine's `generate`, the dtype of its activations, and its receipt."""
    if engine == hf.NAME:
        import transformers

        model, tokens = hf.load(path, device, devices.compute_dtype(dtype, device))
        receipt = {
            "engine": f"{hf.NAME} {transformers.__version__}",
            "attention": model.config._attn_implementation,
            "batch_size": batch_size,
        }
        yield (
            partial(hf.generate, model, tokens, batch_size=batch_size),
            str(model.dtype).removeprefix("torch."),
            receipt,
        )
    else:
        from qrl.engine import vllm

        longest = max(map(len, prompts)) + max_new_tokens
        given = {
            "max_tokens": longest,
            "sequences": batch_size,
            "deterministic": deterministic,
            "memory": memory,
            "seed": seed,
        }
        with vllm.Vllm(path, device, dtype, **given) as loaded:
            yield loaded.generate, loaded.dtype, loaded.receipt()


def _digest(completions: Sequence[hf.Completion]) -> str:
    """sha256 over what was written, in order: equal where a run was repeated to the letter."""
    return sha256("".join(f"{each.raw}\0{each.finish_reason}\0" for each in completions).encode()).hexdigest()


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
