"""Two processes on this machine that train together, started by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import qrl

ROOT = Path(qrl.__file__).parents[1]
# A thread of Gloo's may still hold the last collective when Python ends; torch then aborts the process, of two in
# torch 2.13's smallest such script once in forty runs. So a script that ends with one ends without Python's teardown.
ENDS = """
import os as _os, sys as _sys
_sys.stdout.flush()
_os._exit(0)
"""


def torchrun(*words: object, cwd: str | Path | None = None) -> subprocess.CompletedProcess:
    """Run a script or `-m` and a module with its words, in two processes, and return what they wrote."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command += map(str, words)
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)


def run(folder: Path, source: str, *words: object) -> subprocess.CompletedProcess:
    """Run Python source, as a file in a folder, with its words."""
    (folder / "child.py").write_text(source + ENDS)
    return torchrun(folder / "child.py", *words)
