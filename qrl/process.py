"""This process and those that it starts: settings, signals of the kernel, `multiprocessing`, and training in several.

`prepare_process` is called first by every command: it quiets libraries, keeps threads from spinning, lets the allocator
keep its memory, and Python end at once. The rest is what Python or a library lacks for a command that can be killed at
any moment without leaving processes behind.
"""

import atexit
import contextlib
import ctypes
import gc
import hashlib
import importlib
import io
import logging
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import context as multiprocessing_context
from multiprocessing import forkserver, spawn
from pathlib import Path
from typing import Any, Literal

from qrl import mlflow_run
from qrl.errors import QrlError

CHATTY = ("torchao", "torch.utils._pytree", "bitsandbytes", "torch.distributed.elastic", "torch.fx", "alembic")
ROOT = Path(__file__).parents[1]
CALLER = "QRL_CALLER"  # how the user types commands, for processes that such a command launches
FOLDER = "QRL_FOLDER"  # the folder in which the launching command was typed; MLflow starts us in the project's own
WORK = "QRL_WORK"  # the folder for work in progress (`workspace.WORK`)
FIRST = "QRL_FIRST"  # pid of the first process of a training in several, set for those that it started
# Linux's prctl.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_HUGE_THRESHOLD = 1 << 30  # bytes: in effect, memory is never returned
_swallowing = False  # whether a block of `swallowing` runs


