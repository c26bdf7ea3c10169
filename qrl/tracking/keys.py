"""Cache keys: what a step's result depends on, the same whether the study or a user ran the step.

A key covers the step's name, the settings that it reads, its inputs' digests, the device class, its environment file
and the sources that can change its result. It does not cover the commit: a changed README must not retrain. A setting
that can change no result is marked `NotInKey` in the recipe; one that only judges a cell's answers, `Judges`.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import yaml

from qrl import names, process
from qrl.formats import groups
from qrl.quantize import settings as choices
from qrl.recipe import Recipe
from qrl.tasks import own, rows
from qrl.tracking import sources

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {names.AWQ: ROOT / "projects" / "awq" / "conda.yaml"}
CORE = ROOT / "conda.yaml"
VLLM = {"cpu": ROOT / "projects" / "vllm_cpu" / "conda.yaml", "cuda": ROOT / "projects" / "vllm" / "conda.yaml"}
VERL = ROOT / "projects" / "verl" / "conda.yaml"
INPUT, SOURCE = "input ", "qrl/"  # begin the names of inputs and sources among a key's parts
SECTIONS = ("train", "rollout", "watch", "merge", "quantize", "evaluate", "diagnose", "compare", "promote")
PARTS: dict[str, dict[str, str]] = {}  # of the keys that this process made, to say why a finished step is not reused


def pins() -> dict[str, str]:
    """Return package → release that the core environment pins; empty without a checkout."""
    if not CORE.is_file():
        return {}
    dependencies = yaml.safe_load(CORE.read_text())["dependencies"]
    pip_lines = next((part["pip"] for part in dependencies if isinstance(part, dict)), [])
    releases = {}
    for line in pip_lines:
        requirement = line.split(";")[0].strip()  # without markers
        package, equals, release = requirement.partition("==")
        if equals:
            releases[package] = release
    return releases


def trained(
    recipe: Recipe,
    base: str,
    device: str,
    *,
    teacher: str | None = None,
    processes: int = 1,
    group_size: int = groups.USUAL,
) -> str:
    """Return the key of a training that starts from the checkpoint with digest `base`.

    Args:
        teacher: digest of the checkpoint that `train.teacher` names: its address may come to hold another model.
        processes: number of processes that train together; how they share a batch changes the result.
        group_size: of the base, as `groups.of` returns it. Only formats of train.qat that have groups depend on it.
    """
    inputs = {"base": base}
    if teacher:
        inputs["teacher"] = teacher
    if recipe.train.qat_calibration != choices.TASK:
        inputs["qat_calibration"] = process.file_digest(recipe.train.qat_calibration)
    if recipe.train.has_groups and group_size != groups.USUAL:
        inputs["group_size"] = str(group_size)
    if recipe.train.qat.endswith(".yaml"):
        inputs["qat"] = process.file_digest(recipe.train.qat)
    environment = VLLM[device] if recipe.rollout.engine == "vllm" else CORE
    if recipe.train.trainer == "verl":
        environment = VERL
    devices = device if processes == 1 else f"{device} x {processes}"
    return _key("train", recipe, ("train", "rollout", "watch"), inputs, devices, environment)


def quantized(recipe: Recipe, scheme: str, model: str, device: str, *, group_size: int = groups.USUAL) -> str:
    """Return the key of the checkpoint with digest `model` under a scheme, with the settings that apply to it.

    `group_size` is the model's, as `groups.of` returns it: a size that is left to the model and the same one, chosen,
    have one key.
    """
    settings = choices.settings_of(scheme, recipe.quantize, recipe.seed).with_groups(group_size)
    calibration = settings.calibration
    if calibration not in (None, choices.TASK, choices.ROLLOUTS):
        calibration = process.file_digest(calibration)
    sections = ("evaluate",) if calibration == choices.ROLLOUTS else ()  # which says how the policy answers
    covered = {key: str(value) for key, value in settings.covered().items()}
    inputs = {"model": model, **covered, "texts": str(calibration)}
    recipe = recipe.model_copy(update={"seed": settings.seed})  # the recipe's own has no other part in it
    return _key("quantize", recipe, sections, inputs, device, ENVIRONMENTS.get(scheme, CORE), judging=False)


def cell(recipe: Recipe, variant: str, scheme: str, model: str, device: str) -> str:
    """Return the key of a cell: the checkpoint with digest `model`, evaluated on the recipe's held-out questions."""
    return _cell(recipe, variant, scheme, model, device, judging=True)


