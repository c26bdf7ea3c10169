"""One study by hand: train, quantize, evaluate and compare the shipped model, in one script from top to bottom.

    python -m qrl.examples.by_hand
    python -m qrl.examples.by_hand --steps 2 --questions 40 --out /tmp/by_hand

`mlflow run .` does the same with settings from a recipe, a run for each step, reuse of finished steps and gates. None
of that is here: no launcher, no MLflow, only the functions that compute. Each takes folders or tables and returns
folders or tables, so that any of them can be replaced by your own.
"""

import argparse
import tempfile
from pathlib import Path

import pandas as pd

import qrl
from qrl import quantize, tasks, tiny
from qrl.evaluate import cells
from qrl.recipe import Evaluate, Recipe, Train
from qrl.train import Job, grpo

parser = argparse.ArgumentParser(description="Train, quantize, evaluate and compare qrl-tiny on a CPU.")
parser.add_argument("--steps", type=int, default=16, help="optimizer steps of GRPO")
parser.add_argument("--questions", type=int, default=2000, help="held-out questions that every cell answers")
parser.add_argument("--out", type=Path, help="a new folder for the models and the answers")
options = parser.parse_args()
out = options.out or Path(tempfile.mkdtemp(prefix="by_hand-"))

# 1. Questions. A generated question belongs to one split only, so training never sees a held-out one.
prompts_per_step = 12
training_questions = tasks.load("arithmetic", "train", n=options.steps * prompts_per_step, seed=0)
heldout_questions = tasks.load("arithmetic", "heldout", n=options.questions, seed=0)

# 2. Train. GRPO samples 8 completions for each question and reinforces those that score above their group's mean.
# The learning rate is high for a model of this size: it diverges above 5e-5.
train_settings = Train(
    steps=options.steps, prompts_per_step=prompts_per_step, micro_batch=32, learning_rate=4e-5, max_completion_tokens=80
)
job = Job(
    base=tiny.PATH,
    questions=training_questions,
    settings=train_settings,
    task="arithmetic",
    template="plain",  # the model knows the answer format, so instructions would only cost tokens
    seed=0,
    device="cpu",
    work=out / "checkpoints",
    out=out / "grpo",
)
trained = grpo.run(job)
print(f"trained {options.steps} steps in {trained.seconds:.0f} s: {trained.path}")

# 3. Quantize both models, not only the trained one. NF4 costs the base some accuracy too, and only the difference
# between the two costs says what quantization does to the gain.
full_precision = {"base": tiny.PATH, "grpo": trained.path}
checkpoints = {}
for variant, folder in full_precision.items():
    quantized = quantize.run("nf4", folder, out / f"{variant}-nf4")
    checkpoints[variant, "full"] = folder
    checkpoints[variant, "nf4"] = quantized.path
    print(f"quantized {variant}: {quantized.bits_per_weight:.2f} bits a weight")

# 4. Evaluate. All four cells answer the same questions with the same prompt and the same grader. Greedy decoding makes
# the answers repeatable, and the same questions make every comparison paired.
evaluation = Recipe(
    task="arithmetic", prompt="plain", evaluate=Evaluate(n=options.questions, batch_size=128, max_new_tokens=96)
)
answers = []
for (variant, scheme), folder in checkpoints.items():
    answered = cells.answer_questions(cells.Cell(variant, scheme, folder), heldout_questions, evaluation, "cpu")
    answers.append(answered.frame)
    print(f"evaluated {variant} under {scheme}: accuracy {answered.frame.correct.mean():.3f}")

# 5. Compare. A row per cell and question is all that the statistics need: `qrl.compare` computes the gains, gain
# survival with its paired interval, and the verdict. The file can be compared again without any model.
table = pd.concat(answers, ignore_index=True)
table.to_parquet(out / "questions.parquet")
print(qrl.compare(table))
print(f"\nAgain: qrl compare --questions {out / 'questions.parquet'} --out report")
