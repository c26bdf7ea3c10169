"""Compare transformers' and vLLM's answers from a checkpoint with stored codes.

    python tests/benchmarks/qat_stored.py make DIR int4  # train the built-in model, store its codes, ask transformers
    python tests/benchmarks/qat_stored.py ask DIR int4   # in projects/vllm or projects/vllm_cpu: ask vLLM

llm-compressor stores and vLLM answers; the two cannot share an environment, hence two commands. Answers are greedy. The
engines round their products differently, so an answer may change at a near tie. Both are graded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import tasks, tiny
from qrl.engine import hf
from qrl.tasks import prompt

NEW_TOKENS, DTYPES = 96, {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("make", "ask"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("format")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    {"make": _make, "ask": _ask}[given.what](given, given.folder / given.format, device)


def _make(given, folder: Path, device: str) -> None:
    from qrl import quantize
    from qrl.quantize import settings as choices
    from qrl.recipe import Quantize, Train
    from qrl.train import Job, grpo

    batch = {"prompts_per_step": 8, "generations": 4, "micro_batch": 32, "max_completion_tokens": 80}
    how = {"learning_rate": 4e-5, "qat_calibration_samples": 16, "max_ngram_share": 1.0}
    settings = Train(steps=given.steps, qat=given.format, **batch, **how)
    data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 512, 0), "task": "arithmetic"}
    folders = {"work": folder / "work", "out": folder / "masters"}
    done = grpo.run(Job(settings=settings, template="plain", seed=0, device=device, **data, **folders))
    scheme = f"rtn-{given.format}"
    # Texts are required, but not used: the training's own scales are stored beside the masters.
    texts = ["Tom has 3 apples. #### 3"] * 2 if scheme in choices.CALIBRATED else ()
    options = choices.settings_of(scheme, Quantize(calibration_samples=2), 0)
    quantize.run(scheme, done.path, folder / "stored", settings=options, calibration=texts)
    model, tokens = hf.load(folder / "stored", device, DTYPES[given.dtype])
    questions, prompts = _heldout(tokens, given.questions)
    completions = hf.generate(model, tokens, prompts, max_new_tokens=NEW_TOKENS, batch_size=len(prompts))
    answers = [completion.text for completion in completions]
    (folder / "transformers.json").write_text(json.dumps(answers))
    print(
        f"{given.format}: trained {given.steps} steps, stored, {_right(questions, answers)} of {len(answers)} right in "
        "transformers"
    )


def _ask(given, folder: Path, device: str) -> None:
    from qrl.engine import vllm

    before = json.loads((folder / "transformers.json").read_text())
    options = {"max_tokens": 512, "sequences": 64, "deterministic": False, "seed": 0, "memory": 0.2}
    options["cache_gib"] = 0.5  # a fixed size lets engines of several formats load at once
    with vllm.Vllm(folder / "stored", device, given.dtype, **options) as engine:
        questions, prompts = _heldout(engine.tokens, len(before))
        answers = [completion.text for completion in engine.generate(prompts, max_new_tokens=NEW_TOKENS)]
        receipt = engine.receipt()
    same = sum(ours == theirs for ours, theirs in zip(before, answers, strict=True))
    print(
        f"{given.format}: {same} of {len(answers)} answers the same; right: {_right(questions, before)} in "
        f"transformers, {_right(questions, answers)} in vLLM"
    )
    print(json.dumps(receipt))


def _heldout(tokens, count: int) -> tuple[list[tasks.Question], list[list[int]]]:
    questions = tasks.load("arithmetic", "heldout", count, 0)
    return questions, [prompt.render(tokens, question.question, "plain") for question in questions]


def _right(questions: list[tasks.Question], answers: list[str]) -> int:
    gold = [question.answer for question in questions]
    return sum(verdict.strict for verdict in tasks.grade_many("arithmetic", answers, gold))


if __name__ == "__main__":
    main()
