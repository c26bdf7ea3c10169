"""`python tether.py PARENT COMMAND…`: becomes the command, tied to its parent's life, be it ended by SIGKILL.

A program of its own, because code between fork and exec is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # kept across exec


def main(parent: int, command: list[str]) -> None:
    """Asks the kernel for SIGTERM at the parent's death, and executes the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:  # else it died before we asked
        os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
