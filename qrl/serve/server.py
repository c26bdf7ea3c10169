"""An OpenAI-compatible server of one checkpoint: start it, wait for it, and stop it."""

import socket
import time
from collections.abc import Callable

from qrl.errors import BadInput
from qrl.serve.engines import ServedModel
from qrl.serve.process import Engine

READY_TIMEOUT_S = 900
POLL_S = 0.05


def run(engine: Engine, model: ServedModel, host: str, port: int, *, on_ready: Callable[[str], None]) -> None:
    """Serve a checkpoint until Ctrl-C, or a signal that raises KeyboardInterrupt.

    Args:
        engine: started, with nothing loaded.
        on_ready: called with the address, http://host:port/v1, once the engine answers and the files are verified.

    Raises:
        BadInput: the port cannot be listened on; nothing was loaded.
        QrlError: the engine died or timed out, or the files are not those that were evaluated.
        KeyboardInterrupt: interrupted while the model was loading; once it serves, an interrupt is a normal return.
    """
    check_port(host, port)
    engine.load(model, (host, port))
    wait(engine, f"loading {model.id}")
    engine.log.echo = True
    try:
        on_ready(f"{url(host, port)}/v1")
        engine.process.wait()
    except KeyboardInterrupt:
        return
    raise engine.failure("stopped serving unexpectedly")


def wait(engine: Engine, label: str) -> None:
    """Show a clock with a label, in a terminal, until the engine is ready; raise QrlError as `run` does."""
    from tqdm import tqdm

    deadline = time.monotonic() + READY_TIMEOUT_S
    with tqdm(bar_format="{desc} {elapsed}", desc=label, leave=False, mininterval=1, disable=None) as bar:
        while not engine.ready():
            if time.monotonic() > deadline:
                raise engine.failure(f"did not answer within {READY_TIMEOUT_S} s")
            time.sleep(POLL_S)
            bar.update()


def check_port(host: str, port: int) -> None:
    """Listen for a moment, so that a port in use raises BadInput before the model is loaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise cannot_listen(host, port, error) from None


def cannot_listen(host: str, port: int, error: OSError) -> BadInput:
    """Return the error for an address that cannot be listened on."""
    address = url(host, port).removeprefix("http://")
    where = f"{address} ({error.strerror or error})"
    return BadInput(f"Cannot listen on {where}: stop the program that uses it, or choose another port or host.")


def url(host: str, port: int) -> str:
    """Return http://host:port, with an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
