"""A port for a server that a test starts."""

import random
import socket

_PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections while a server still starts


def free_port() -> int:
    """Return a port that nothing listens on."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
