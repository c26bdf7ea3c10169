"""Chat templates, rendered in a process with limits of time and memory: a template is a program that anybody wrote.

Why a process and not a limit within this one:

- Jinja's sandbox stops a template from reading files and from long ranges, not from nesting two ranges of 10⁵ or from
  multiplying a text by 10¹⁰.
- A signal, or an exception raised in another thread, takes effect between two steps of Python. It cannot interrupt a
  call into C: `'a' * 10000000000`, `10 ** 10 ** 10`, `'%*d' % (10 ** 10, 1)`, a filter such as `center` or `indent`, a
  text that doubles in a loop. A signal also reaches the main thread alone, and servers render on others.
- A list of forbidden operations would never be complete, and the memory of this process cannot be limited, since torch
  and CUDA reserve more addresses than any template may have.
- A check once per template would not do, since a template may act by the question or by the clock.

So one process (`chat_templates.py`) serves all prompts of this one. It starts with the first prompt. The kernel ends it
when it exceeds its processor time, and it ends by itself when this process does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_S = 5.0  # for one prompt; typical ones need a millisecond
WALL_S = 120.0  # for one prompt, and for the start; reached only by a process that does not even use its CPU time
LONGEST_TEMPLATE = 1 << 20  # characters; the longest published ones have 20,000
# A module's name, not a path: results depend on its code, and `tracking/sources.py` finds what they depend on by names.
PROGRAM = "qrl.tasks.chat_templates"

_lock = threading.Lock()
_processes: dict[int, subprocess.Popen] = {}  # by the id of this process: a forked child must not share its parent's


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return a chat as the text of a prompt, up to the start of the model's own turn.

    The text is that of `tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)`.

    Args:
        tokenizer: it has the template and the special tokens.
        messages: the turns of the chat, each with `role` and `content`.
        variables: values of the template's own variables; they precede the special tokens.
        add_generation_prompt: whether the start of the model's next turn follows the last message.

    Raises:
        jinja2.TemplateError: the template fails or exceeds a limit; its class has the name of the error.
        ValueError: the tokenizer has no template, or several and none is the default.
    """
    values = {"messages": messages, "tools": None, "documents": None}
    values["add_generation_prompt"] = add_generation_prompt
    values |= tokenizer.special_tokens_map
    values |= variables
    return _request({"template": tokenizer.get_chat_template(), "values": values})


@lru_cache(maxsize=8)
def variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set before; raise jinja2.TemplateError as `render`."""
    return frozenset(_request({"template": template, "values": None}))


def _request(request: dict[str, Any]) -> Any:
    """Return what the other process answers; raise its error as jinja2.TemplateError."""
    from jinja2 import TemplateError

    error_name, answer = _answer(request)
    if error_name:
        raise type(error_name, (TemplateError,), {})(answer)
    return answer


def _answer(request: dict[str, Any]) -> list[Any]:
    """Return the name of an error and its message, or an empty name and what was requested."""
    length = len(request["template"])
    if length > LONGEST_TEMPLATE:
        return ["TooLong", f"it has {length:,} characters, but {LONGEST_TEMPLATE:,} were expected"]

    line = json.dumps(request | {"cpu_s": CPU_S}, default=str).encode() + b"\n"
    with _lock:
        process = _running_process()
        try:
            answer = _exchange(process, line)
        except BaseException:  # a later prompt would get the answer to this one
            process.kill()
            process.wait()
            raise
        if answer:
            return json.loads(answer)

        process.kill()
        is_late = process.wait() in (-signal.SIGPROF, -signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()
    if is_late:
        return ["Timeout", f"it took longer than {CPU_S:g} s"]
    return ["Ended", "the process that renders it ended"]


def _running_process() -> subprocess.Popen:
    """Return the process that serves this one; start it if there is none, or if it ended."""
    process = _processes.get(os.getpid())
    if process is None or process.poll() is not None:
        # -I: neither the working folder nor the user's own packages are on its path before it sets this one's.
        program = importlib.util.find_spec(PROGRAM).origin
        command = [sys.executable, "-I", program, json.dumps(sys.path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        _processes[os.getpid()] = process
    return process


def _exchange(process: subprocess.Popen, line: bytes) -> bytes:
    """Send a request and return the answer; empty if the process ended, or is silent for `WALL_S`."""
    try:
        process.stdin.write(line)
        process.stdin.flush()
        if not wait([process.stdout], WALL_S):
            return b""
        return process.stdout.readline()
    except BrokenPipeError:
        return b""
