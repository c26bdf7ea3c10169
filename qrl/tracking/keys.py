"""What a step's result depends on: one cache key a result, the same whether the study or a user ran the step.

A key covers the recipe sections that the step reads, the digests of its inputs, the device class, its environment file
and its sources. Not the commit: a change of README must not retrain.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from functools import cache
from pathlib import Path

from qrl import names
from qrl.quantize import settings as choices
from qrl.recipe import Recipe
from qrl.tracking import reuse

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {names.AWQ: ROOT / "projects" / "awq" / "conda.yaml"}
CORE = ROOT / "conda.yaml"
VLLM = {"cpu": ROOT / "projects" / "vllm_cpu" / "conda.yaml", "cuda": ROOT / "projects" / "vllm" / "conda.yaml"}
SECTIONS = ("train", "rollout", "watch", "merge", "quantize", "evaluate", "diagnose", "compare", "promote")
ASKED = ("task", "prompt", "seed")  # top-level fields that decide which questions are put, and how


def trained(recipe: Recipe, base: str, device: str, *, teacher: str | None = None, processes: int = 1) -> str:
    """Key of a training that starts from the checkpoint with digest `base`.

    Args:
        teacher: digest of the checkpoint that `train.teacher` names: its address may come to hold another model.
        processes: that train together; how they share a batch changes what is trained.
    """
    inputs = {"base": base} | ({"teacher": teacher} if teacher else {})
    environment = VLLM[device] if recipe.rollout.engine == "vllm" else CORE
    return _key(
        "train",
        recipe,
        ("train", "rollout", "watch"),
        inputs,
        device if processes == 1 else f"{device} x {processes}",
        environment,
    )


def quantized(recipe: Recipe, scheme: str, model: str, device: str) -> str:
    """Key of the checkpoint with digest `model` under a scheme; of the section `quantize`, what means something to it."""
    settings = choices.of(scheme, recipe.quantize, recipe.seed)
    texts = settings.calibration
    if texts not in (None, choices.TASK, choices.ROLLOUTS):
        texts = hashlib.sha256(Path(texts).read_bytes()).hexdigest() if Path(texts).is_file() else ""
    sections = ("evaluate",) if texts == choices.ROLLOUTS else ()  # how the policy answers is set there
    inputs = {"model": model, **{key: str(value) for key, value in asdict(settings).items()}, "texts": str(texts)}
    return _key("quantize", recipe, sections, inputs, device, ENVIRONMENTS.get(scheme, CORE))


def cell(recipe: Recipe, variant: str, scheme: str, model: str, device: str) -> str:
    """Key of a cell: the checkpoint with digest `model`, asked the recipe's held-out questions."""
    inputs = {"model": model, "variant": variant, "scheme": scheme}
    environment = VLLM[device] if recipe.evaluate.engine == "vllm" else CORE
    return _key("evaluate", recipe, ("evaluate",), inputs, device, environment)


def merged(recipe: Recipe, base: str, adapter: str, device: str) -> str:
    """Key of an adapter, by address, folded into the checkpoint with digest `base`; the device is where that is packed again."""
    return _key("merge", recipe, ("merge",), {"base": base, "adapter": adapter}, device)


def diagnosis(recipe: Recipe, base: str, trained: str, quantized: dict[str, str]) -> str:
    """Key of what training did to the weights, by both digests and those of the quantized checkpoints, by `variant:scheme`."""
    return _key("diagnose", recipe, ("diagnose",), {"base": base, "trained": trained} | quantized, "any")


def comparison(recipe: Recipe, cells: list[str]) -> str:
    """Key of the table over cells, by the run ids of their evaluations."""
    return _key("compare", recipe, ("compare",), {str(i): run_id for i, run_id in enumerate(cells)}, "any")


def _key(
    step: str, recipe: Recipe, sections: tuple[str, ...], inputs: dict, device: str, environment: Path = CORE
) -> str:
    flat = recipe.flat(*sections)
    section = {key: value for key, value in flat.items() if "." in key or key in ASKED}
    section = {
        key: value for key, value in section.items() if not key.startswith("rollout.server")
    }  # where it listens is no setting
    section.pop("evaluate.gpu_memory_utilization", None)  # room for a cache changes no answer
    if flat.get("evaluate.samples") == "1":
        section.pop("evaluate.temperature")  # greedy answers know none
    if (
        flat.get("watch.stop") == ""
    ):  # thresholds that only warn train the same weights; probes are a record that one asks for
        section = {
            key: value
            for key, value in section.items()
            if not key.startswith("watch.") or key.startswith("watch.probe")
        }
    if flat.get("rollout.engine") == "transformers":
        section = {
            key: value for key, value in section.items() if not key.startswith("rollout.") or key == "rollout.engine"
        }
    if "teacher" in inputs:
        section.pop("train.teacher")  # its digest says more than its address
    section.pop("quantize.schemes", None)  # which schemes a study has does not change what one of them does
    return reuse.key(
        step,
        section=section,
        inputs=inputs | {"data": data_digest(recipe.data)},
        device=device,
        environment=environment,
        sources=reuse.sources_of(step),
    )


@cache
def data_digest(folder: str | None) -> str:
    """sha256 over a data folder's jsonl files; of nothing where questions are generated or come from the hub."""
    found = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.jsonl")) if folder else []:
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
