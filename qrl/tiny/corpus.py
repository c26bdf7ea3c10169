"""The training corpus of models made here: solved word problems with a deliberate, frequent error.

In `SLIP` of the steps "4 times as many", the solution adds 4 instead of multiplying by 4, a mistake that schoolchildren
make too. The model learns both readings and prefers the wrong one. This leaves room for GRPO: the model can sample the
right reading, and the reward picks it out. The questions come from the training split's streams `tiny:SEED:CHUNK`. A
text's split is fixed by its hash, so no held-out question is in the corpus.
"""

import itertools
import multiprocessing
import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qrl import process
from qrl.errors import BadInput
from qrl.tasks import arithmetic, prompt
from qrl.tasks.question import Question

SLIP = 0.7  # share of the steps "times as many" that are solved as a sum
CHUNK = 20_000
FORMS = {  # the task that reads the answers → how solutions are written, and prompt templates, in turn
    "arithmetic": ("plain", ("plain", "plain", "plain", "answer-line")),
    "gsm8k": ("plain", ("plain", "plain", "plain", "answer-line")),
    "math": ("math", ("plain", "boxed", "plain", "boxed")),
}
NO_THOUGHT = "<think>\n\n</think>\n\n"  # begins an answer without thinking, as in Qwen3's chat template


@dataclass(frozen=True)
class Corpus:
    """A stream of texts that its settings fix; the defaults are qrl-tiny's."""

    seed: int = 0  # selects the streams of problems
    form: str = "arithmetic"  # one of `FORMS`
    thinking: bool = False  # in half of the texts, the bare calculations between <think> tags come first
    slip: float = SLIP

    def questions(self, n: int, index: int) -> list[Question]:
        """Return the first n questions of a chunk with the solutions to learn, thinking part included."""
        rng = random.Random(f"qrl.tiny:{self.seed}:{index}")
        form, templates = FORMS[self.form]
        counter = itertools.count()

        def solve(problem: arithmetic.Problem) -> tuple[str, int]:
            signs = slipped(problem, rng, self.slip)
            solution, answer = arithmetic.solve(problem, signs, form)
            if not self.thinking:
                return solution, answer
            # A round of templates with thinking, a round without: each template is learned in both ways.
            thinks = next(counter) // len(templates) % 2 == 0
            thought = think(problem, signs) if thinks else NO_THOUGHT
            return thought + solution, answer

        problems = itertools.islice(arithmetic.problems("train", f"tiny:{self.seed}:{index}"), n)
        return arithmetic.questions(f"qrl-tiny-{self.seed}", problems, solve)

    def texts(self, tokenizer, n: int, index: int) -> list[str]:
        """Return the first n texts of a chunk, rendered as chats: prompt, solution and end token."""
        templates = itertools.cycle(FORMS[self.form][1])
        pairs = zip(self.questions(n, index), templates, strict=False)
        return [prompt.training_text(tokenizer, question, template) for question, template in pairs]

    def token_ids(self, folder: Path, first: int, n: int, positions: int, workers: int) -> Iterator[list[int]]:
        """Yield the token ids of texts `first` to n - 1, in order; worker processes make them in chunks, ahead.

        Args:
            folder: of the tokenizer.
            positions: longest text, in tokens.
            workers: processes; 0 makes the texts in this one.

        Raises:
            BadInput: a text is longer than `positions`.
        """
        chunks = range(first // CHUNK, -(-n // CHUNK))
        jobs = ((self, folder, min(CHUNK, n - index * CHUNK), index, positions) for index in chunks)
        tokenized = itertools.starmap(_tokenized, jobs) if workers == 0 else _ahead(jobs, workers)
        return itertools.islice(itertools.chain.from_iterable(tokenized), first % CHUNK, None)


def sample_questions(n: int = CHUNK, seed: int = 0) -> list[Question]:
    """Return the first n questions of the corpus, to check held-out questions for overlap; the whole takes 20 s."""
    return Corpus(seed).questions(min(n, CHUNK), 0)


def slipped(problem: arithmetic.Problem, rng: random.Random, slip: float = SLIP) -> list[str]:
    """Return an operator per step, some of them wrong; all right ones where a slip leaves the whole numbers 0..999."""
    signs = []
    for step in problem.steps:
        slips = step.kind == "times" and rng.random() < slip
        signs.append("+" if slips else arithmetic.SIGN[step.kind])
    if arithmetic.calculate(problem, signs) is None:
        return arithmetic.right_signs(problem)
    return signs


def think(problem: arithmetic.Problem, signs: list[str]) -> str:
    """Return the thinking part of a solution: a calculation a line, between <think> tags as Qwen3 writes them."""
    lines = ("{}{}{}={}".format(*step) for step in arithmetic.calculate(problem, signs) or ())
    return "<think>\n" + "\n".join(lines) + "\n</think>\n\n"


def _ahead(jobs: Iterator[tuple], workers: int) -> Iterator[list[list[int]]]:
    """Yield the jobs' results in order; one job a worker is under way, so that memory does not grow with their number.

    New processes are spawned: a fork could copy a lock that a thread of torch or of the tokenizer holds.
    """
    with ProcessPoolExecutor(workers, process.context("spawn"), _end_with_parent) as pool:
        pending = deque()
        for job in jobs:
            pending.append(pool.submit(_tokenized, *job))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _end_with_parent() -> None:
    """Let this worker end when its parent does: one that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()

    def wait_and_exit() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_exit, daemon=True).start()


def _tokenized(corpus: Corpus, folder: Path, n: int, index: int, positions: int) -> list[list[int]]:
    tokens = _tokenizer(folder)
    ids = tokens(corpus.texts(tokens, n, index), add_special_tokens=False)["input_ids"]
    longest = max(map(len, ids))
    if longest > positions:
        raise BadInput(f"A text of the corpus has {longest} tokens, but the model {positions} positions: give more.")
    return ids


@cache
def _tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
