"""Run the sweep of README.md: make models, train, quantize, evaluate, measure weights; then export it. Resumable.

    python tests/benchmarks/answer/run.py WORK --sizes m3,m10 --seeds 0,1 --lanes 4   # on one GPU
    python tests/benchmarks/answer/run.py WORK --check                                # qrl-tiny and two seeds on a CPU

Each size and seed is one lane's work: commands of qrl, whose output goes to WORK/logs. A lane's variants are trained,
quantized and evaluated side by side, with an engine each. A sweep over all arms comes last, and reuses what is ready.
A second call does what is left.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import export
import why
from filelock import FileLock
from findings import OF_GRPO

from qrl import names, tiny
from qrl import recipe as recipes
from qrl.errors import BadInput
from qrl.study.arms import load as load_arms
from qrl.tiny.make import RECORD


class Size(NamedTuple):
    """A shape, how it is made, and how GRPO trains it."""

    layers: int
    hidden: int
    steps: int  # of 512 texts
    learning_rate: float  # of GRPO
    rate: float = 2e-3  # the peak while the model is made
    texts: int = 0  # computed at once while the model is made; 0: all. With 512, m200 does not fit 80 GB
    micro_batch: int = 128  # sequences at once in training


SIZES = {
    "m3": Size(4, 256, 1000, 2e-5),
    "m10": Size(6, 384, 1000, 2e-5),
    "m25": Size(10, 512, 800, 2e-5),
    "m200": Size(16, 1152, 800, 1e-5, rate=6e-4, texts=128, micro_batch=32),
}
SLIPS = {"": 0.7, "-pretrained": 0.4}  # errors in the text: of the base, and of the control that is more accurate
ACCURACY = (0.60, 0.72)  # of a base; else it is made in twice the steps, once
ENDED = (0, 3)  # 3: a gate refused a stage, after everything else
FP8 = "grpo-fp8"
TRAINED = {names.GRPO: (names.GRPO, "none"), names.SFT: (names.SFT, "none"), FP8: (names.GRPO, "fp8")}
# Variant → its tag in the store, what its rollouts are quantized to.
PACKED = {"fp8": "packed", "nvfp4": "packed", "int8": "int8"}
# Scheme that rounds activations, so that it is not answered unpacked → which evaluation answers it; int8 is slow.
ARMS = ("sft", "tiny-qlora", "qat-int4", "qad-int4")
THREADS = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 8))}  # of a command: many run side by side
CHECK = {  # changes of recipe `tiny`, which sweep.yaml extends for a GPU
    "device": "cpu",
    "train": {"steps": 2, "prompts_per_step": 4, "micro_batch": 32},
    "evaluate": {"n": 60, "batch_size": 60},
    "quantize": {"schemes": ["rtn-int4", "gptq-int3"], "calibration_samples": 4, "calibration_seed": 0},
}


class Work:
    """Commands below one folder, with one store."""

    def __init__(
        self,
        folder: Path,
        changes: Mapping[str, object],
        arms: Sequence[str],
        *,
        fp8: bool,
        weights: bool = True,
        check: bool = False,
        trainings: int = 16,
        engines: int = 64,
    ) -> None:
        self.folder, self.changes, self.arms, self.check = folder.resolve(), changes, arms, check
        self.store, self.fp8, self.weights = f"sqlite:///{self.folder}/store.db", fp8, weights
        self.recipe = "tiny" if check else str(Path(__file__).with_name("sweep.yaml"))
        self.schemes = changes.get("quantize", {}).get("schemes") or list(recipes.load(self.recipe).quantize.schemes)
        self.printing, self.training = threading.Lock(), threading.Semaphore(trainings)
        self.evaluating, self.failed = threading.Semaphore(engines), []  # names of commands
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    def qrl(self, name: str, *words: str, module: str = "qrl") -> bool:
        """Run a command of qrl unless it was done, note its seconds, and return whether it ended well."""
        done = self.folder / "logs" / f"{name}.done"
        if done.exists():
            return True
        variables = THREADS | os.environ | {"MLFLOW_TRACKING_URI": self.store, "PYTHONPATH": export.with_checkout()}
        began, path = time.monotonic(), self.folder / "logs" / f"{name}.log"
        with open(path, "w") as log:
            command = [sys.executable, "-m", module, *words]
            code = subprocess.run(
                command, cwd=self.folder, env=variables, stdout=log, stderr=log, check=False
            ).returncode
        took = f"after {time.monotonic() - began:.0f} s"
        with self.printing:
            print(
                f"{name}: done {took}" if code in ENDED else f"{name}: ended with {code} {took}, see {path}", flush=True
            )
        if code in ENDED:
            done.touch()
        else:
            self.failed.append(name)
        return code in ENDED

    def made(self, size: str, shape: Size, *, device: str, slip: float, suffix: str) -> bool:
        """Make a model unless it is there, and return whether it is. A second call waits for the first."""
        with self.alone(f"make-{size}{suffix}"):
            return self.make(size, shape, device=device, slip=slip, suffix=suffix)

    def make(self, size: str, shape: Size, *, device: str, slip: float, suffix: str) -> bool:
        """Make a model of one size; its texts have errors in a share `slip` of one kind of step."""
        if self.check:
            shutil.copytree(tiny.PATH, self.folder / "models" / (size + suffix), dirs_exist_ok=True)
            return True
        model = self.folder / "models" / (size + suffix)
        words = ["--out", str(model), "--type", "qwen2", "--positions", "512", "--vocab", "640", "--device", device]
        words += ["--layers", str(shape.layers), "--hidden", str(shape.hidden), "--slip", str(slip)]
        words += ["--micro-batch", str(shape.texts), "--learning-rate", str(shape.rate)]
        if not self.qrl(f"make-{size}{suffix}", *words, "--steps", str(shape.steps), module="qrl.tiny.make"):
            return False
        longer, record = f"make-{size}-longer", model / RECORD
        if record.is_file():  # else the second making was interrupted
            scores = json.loads(record.read_text())["scores"]
            (accuracy,) = (score["accuracy"] for score in scores if score["prompt"] == "plain")
            if suffix or ACCURACY[0] <= accuracy <= ACCURACY[1] or (self.folder / "logs" / f"{longer}.done").exists():
                return True
            shutil.rmtree(model)
        return self.qrl(longer, *words, "--steps", str(2 * shape.steps), module="qrl.tiny.make")

    def unit(self, size: str, shape: Size, seed: int, slips: Sequence[str]) -> None:
        """Train and evaluate one size under one seed, and measure its weights."""
        recipe = ["--recipe", self.recipe_of(size, shape)]
        base = str(self.folder / "models" / size)

        words = ["--models", base, "--seeds", str(seed), "--yes", "--arms"]

        def sweep(arm: str) -> None:
            # Every sweep begins with GRPO, which two at once would not share; nor would they share its cells.
            self.train(names.GRPO, base, seed, recipe)
            few = [scheme for scheme in self.schemes if scheme in OF_GRPO]
            schemes = ["--quantize.schemes", ",".join(few)] if few else []
            with self.training:
                self.begin(arm, base, seed, recipe)
                self.qrl(f"arm-{arm}-{size}-{seed}", "sweep", *recipe, *words, arm, *schemes)

        variants = [names.GRPO, *({names.SFT} & set(self.arms))] if self.arms else []
        variants += [FP8] if self.fp8 else []
        work = [partial(self.trained, variant, base, seed, recipe) for variant in variants]
        work += [partial(self.untrained, size, suffix, seed, recipe) for suffix in slips]
        work += [partial(sweep, arm) for arm in self.arms if arm != names.SFT]
        with ThreadPoolExecutor(len(work)) as side_by_side:
            jobs = [side_by_side.submit(each) for each in work]
        if self.arms:
            self.qrl(f"sweep-{size}-{seed}", "sweep", *recipe, *words, ",".join(self.arms))
        for job in jobs:
            job.result()  # raises what a job has raised

    def begin(self, arm: str, base: str, seed: int, recipe: Sequence[str]) -> None:
        """Train an arm that does not need GRPO's model while that is trained; the arm's sweep reuses it."""
        _, own = load_arms(recipe[1], (arm,), {"model": base}, seed)
        if own.recipe.train.teacher is None:
            words = [word for key, value in own.typed.items() for word in (f"--{key}", value)]
            self.qrl(f"train-{arm}-{Path(base).name}-{seed}", "train", *words)

    def recipe_of(self, size: str, shape: Size) -> str:
        """Write the sweep's recipe for one size, whose settings hold for arms that do not change them."""
        path = self.folder / f"{size}.yaml"
        train = {"learning_rate": shape.learning_rate, "micro_batch": shape.micro_batch}
        whole = {"extends": self.recipe, **self.changes, "train": train | self.changes.get("train", {})}
        with self.alone(size):
            text = json.dumps(whole)  # which is YAML, too
            if not path.is_file() or path.read_text() != text:
                path.write_text(text)
        return str(path)

    def untrained(self, size: str, suffix: str, seed: int, recipe: Sequence[str]) -> None:
        """Make the cells of a base, or of `pretrained`, made of text with fewer errors."""
        model = str(self.folder / "models" / (size + suffix))
        self.cells("pretrained" if suffix else names.BASE, model, model, seed, recipe)

    def trained(self, variant: str, base: str, seed: int, recipe: Sequence[str]) -> None:
        """Train a variant and make its cells; measure the weights of GRPO meanwhile."""
        if not (model := self.train(variant, base, seed, recipe)):
            return
        work = [partial(self.cells, variant, model, base, seed, recipe)]
        work += [partial(self.diagnose, model, base, seed, recipe)] if variant == names.GRPO and self.weights else []
        with ThreadPoolExecutor(len(work)) as side_by_side:
            for job in [side_by_side.submit(each) for each in work]:
                job.result()

    def train(self, variant: str, base: str, seed: int, recipe: Sequence[str]) -> str:
        """Train a variant; return its address, or nothing if it failed. A second call waits for the first."""
        tag, rollouts = TRAINED[variant]
        words = ["--model", base, "--seed", str(seed), "--rollout.quantization", rollouts]
        words += ["--train.algorithm", "sft"] if variant == names.SFT else []
        name = f"train-{variant}-{Path(base).name}-{seed}"
        with self.alone(name), self.training:
            whole = self.qrl(name, "train", *recipe, *words)
        asked = {"model": base, "seed": seed, "rollout.quantization": rollouts, "train.method": "full"}  # not QLoRA's
        if whole and not (model := export.trained(self.store, tag, **asked)):
            raise RuntimeError(f"{name} is done, but {self.store} has no such training")
        return model if whole else ""

    def alone(self, name: str) -> FileLock:
        """Return the lock of one piece of work, for threads and for another call on the same folder."""
        return FileLock(self.folder / "logs" / f"{name}.lock")

    def diagnose(self, model: str, base: str, seed: int, recipe: Sequence[str]) -> None:
        """Measure GRPO's weights, and what they and the base's are stored as, once they are."""
        of_base = self.quantize(names.BASE, base, base, seed, recipe)
        of_grpo = self.quantize(names.GRPO, model, base, seed, recipe)
        if not (of_base and of_grpo):  # what both store is compared
            return
        words = ["--model", base, "--seed", str(seed), "--base", base, "--trained", model]
        words += ["--quantized", ",".join(f"{cell}={each}" for cell, each in (of_base | of_grpo).items())]
        words += ["--out", str(self.folder / "weights" / f"{Path(base).name}-{seed}"), "--diagnose.behaviour", "64"]
        self.qrl(f"diagnose-{Path(base).name}-{seed}", "diagnose", *recipe, *words)

    def quantize(self, variant: str, model: str, base: str, seed: int, recipe: Sequence[str]) -> dict[str, str]:
        """Quantize a model, made from a base, into the recipe's schemes; return addresses by cell.

        One that was not trained under the seed is quantized once for all seeds. A second call waits for the first.
        """
        untrained = model == base
        name = f"quantize-{variant}-{Path(base).name}" + ("" if untrained else f"-{seed}")
        words = ["--model", base, "--seed", str(seed), "--models", f"{variant}={model}"]
        words += ["--scheme", ",".join(self.schemes)]
        with self.alone(name):
            if not self.qrl(name, "quantize", *recipe, *words):
                return {}
        made = export.quantized(self.store, base, None if untrained else seed)
        return {f"{v}:{q}": each for (v, q), each in made.items() if v == variant and q in self.schemes}

    def cells(self, variant: str, model: str, base: str, seed: int, recipe: Sequence[str]) -> None:
        """Quantize a model, made from a base, and evaluate all of its cells."""
        if made := self.quantize(variant, model, base, seed, recipe):
            listed = {f"{variant}:full": model} | made
            groups: dict[str, dict[str, str]] = defaultdict(dict)
            for cell in sorted(listed):
                groups[PACKED.get(cell.partition(":")[2], "evaluate")][cell] = listed[cell]
            with ThreadPoolExecutor(len(groups)) as side_by_side:
                jobs = []
                for step, cells in groups.items():
                    words = ["--model", base, "--seed", str(seed)]
                    words += ["--cells", ",".join(f"{cell}={each}" for cell, each in cells.items())]
                    name = f"{step}-{variant}-{Path(base).name}-{seed}"
                    jobs += [side_by_side.submit(self.evaluate, name, *recipe, *words)]
                for job in jobs:
                    job.result()

    def evaluate(self, name: str, *words: str) -> bool:
        """Evaluate cells, as soon as few enough others are."""
        with self.evaluating:
            return self.qrl(name, "evaluate", *words)


