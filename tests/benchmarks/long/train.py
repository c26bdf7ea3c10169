"""Train on answers of 8,000 tokens with rollouts of an engine that rounds: does the reward rise as with bf16's?

    python tests/benchmarks/long/train.py WORK                          # one GPU
    python tests/benchmarks/long/train.py WORK --kinds fp8,fp8-uncorrected --together
    python tests/benchmarks/long/train.py WORK --check                  # short answers, CPU, `bf16` alone
    python tests/benchmarks/long/train.py WORK --print                  # the table again

Makes a model that counts (chains.py) with a wrong sum in one of fifty lines, then trains it with `qrl train`, all
weights, 64 completions a step; the reward is the share of right lines. Every kind has the same prompts and seed:

bf16                vLLM in bf16
fp8                 vLLM's FP8 kernels, corrected token by token (the default)
fp8-sequence        the same, corrected by whole completions
fp8-uncorrected     the same without a correction
nvfp4-a4            quantization-aware training in NVFP4 W4A4; the engine rounds as the trainer does
nvfp4-a4-uncorrected

Prints the reward in the first and the last quarter of the steps with the standard error over steps, k3, token and
sequence ESS, and which watchers warned. Output goes to WORK/logs and WORK/*.db; a second call does what is left.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1] / "answer"))

import chains
import export

from qrl import names
from qrl.tasks import Question, prompt
from qrl.workspace import write_atomically

FP8 = ("--rollout.quantization", "fp8")
TOKENS = 8192
PROMPT = "plain"  # of the texts that the model is made of, and of its training: with another it answers nothing right
QAT = ("--train.qat", "nvfp4-a4", "--train.qat_calibration_max_tokens", str(TOKENS))
PLAIN = ("--rollout.is_correction", "none")
KINDS = {
    "bf16": (),
    "fp8": FP8,
    "fp8-sequence": (*FP8, "--rollout.is_correction", "sequence_truncate"),
    "fp8-uncorrected": (*FP8, *PLAIN),
    "nvfp4-a4": QAT,
    "nvfp4-a4-uncorrected": (*QAT, *PLAIN),
}
SLIP = 0.02  # share of the sums that are wrong
SHORT = 4  # lines of a text that is cut, at most: the first sums cannot be copied from the lines before
WHOLE = 8  # of so many texts one is whole; from whole ones alone a model learns to go on, but not to begin
LINES = 3  # whose likeliest tokens are looked at
BEGUN = 0.95  # share of these that is enough; else the beginnings are learned once more
ROUNDS = 3  # at most
PART = 32  # texts that a process makes at once
WORKERS = 8
USUAL = "--train.method full --train.prompts_per_step 8 --train.generations 8 --train.micro_batch 4 --train.dtype bf16 "
USUAL += "--train.questions 400 --rollout.engine vllm --rollout.kv_cache_gib 3 "
USUAL += f"--rollout.compile false --rollout.max_model_tokens {TOKENS + 100} --train.max_completion_tokens {TOKENS}"
CHECK = "--device cpu --train.prompts_per_step 2 --train.generations 4 --train.micro_batch 4 --train.questions 16 "
CHECK += "--train.max_completion_tokens 300"
CHECK_LINES = 12


@dataclass(frozen=True)
class Chains:
    """A corpus as `qrl.tiny.train` reads it: long answers cut after a few lines, and `whole` ones among them."""

    whole: bool  # else all are cut
    slip: float  # share of the sums that are wrong
    seed: int

    def token_ids(self, folder: Path, first: int, n: int, positions: int, workers: int):
        """Yield the token ids of n texts."""
        parts = [(self, folder, positions, number) for number in range(-(-n // PART))]
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for texts in pool.imap(_tokenized, parts):
                yield from texts


def _tokenized(part: tuple[Chains, Path, int, int]) -> list[list[int]]:
    """Return the token ids of a part of a corpus; in a process of its own."""
    corpus, folder, positions, number = part
    tokens, draw, made = _tokenizer(folder), random.Random(f"corpus {corpus.seed} {number}"), []
    for place in range(PART):
        whole = corpus.whole and place % WHOLE == 0
        target, start, step = chains.drawn(draw, chains.LINES, range(2, 1000 if whole else 6000, 2))
        solution = chains.chain(target, start, step, lambda: draw.choice((-1, 1)) * (draw.random() < corpus.slip))
        asked = Question("", f"Count from {start} to {target} by {step}.", solution, str(target))
        text = prompt.training_text(tokens, asked, PROMPT)
        if not whole:
            head, _, _ = text.partition(solution)
            text = head + "".join(solution.splitlines(keepends=True)[: draw.randint(1, SHORT)])
        made.append(tokens(text, add_special_tokens=False)["input_ids"][:positions])
    return made


@functools.cache
def _tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def make(out: Path, work: Path, *, check: bool) -> None:
    """Make the model that counts: first on the beginnings of answers, then on whole ones among them."""
    import torch

    from qrl.tiny import tokenizer
    from qrl.tiny.shape import Shape, new_model
    from qrl.tiny.train import Budget, train

    words = [f"Count from {number} to {number + 9} by 3. #### 12" for number in range(100)]
    tokens = tokenizer.make(words, work / "tokenizer", 320, TOKENS + 512)
    torch.manual_seed(0)
    device = "cpu" if check else "cuda"
    model = new_model(Shape(vocab=320, positions=TOKENS + 512).whole(), tokens).to(device)
    limits = {"positions": TOKENS + 512, "workers": 1 if check else WORKERS, "save_every": 10_000}

    def learned(number: int, budget: Budget, micro_batch: int, *, whole: bool) -> float:
        place = work / f"part{number}"
        place.mkdir(exist_ok=True)
        (place / "tokenizer").exists() or (place / "tokenizer").symlink_to(work / "tokenizer")
        train(model, tokens, Chains(whole, SLIP, number), budget, place, micro_batch=micro_batch, **limits)
        right = _begun(model, tokens)
        print(f"{right:.2f} of the first {LINES} lines are the likeliest, each after right ones", flush=True)
        return right

    for number in range(ROUNDS):
        if learned(number, Budget(*((60, 32) if check else (1000, 512))), 0, whole=False) >= BEGUN or check:
            break
    else:
        sys.exit(f"Fewer than {BEGUN} of the first lines are right after {ROUNDS} rounds: make SHORT or LINES smaller.")
    if not check:
        learned(ROUNDS, Budget(600, 128, learning_rate=5e-4), 128 // WHOLE, whole=True)
    with write_atomically(out) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokens.save_pretrained(folder)


def _begun(model, tokens) -> float:
    """Return of 64 questions the share of first lines that are the model's most likely ones, each after right ones."""
    import torch

    right = 0
    for asked in chains.load("train", 64, 0):
        head = prompt.training_text(tokens, asked, PROMPT).partition(asked.solution)[0]
        ids = [
            tokens(head + "".join(asked.solution.splitlines(keepends=True)[:n]), add_special_tokens=False)["input_ids"]
            for n in range(LINES + 1)
        ]
        with torch.no_grad():
            likely = model(torch.tensor([ids[-1]], device=model.device)).logits[0].argmax(-1).tolist()
        ends = [len(each) for each in ids]
        right += sum(likely[a - 1 : b - 1] == ids[-1][a:b] for a, b in itertools.pairwise(ends))
    return right / 64 / LINES


