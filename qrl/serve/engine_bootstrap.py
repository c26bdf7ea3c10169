"""`python -P engine_bootstrap.py PARENT MODULE`: import an engine, wait on stdin for its options, then run it.

An engine takes seconds to import, and a stage takes seconds to resolve to a version, so both happen at once. The
options come as one line, a JSON list; a parent with nothing to serve closes stdin instead, and this process ends. The
engine also ends when its parent dies. This is a program of its own because code between fork and exec is unsafe in a
process with threads.
"""

import importlib
import json
import os
import runpy
import sys

from qrl.process import die_with_parent

IMPORTED = "qrl: imported"  # the line on stdout once the imports are done


def main(parent: int, module: str) -> None:
    """Ask the kernel for SIGTERM when the parent dies, however it dies, and run the module as `python -m` would."""
    die_with_parent(parent)
    importlib.import_module(module)
    print(IMPORTED, flush=True)
    line = sys.stdin.readline()
    if not line:
        return
    with open(os.devnull) as null:
        os.dup2(null.fileno(), sys.stdin.fileno())
    sys.argv = [module, *json.loads(line)]
    del sys.modules[module]  # it runs again, as the main module; its own imports stay
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
