"""What vLLM's process gets from us: it ends with the process that started it, however that one dies."""

import multiprocessing

from qrl import process

if parent := multiprocessing.parent_process():  # None: the engine runs in the command's own process
    process.die_with_parent(parent.pid or 0)


class Extension:
    """Adds nothing to vLLM's worker, which imports this file to get it."""