def trained(kind: str, work: Path, steps: int, rate: float, *, check: bool) -> str:
    """Train one kind unless it was trained, and return its line of the table."""
    store, log = f"sqlite:///{work}/{kind}.db", work / "logs" / f"{kind}.log"
    if not (line := told(kind, store)):
        variables = os.environ | {"MLFLOW_TRACKING_URI": store, "PYTHONPATH": export.with_checkout()}
        task = str(work / "chains.py")
        words = ["--model", str(work / "model"), "--task", task, "--train.rewards", f"{task}:lines"]
        words += ["--prompt", PROMPT, "--train.max_ngram_share", "1"]
        words += [
            "--train.steps",
            str(steps),
            "--train.learning_rate",
            str(rate),
            *(CHECK if check else USUAL).split(),
            *KINDS[kind],
        ]
        began = time.monotonic()
        with open(log, "w") as written:
            command = [sys.executable, "-m", "qrl", "train", *words]
            given = {"env": variables | {"TQDM_DISABLE": "1"}, "stdout": written, "stderr": written}
            code = subprocess.run(command, cwd=work, check=False, **given).returncode
        line = told(kind, store) or f"{kind}: ended with {code} after {time.monotonic() - began:.0f} s, see {log}"
    print(line, flush=True)
    return line


def told(kind: str, store: str) -> str:
    """Return a kind's line; empty if it was not trained to its end."""
    from mlflow import MlflowClient

    if not Path(store.removeprefix("sqlite:///")).is_file():
        return ""
    client = MlflowClient(store)
    runs = client.search_runs(["0"], f"{export.FINISHED} and tags.`{names.TAG_STEP}` = 'train'")
    if not runs:
        return ""
    keys = ("train/reward", "train/completion_tokens", "rollout/kl_k3", "rollout/token_ess", "rollout/sequence_ess")
    every = {key: [one.value for one in client.get_metric_history(runs[0].info.run_id, key)] for key in keys}
    reward = every["train/reward"]
    part = max(2, len(reward) // 4)
    first, last = (f"{statistics.mean(each):.3f}" for each in (reward[:part], reward[-part:]))
    ranges = {
        key.partition("/")[2]: f"{min(values):.3g} to {max(values):.3g}"
        for key, values in every.items()
        if values and key != "train/reward"
    }
    tagged = {tag.removeprefix(names.TAG_WATCH) for tag in runs[0].data.tags if tag.startswith(names.TAG_WATCH)}
    warned = sorted(tagged - {"format", "gap"})  # what is known before the first step
    spread = statistics.stdev(reward[-part:]) / part**0.5
    return (
        f"{kind}: reward {first} in the first {part} steps, {last} ± {spread:.3f} in the last; "
        + "; ".join(f"{key} {value}" for key, value in ranges.items())
        + f"; warned: {', '.join(warned) or 'none'}\n  reward by step: {' '.join(f'{one:.2f}' for one in reward)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=4e-5)
    parser.add_argument("--together", action="store_true", help="train the kinds side by side on the GPU")
    parser.add_argument("--check", action="store_true", help="short answers and three steps, on a CPU")
    parser.add_argument("--print", action="store_true", help="only print what was trained")
    given = parser.parse_args()
    work, kinds = given.work.resolve(), ["bf16"] if given.check else given.kinds.split(",")
    if given.print:
        print("\n".join(filter(None, (told(kind, f"sqlite:///{work}/{kind}.db") for kind in kinds))))
        return
    (work / "logs").mkdir(parents=True, exist_ok=True)
    task = Path(chains.__file__).read_text()
    lines = CHECK_LINES if given.check else chains.LINES
    (work / "chains.py").write_text(task.replace(f"LINES = {chains.LINES}", f"LINES = {lines}"))
    if not (work / "model").is_dir():
        make(work / "model", work, check=given.check)
    steps = 3 if given.check else given.steps
    with ThreadPoolExecutor(len(kinds) if given.together else 1) as trainings:
        list(trainings.map(lambda kind: trained(kind, work, steps, given.learning_rate, check=given.check), kinds))


if __name__ == "__main__":
    main()
