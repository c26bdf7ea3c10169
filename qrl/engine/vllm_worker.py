"""Imported by vLLM's worker process: let it end with the process that started it, and silence bitsandbytes.

vLLM imports the module of `worker_extension_cls` in every worker before it loads a model. That import is the only
place where code of ours runs in a spawned worker; the class itself is empty.
"""

import logging
import multiprocessing
import os

from qrl import process

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # INT8 warns at every matrix product: 112 lines a token

parent = multiprocessing.parent_process()
is_in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
if parent is not None and not is_in_process:  # otherwise the engine runs in a process of our own
    process.die_with_parent(parent.pid or 0)


class Extension:
    """Adds nothing to vLLM's worker, which imports this file to get it."""
