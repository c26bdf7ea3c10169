"""Chat templates rendered in a process with limits of time and memory: a template is a program that anybody wrote.

Jinja's sandbox stops a template from reading files, not from counting to 10¹⁰ or from multiplying a text by it. One
process serves all prompts of this one: it starts with the first (0.3 s) and runs transformers' own compiler, without
the rest of that package. A check once per template would not do, since a template may act by the question or the clock.
The kernel ends it when it exceeds its processor time, and it ends by itself when this process does.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import types
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

CPU_S = 5.0  # for one prompt; typical ones need a millisecond
WALL_S = 120.0  # for one prompt, and for the start; reached only by a process that does not even use its CPU time
MEMORY_BYTES = 1 << 30  # address space of the process
LONGEST_TEMPLATE = 1 << 20  # characters; the longest published ones have 20,000
LONGEST_PROMPT = 1 << 22  # characters
_UTILS = "transformers.utils.chat_template_utils"
_COMPILE = "_compile_jinja_template"

_lock = threading.Lock()
_processes: dict[int, subprocess.Popen] = {}  # by the id of this process: a forked child must not share its parent's


def limit() -> None:
    """Let transformers render every chat template of this process in the other one; a second call changes nothing."""
    utils = importlib.import_module(_UTILS)
    compiler = getattr(utils, _COMPILE)
    if isinstance(compiler, type):  # `_Limited`, from an earlier call
        return
    _Limited.environment = compiler("").environment
    for module in (utils, sys.modules.get("transformers.tokenization_utils_base")):  # transformers 4 imports the name
        if hasattr(module, _COMPILE):
            setattr(module, _COMPILE, _Limited)


class _Limited:
    """A template as transformers' compiler returns it, neither compiled nor rendered in this process."""

    environment: Any = None  # parses templates, and compiles none

    def __init__(self, template: str) -> None:
        self._template = template

    def render(self, **values: Any) -> str:
        """Return the prompt; raise jinja2.TemplateError, by the name of the error in the other process, if it fails."""
        return _ask({"template": self._template, "values": values})


@lru_cache(maxsize=8)
def variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set before; raise jinja2.TemplateError as `render`."""
    return frozenset(_ask({"template": template, "values": None}))


def _ask(request: dict[str, Any]) -> Any:
    from jinja2 import TemplateError

    error, text = _answer(request)
    if error:
        raise type(error, (TemplateError,), {})(text)
    return text


def _answer(request: dict[str, Any]) -> list:
    """Return the kind of an error and its message, or none and what was asked for."""
    if len(request["template"]) > LONGEST_TEMPLATE:
        return ["TooLong", f"it has {len(request['template']):,} characters, but {LONGEST_TEMPLATE:,} were expected"]
    line = json.dumps(request | {"cpu_s": CPU_S}, default=str).encode() + b"\n"
    with _lock:
        process = _processes.get(os.getpid())
        if process is None or process.poll() is not None:
            process = _processes[os.getpid()] = _start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            if wait([process.stdout], WALL_S) and (answer := process.stdout.readline()):
                return json.loads(answer)
        except BrokenPipeError:
            pass
        except BaseException:  # its answer would be taken for the next prompt's
            process.kill()
            process.wait()
            raise
        process.kill()
        late = process.wait() in (-signal.SIGPROF, -signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()
    return ["Timeout", f"it took longer than {CPU_S:g} s"] if late else ["Ended", "the process that renders it ended"]


def _start() -> subprocess.Popen:
    words = [sys.executable, "-I", __file__, json.dumps(sys.path)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _serve(path: list[str]) -> None:
    """Answer requests from stdin, a line each, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    sys.path[:] = path
    os.environ["USE_TORCH"] = "0"  # of transformers 4, which would import it
    package = Path(importlib.util.find_spec("transformers").origin).parent
    for name, folder in (("transformers", package), ("transformers.utils", package / "utils")):
        sys.modules[name] = types.ModuleType(name)  # without what the packages themselves import, for seconds
        sys.modules[name].__path__ = [str(folder)]
    compiler = getattr(importlib.import_module(_UTILS), _COMPILE)
    environment, meta = compiler("").environment, importlib.import_module("jinja2.meta")
    for kind, most in (("AS", MEMORY_BYTES), ("CORE", 0), ("FSIZE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            if request["values"] is None:
                variables = meta.find_undeclared_variables(environment.parse(request["template"]))
                answer = ["", sorted(variables - environment.globals.keys())]
            else:
                answer = ["", compiler(request["template"]).render(**request["values"])]
            if len(answer[1]) > LONGEST_PROMPT:
                answer = ["TooLong", f"the prompt has {len(answer[1]):,} characters"]
        except MemoryError:
            answer = ["MemoryError", f"it needs more than {MEMORY_BYTES >> 30} GiB"]
        except Exception as error:  # a program raises what it likes
            answer = [type(error).__name__, str(error)[:1000]]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    import importlib.util

    _serve(json.loads(sys.argv[1]))
