"""Steps that start at once: a process that has imported what they need forks for each, instead of a new one importing.

A step needs 2 to 15 s to import torch, transformers, MLflow or vLLM. So a study starts a warm process in each
environment that several of its steps run in, beside its own work:

    study ──starts──► warm process: imports, then waits at a socket, which the study has made
    MLflow ─starts──► `python -m qrl evaluate …`, which finds the socket and hands its words, folder, environment and
                      standard streams over; the warm process forks, and the fork becomes that command

The command that MLflow started stays as the fork's proxy: it passes stop signals on and ends as the fork ends, with its
exit code or by its signal. If the proxy is killed, so is the fork. Where anything is amiss, because the warm process is
gone or was started under other variables, the command runs by itself, as it would without one.

This file imports nothing heavy, nor do the modules that it needs.
"""

import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

FOLDER = "QRL_WARM"  # environment variable of a study's steps: the folder with its warm processes' sockets
OFF = "off"  # its value for a study that is to start none
COMMAND = "--warm"  # `python -m qrl --warm SOCKET NUMBER OWNER MODULE …` is a warm process; NUMBER: of its descriptor
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASKS_CUDA = "torchao"  # asks the GPU for its capability, for kernels that qrl does not use
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LENGTH = struct.Struct("!I")
_FOLLOWED = b"+"  # a proxy says that it passes signals on
_ACCEPT_S = 10  # for a command to say what it is
# Variables that MLflow, a shell or a study sets for each step, and that nothing reads while it is imported. Others that
# a warm process was started with must be as they were; what the study's libraries have added since makes no difference.
_FREE_VARIABLES = (
    *("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "UV_OVERRIDE"),
    *("_MLFLOW_TELEMETRY_SESSION_ID", "QRL_LAUNCHER", "QRL_FOLDER", "QRL_CALLER", "QRL_PLACE", FOLDER),
    *("PATH", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PS1", "PWD", "OLDPWD", "SHLVL", "_"),
)


def socket_of(folder: Path, place: str) -> Path:
    """Return the socket of the warm process of an environment; `place` is its folder below projects/, or empty."""
    return folder / f"{place or 'core'}.sock"


# ---- the command that MLflow started ----


def hand_over(variables: dict[str, str]) -> None:
    """Let a warm process run this command, and exit as it does; return if there is none.

    Args:
        variables: this process's environment, as it was started.
    """
    if os.environ.get(FOLDER) == OFF:
        return
    folder = os.environ.pop(FOLDER, None)
    is_step = "MLFLOW_RUN_ID" in os.environ and "RANK" not in os.environ  # and no process of a training in several
    if folder is None or not is_step or not _has_streams():
        return
    variables = {name: value for name, value in variables.items() if name != FOLDER}
    job = {
        "words": sys.argv,
        "original_words": sys.orig_argv,
        "folder": os.getcwd(),
        "variables": variables,
        "python": [sys.prefix, __file__, list(sys.warnoptions)],
        "group": os.getpgrp(),
        "ignored": [signum for signum in _SIGNALS if signal.getsignal(signum) is signal.SIG_IGN],
    }
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(socket_of(Path(folder), os.environ.get("QRL_PLACE", ""))))
            message = json.dumps(job).encode()
            socket.send_fds(connection, [_LENGTH.pack(len(message))], [0, 1, 2])
            connection.sendall(message)
            pid = _receive(connection)["pid"]
        except OSError:  # no warm process, or none any more
            return
        if pid is None:  # it was started under other variables
            return
        status = _follow(connection, pid)
    if status is None:  # the warm process was killed, and the fork with it
        os._exit(128 + signal.SIGKILL)
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status))


def _has_streams() -> bool:
    """Return whether the three standard streams are open; a socket would take the number of one that is not."""
    try:
        return all(os.fstat(number) for number in range(3))
    except OSError:
        return False


