"""An OpenAI-compatible server of one checkpoint: start it, wait for it, and stop it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from qrl.errors import BadInput
from qrl.serve.engines import ServedModel
from qrl.serve.process import Engine

READY_TIMEOUT_S = 900
POLL_S = 0.05


def run(
    engine: Engine,
    model: ServedModel,
    host: str,
    port: int,
    *,
    on_ready: Callable[[str], None],
    timeout_s: float = READY_TIMEOUT_S,
) -> None:
    """Serve a checkpoint until Ctrl-C, or a signal that raises KeyboardInterrupt.

    Args:
        engine: the engine, started.
        model: version and folder.
        host: address to listen on.
        port: port to listen on.
        on_ready: called with the address, http://host:port/v1, once the engine answers and the files are verified.
        timeout_s: time limit for loading, in seconds.

    Raises:
        BadInput: the port cannot be listened on; nothing was loaded.
        QrlError: the engine died or timed out, or the files are not those that were evaluated.
        KeyboardInterrupt: interrupted while the model was loading; once it serves, an interrupt is a normal return.
    """
    check_port(host, port)
    engine.load(model, (host, port))
    wait(engine, f"loading {model.id}", timeout_s)
    engine.log.echo = True
    try:
        on_ready(f"{url(host, port)}/v1")
        engine.process.wait()
    except KeyboardInterrupt:
        return
    raise engine.failure("stopped serving unexpectedly")


def wait(engine: Engine, label: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return once the engine is ready; show a clock with a label meanwhile.

    Raises:
        QrlError: the engine died or timed out, or its files are not those that were evaluated.
    """
    from tqdm import tqdm

    deadline = time.monotonic() + timeout_s
    with tqdm(bar_format="{desc} {elapsed}", desc=label, leave=False, mininterval=1) as bar:
        while not engine.ready():
            if time.monotonic() > deadline:
                raise engine.failure(f"did not answer within {timeout_s:.0f} s")
            time.sleep(POLL_S)
            bar.update()


def check_port(host: str, port: int) -> None:
    """Listen for a moment, so that a port in use is reported before the model is loaded.

    Raises:
        BadInput: the port cannot be listened on.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise BadInput(
            f"Cannot listen on {url(host, port).removeprefix('http://')} ({error.strerror or error}): "
            "stop the program that uses it, or choose another port or host."
        ) from None


def url(host: str, port: int) -> str:
    """Return http://host:port, with an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
