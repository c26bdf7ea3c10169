"""Measure a recipe's gain on held-out questions, and how far each way to merge an adapter is from the trained model.

    python tests/benchmarks/adapters.py tiny-qlora 0 train.steps=16 evaluate.n=1000
    python tests/benchmarks/adapters.py raft 0 evaluate.n=1000

Recipe, seed, and overrides; on a CPU, without MLflow. The gain is paired over the questions; the merge is tried into
the base as it was stored and into the original one, which is wrong for a packed base and shows by how much.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import process, recipe, stats, tasks, tiny
from qrl.engine import hf
from qrl.evaluate import cells
from qrl.tasks import prompt
from qrl.train import Job, merge, trainers


def main() -> None:
    process.prepare_process()
    name, seed, *given = sys.argv[1:]
    settings = recipe.load(name, {"seed": seed} | dict(each.split("=", 1) for each in given))
    asked = {"task": settings.task, "template": settings.prompt, "device": "cpu"}
    questions = tasks.load(settings.task, "train", settings.train.questions, settings.seed)
    folder = Path(tempfile.mkdtemp(prefix="adapters-"))
    warnings = []
    data = {"base": tiny.PATH, "questions": questions, "settings": settings.train, "seed": settings.seed}
    out = {"work": folder / "work", "out": folder / "model", "watch": settings.watch, "warn": warnings.append}
    trained = trainers.TRAINERS[trainers.name(settings.train)].run(Job(**data, **asked, **out))
    path = merged(trained.path, questions[:8], settings, folder) if trained.adapter else trained.path

    heldout = tasks.load(settings.task, "heldout", settings.evaluate.n, settings.seed)
    before, after = (
        cells.answer_questions(cells.Cell("", "full", each), heldout, settings, "cpu").frame["correct"]
        for each in (tiny.PATH, path)
    )
    gain = stats.contrast([after, before], (1, -1))
    print(
        f"{name}, seed {seed} {' '.join(given)}: {before.mean():.3f} -> {after.mean():.3f}, gain {gain.estimate:+.3f} "
        f"[{gain.low:+.3f}, {gain.high:+.3f}], n = {len(heldout):,}; {trained.seconds:.0f} s of training, peak "
        f"{trained.history['peak_memory_gib'].max():.2f} GiB; {len(warnings)} warnings "
        f"{[alarm.watcher for alarm in warnings]}"
    )


def merged(adapter: Path, questions: list, settings: recipe.Recipe, folder: Path) -> Path:
    """Merge an adapter into the original base and into the one it was trained over, and print how far each is off."""
    tokens = hf.tokenizer(tiny.PATH)
    prompts = [prompt.render(tokens, question.question, settings.prompt) for question in questions]
    for into in ("full", "auto"):
        made = merge.run(tiny.PATH, adapter, folder / into, prompts, max_kl=float("inf"), into=into)
        print(
            f"merged into {made.into} (trained over {settings.train.storage}): KL {made.kl:.2g} nats per token, "
            f"largest logit difference {made.max_logit_diff:.3f}, residual {made.merge_residual:.3f}, "
            f"base shifted by {made.base_shift:.3f}"
        )
    return made.path


if __name__ == "__main__":
    main()