def _follow(connection: socket.socket, pid: int) -> int | None:
    """Pass stop signals on to a process; return its wait status once it ends, None if that is not known."""

    def forward(signum: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)

    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, forward)
    try:
        connection.sendall(_FOLLOWED)
        return _receive(connection)["status"]
    except OSError:
        return None


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message; raise OSError if the other side has closed."""
    length = _LENGTH.unpack(_read(connection, _LENGTH.size))[0]
    return json.loads(_read(connection, length))


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


# ---- the warm process ----


def listen(address: Path) -> socket.socket:
    """Return a new socket for a warm process, which gets it by inheritance: what connects before it is ready waits."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    return listener


def serve(prepare: Callable[[], None]) -> None:
    """Import modules and fork for each command that comes; return in a fork, which is to run `sys.argv`.

    The process ends once its owner has, after the commands that still run.

    Args:
        prepare: called before anything is imported, while standard error is still the owner's: what is imported may
            depend on whether that is a terminal.
    """
    address, listener, owner, *modules = sys.argv[2:]
    server = _Server(Path(address), socket.socket(fileno=int(listener)), int(owner))
    prepare()
    # torch then asks the driver's library whether there is a GPU. Once CUDA itself was asked, no fork can use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    server.run(modules)


def import_more(address: Path, modules: Sequence[str]) -> None:
    """Let a warm process import further modules; commands that come meanwhile wait for that."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(str(address))
        _send(connection, {"modules": list(modules)})


def _sources() -> dict[str, tuple[int, int]]:
    """Return the size and time of each of our own sources: an edit during a study counts for its later steps."""
    found = {}
    for file in Path(__file__).parents[1].rglob("*.py"):
        with suppress(OSError):  # an editor's lock, which is a link to nothing, or a file that has just gone
            facts = file.stat()
            found[str(file)] = (facts.st_size, facts.st_mtime_ns)
    return found


class _Server:
    """A socket, and the forks that run commands."""

    def __init__(self, address: Path, listener: socket.socket, owner: int) -> None:
        self._address = address
        self._listener = listener
        self._sources = _sources()
        self._variables = {name: value for name, value in os.environ.items() if name not in _FREE_VARIABLES}
        self._selector = selectors.DefaultSelector()
        self._forks: dict[int, socket.socket] = {}  # pid → the connection to its proxy
        self._can_fork = True
        self._is_ending = False
        listener.set_inheritable(False)
        for signum in _SIGNALS:  # forks get them from their proxies
            signal.signal(signum, signal.SIG_IGN)
        try:
            owner_ended = os.pidfd_open(owner)
        except OSError:
            self._remove_socket()
            sys.exit(0)
        self._selector.register(owner_ended, selectors.EVENT_READ, self._end)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def run(self, modules: Sequence[str]) -> None:
        """Import modules, then serve; return in a fork."""
        self._import(modules)
        while self._forks or not self._is_ending:
            if any(key.data(key.fileobj) for key, _ in self._selector.select()):
                return
        self._remove_socket()
        os._exit(0)

    def _remove_socket(self) -> None:
        with suppress(OSError):  # the owner was killed, or it would have done this; another's socket may still be there
            self._address.unlink()
            self._address.parent.rmdir()

    def _end(self, owner_ended: int) -> None:
        """Take no further command, since the owner has ended."""
        self._is_ending = True
        self._selector.unregister(owner_ended)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _import(self, modules: Sequence[str]) -> None:
        gc.disable()  # a fifth of the seconds that importing takes would go to looking for garbage
        for module in modules:
            with suppress(Exception), _gpus_hidden_from(module):  # the command that needs it will say what is wrong
                importlib.import_module(module)
        gc.enable()
        gc.collect()
        gc.freeze()  # what was imported is shared with forks for as long as nothing touches it
        self._can_fork = self._can_fork and _forks_can_use_gpu()

    def _accept(self, listener: socket.socket) -> bool:
        """Take a message, and fork for it if it is a command; return True in the fork."""
        if self._is_ending:  # its end came in the same moment
            return False
        connection, _ = listener.accept()
        connection.settimeout(_ACCEPT_S)
        message, streams = _take(connection)
        is_fork = False
        if "modules" in message:
            connection.close()
            self._import(message["modules"])
        elif message and self._can_fork and self._is_alike(message):
            is_fork = self._fork(connection, message, streams)
        else:
            _refuse(connection)
        if not is_fork:
            for stream in streams:
                os.close(stream)
        return is_fork

    def _is_alike(self, job: dict[str, Any]) -> bool:
        """Return whether a command would import the same in the same way."""
        is_same_python = job["python"] == [sys.prefix, __file__, list(sys.warnoptions)]
        has_same_variables = self._variables.items() <= job["variables"].items()
        return is_same_python and has_same_variables and _sources() == self._sources

    def _fork(self, connection: socket.socket, job: dict[str, Any], streams: Sequence[int]) -> bool:
        """Fork for a command; return True in the fork, once the proxy passes signals on to it."""
        gate, opening = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # there are too many processes
            os.close(gate)
            os.close(opening)
            _refuse(connection)
            return False
        if pid == 0:
            os.close(opening)
            is_open = os.read(gate, 1)
            os.close(gate)
            if not is_open:  # the proxy has died
                os._exit(1)
            self._leave()
            connection.close()
            _become(job, streams)
            return True
        os.close(gate)
        self._forks[pid] = connection
        with suppress(OSError):
            _send(connection, {"pid": pid})
            _read(connection, len(_FOLLOWED))
            os.write(opening, b"+")
        os.close(opening)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._kill(pid))
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, lambda ended: self._report(pid, ended))
        return False

    def _kill(self, pid: int) -> None:
        """Kill a fork whose proxy has died."""
        if pid in self._forks:  # otherwise it has ended in the same moment
            self._selector.unregister(self._forks[pid])
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def _report(self, pid: int, ended: int) -> None:
        """Tell the proxy of a fork that has ended how it did."""
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        connection = self._forks.pop(pid)
        with suppress(KeyError):
            self._selector.unregister(connection)
        with suppress(OSError):
            _send(connection, {"status": status})
        connection.close()

    def _leave(self) -> None:
        """In a fork: close what belongs to the warm process."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        for connection in self._forks.values():
            connection.close()


