"""Run README.md's study on one GPU: train, quantize, evaluate, measure, export. Several seeds side by side.

    python tests/benchmarks/answer/real/run.py WORK --model MODEL --seeds 2,3                       # leases A and B
    python tests/benchmarks/answer/real/run.py WORK --model MODEL --seeds 2,3 --variants lora,qat-int4   # C and D
    python tests/benchmarks/answer/real/run.py WORK --model MODEL --seeds 2,3 --task gsm8k --data DIR    # E
    python tests/benchmarks/answer/real/run.py WORK --check       # the same path on a CPU, with qrl-tiny

The same command does what is left. WORK/TASK/export holds what is finished, at any time; `collect.py` writes it anew.
"""

import argparse
import itertools
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[4]))
sys.path.insert(0, str(Path(__file__).parent))

import collect
import layers
from commands import Commands

from qrl import names, tiny
from qrl import recipe as recipes
from qrl.errors import QrlError

GRPO, SFT, BASE, FULL = names.GRPO, names.SFT, names.BASE, names.FULL
LORA, QAT, QAD = "lora", "qat-int4", "qad-int4"
SFT_AT_GRPO_RATE = "sft-1e-5"  # tells the size of an update from its kind
PRETRAINED = "pretrained"  # the model before GSM8K's SFT, which makes the base there
VARIANTS = (GRPO, SFT, BASE)  # by default
TRAINED = {  # variant → what `train` is told beside the recipe
    GRPO: (),
    SFT: ("--train.algorithm", "sft"),
    SFT_AT_GRPO_RATE: ("--train.algorithm", "sft", "--train.learning_rate", "1e-5"),
    LORA: ("--train.method", "lora", "--train.lora_rank", "16", "--train.learning_rate", "2e-4"),
    QAT: ("--train.qat", "int4"),
    QAD: ("--train.qat", "int4", "--train.generations", "2", "--train.learning_rate", "2e-5", "--train.steps", "50"),
}
RANK, OF_EXTRAS = {BASE: 0, GRPO: 0, SFT: 0, LORA: 2}, 2  # which commands go first; other variants have 1
IN_INT4 = (QAT, QAD)  # their codes are RTN_INT4; other schemes of them are not evaluated
RTN_INT4 = "rtn-int4"
GSM8K_BASE = (*TRAINED[SFT], "--train.steps", "350", "--train.prompts_per_step", "64", "--train.learning_rate", "2e-4")
RATES, RATE_SEED, AIM = ("1e-5", "3e-5", "1e-4"), 0, 0.64  # of SFT: chosen at full precision under a seed seen before
# Schemes that one command quantizes. Calibration takes the longest, and commands run side by side.
TOGETHER = (
    (names.AWQ_CT,),
    (names.GPTQ,),
    (names.GPTQ_INT3,),
    (names.GPTQ_INT2,),
    (names.NF4, RTN_INT4, names.INT8, names.FP8, names.NVFP4A16),
)
PACKED = (names.FP8, names.INT8)  # they round activations, so they are not answered unpacked; an engine for each


class Treatment(NamedTuple):
    """Another way to quantize, whose cells carry its label: `base-c100:gptq`."""

    words: tuple[str, ...]
    variants: tuple[str, ...]
    schemes: tuple[str, ...]


TREATMENTS = {
    "c100": Treatment(("--quantize.calibration_seed", "100"), (BASE,), (names.AWQ_CT, names.GPTQ, names.GPTQ_INT3)),
    "c101": Treatment(("--quantize.calibration_seed", "101"), (BASE,), (names.AWQ_CT, names.GPTQ, names.GPTQ_INT3)),
    "g32": Treatment(("--quantize.group_size", "32"), (BASE, GRPO), (names.AWQ_CT, names.GPTQ, RTN_INT4)),
    "own": Treatment(("--quantize.calibration", "rollouts"), (BASE, GRPO), (names.AWQ_CT, names.GPTQ, names.GPTQ_INT3)),
}
EXTRAS = ("calibration", "layers", "weights", "elsewhere")
ELSEWHERE, CHECKED = "hf", (names.NF4, names.AWQ_CT, names.GPTQ)  # label of cells that transformers answers; which
LIMITS = {"train": 3, "quantize": 8, "evaluate": 5, "diagnose": 1}  # commands at a time, on 80 GB and 16 cores
CHECK = {  # on top of recipe `tiny`
    "device": "cpu",
    "train": {"steps": 2, "prompts_per_step": 4, "micro_batch": 32},
    "evaluate": {"n": 60, "batch_size": 60, "min_eos_rate": 0, "max_truncation_rate": 1, "min_parse_rate": 0},
    "quantize": {"schemes": [names.NF4, RTN_INT4, names.GPTQ_INT3], "calibration_samples": 4},
}


