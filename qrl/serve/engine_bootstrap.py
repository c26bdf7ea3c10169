"""`python -P tether.py PARENT MODULE`: imports an engine, waits on stdin for its options, and becomes it, tied to its parent's life.

An engine takes seconds to import, and which version a stage means takes seconds to look up: so both are done at once. The
options come as one line, a JSON list; a parent that finds nothing to serve closes stdin instead, and nothing happens.
A program of its own, because code between fork and exec is unsafe in a process with threads.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys

IMPORTED = "qrl: imported"  # the line on stdout once it only waits for its options
_PR_SET_PDEATHSIG = 1


def main(parent: int, module: str) -> None:
    """Asks the kernel for SIGTERM at the parent's death, however it comes, and runs the module as `python -m` would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked
        return
    importlib.import_module(module)
    print(IMPORTED, flush=True)
    line = sys.stdin.readline()
    if not line:
        return
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    sys.argv = [module, *json.loads(line)]
    del sys.modules[module]  # run anew, as the main module; what it imported stays
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
