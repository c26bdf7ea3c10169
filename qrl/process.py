"""Settings of this process: quiet libraries, threads that do not spin, an allocator that keeps its memory."""

import contextlib
import ctypes
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

from qrl.errors import QrlError

CHATTY = ("torchao", "torch.utils._pytree", "bitsandbytes", "torch.distributed.elastic", "torch.fx", "alembic")
ROOT = Path(__file__).parents[1]
CALLER = "QRL_CALLER"  # how the user types commands, for processes that such a command launches
FOLDER = "QRL_FOLDER"  # the folder in which the launching command was typed; MLflow starts us in the project's own
FIRST = "QRL_FIRST"  # pid of the first of several processes that train together, for those that it started
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, 1 << 30  # glibc's mallopt
_swallowing = False


@contextmanager
def sentences() -> Iterator[None]:
    """End a program with the exit code of an expected error, its sentence printed without a traceback."""
    try:
        yield
    except QrlError as error:
        print(f"qrl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def settle() -> None:
    """Set working folder, environment, log levels and the allocator; call it before torch is imported."""
    if first := os.environ.pop(FIRST, None):
        die_with_parent(int(first), signal.SIGKILL)  # no handler of Python's runs while it waits for other GPUs
    if folder := os.environ.pop(FOLDER, None):
        os.chdir(folder)  # relative paths and work in progress belong to the folder of the launching command
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"  # nothing from a checkpoint is executed, by no child
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():  # progress in a file: a line every half minute instead of ten a second
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    # OpenMP threads that spin while they wait take the processor from the threads they wait for, if others want it too:
    # on two busy cores decoding took 5.8 s instead of 1.5 s in one trial.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Images set it to stay small, but each of a study's dozens of processes would then compile all that it imports;
    # PYTHONPYCACHEPREFIX says where the compiled files go.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.dont_write_bytecode = False
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*MatMul8bitLt.*")  # INT8 warns at every matrix product
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not glibc
        # glibc keeps the memory of freed tensors: mapping each one anew costs a third of decoding's time.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def die_with_parent(launcher: int = 0, by: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal at the parent's death, however it dies; on Linux alone.

    `launcher` is the process that is known to have wanted this one, and may have died before this call.
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
    children: one that nobody has ended keeps it waiting for ever. A fork forgets its parent's finalizers, so whoever
    starts a process calls this then, and not at import.
    """
    from multiprocessing import util

    util.Finalize(None, close, exitpriority=1)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent dies; on Linux alone, and kept by `exec`."""
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
        again = "A process that `multiprocessing` started runs this script again, and would start others in turn"
        raise QrlError(f'{again}: put its main code below `if __name__ == "__main__":`.')
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
    describe = spawn.get_preparation_data

    def described(name: str) -> dict[str, Any]:
        data = describe(name)
        if getattr(_starting, "without_script", False):
            data = {key: value for key, value in data.items() if not key.startswith("init_main_from_")}
        return data

    spawn.get_preparation_data = described


@cache
def _forget_server_in_forks() -> None:
    """Let a fork of this process start a fork server of its own.

    `multiprocessing` waits for the server as for a child, and a fork's parent's server is none: it would raise.
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

    A signal then ends the process where it stands, instead of waiting for a block that will not be left.
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

    spawn = util.spawnv_passfds

    def spawn_deaf(*how: Any) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # a process inherits what is blocked
        try:
            return spawn(*how)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    util.spawnv_passfds = spawn_deaf
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


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
    """Return the line that runs a step, as the user would type it who typed the command that runs now.

    Args:
        step: entry point.
        options: name without dashes → value.
    """
    pattern = caller()
    form = "-P {}={}" if " run " in pattern else "--{} {}"
    words = (form.format(name, shlex.quote(value)) for name, value in options.items())
    return " ".join((pattern.format(step), *words))


def caller() -> str:
    """Return how commands are typed here, with `{}` for the step: `mlflow run . -e {} --env-manager uv`, say."""
    if CALLER in os.environ:  # this process was started by such a command, in another environment
        return os.environ[CALLER]
    words, above, folder = _launchers()
    if "run" in words and Path(words[words.index("run") - 1]).name == "mlflow":
        program = f"{shlex.quote(words[0])} -m mlflow" if words[1] == "-m" else "mlflow"
        if above[1:3] == ["tool", "uvx"]:  # as which uv starts itself
            program = shlex.join(["uvx", *above[3 : above.index("run")]])
        manager = re.search(r"--env-manager[ =]\S+", " ".join(words))
        project = "." if folder == str(ROOT) else shlex.quote(str(ROOT))
        return " ".join(filter(None, (program, "run", project, "-e {}", manager and manager[0])))
    if sys.argv[0] == shutil.which("qrl"):
        return "qrl {}"
    return f"{shlex.quote(sys.orig_argv[0])} -m qrl {{}}"


def _launchers() -> tuple[list[str], list[str], str]:
    """Return the words of the process that started this one, and of the one above it; the former's folder."""
    import psutil

    try:
        first, second = psutil.Process().parents()[:2]
        return first.cmdline(), second.cmdline(), first.cwd()
    except (psutil.Error, ValueError):  # another user's, or there are no two
        return [], [], ""


@contextmanager
def variables(**wanted: str) -> Iterator[None]:
    """Set environment variables, for the processes that the block starts, and restore the former values at its end."""
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


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
    """Return the sha256 of a file's bytes; nothing where there is no file, which whoever reads it refuses."""
    if not Path(file).is_file():
        return ""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