class Study:
    """The work of one task under several seeds.

    Attributes:
        commands: with a folder and a store of the task's own.
        schemes: all that the recipe has.
    """

    def __init__(
        self,
        commands: Commands,
        task: str,
        recipe: Path,
        model: str,
        *,
        data: str | None = None,
        rate: str = "",
        rate_file: Path | None = None,
        check: bool = False,
    ) -> None:
        """Take a task's settings.

        Args:
            commands: with a folder and a store of the task's own.
            task: sums or gsm8k.
            recipe: the task's.
            model: folder of the pretrained model.
            data: folder of train.jsonl and test.jsonl, for gsm8k.
            rate: of SFT; empty: it is chosen.
            rate_file: written by a run beside this one, which chooses; None: this one does.
            check: whether trainings are short.
        """
        self.commands, self.task, self.recipe, self.pretrained = commands, task, recipe, model
        self.schemes = tuple(recipes.load(str(recipe)).quantize.schemes)
        self._rate, self._rate_file = rate, rate_file
        self._choosing = threading.Lock()
        self._data = ("--data", data) if data else ()
        self._check = check
        self._exporting = threading.Lock()

    # Models

    def base(self, seed: int) -> str | None:
        """Return the address of the model that RL starts from; None if it could not be made."""
        if self.task == "sums":
            return self.pretrained
        words = self._words(self.pretrained, seed)
        return self.commands.run("train", f"train-{BASE}-{seed}", *words, *self._short(GSM8K_BASE))

    def trained(self, variant: str, seed: int) -> str | None:
        """Return the address of a variant in full precision; None if it could not be made."""
        base = self.base(seed)
        if variant == BASE or not base:
            return base
        name, own = f"train-{variant}-{seed}", self._short(TRAINED[variant])
        if variant == QAD:
            base = self.trained(GRPO, seed)
            if not base:
                return None
            own += ("--train.teacher", base)
        if variant == SFT:
            own += ("--train.learning_rate", self.sft_rate())
        made = self.commands.run("train", name, *self._words(base, seed), *own, rank=_rank(variant))
        if variant == LORA and made:
            return self.commands.run("merge", f"merge-{seed}", *self._words(base, seed), "--adapter", made)
        return made

    def quantized(self, variant: str, seed: int, treatment: str = "") -> dict[str, str]:
        """Return the addresses of a variant's quantized forms, by cell; those that could not be made are left out."""
        if not (model := self.trained(variant, seed)):
            return {}
        schemes, how = ((RTN_INT4,) if variant in IN_INT4 else self.schemes), ()
        if treatment:
            schemes, how = TREATMENTS[treatment].schemes, TREATMENTS[treatment].words
        label = f"{variant}-{treatment}" if treatment else variant
        groups = [[scheme for scheme in group if scheme in schemes and scheme in self.schemes] for group in TOGETHER]
        groups = [list(itertools.chain(*groups))] if self._check else groups
        found = {}
        with ThreadPoolExecutor(len(groups)) as side_by_side:
            jobs = [side_by_side.submit(self._quantize, label, model, seed, group, how) for group in groups if group]
        for job in jobs:
            found |= job.result()
        return found

    def _quantize(
        self, label: str, model: str, seed: int, schemes: Sequence[str], how: Sequence[str]
    ) -> dict[str, str]:
        name = f"quantize-{label}-{seed}-{'+'.join(schemes)}"
        words = [
            *self._words(self.pretrained, seed),
            "--scheme",
            ",".join(schemes),
            "--models",
            f"{label}={model}",
            *how,
        ]
        printed = self.commands.run("quantize", name, *words, rank=_rank(label))
        return dict(pair.partition("=")[::2] for pair in printed.split(",")) if printed else {}

    # What is measured of them

    def cells(self, variant: str, seed: int) -> None:
        """Evaluate a variant in full precision and in the schemes that one engine answers unpacked."""
        cells = self.quantized(variant, seed)
        if model := self.trained(variant, seed):
            unpacked = {cell: address for cell, address in cells.items() if _scheme(cell) not in PACKED}
            cells = {f"{variant}:{FULL}": model} | unpacked
            if model != self.pretrained and variant == BASE:
                cells[f"{PRETRAINED}:{FULL}"] = self.pretrained
            self._evaluate(f"evaluate-{variant}-{seed}", seed, cells, _rank(variant))

    def packed(self, scheme: str, variants: Sequence[str], seed: int) -> None:
        """Evaluate a scheme that rounds activations, of all variants with one engine."""
        cells: dict[str, str] = {}
        for variant in variants:
            cells |= {cell: at for cell, at in self.quantized(variant, seed).items() if _scheme(cell) == scheme}
        if cells:
            self._evaluate(f"evaluate-{scheme}-{'+'.join(variants)}-{seed}", seed, cells)

    def treated(self, variants: Sequence[str], seed: int) -> None:
        """Quantize variants in other ways, and evaluate what comes out."""
        wanted = [
            (variant, treatment)
            for treatment, how in TREATMENTS.items()
            for variant in how.variants
            if variant in variants
        ]
        with ThreadPoolExecutor(len(wanted) or 1) as side_by_side:
            jobs = [side_by_side.submit(self.quantized, variant, seed, treatment) for variant, treatment in wanted]
        cells: dict[str, str] = {}
        for job in jobs:
            cells |= job.result()
        if cells:
            self._evaluate(f"evaluate-treated-{seed}", seed, cells)

    def layers(self, variants: Sequence[str], seed: int) -> None:
        """Evaluate variants in NF4 that keep some linears in full precision, as `base-keep-q_proj:full`."""
        cells: dict[str, str] = {}
        for variant in variants:
            nf4 = self.quantized(variant, seed).get(f"{variant}:{names.NF4}")
            model = self.trained(variant, seed)
            if nf4 and model:
                out = self.commands.folder / "layers" / f"{variant}-{seed}"
                folders = layers.write(self.commands.folder_of(model), self.commands.folder_of(nf4), out)
                cells |= {f"{variant}-keep-{label}:{FULL}": str(folder) for label, folder in folders.items()}
        if cells:
            self._evaluate(f"evaluate-layers-{seed}", seed, cells)

    def elsewhere(self, variants: Sequence[str], seed: int) -> None:
        """Evaluate variants with transformers, which loads the same checkpoints by itself, as `base-hf:nf4`."""
        cells: dict[str, str] = {}
        for variant in variants:
            stored, model = self.quantized(variant, seed), self.trained(variant, seed)
            found = {FULL: model} | {scheme: stored.get(f"{variant}:{scheme}") for scheme in CHECKED}
            cells |= {f"{variant}-{ELSEWHERE}:{scheme}": address for scheme, address in found.items() if address}
        if cells:
            engine = ("--evaluate.engine", "transformers", "--evaluate.unpacked", "false")
            self._evaluate(f"evaluate-{ELSEWHERE}-{seed}", seed, cells, more=engine)

    def weights(self, seed: int) -> None:
        """Measure the weights of base and GRPO, what they are stored as, and how far both answer apart."""
        cells = self.quantized(BASE, seed) | self.quantized(GRPO, seed)
        base, grpo = self.trained(BASE, seed), self.trained(GRPO, seed)
        if not (base and grpo and cells):
            return
        out = self.commands.folder / "weights" / str(seed)
        words = ["--base", base, "--trained", grpo, "--out", str(out), "--diagnose.effective_rank", "false"]
        words += ["--diagnose.behaviour", "8" if self._check else "64"]
        words += ["--quantized", _pairs(cells)]
        self.commands.run("diagnose", f"diagnose-{seed}", *self._words(self.pretrained, seed), *words)
        self.export()

    def sft_rate(self) -> str:
        """Return the learning rate of SFT: the one whose accuracy at full precision is nearest to GRPO's.

        Raises:
            QrlError: a rate could not be tried, or the run that chooses it did not in time.
        """
        with self._choosing:
            if not self._rate:
                self._rate = self._await_rate(self._rate_file) if self._rate_file else self._choose_rate()
        return self._rate

    def _await_rate(self, file: Path) -> str:
        while not file.exists():
            if self.commands.time_is_up:
                raise QrlError(f"SFT's rate was not chosen in time: the run beside this one has not written {file}.")
            time.sleep(1)
        return file.read_text()

    def _choose_rate(self) -> str:
        chosen = self.commands.path("sft-rate.txt")
        if chosen.exists():
            return chosen.read_text()
        rates = RATES[:2] if self._check else RATES
        words = (*self._words(self.pretrained, RATE_SEED), *TRAINED[SFT])
        with ThreadPoolExecutor(len(rates)) as side_by_side:
            jobs = [side_by_side.submit(self._train_at, rate, words) for rate in rates]
        made = {f"{SFT}-{rate}:{FULL}": job.result() for rate, job in zip(rates, jobs, strict=True)}
        if None in made.values() or not self._evaluate("evaluate-rates", RATE_SEED, made, 0):
            raise QrlError("SFT's rates were not all tried: look at the commands that failed, and call again.")
        frame, _ = collect.answers(self.commands.store, self.task)
        accuracy = frame.groupby("variant")["correct"].mean()
        rate = min(rates, key=lambda rate: abs(accuracy[f"{SFT}-{rate}"] - AIM))
        found = ", ".join(f"{each}: {accuracy[f'{SFT}-{each}']:.3f}" for each in rates)
        print(f"SFT's rate is {rate} (accuracies under seed {RATE_SEED}: {found})", flush=True)
        part = chosen.with_suffix(".part")
        part.write_text(rate)
        part.replace(chosen)  # a run beside this one waits for the file
        return rate

    def _train_at(self, rate: str, words: Sequence[str]) -> str | None:
        return self.commands.run("train", f"train-{SFT}-{rate}", *words, "--train.learning_rate", rate)

    def export(self) -> None:
        """Export what is finished, one thread at a time."""
        with self._exporting:
            collect.write(self.commands.folder)

    def _evaluate(
        self, name: str, seed: int, cells: dict[str, str], rank: int = OF_EXTRAS, more: Sequence[str] = ()
    ) -> bool:
        words = (*self._words(self.pretrained, seed), *more, "--cells", _pairs(cells))
        done = self.commands.run("evaluate", name, *words, rank=rank) is not None
        if done:
            self.export()
        return done

    def _words(self, model: str, seed: int) -> tuple[str, ...]:
        folder = str(self.commands.folder_of(model))  # a recipe takes no address of the store
        return ("--recipe", str(self.recipe), "--model", folder, "--seed", str(seed), *self._data)

    def _short(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Return options without those that make a training long, for --check."""
        if not self._check:
            return words
        pairs = zip(words[::2], words[1::2], strict=True)
        long = ("--train.steps", "--train.prompts_per_step")
        return tuple(word for pair in pairs if pair[0] not in long for word in pair)


def _scheme(cell: str) -> str:
    return cell.partition(":")[2]


def _pairs(cells: dict[str, str]) -> str:
    return ",".join(f"{cell}={address}" for cell, address in cells.items())


def _rank(label: str) -> int:
    """Return when a variant's commands go, or those of a variant that is quantized in another way."""
    if label.rpartition("-")[2] in TREATMENTS:
        return OF_EXTRAS
    return RANK.get(label, 1)


def jobs_of(study: Study, seed: int, variants: Sequence[str], extras: Sequence[str]) -> list[Callable[[], None]]:
    """Return the work of one seed, the most valuable first; each obtains what it needs by itself."""
    jobs: list[Callable[[], None]] = [partial(study.cells, variant, seed) for variant in variants]
    early = [variant for variant in variants if variant not in (*IN_INT4, LORA)]
    late = [variant for variant in variants if variant == LORA]  # the others do not wait for it
    for scheme, together in itertools.product(PACKED, filter(None, (early, late))):
        jobs += [partial(study.packed, scheme, together, seed)] if scheme in study.schemes else []
    both = [variant for variant in (BASE, GRPO) if variant in variants]
    jobs += [partial(study.treated, both, seed)] if "calibration" in extras and both else []
    jobs += [partial(study.layers, both, seed)] if "layers" in extras and both else []
    jobs += [partial(study.elsewhere, both, seed)] if "elsewhere" in extras and both else []
    jobs += [partial(study.weights, seed)] if "weights" in extras and len(both) == 2 else []
    return jobs


def _recipe(folder: Path, task: str, *, check: bool) -> Path:
    """Return the task's recipe; for --check one that trains the shipped model on a CPU."""
    if not check:
        return Path(__file__).with_name(f"{task}.yaml")
    path = folder / f"{task}.yaml"
    path.write_text(json.dumps({"extends": "tiny", **CHECK}))  # which is YAML, too
    return path


def _listed(text: str, known: Sequence[str], option: str, parser: argparse.ArgumentParser) -> list[str]:
    items = [item for item in text.split(",") if item]
    if unknown := [item for item in items if item not in known]:
        parser.error(f"{option} has {unknown[0]!r}: expected some of {', '.join(known)}")
    return items


def main() -> int:
    """Run what is left, export it, and return 1 if something failed or was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for stores, logs and exports")
    parser.add_argument("--model", help="folder of the pretrained model, as fetch.py writes it")
    parser.add_argument("--task", choices=("sums", "gsm8k"), default="sums")
    parser.add_argument("--data", help="with --task gsm8k: folder of train.jsonl and test.jsonl")
    parser.add_argument("--seeds", help="default: 2,3; of --check 2")
    parser.add_argument("--variants", help=f"some of {', '.join((BASE, *TRAINED))}; default: {', '.join(VARIANTS)}")
    parser.add_argument("--extras", help=f"some of {', '.join(EXTRAS)}, of base and grpo; default: all, on sums")
    parser.add_argument("--sft-rate", help="instead of choosing it; later leases give the first one's choice")
    parser.add_argument("--sft-rate-file", type=Path, help="or WORK/sums/logs/sft-rate.txt of a run beside this one")
    parser.add_argument("--quantize-path", default="", help="put before PYTHONPATH for `quantize` and `diagnose`")
    for step, limit in LIMITS.items():
        parser.add_argument(f"--{step}-limit", type=int, default=limit, help=f"{step} commands at a time ({limit})")
    parser.add_argument("--stop-after", type=float, metavar="S", help="begin no command after S seconds")
    parser.add_argument("--check", action="store_true", help="the same path with qrl-tiny on a CPU, in minutes")
    given = parser.parse_args()
    seeds = (given.seeds or ("2" if given.check else "2,3")).split(",")
    if wrong := [seed for seed in seeds if not seed.isdecimal()]:
        parser.error(f"--seeds has {wrong[0]!r}: expected whole numbers, by comma")
    if not given.check and not given.model:
        parser.error("--model is missing: give the folder that qrl/examples/smollm2/fetch.py writes")
    if given.task == "gsm8k" and not given.check and not given.data:
        parser.error("--task gsm8k needs --data: a folder of train.jsonl and test.jsonl")
    default_variants = VARIANTS if given.task == "sums" else (BASE, GRPO)
    asked = ",".join(default_variants) if given.variants is None else given.variants
    variants = _listed(asked, (BASE, *TRAINED), "--variants", parser)
    default_extras = EXTRAS if given.task == "sums" and given.variants is None else ()
    extras = _listed(",".join(default_extras) if given.extras is None else given.extras, EXTRAS, "--extras", parser)
    limits = 1 if given.check else {step: getattr(given, f"{step}_limit") for step in LIMITS}
    folder = given.work.resolve() / given.task
    folder.mkdir(parents=True, exist_ok=True)
    commands = Commands(folder, limits, quantize_path=given.quantize_path, stop_after_s=given.stop_after)
    model = str(tiny.PATH) if given.check else str(Path(given.model).resolve())
    recipe = _recipe(folder, given.task, check=given.check)
    study = Study(
        commands,
        given.task,
        recipe,
        model,
        data=given.data,
        rate=given.sft_rate or "",
        rate_file=given.sft_rate_file,
        check=given.check,
    )
    return _run_all(study, list(map(int, seeds)), variants, extras)


def _run_all(study: Study, seeds: Sequence[int], variants: Sequence[str], extras: Sequence[str]) -> int:
    """Run all seeds side by side, and return the exit code."""
    commands, work, errors = study.commands, [], []
    for seed in seeds:
        work += jobs_of(study, seed, variants, extras)
    with ThreadPoolExecutor(len(work)) as side_by_side:
        for job in [side_by_side.submit(each) for each in work]:
            if error := job.exception():
                errors.append(error)
    for error in errors:
        traceback.print_exception(error)
    study.export()
    for title, left in {"Failed": commands.failed, "Not begun, since the time was up": commands.left}.items():
        if left:
            print(f"{title}: {', '.join(left)}. The same command does what is left.", file=sys.stderr)
    return int(bool(errors) or not commands.whole)


if __name__ == "__main__":
    sys.exit(main())
