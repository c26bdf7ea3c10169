"""The warm processes of a study, one in each environment that several of its steps run in.

What such a process is, `qrl/tracking/warm.py` says.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from qrl import cluster
from qrl.process import ROOT
from qrl.study.build import MANAGERS, PLACE, is_ready
from qrl.tracking import warm

_LONGEST_FOLDER = 70  # bytes: a socket's path has 107 at most
_FEW_CORES = 4  # below these, imports take time from the steps that run meanwhile
_LIGHT = (
    *("qrl.steps.promote", "mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store"),
    *("scipy.stats", "pyarrow.parquet", "qrl.figures.comparison"),
)
_HEAVY = (
    "torchao.prototype.safetensors.safetensors_support",  # before transformers, which imports it where it is installed
    *("qrl.steps.train", "qrl.steps.quantize", "qrl.steps.evaluate", "qrl.steps.diagnose", "qrl.figures.weights"),
    *("transformers.modeling_utils", "transformers.generation.utils", "transformers.models.auto.modeling_auto"),
)
# It looks for a GPU when it is imported, and a process that has found one cannot fork.
_ON_CPU = ("trl.trainer.grpo_trainer",)
_OF_PLACE = {
    "vllm": ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"),
    "vllm_cpu": ("vllm", "vllm.v1.engine.llm_engine"),
}


class WarmProcesses(AbstractContextManager):
    """Warm processes; leave the `with` block to end them."""

    def __init__(self) -> None:
        self._folder: Path | None = None  # of their sockets
        self._processes: dict[str, subprocess.Popen] = {}  # by place

    def begin(self) -> None:
        """Start a process in this environment, the core one, with what the last steps need: they always run.

        Nothing happens where one was started already.
        """
        is_off = os.environ.get(warm.FOLDER) == warm.OFF
        if not is_off and not cluster.chosen():  # a job's processes are its own
            self._start(os.environ.get(PLACE, ""), Path(sys.executable), _LIGHT)

    def add(self, device: str, folders: list[Path], manager: str) -> None:
        """Import what the steps still to run need, in each environment that will pay for it.

        Args:
            device: "cpu" or "cuda".
            folders: the projects of the steps still to run, one a step.
            manager: of environments, as `mlflow run --env-manager` takes it.
        """
        if not folders or not self._folder:
            return
        for place in self._processes:
            warm.import_more(warm.socket_of(self._folder, place), _heavy(device, place))
        has_cores = len(os.sched_getaffinity(0)) >= _FEW_CORES
        for folder in dict.fromkeys(folders):
            python = _python(folder, manager)
            is_worth_it = has_cores or folders.count(folder) > 1
            if folder != ROOT and python and is_worth_it:
                self._start(folder.name, python, (*_LIGHT, *_heavy(device, folder.name)))

    def _start(self, place: str, python: Path, modules: tuple[str, ...]) -> None:
        if place in self._processes:
            return
        variables = os.environ | ({PLACE: place} if place else {})
        variables.pop("MLFLOW_RUN_ID", None)  # of the study
        with suppress(OSError):  # a full disk, or no further process: the steps run without
            if self._folder is None:
                self._folder = _make_folder()
                os.environ[warm.FOLDER] = str(self._folder)  # for the steps that this process launches
            address = warm.socket_of(self._folder, place)
            self._processes[place] = start([python, "-m", "qrl"], address, modules, variables)

    def __exit__(self, *_error: object) -> None:
        for warm_process in self._processes.values():
            warm_process.kill()
            warm_process.wait()
        self._processes.clear()
        if self._folder:
            os.environ.pop(warm.FOLDER, None)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _make_folder() -> Path:
    """Make a folder that nobody else can read, with a path that leaves room for a socket's name."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder = "/tmp"
    return Path(tempfile.mkdtemp(prefix="qrl-warm-", dir=folder))


def start(
    command: Sequence[str | Path], address: Path, modules: Sequence[str], variables: dict[str, str], owner: int = 0
) -> subprocess.Popen:
    """Start a warm process.

    Args:
        command: what runs `warm.serve` if `warm.COMMAND` follows.
        address: of its socket, which is made here: what connects before the process is ready waits.
        modules: to import first.
        variables: its environment.
        owner: pid of the process with which it ends; default: this one.
    """
    with warm.listen(address) as listener:  # closed here again: commands then see that the warm process has ended
        number = listener.fileno()
        return subprocess.Popen(
            [*command, warm.COMMAND, address, str(number), str(owner or os.getpid()), *modules],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
        )


def _python(folder: Path, manager: str) -> Path | None:
    """Return the Python of a folder's environment; None if MLflow has still to build it, or builds none of its own."""
    if manager == "local":
        return Path(sys.executable)
    if manager not in MANAGERS or not is_ready(folder, manager):
        return None
    from qrl.tracking import projects  # imports MLflow, before which a study begins the first warm process

    return projects.environment(folder) / "bin" / "python"


def _heavy(device: str, place: str) -> tuple[str, ...]:
    on_cpu = _ON_CPU if device == "cpu" else ()
    return (*_HEAVY, *on_cpu, *_OF_PLACE.get(place, ()))