def answers(recipe: Recipe, variant: str, scheme: str, model: str, device: str) -> str:
    """Return the key of a cell's answers, arguments as for `cell`: other limits of health judge the same answers."""
    return _cell(recipe, variant, scheme, model, device, judging=False)


def _cell(recipe: Recipe, variant: str, scheme: str, model: str, device: str, *, judging: bool) -> str:
    inputs = {"model": model, "variant": variant, "scheme": scheme}
    environment = VLLM[device] if recipe.evaluate.engine == "vllm" else CORE
    return _key("evaluate", recipe, ("evaluate",), inputs, device, environment, judging=judging)


def merged(recipe: Recipe, base: str, adapter: str, device: str) -> str:
    """Return the key of an adapter, by address, folded into the checkpoint with digest `base`."""
    return _key("merge", recipe, ("merge",), {"base": base, "adapter": adapter}, device)


def diagnosis(recipe: Recipe, base: str, trained: str, quantized: dict[str, str]) -> str:
    """Return the key of a diagnosis, by the digests of both models and of the quantized ones by `variant:scheme`."""
    return _key("diagnose", recipe, ("diagnose",), {"base": base, "trained": trained} | quantized, "any")


def comparison(recipe: Recipe, cells: list[str]) -> str:
    """Return the key of the table over cells, by the run ids of their evaluations."""
    return _key("compare", recipe, ("compare",), {str(i): run_id for i, run_id in enumerate(cells)}, "any")


def _key(
    step: str,
    recipe: Recipe,
    sections: tuple[str, ...],
    inputs: dict[str, str],
    device: str,
    environment: Path = CORE,
    *,
    judging: bool = True,
) -> str:
    parts = {
        "step": step,
        **recipe.key_settings(*sections, judging=judging),
        **{f"{INPUT}{name}": digest for name, digest in inputs.items()},
        "data": _data_digest(recipe.data),
        "device": device,
        "environment": hashlib.sha256(environment.read_bytes()).hexdigest(),
    }
    parts |= _of_files(recipe, sections)
    files = sources.digests(step)
    content = "".join(f"{name}\0{digest}\0" for name, digest in files.items())
    parts["sources"] = hashlib.sha256(content.encode()).hexdigest()
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    PARTS[key] = parts | {f"{SOURCE}{name}": digest for name, digest in files.items()}
    return key


def _of_files(recipe: Recipe, sections: tuple[str, ...]) -> dict[str, str]:
    """Return the parts that name the user's files, by their own names and digests: an address may come to hold others.

    They replace the settings of the same names.
    """
    rewards = recipe.train.rewards if "train" in sections else ()
    parts = {}
    if own.is_file(recipe.task):
        parts["task"] = Path(recipe.task).name
    if own.files("", rewards):
        parts["train.rewards"] = ",".join(name.rpartition("/")[2] for name in rewards)
    for number, path in enumerate(own.files(recipe.task, rewards)):
        parts[f"{INPUT}file {number} ({Path(path).name})"] = own.digest(path)
    return parts


@cache
def _data_digest(folder: str | None) -> str:
    """Return the sha256 over a data folder's files; of nothing if questions are generated or from the hub."""
    content = hashlib.sha256()
    if folder:
        for path in rows.files(Path(folder)):
            content.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return content.hexdigest()
