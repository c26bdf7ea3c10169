"""cluster.yaml: which cluster runs the jobs, and the resources that each step requests.

A step's resources are the file's `defaults` with the step's own section over them. Everything is checked before
anything is submitted, since a job that asks for the wrong thing may wait for hours before it fails.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from qrl.errors import BadInput
from qrl.recipe import documents
from qrl.recipe.base import Count, Section, option

FILE = "cluster.yaml"  # in the working folder, if no other is named
CHOSEN = "QRL_CLUSTER"  # set in a study's own job: the file by which it submits its steps
STUDY = ("main", "sweep")  # entry points that submit others
ON_DEVICE = ("train", "merge", "quantize", "evaluate")  # steps whose cache keys name the device
OPTIONS = (  # of sbatch, allowed beside our own keys: none runs a command, writes a file or changes the environment
    *("begin", "comment", "constraint", "deadline", "exclude", "exclusive", "gres-flags", "hint", "licenses"),
    *("mail-type", "mail-user", "nice", "nodelist", "reservation", "signal", "switches", "tmp", "wckey"),
)


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Return a validator of texts; `expected` says in words what the pattern allows."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


def _number_as_text(value: Any) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value


def _check_options(options: dict[str, Any]) -> dict[str, str]:
    """Return options of sbatch as texts, empty for a flag."""
    texts = {}
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"'{name}' is not allowed; expected one of {', '.join(OPTIONS)}")
        # A line break would begin a line of its own in the script.
        if not re.fullmatch(r"[^\x00-\x1f\x7f]*", str(value)):
            raise ValueError(f"'{name}' has a line break or another control character: write it without")
        texts[name] = "" if value is True else str(value)
    return texts


Name = Annotated[str, _matching(r"[\w.,:/@+-]+", "a name without spaces, such as gpu or a100,h100")]
# YAML reads 30 and 1:00:00 without quotes as numbers.
Time = Annotated[
    str, BeforeValidator(_number_as_text), _matching(r"(\d+-)?\d+(:\d+){0,2}", "minutes, H:MM:SS or D-HH:MM:SS")
]
Memory = Annotated[
    str, BeforeValidator(_number_as_text), _matching(r"[1-9]\d*[KMGT]?", "a size for a node, such as 32G")
]


def _container_path(path: str) -> str:
    if not re.fullmatch(r"/[^,:\x00-\x20\x7f]*(:/[^,:\x00-\x20\x7f]*){0,1}(:ro|:rw)?", path):
        raise ValueError("expected a path, or HOST:CONTAINER, or HOST:CONTAINER:ro, without spaces and commas")
    return path


class Container(Section):
    """The image that a step runs in."""

    runtime: Literal["pyxis", "apptainer"]
    image: Annotated[str, _matching(r"[^\s-]\S*", "an image without spaces, such as nvcr.io#nvidia/pytorch:25.10-py3")]
    mounts: tuple[Annotated[str, AfterValidator(_container_path)], ...] = option(
        (), "Paths of the node beside `shared`, as HOST or HOST:CONTAINER."
    )


class Resources(Section):
    """What one job requests from the cluster; per node if there are several."""

    partition: Name | None = option(None, "Partition of Slurm.")
    account: Name | None = option(None, "Account that pays.")
    qos: Name | None = option(None, "Quality of service.")
    nodes: Count = option(1, "Nodes; several train together through srun and torchrun.")
    gpus: int = option(0, "GPUs.", ge=0, le=64)
    gpu: Name | None = option(None, "Type of GPU, such as h100.")
    cpus: Count | None = option(None, "CPU cores.")
    memory: Memory | None = option(None, "Memory, such as 32G.")
    time: Time | None = option(None, "Time limit, such as 8:00:00.")
    options: Annotated[dict[str, Any], AfterValidator(_check_options)] = option({}, "Further options of sbatch.")
    setup: tuple[str, ...] = option((), "Lines of shell before the step, after those of the cluster.")
    container: Container | None = option(None, "Image that the step runs in: runtime, image, mounts.")


class Cluster(Section):
    """The whole of cluster.yaml."""

    driver: Literal["slurm"]
    shared: Path | None = option(None, "Folder that every node sees, with the checkout and the store below it.")
    one_job: bool = option(False, "Run a study's steps in the study's own job.")
    poll: float = option(10, "Seconds between two questions to the cluster.", gt=0, le=3600)
    python: Name | None = option(None, "Python on the nodes, with qrl's packages; default: this one.")
    setup: tuple[str, ...] = option((), "Lines of shell before every step, such as `module load cuda`.")
    defaults: dict[str, Any] = Field(default_factory=dict)  # of Resources
    steps: dict[str, dict[str, Any]] = Field(default_factory=dict)  # entry point → what differs from the defaults

    def resources(self, step: str) -> Resources:
        """Return what a step requests; raise BadInput if a key is unknown or a value does not fit."""
        step_settings = self.steps.get(step, {})
        try:
            return Resources.model_validate(self.defaults | step_settings)
        except ValidationError as error:
            wrong_key = str(_first_error(error)["loc"][0])
            section = f"steps.{step}" if wrong_key in step_settings else "defaults"
            raise BadInput(_sentence(error, section, Resources)) from None

    def check(self, entry_points: Iterable[str], entry: str) -> None:
        """Check every section, before anything is submitted.

        Args:
            entry_points: of the project.
            entry: the one to be submitted.

        Raises:
            BadInput: the sentence names the key.
        """
        project_steps = sorted(entry_points)
        unknown_steps = sorted(set(self.steps).difference(project_steps))
        if unknown_steps:
            raise BadInput(
                f"{FILE}: 'steps' has '{unknown_steps[0]}', but the project's steps are {', '.join(project_steps)}."
            )
        resources = {step: self.resources(step) for step in (*project_steps, entry)}
        if self.shared is None:
            raise BadInput(f"{FILE}: 'shared' is missing: name the folder that every node of the cluster sees.")

        for step, requested in resources.items():
            if requested.nodes > 1 and step != "train":
                section = f"steps.{step}" if step in self.steps else "defaults"
                raise BadInput(
                    f"{FILE}: '{section}.nodes' is above 1, but only train runs on several: set steps.train.nodes."
                )

        for step in set(STUDY) & self.steps.keys():
            if self.submits(step) and self.steps[step].get("container"):
                raise BadInput(
                    f"{FILE}: 'steps.{step}.container' is set, but a study's own job calls sbatch, which an image does "
                    "not have: leave it out there, or set one_job."
                )

        # Cache keys name the device, so a study that changes it half-way would not find its own results.
        steps_on_device = [step for step in ON_DEVICE if step in resources]
        with_gpu = [step for step in steps_on_device if resources[step].gpus]
        without_gpu = [step for step in steps_on_device if not resources[step].gpus]
        if self.submits(entry) and with_gpu and without_gpu:
            raise BadInput(
                f"{FILE}: steps.{without_gpu[0]} asks for no GPU, but steps.{with_gpu[0]} does: a study runs "
                f"{', '.join(ON_DEVICE)} on one kind of device, so give all of them `gpus`, or none."
            )

    def submits(self, entry: str) -> bool:
        """Return whether an entry point's steps become jobs of their own."""
        return entry in STUDY and not self.one_job

    def container(self, entry: str) -> Container | None:
        """Return the image that an entry point runs in: none for a study's own job, which calls sbatch."""
        return None if self.submits(entry) else self.resources(entry).container

    def processes(self) -> int:
        """Return how many processes train together, which the cache key of a training names."""
        training = self.resources("train")
        if training.nodes == 1:
            return 1
        return training.nodes * max(training.gpus, 1)

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
    for name in ("defaults", "steps"):  # `steps:` with nothing below it is read as null
        document = document | {name: document.get(name) or {}}
    try:
        return Cluster.model_validate(document)
    except ValidationError as error:
        raise BadInput(_sentence(error, "", Cluster)) from None


def chosen() -> Cluster | None:
    """Return the cluster to which this process submits a study's steps; None: they run here."""
    file = os.environ.get(CHOSEN)
    return load(Path(file)) if file else None


def _first_error(error: ValidationError) -> Any:
    """Return the error to report: an unknown key before all others, since a missing key may have been misspelt."""
    return min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")


_EXPECTED = {"driver": "slurm", "runtime": "pyxis or apptainer", "image": "the image's name or file"}  # if missing


def _sentence(error: ValidationError, section: str, model: type[Section]) -> str:
    """Return a validation error as a sentence that names the key; `section` is empty at the top of the file."""
    details = _first_error(error)
    parts = [part for part in (section, *map(str, details["loc"])) if part]
    key = f"{FILE}: '{'.'.join(parts)}'"
    if details["type"] == "extra_forbidden":
        owner = Container if details["loc"][0] == "container" else model
        return f"{key} is unknown: expected one of {', '.join(owner.model_fields)}."
    if details["type"] == "missing":
        return f"{key} is missing: expected {_EXPECTED[details['loc'][-1]]}."
    message = details["msg"].removeprefix("Value error, ")
    return f"{key} is {details['input']!r}: {message[0].lower()}{message[1:]}."
