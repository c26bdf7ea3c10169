"""What qrl-tiny learned from: solved word problems in which one reading is often wrong.

The corpus's authors have a habit that schoolchildren have too: they read "4 times as many" as "4 more". They do it in
`SLIP` of the steps of that kind, so the model learns both readings and prefers the wrong one. This is what leaves room
for GRPO: the right reading is there to be sampled, and the reward says which of the two it is. The questions come from
the training split's streams `SEEDS`; no held-out question is among them, because a text's split is fixed by its hash.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from tqdm import tqdm

from qrl.tasks import arithmetic, prompt
from qrl.tasks.question import Question

SLIP = 0.7  # share of the steps "times as many" that are worked as a sum
TEMPLATES = ("plain", "plain", "plain", "answer-line")  # how prompts are worded, in turn
CHUNK = 20_000


def texts(tokenizer, n: int, seed: int, workers: int) -> Iterator[str]:
    """n chat-rendered texts, prompt, solution and end token; chunks are made by worker processes, in order.

    Args:
        tokenizer: renders the chat.
        n: how many texts.
        seed: names the streams of problems, one a chunk.
        workers: processes.
    """
    chunks = [(min(CHUNK, n - first), seed, first // CHUNK) for first in range(0, n, CHUNK)]
    with ProcessPoolExecutor(workers) as pool:
        for found in tqdm(pool.map(_chunk, chunks), total=len(chunks), desc="corpus", unit="chunk"):
            for i, question in enumerate(found):
                yield prompt.training_text(tokenizer, question, TEMPLATES[i % len(TEMPLATES)])


def sample(n: int = CHUNK, seed: int = 0) -> list[Question]:
    """The first n questions that qrl-tiny learned from (all of them take 20 s to make), to hold held-out ones against."""
    found = _chunk((min(n, CHUNK), seed, 0))
    return [replace(question, id=f"qrl-tiny-{seed}-{i}") for i, question in enumerate(found)]


def habit(problem: arithmetic.Problem, rng: random.Random) -> tuple[str, int]:
    """A solution as the corpus's authors write it; the right one where the slip leads out of the whole numbers."""
    signs = [
        "+" if step.kind == "times" and rng.random() < SLIP else arithmetic.SIGN[step.kind] for step in problem.steps
    ]
    return arithmetic.solve(problem, signs) or arithmetic.solve(problem)


def _chunk(job: tuple[int, int, int]) -> list[Question]:
    n, seed, index = job
    rng = random.Random(f"qrl.tiny:{seed}:{index}")
    stream = arithmetic.problems("train", f"tiny:{seed}:{index}")
    found = []
    for _ in range(n):
        problem = next(stream)
        solution, answer = habit(problem, rng)
        found.append(Question("", problem.question, solution, str(answer)))
    return found
