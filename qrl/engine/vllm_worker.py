"""What vLLM's process gets from us: it ends with the process that started it, and is quiet."""

import logging
import multiprocessing

from qrl import process

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # INT8 warns at every matrix product: 112 lines a token

if parent := multiprocessing.parent_process():  # None: the engine runs in the command's own process
    process.die_with_parent(parent.pid or 0)


class Extension:
    """Adds nothing to vLLM's worker, which imports this file to get it."""