@contextmanager
def sentences() -> Iterator[None]:
    """End a program with the exit code of an expected error, its sentence printed without a traceback."""
    try:
        yield
    except QrlError as error:
        print(f"qrl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def prepare_process() -> None:
    """Set working folder, environment, log levels and the allocator; call it before torch is imported."""
    first_process = os.environ.pop(FIRST, None)
    if first_process:
        die_with_parent(int(first_process), signal.SIGKILL)  # no handler of Python's runs while it waits for other GPUs
    folder = os.environ.pop(FOLDER, None)
    if folder:
        os.chdir(folder)  # relative paths and work in progress belong to the folder of the launching command
    else:
        _leave_fetched_project()
    prepare_imports()


def prepare_imports() -> None:
    """Set environment, log levels, the allocator and the collector as libraries that are imported should find them."""
    _set_variables()
    _quiet_libraries()
    _keep_freed_memory()
    # Before it ends, Python looks through all that was imported for garbage: two seconds after torch and transformers.
    atexit.register(gc.freeze)


def _leave_fetched_project() -> None:
    """Work where the user is, if MLflow fetched this checkout into a temporary folder that the next run will not see.

    Relative paths then count from the folder in which `mlflow run` was typed, and work in progress stays in the user's
    cache, where the same command finds it again, wherever it is typed.
    """
    if "MLFLOW_RUN_ID" not in os.environ or Path.cwd() != ROOT:
        return
    launched = _mlflow_run()
    if launched is None or not launched.is_fetched:
        return
    os.environ[CALLER] = caller()
    os.environ.setdefault(WORK, str(cache_folder()))
    os.chdir(launched.folder)


def cache_folder() -> Path:
    """Return the folder in which this user's programs keep what is ours and can be made again."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "qrl"


def _set_variables() -> None:
    """Set environment variables, which the processes that this one starts inherit."""
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"  # nothing from a checkpoint is executed, by no child
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get("QRL_PLACE") == "vllm":  # torch asks the driver's library, so that the process can still fork
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if not sys.stderr.isatty():  # progress in a file: a line every half minute instead of ten a second
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    # OpenMP threads that spin while they wait take the processor from the threads they wait for, if others want it too:
    # on two busy cores decoding took 5.8 s instead of 1.5 s in one trial.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Images set it to stay small, but each of a study's dozens of processes would then compile all that it imports;
    # PYTHONPYCACHEPREFIX says where the compiled files go.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.dont_write_bytecode = False


def _quiet_libraries() -> None:
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*MatMul8bitLt.*")  # INT8 warns at every matrix product


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors: mapping each one again costs a third of decoding's time."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _HUGE_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _HUGE_THRESHOLD)


def die_with_parent(launcher: int = 0, by: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal at the parent's death, however it dies; on Linux only.

    Args:
        launcher: pid of the process that started this one, which may have died before this call; 0: not known.
        by: the signal.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent or (launcher and is_gone(launcher)):  # it died before the request
        os.kill(os.getpid(), by)


def at_end(close: Callable[[], object]) -> None:
    """Call `close` when this process ends, before it waits for the processes that it started.

    A process that `multiprocessing` started calls no handler of `atexit`. It calls such finalizers, and then joins its
    children: one that nobody has ended keeps it waiting for ever. A fork forgets its parent's finalizers, so this is
    called when a process is started, and not at import.
    """
    from multiprocessing import util

    util.Finalize(None, close, exitpriority=1)


def adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its parent; on Linux only, and kept by `exec`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not noticed."""
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


_starting = threading.local()  # `without_script`: this thread starts a process that must not run the user's script


class _SpawnProcess(multiprocessing_context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _without_script():
            return multiprocessing_context.SpawnProcess._Popen(process_obj)


class _ForkServerProcess(multiprocessing_context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _without_script():
            return multiprocessing_context.ForkServerProcess._Popen(process_obj)


class _SpawnContext(multiprocessing_context.SpawnContext):
    Process = _SpawnProcess


class _ForkServerContext(multiprocessing_context.ForkServerContext):
    Process = _ForkServerProcess


def context(method: Literal["spawn", "forkserver"]) -> _SpawnContext | _ForkServerContext:
    """Return a `multiprocessing` context whose processes do not run the user's script again, guarded or not.

    They call functions of this package alone, so they need nothing of the script.

    Raises:
        QrlError: this process is itself one that runs a script again, which would start others without end.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        problem = "A process that `multiprocessing` started runs this script again, and would start others in turn"
        raise QrlError(f'{problem}: put its main code below `if __name__ == "__main__":`.')
    _leave_out_script()
    if method == "spawn":
        return _SpawnContext()
    _forget_server_in_forks()
    return _ForkServerContext()


@contextmanager
def _without_script() -> Iterator[None]:
    _starting.without_script = True
    try:
        yield
    finally:
        _starting.without_script = False


@cache
def _leave_out_script() -> None:
    """Let `multiprocessing` not name the main module to processes that `_without_script` starts."""
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if getattr(_starting, "without_script", False):
            data = {key: value for key, value in data.items() if not key.startswith("init_main_from_")}
        return data

    spawn.get_preparation_data = get_preparation_data


@cache
def _forget_server_in_forks() -> None:
    """Let a fork of this process start a fork server of its own.

    `multiprocessing` waits for the server as for a child, but in a fork the parent's server is none: it would raise.
    """
    server = forkserver._forkserver

    def forget() -> None:
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
        server.__init__()

    os.register_at_fork(after_in_child=forget)


@contextmanager
def swallowing() -> Iterator[None]:
    """Mark a block in which a library may swallow the exception of a stop signal, as a poll of ZeroMQ does.

    A signal then ends the process at once, instead of waiting for a block that will not be left.
    """
    global _swallowing  # noqa: PLW0603
    _swallowing = True
    try:
        yield
    finally:
        _swallowing = False


def swallows() -> bool:
    """Return whether a block of `swallowing` runs."""
    return _swallowing


@contextmanager
def deaf_children() -> Iterator[None]:
    """Keep Ctrl-C from processes that `multiprocessing` spawns in this block: the parent gets it too, and ends them.

    Otherwise one that is still importing prints hundreds of lines.
    """
    from multiprocessing import util

    original = util.spawnv_passfds

    def spawn_deaf(*arguments: Any) -> int:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # a process inherits what is blocked
        try:
            return original(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    util.spawnv_passfds = spawn_deaf
    try:
        yield
    finally:
        util.spawnv_passfds = original


def hush_transformers() -> None:
    """Turn off transformers' progress bars and warnings, which flash at every load and save of a small model."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def hush_gptqmodel() -> None:
    """Import GPTQModel, if installed, without its banner: PEFT imports it for every adapter, whatever the base."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
        importlib.import_module("gptqmodel")


def command(step: str, options: Mapping[str, str]) -> str:
    """Return the line that runs a step, typed in the way of the command that runs now.

    Args:
        step: entry point.
        options: name without dashes → value.
    """
    pattern = caller()
    option_pattern = "-P {}={}" if " run " in pattern else "--{} {}"  # under `mlflow run`, or of our own command
    words = [option_pattern.format(name, shlex.quote(value)) for name, value in options.items()]
    return " ".join((pattern.format(step), *words))


def caller() -> str:
    """Return how commands are typed here, with `{}` for the step, such as `mlflow run . -e {} --env-manager uv`."""
    if CALLER in os.environ:  # this process was started by such a command, in another environment
        return os.environ[CALLER]
    launched = _mlflow_run()
    if launched:
        return launched.pattern(ROOT)
    if sys.argv[0] == shutil.which("qrl"):
        return "qrl {}"
    return f"{shlex.quote(sys.orig_argv[0])} -m qrl {{}}"


def environment_command(step: str) -> str:
    """Return how a step is run in the environment that MLflow builds: `mlflow run . -e train … --env-manager uv`."""
    pattern = caller()
    if " run " not in pattern:
        pattern = "mlflow run . -e {}"
    pattern = re.sub(r" --env-manager[ =]\S+", "", pattern)
    return f"`{pattern.format(f'{step} …')} --env-manager uv`"


def _mlflow_run() -> mlflow_run.MlflowRun | None:
    """Return the `mlflow run` that started this process, typed or called from Python; None if there was none."""
    words, words_above, folder = _launchers()
    typed = mlflow_run.read(words, words_above, folder)
    if typed or "MLFLOW_RUN_ID" not in os.environ:
        return typed
    return mlflow_run.of_clone(ROOT, folder)


def _launchers() -> tuple[list[str], list[str], str]:
    """Return the words of the process that started this one, and of the one above it; the former's folder."""
    import psutil

    try:
        parent, grandparent = psutil.Process().parents()[:2]
        return parent.cmdline(), grandparent.cmdline(), parent.cwd()
    except (psutil.Error, ValueError):  # another user's, or there are no two
        return [], [], ""


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables, for the processes that the block starts, and restore their values at its end."""
    original = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(original)


def installed(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def rank() -> int:
    """Return this process's number in a training of several, as `torchrun` sets it; process 0 writes and logs."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's number on this machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return how many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Return how many of the processes that train together are on this machine, as `torchrun` says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))


def nodes() -> int:
    """Return on how many machines processes train together."""
    return -(-world_size() // local_world_size())


def sharded() -> bool:
    """Return whether each process holds only a part of the weights, as with `accelerate launch --use_fsdp`."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def file_digest(file: str | Path) -> str:
    """Return the sha256 of a file's bytes; empty if there is no file, which is refused when it is read."""
    if not Path(file).is_file():
        return ""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
