"""What a quantization-aware training stores, answered by transformers and by vLLM: the same questions, answer by answer.

    python tests/benchmarks/qat_stored.py make DIR int4    # trains the built-in model a few steps, stores its codes, asks transformers
    python tests/benchmarks/qat_stored.py ask DIR int4     # in vLLM's environment (projects/vllm, projects/vllm_cpu): asks vLLM

llm-compressor stores and vLLM answers, and the two cannot share an environment, hence two commands. Answers are greedy; two
engines round their products differently, so an answer may turn at a near tie. Both are graded.
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
    """Makes, or asks."""
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
    from qrl.train import grpo

    settings = Train(steps=given.steps, prompts_per_step=8, generations=4, micro_batch=32, max_completion_tokens=80, learning_rate=4e-5,
                     qat=given.format, qat_calibration_samples=16, max_ngram_share=1.0)  # fmt: skip
    done = grpo.run(tiny.PATH, tasks.load("arithmetic", "train", 512, 0), settings, task="arithmetic", template="plain", seed=0, device=device,
                    work=folder / "work", out=folder / "masters")  # fmt: skip
    scheme = f"rtn-{given.format}"
    calibration = (
        ["Tom has 3 apples. #### 3"] * 2 if scheme in choices.CALIBRATED else ()
    )  # its own scales lie beside the masters
    quantize.run(
        scheme,
        done.path,
        folder / "stored",
        settings=choices.of(scheme, Quantize(calibration_samples=2), 0),
        calibration=calibration,
    )
    model, tokens = hf.load(folder / "stored", device, DTYPES[given.dtype])
    questions, prompts = _asked(tokens, given.questions)
    told = [
        each.text for each in hf.generate(model, tokens, prompts, max_new_tokens=NEW_TOKENS, batch_size=len(prompts))
    ]
    (folder / "transformers.json").write_text(json.dumps(told))
    print(
        f"{given.format}: trained {given.steps} steps, stored, {_right(questions, told)} of {len(told)} right in transformers"
    )


def _ask(given, folder: Path, device: str) -> None:
    from qrl.engine import vllm

    before = json.loads((folder / "transformers.json").read_text())
    room = 2**29  # of cache, said in bytes, so that engines of several formats can load at once
    with vllm.Vllm(
        folder / "stored",
        device,
        given.dtype,
        max_tokens=512,
        sequences=64,
        deterministic=False,
        seed=0,
        memory=0.2,
        cache_bytes=room,
    ) as engine:
        questions, prompts = _asked(engine.tokens, len(before))
        told = [each.text for each in engine.generate(prompts, max_new_tokens=NEW_TOKENS)]
        receipt = engine.receipt()
    same = sum(one == other for one, other in zip(before, told, strict=True))
    print(
        f"{given.format}: {same} of {len(told)} answers the same; right: {_right(questions, before)} in transformers, {_right(questions, told)} in vLLM"
    )
    print(json.dumps(receipt))


def _asked(tokens, count: int) -> tuple[list[tasks.Question], list[list[int]]]:
    questions = tasks.load("arithmetic", "heldout", count, 0)
    return questions, [prompt.render(tokens, each.question, "plain") for each in questions]


def _right(questions: list[tasks.Question], told: list[str]) -> int:
    return sum(verdict.strict for verdict in tasks.grade_many("arithmetic", told, [each.answer for each in questions]))


if __name__ == "__main__":
    main()
