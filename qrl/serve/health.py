"""Whether an engine on this machine answers."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path


def healthy(listen: tuple[str, int] | Path) -> bool:
    """Return whether /health answers 200, bypassing any proxy; both engines listen only once the model is loaded.

    Args:
        listen: host and port, or the path of a Unix socket.
    """
    host, port = ("localhost", 80) if isinstance(listen, Path) else listen
    connection = http.client.HTTPConnection({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, timeout=5)
    try:
        if isinstance(listen, Path):
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(connection.timeout)
            connection.sock.connect(str(listen))
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
