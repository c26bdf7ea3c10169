"""Bits, size, time, error and accuracy of each scheme on qrl-tiny: `python tests/benchmarks/schemes.py [SCHEME …]`.

All schemes take about six minutes on one core. Scheme awq needs the environment of projects/awq; a study measures it.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import names, process, quantize, recipe, stats, tasks, tiny
from qrl.engine import hf
from qrl.evaluate import cells
from qrl.stats.text import interval
from qrl.tasks import prompt

N, TEMPLATE = 1000, "answer-line"
RECIPE = recipe.Recipe(task="arithmetic", prompt=TEMPLATE)
SCHEMES = (*names.BITSANDBYTES, *names.COMPRESSED)
HEAD = ("scheme", "bits a weight", "MB on disk", "seconds", "error after the last layer", "accuracy", "− full")


def main(schemes: list[str]) -> None:
    """Print a row per scheme as soon as it is measured."""
    process.prepare_process()
    process.hush_transformers()
    tokens = hf.plain_tokenizer(tiny.PATH)
    texts = [prompt.training_text(tokens, question, TEMPLATE) for question in tasks.load("arithmetic", "train", 128, 0)]
    questions = tasks.load("arithmetic", "heldout", N, 0)
    reference = correct("full", tiny.PATH, questions)
    print(f"full: {reference.mean():.3f}, n = {N}\n\n| {' | '.join(HEAD)} |\n|---{'|---:' * (len(HEAD) - 1)}|")
    for scheme in schemes:
        with tempfile.TemporaryDirectory() as folder:
            made = quantize.run(scheme, tiny.PATH, Path(folder) / scheme, calibration=texts, probe=texts)
            own = correct(scheme, made.path, questions)
        lost = stats.contrast(np.stack([own, reference]), (1, -1))
        cost = f"{made.bits_per_weight:.2f} | {made.bytes / 1e6:.2f} | {made.seconds:.1f} | {made.layer_errors[-1]:.2g}"
        print(f"| {scheme} | {cost} | {own.mean():.3f} | {interval(lost)} |", flush=True)


def correct(scheme: str, path: Path, questions: list) -> np.ndarray:
    return (
        cells.answer_questions(cells.Cell("base", scheme, path), questions, RECIPE, "cpu")
        .frame["correct"]
        .to_numpy(float)
    )


if __name__ == "__main__":
    main(sys.argv[1:] or list(SCHEMES))
