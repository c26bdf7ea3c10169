"""An OpenAI-compatible server of one checkpoint: waited for, watched and stopped."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from qrl.errors import BadInput
from qrl.serve.process import Engine, Load

READY_TIMEOUT_S = 900
LOOK_EVERY_S = 0.05  # whether an engine that loads has come up


def run(
    child: Engine,
    what: Load,
    host: str,
    port: int,
    *,
    on_ready: Callable[[str], None],
    timeout_s: float = READY_TIMEOUT_S,
) -> None:
    """Serves a checkpoint until it is told to stop; Ctrl-C, or a signal that raises KeyboardInterrupt, stops it.

    Args:
        child: the engine, started.
        what: version and folder.
        host: address to listen on.
        port: port to listen on.
        on_ready: called with the address, http://host:port/v1, once the engine answers and the files are verified.
        timeout_s: how long loading may take, in seconds.

    Raises:
        BadInput: the port cannot be listened on; nothing was loaded.
        QrlError: the engine died, in its own words, or did not answer in time; or the files are not those that were evaluated.
        KeyboardInterrupt: told to stop while the model was loading; once it serves, that is a normal return.
    """
    check_port(host, port)
    child.load(what, (host, port))
    wait(child, f"loading {what.served}", timeout_s)
    child.echo = True
    try:
        on_ready(f"{url(host, port)}/v1")
        child.process.wait()
    except KeyboardInterrupt:
        return
    raise child.failure("stopped serving, though nobody asked it to")


def wait(child: Engine, what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Returns once the engine is ready.

    Raises:
        QrlError: it died, did not answer in time, or its files are not those that were evaluated.
    """
    from tqdm import tqdm

    deadline = time.monotonic() + timeout_s
    with tqdm(bar_format="{desc} {elapsed}", desc=what, leave=False, mininterval=1) as bar:
        while not child.ready():
            if time.monotonic() > deadline:
                raise child.failure(f"did not answer within {timeout_s:.0f} s")
            time.sleep(LOOK_EVERY_S)
            bar.update()


def check_port(host: str, port: int) -> None:
    """Listens for a moment, so that a port in use is told before the model is loaded.

    Raises:
        BadInput: it cannot be listened on.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise BadInput(
            f"Cannot listen on {url(host, port).removeprefix('http://')} ({error.strerror or error}): "
            "stop what listens there, or choose another port or host."
        ) from None


def url(host: str, port: int) -> str:
    """http://host:port, an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