def _refuse(connection: socket.socket) -> None:
    """Let a command run by itself."""
    with suppress(OSError):  # it has gone
        _send(connection, {"pid": None})
    connection.close()


def _take(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the message of a connection, empty if it is none of ours, and the descriptors that came with it."""
    streams: list[int] = []
    try:
        start, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
        start += _read(connection, _LENGTH.size - len(start))
        return json.loads(_read(connection, _LENGTH.unpack(start)[0])), streams
    except (OSError, ValueError):
        return {}, streams


@contextmanager
def _gpus_hidden_from(module: str) -> Iterator[None]:
    """Let a module find no GPU while it is imported, if it would use one: then no fork could."""
    if not module.startswith(_ASKS_CUDA):
        yield
        return
    visible = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        del os.environ[_VISIBLE]
        if visible is not None:
            os.environ[_VISIBLE] = visible


def _forks_can_use_gpu() -> bool:
    """Return whether forks of this process can use a GPU: not if something that was imported has asked CUDA for one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    try:
        pid = os.fork()
    except OSError:
        return False
    if pid == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    _, status = os.waitpid(pid, 0)
    return status == 0


def _become(job: dict[str, Any], streams: Sequence[int]) -> None:
    """In a fork: take over a command's words, folder, environment, standard streams and process group."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = _stream(1, sys.stdout)
    sys.stderr = _stream(2, sys.stderr)
    with suppress(OSError):  # of another session
        os.setpgid(0, job["group"])
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["variables"])
    sys.argv[:] = job["words"]
    sys.orig_argv[:] = job["original_words"]
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN if signum in job["ignored"] else signal.SIG_DFL)


def _stream(number: int, previous: TextIO) -> TextIO:
    """Return a standard stream as Python opens it: by lines at a terminal, and always for errors."""
    by_lines = number == 2 or os.isatty(number)
    is_unbuffered = bool(getattr(previous, "write_through", False))  # as PYTHONUNBUFFERED says
    return io.TextIOWrapper(
        os.fdopen(number, "wb", buffering=0 if is_unbuffered else -1, closefd=False),
        encoding=previous.encoding,
        errors=previous.errors,
        line_buffering=by_lines,
        write_through=is_unbuffered,
    )