def main() -> int:
    """Run what is left, export it, and return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for models, store, logs and the export")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--seeds", help="default: 0,1,2,3")
    parser.add_argument("--lanes", type=int, default=4, help="sizes and seeds at once on one GPU")
    parser.add_argument("--trainings", type=int, default=16, help="at once, of all lanes; m200: 3 on 80 GB")
    parser.add_argument("--engines", type=int, default=64, help="evaluations at once; m200: 8 on 80 GB")
    parser.add_argument(
        "--arms",
        help=f"of the sweep, beside GRPO in full precision; '': bases alone; default: {','.join(ARMS)}, of --check sft",
    )
    parser.add_argument("--schemes", help="of base, grpo and sft, instead of sweep.yaml's")
    parser.add_argument("--without-control", action="store_true", help="leave `pretrained` out")
    parser.add_argument("--without-fp8", action="store_true", help="leave the trainings with FP8 rollouts out")
    parser.add_argument("--without-weights", action="store_true", help="leave the measures of GRPO's weights out")
    parser.add_argument("--check", action="store_true", help="a copy of qrl-tiny as m3, and two seeds, on a CPU")
    given = parser.parse_args()
    seeds = (given.seeds or ("0,1" if given.check else "0,1,2,3")).split(",")
    if wrong := [seed for seed in seeds if not seed.isdecimal()]:
        parser.error(f"--seeds has {wrong[0]!r}: expected whole numbers, by comma")
    sizes = ["m3"] if given.check else given.sizes.split(",")
    if wrong := [size for size in sizes if size not in SIZES]:
        parser.error(f"--sizes has {wrong[0]!r}: expected some of {', '.join(SIZES)}")
    asked = (names.SFT if given.check else ",".join(ARMS)) if given.arms is None else given.arms
    arms = list(filter(None, asked.split(",")))
    changes = CHECK if given.check else {"quantize": {"schemes": given.schemes.split(",")}} if given.schemes else {}
    fp8 = not given.check and not given.without_fp8
    limits = {"trainings": given.trainings, "engines": given.engines}
    work = Work(given.work, changes, arms, fp8=fp8, weights=not given.without_weights, check=given.check, **limits)
    try:
        load_arms(work.recipe, arms, {"model": str(tiny.PATH)}, 0)
    except BadInput as error:
        parser.error(f"--arms: {error}")
    slips = [""] if given.without_control else list(SLIPS)
    device = "cpu" if given.check else "cuda"
    with ThreadPoolExecutor(len(sizes)) as makers, ThreadPoolExecutor(1 if given.check else given.lanes) as lanes:

        def made(size: str) -> bool:
            with ThreadPoolExecutor(len(slips)) as both:
                jobs = [
                    both.submit(work.made, size, SIZES[size], device=device, slip=SLIPS[each], suffix=each)
                    for each in slips
                ]
            return all(job.result() for job in jobs)

        waiting = []
        for size, whole in zip(sizes, makers.map(made, sizes), strict=True):
            if whole:
                waiting += [lanes.submit(work.unit, size, SIZES[size], int(seed), slips) for seed in seeds]
        failed = [error for one in waiting if (error := one.exception())]
    for error in failed:
        traceback.print_exception(error)
    export.write(work.store, work.folder / "weights", work.folder / "export")
    why.write(work.folder)
    if work.failed:
        print(f"Failed: {', '.join(work.failed)}. The same command does what is left.", file=sys.stderr)
    return int(bool(failed or work.failed))


if __name__ == "__main__":
    sys.exit(main())
