"""Run a module of verl's as `python -m` does, in a process that ends with the training that started it."""

import os
import runpy
import sys

from qrl import process

PARENT = "QRL_VERL_PARENT"  # pid of the training


def main() -> None:
    """Run the module that the first argument names, with the arguments after it."""
    process.die_with_parent(int(os.environ[PARENT]))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
