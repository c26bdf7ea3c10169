"""cluster.yaml: which cluster runs the jobs, and what each step asks of it."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from qrl.errors import BadInput
from qrl.recipe import documents
from qrl.recipe.base import Count, Section, option

FILE = "cluster.yaml"  # of the working folder, where none is named
CHOSEN = "QRL_CLUSTER"  # set in a study's own job: the file by which it submits its steps
STUDY = ("main", "sweep")  # entry points that submit others
ON_DEVICE = ("train", "merge", "quantize", "evaluate")  # steps whose cache keys name the device
OPTIONS = (  # of sbatch, allowed beside our own keys: none runs a command, writes a file or changes the environment
    *("begin", "comment", "constraint", "deadline", "exclude", "exclusive", "gres-flags", "hint", "licenses"),
    *("mail-type", "mail-user", "nice", "nodelist", "reservation", "signal", "switches", "tmp", "wckey"),
)
OF_DRIVER = {  # resources that only one driver knows
    "slurm": ("partition", "account", "qos", "time", "options"),
    "skypilot": ("infra",),
}


def _checked(pattern: str, expected: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


_Text = BeforeValidator(lambda value: str(value) if isinstance(value, int) and not isinstance(value, bool) else value)
Name = Annotated[str, _checked(r"[\w.,:/@+-]+", "a name without spaces, such as gpu or a100,h100")]
Time = Annotated[str, _Text, _checked(r"(\d+-)?\d+(:\d+){0,2}", "minutes, H:MM:SS or D-HH:MM:SS")]
Memory = Annotated[str, _Text, _checked(r"[1-9]\d*[KMGT]?", "a size for a node, such as 32G")]


def _options(given: Any) -> Any:
    for name, value in given.items() if isinstance(given, dict) else ():
        if name not in OPTIONS:
            raise ValueError(f"'{name}' is not allowed; expected one of {', '.join(OPTIONS)}")
        if not re.fullmatch(r"[^\x00-\x1f\x7f]*", str(value)):
            raise ValueError(f"'{name}' has a line break or another control character: write it without")
    return {name: "" if value is True else str(value) for name, value in given.items()}


class Resources(Section):
    """What one job asks of the cluster; per node where there are several."""

    partition: Name | None = option(None, "Partition of Slurm.")
    account: Name | None = option(None, "Account that pays.")
    qos: Name | None = option(None, "Quality of service.")
    infra: str | None = option(None, "SkyPilot's cloud, region or context, such as k8s or aws/us-east-1.")
    nodes: Count = option(1, "Nodes; several train together through srun and torchrun.")
    gpus: int = option(0, "GPUs.", ge=0, le=64)
    gpu: Name | None = option(None, "Type of GPU, such as h100.")
    cpus: Count | None = option(None, "CPU cores.")
    memory: Memory | None = option(None, "Memory, such as 32G.")
    time: Time | None = option(None, "Time limit, such as 8:00:00.")
    options: Annotated[dict[str, Any], AfterValidator(_options)] = option({}, "Further options of sbatch.")
    setup: tuple[str, ...] = option((), "Lines of shell before the step, after those of the cluster.")


class Cluster(Section):
    """The whole of cluster.yaml."""

    driver: Literal["slurm", "skypilot"]
    shared: Path | None = option(None, "Folder that every node sees, with the checkout and the store below it.")
    one_job: bool = option(False, "Run a study's steps in the study's own job.")
    poll: float = option(10, "Seconds between two questions to the cluster.", gt=0, le=3600)
    python: Name | None = option(None, "Python on the nodes, with qrl's packages; default: this one.")
    setup: tuple[str, ...] = option((), "Lines of shell before every step, such as `module load cuda`.")
    defaults: dict[str, Any] = Field(default_factory=dict)  # of Resources
    steps: dict[str, dict[str, Any]] = Field(default_factory=dict)  # entry point → what differs from the defaults

    def resources(self, step: str) -> Resources:
        """Return what a step asks for; raise BadInput for an unknown key or a value that does not fit."""
        own = self.steps.get(step, {})
        where, given = (f"steps.{step}", own) if own else ("defaults", self.defaults)
        try:
            merged = Resources.model_validate(self.defaults | own)
        except ValidationError as error:
            if str(_first(error)["loc"][0]) not in own:
                where, given = "defaults", self.defaults
            raise BadInput(_sentence(error, where, Resources)) from None
        for driver, names in OF_DRIVER.items():
            if wrong := [name for name in names if name in given and driver != self.driver]:
                raise BadInput(
                    f"{FILE}: '{where}.{wrong[0]}' means nothing to {self.driver}, only to {driver}: omit it."
                )
        return merged

    def check(self, entry_points: Iterable[str], entry: str) -> None:
        """Check every section, before anything is submitted.

        Args:
            entry_points: of the project.
            entry: the one to be submitted.

        Raises:
            BadInput: the sentence names the key.
        """
        known = sorted(entry_points)
        if unknown := sorted(set(self.steps).difference(known)):
            raise BadInput(f"{FILE}: 'steps' has '{unknown[0]}', but the project's steps are {', '.join(known)}.")
        every = {step: self.resources(step) for step in (*known, entry)}
        if self.driver == "slurm" and self.shared is None:
            raise BadInput(f"{FILE}: 'shared' is missing: name the folder that every node of the cluster sees.")
        if self.driver == "skypilot" and self.shared is not None:
            raise BadInput(
                f"{FILE}: 'shared' means nothing to skypilot, which copies the checkout to its nodes: omit it."
            )
        if several := [step for step, wanted in every.items() if wanted.nodes > 1 and step != "train"]:
            which = "defaults" if several[0] not in self.steps else f"steps.{several[0]}"
            raise BadInput(
                f"{FILE}: '{which}.nodes' is above 1, but only train runs on several: set steps.train.nodes."
            )
        with_gpu = [step for step in ON_DEVICE if step in every and every[step].gpus]
        without = [step for step in ON_DEVICE if step in every and not every[step].gpus]
        if self.submits(entry) and with_gpu and without:
            raise BadInput(
                f"{FILE}: steps.{without[0]} asks for no GPU, but steps.{with_gpu[0]} does: a study runs "
                f"{', '.join(ON_DEVICE)} on one kind of device, so give all of them `gpus`, or none."
            )

    def submits(self, entry: str) -> bool:
        """Return whether an entry point's steps become jobs of their own."""
        return entry in STUDY and not self.one_job and self.driver == "slurm"

    def processes(self) -> int:
        """Return how many processes train together, which the cache key of a training names."""
        wanted = self.resources("train")
        return wanted.nodes * max(wanted.gpus, 1) if wanted.nodes > 1 else 1

    def device(self) -> str:
        """Return the device that a study's steps will find on their nodes."""
        return "cuda" if self.resources(ON_DEVICE[0]).gpus else "cpu"


