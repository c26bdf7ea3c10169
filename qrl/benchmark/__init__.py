"""Benchmarks of stored models: their speed and memory, several side by side in one run.

Every round measures every model in every mode, in an order that rotates from round to round, so that a noisy machine
slows all of them alike and rounds can be paired. One prompt at a time measures the latency of a single user; batches
measure throughput.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from qrl import names
from qrl.errors import BadInput
from qrl.recipe import Benchmark

Prompts = Sequence[Sequence[int]]  # token ids of each
WARM_UP_TOKENS = 4  # of one batch a mode before the first round: libraries initialize, caches are allocated


@dataclass(frozen=True)
class Subject:
    """A model to measure, and its cell."""

    variant: str
    scheme: str
    path: Path

    @property
    def label(self) -> str:
        """The cell's name in the UI."""
        return names.cell_name(self.variant, self.scheme)

    @property
    def stored_bytes(self) -> int:
        """Size of the weights on disk."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))


@dataclass(frozen=True)
class Request:
    """The measurements of one prompt's answer."""

    prompt_tokens: int
    new_tokens: int  # including the end token
    first_token_s: float  # from the start of the batch to this prompt's first token
    latency_s: float  # to its last token


@dataclass(frozen=True)
class BatchResult:
    """The measurements of one batch."""

    requests: tuple[Request, ...]
    seconds: float  # wall time of the whole batch
    cache_bytes: int  # of keys and values, at the last token


class Engine(Protocol):
    """A loaded model that answers prompts."""

    name: str  # and version: "transformers 5.17.0"
    weights_bytes: int | None  # in memory, not on disk; None: unknown

    def ask(self, prompts: Prompts, *, new_tokens: int, fixed: bool) -> BatchResult: ...

    def close(self) -> None: ...


def run(
    subjects: Sequence[Subject],
    prompts: Sequence[Prompts],
    open_engine: Callable[[Subject], Engine],
    settings: Benchmark,
    progress: Callable[[int], Any] = lambda n: None,
) -> pd.DataFrame:
    """Measure every subject in every mode, in rounds.

    Args:
        subjects: S models with different cells.
        prompts: S lists of N prompts as token ids; N is at least the largest batch.
        open_engine: loads a subject; all stay loaded, side by side.
        settings: batches, rounds, requests, lengths.
        progress: called with 1 after each subject's turn in a mode.

    Returns:
        A row per request: variant, scheme, engine, batch, round, turn (batches of one subject, mode and round),
        prompt_tokens, new_tokens, first_token_s, latency_s, turn_s, cache_bytes, weights_bytes, stored_bytes.

    Raises:
        BadInput: there are fewer prompts than the largest batch needs.
    """
    largest_batch = max(settings.batches)
    available = min(map(len, prompts))
    if available < largest_batch:
        raise BadInput(
            f"There are {available} prompts, but a batch of {largest_batch} needs more: lower benchmark.batches."
        )

    with ExitStack() as stack:
        engines = [stack.enter_context(closing(open_engine(subject))) for subject in subjects]
        for engine, subject_prompts in zip(engines, prompts, strict=True):
            for batch in settings.batches:
                engine.ask(subject_prompts[:batch], new_tokens=WARM_UP_TOKENS, fixed=True)

        rows = []
        for number, batch, position in product(range(settings.rounds), settings.batches, range(len(subjects))):
            i = (position + number) % len(subjects)  # another subject goes first in every round
            turns = _turns(subjects[i], engines[i], prompts[i], batch, settings)
            rows += [{"round": number} | row for row in turns]
            progress(1)
    return pd.DataFrame(rows)


def _turns(subject: Subject, engine: Engine, prompts: Prompts, batch: int, settings: Benchmark) -> list[dict]:
    """Return the rows of one subject in one mode and round: as many whole batches as `requests` needs."""
    of_subject = {
        "variant": subject.variant,
        "scheme": subject.scheme,
        "engine": engine.name,
        "batch": batch,
        "weights_bytes": engine.weights_bytes,
        "stored_bytes": subject.stored_bytes,
    }
    rows = []
    for turn in range(math.ceil(settings.requests / batch)):
        batch_prompts = [prompts[(turn * batch + i) % len(prompts)] for i in range(batch)]
        result = engine.ask(batch_prompts, new_tokens=settings.new_tokens, fixed=settings.length == "fixed")
        of_turn = {"turn": turn, "turn_s": result.seconds, "cache_bytes": result.cache_bytes}
        rows += [of_subject | of_turn | asdict(request) for request in result.requests]
    return rows
