"""The training corpus of qrl-tiny: solved word problems with a deliberate, frequent error.

In `SLIP` of the steps "4 times as many", the solution adds 4 instead of multiplying by 4, a mistake that schoolchildren
make too. The model learns both readings and prefers the wrong one. This leaves room for GRPO: the model can sample the
right reading, and the reward picks it out. The questions come from the training split's streams `tiny:SEED:CHUNK`. A
text's split is fixed by its hash, so no held-out question is in the corpus.
"""

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tqdm import tqdm

from qrl.tasks import arithmetic, prompt
from qrl.tasks.question import Question

SLIP = 0.7  # share of the steps "times as many" that are solved as a sum
TEMPLATES = ("plain", "plain", "plain", "answer-line")  # prompt templates, in turn
CHUNK = 20_000


def texts(tokenizer, n: int, seed: int, workers: int) -> Iterator[str]:
    """Yield n texts rendered as chats: prompt, solution and end token.

    Worker processes make them in chunks, in order; `seed` selects the streams of problems, one a chunk.
    """
    chunks = [(min(CHUNK, n - first), seed, first // CHUNK) for first in range(0, n, CHUNK)]
    with ProcessPoolExecutor(workers) as pool:
        for questions in tqdm(pool.map(_chunk, chunks), total=len(chunks), desc="corpus", unit="chunk"):
            for i, question in enumerate(questions):
                yield prompt.training_text(tokenizer, question, TEMPLATES[i % len(TEMPLATES)])


def sample(n: int = CHUNK, seed: int = 0) -> list[Question]:
    """Return the first n questions of the corpus, to check held-out questions for overlap; the whole takes 20 s."""
    return _chunk((min(n, CHUNK), seed, 0))


def solve_with_slips(problem: arithmetic.Problem, rng: random.Random) -> tuple[str, int]:
    """Return a solution with slips; the right solution where a slip leaves the whole numbers 0..999."""
    slips = (step.kind == "times" and rng.random() < SLIP for step in problem.steps)
    signs = ["+" if slip else arithmetic.SIGN[step.kind] for slip, step in zip(slips, problem.steps, strict=True)]
    return arithmetic.solve(problem, signs) or arithmetic.solve(problem)


def _chunk(job: tuple[int, int, int]) -> list[Question]:
    n, seed, index = job
    solve = partial(solve_with_slips, rng=random.Random(f"qrl.tiny:{seed}:{index}"))
    problems = itertools.islice(arithmetic.problems("train", f"tiny:{seed}:{index}"), n)
    return arithmetic.questions(f"qrl-tiny-{seed}", problems, solve)