def load(source: Path | dict[str, Any]) -> Cluster:
    """Return the settings in a YAML or JSON file, or in a mapping.

    Raises:
        BadInput: it cannot be read, or a key is unknown or has a value that does not fit.
    """
    if isinstance(source, Path) and not source.is_file():
        example = "an example is in qrl/cluster/README.md"
        raise BadInput(f"There is no {source}: write one, or name it with --cluster; {example}.")
    document = documents.parse(source, str(source)) if isinstance(source, Path) else source
    for name in ("defaults", "steps"):  # `steps:` with nothing below it
        document = document | {name: document.get(name) or {}}
    try:
        return Cluster.model_validate(document)
    except ValidationError as error:
        raise BadInput(_sentence(error, "", Cluster)) from None


def chosen() -> Cluster | None:
    """Return the cluster to which this process submits a study's steps; None: they run here."""
    return load(Path(os.environ[CHOSEN])) if os.environ.get(CHOSEN) else None


def _first(error: ValidationError) -> Any:
    """Return the error to tell: an unknown key before all, which may be a missing one that was misspelt."""
    return min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")


def _sentence(error: ValidationError, where: str, model: type[Section]) -> str:
    first = _first(error)
    parts = [part for part in (where, *map(str, first["loc"])) if part]
    key = f"{FILE}: '{'.'.join(parts)}'"
    if first["type"] == "extra_forbidden":
        return f"{key} is unknown: expected one of {', '.join(model.model_fields)}."
    if first["type"] == "missing":
        return f"{key} is missing: expected slurm or skypilot."
    message = first["msg"].removeprefix("Value error, ")
    return f"{key} is {first['input']!r}: {message[0].lower()}{message[1:]}."
