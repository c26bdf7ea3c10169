"""How fast stored models answer, and what they hold in memory: several side by side, in one run.

Every round asks every model in every mode, in an order that turns from round to round, so that a noisy machine hurts all
alike and rounds can be paired. One prompt at a time is the latency of a single user; batches are throughput.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qrl import names
from qrl.errors import BadInput
from qrl.recipe import Benchmark

if TYPE_CHECKING:
    import pandas as pd

WARM_UP_TOKENS = 4  # of one batch a mode before the first round: libraries set themselves up, caches are made


@dataclass(frozen=True)
class Subject:
    """A model to measure, and what it is called."""

    variant: str
    scheme: str
    path: Path

    @property
    def label(self) -> str:
        """As the UI shows a cell."""
        return names.cell_name(self.variant, self.scheme)


@dataclass(frozen=True)
class Request:
    """One prompt's answer."""

    prompt_tokens: int
    new_tokens: int  # the end token included
    first_token_s: float  # from handing the batch over to this prompt's first token
    latency_s: float  # to its last


@dataclass(frozen=True)
class Answered:
    """One batch's answers."""

    requests: tuple[Request, ...]
    seconds: float  # wall time of the whole batch
    cache_bytes: int  # of keys and values, when the last token was written


class Engine(Protocol):
    """A loaded model that can be asked."""

    name: str  # and version: "transformers 5.17.0"
    weights_bytes: int | None  # that it holds in memory, not what lies on disk; None: not known

    def ask(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, fixed: bool) -> Answered: ...

    def close(self) -> None: ...


def run(
    subjects: Sequence[Subject],
    prompts: Sequence[Sequence[Sequence[int]]],
    open_engine: Callable[[Subject], Engine],
    settings: Benchmark,
    progress: Callable[[int], Any] = lambda n: None,
) -> pd.DataFrame:
    """Measures every subject in every mode, in rounds.

    Args:
        subjects: S models, told apart by variant and scheme.
        prompts: S lists of N prompts as token ids; N at least the largest batch.
        open_engine: loads a subject; all stay loaded, side by side.
        settings: batches, rounds, requests, lengths.
        progress: called with 1 after each subject's turn in a mode.

    Returns:
        A row per request: variant, scheme, engine, batch, round, turn (batches of one subject, mode and round), prompt_tokens,
        new_tokens, first_token_s, latency_s, turn_s, cache_bytes, weights_bytes, stored_bytes.

    Raises:
        BadInput: fewer prompts than a batch holds.
    """
    import pandas as pd

    most = max(settings.batches)
    if any(len(own) < most for own in prompts):
        raise BadInput(
            f"There are {min(map(len, prompts))} prompts, but a batch of {most} was asked for: lower benchmark.batches."
        )
    with ExitStack() as stack:
        engines = []
        for subject in subjects:
            engines.append(open_engine(subject))
            stack.callback(engines[-1].close)
        for engine, own in zip(engines, prompts, strict=True):
            for batch in settings.batches:
                engine.ask(own[:batch], new_tokens=WARM_UP_TOKENS, fixed=True)
        rows = []
        for number in range(settings.rounds):
            for batch in settings.batches:
                for place in range(len(subjects)):
                    which = (place + number) % len(subjects)
                    rows += _turn(subjects[which], engines[which], prompts[which], batch, number, settings)
                    progress(1)
    return pd.DataFrame(rows)


def _turn(
    subject: Subject, engine: Engine, prompts: Sequence[Sequence[int]], batch: int, number: int, settings: Benchmark
) -> list[dict]:
    """One subject's share of a mode in one round: as many whole batches as `requests` needs, prompts in turn."""
    stored = sum(file.stat().st_size for file in subject.path.glob("*.safetensors"))
    facts = {
        "variant": subject.variant,
        "scheme": subject.scheme,
        "engine": engine.name,
        "batch": batch,
        "round": number,
    }
    memory = {"weights_bytes": engine.weights_bytes, "stored_bytes": stored}
    rows = []
    for turn in range(-(-settings.requests // batch)):  # rounded up
        start = turn * batch
        asked = [prompts[(start + i) % len(prompts)] for i in range(batch)]
        answered = engine.ask(asked, new_tokens=settings.new_tokens, fixed=settings.length == "fixed")
        of_turn = {"turn": turn, "turn_s": answered.seconds, "cache_bytes": answered.cache_bytes}
        rows += [facts | of_turn | vars(request) | memory for request in answered.requests]
    return rows
