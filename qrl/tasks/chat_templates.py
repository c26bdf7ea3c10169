"""The program that renders chat templates in a process of its own; `sandbox.py` starts it and talks to it.

It reads a request a line from stdin and answers each with a line on stdout, both JSON. It knows nothing of this package
and imports only Jinja, so that it starts in a fifth of a second and needs little memory.

The environment offers what transformers offers to chat templates: the sandbox, loop controls, `tojson`, `strftime_now`,
`raise_exception` and the tag `generation`. transformers has no public function that takes a template and its values in
all versions which this package runs with, and its import takes more than a second. A test holds both to the same text.

Source: `transformers.utils.chat_template_utils`, and "Writing a chat template" in transformers' documentation.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

# The process that starts this one gives its own list of paths: Jinja is found where that process finds it.
if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30  # address space of the process
LONGEST_PROMPT = 1 << 22  # characters


class Generation(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks the model's own turns and changes no text."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_unchanged"), [], [], body)
        return block.set_lineno(line_number)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; Jinja's own filter would escape the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


ENVIRONMENT = _environment()


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return ENVIRONMENT.from_string(template)


def variables(template: str) -> list[str]:
    """Return the variables that a template reads and does not set before, sorted."""
    undeclared = meta.find_undeclared_variables(ENVIRONMENT.parse(template))
    return sorted(undeclared - ENVIRONMENT.globals.keys())


def answer(request: dict[str, Any]) -> list[Any]:
    """Return the name of an error and its message, or an empty name and what was requested.

    Args:
        request: `template`; `values` of its variables, or None to request the names of its variables.
    """
    try:
        if request["values"] is None:
            return ["", variables(request["template"])]
        text = _compiled(request["template"]).render(**request["values"])
    except MemoryError:
        return ["MemoryError", f"it needs more than {MEMORY_BYTES >> 30} GiB"]
    except Exception as error:  # a template is a program and raises what it likes
        return [type(error).__name__, str(error)[:1000]]
    if len(text) > LONGEST_PROMPT:
        return ["TooLong", f"the prompt has {len(text):,} characters"]
    return ["", text]


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that sends the requests
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    for line in sys.stdin.buffer:
        request = json.loads(line)
        # The kernel ends the process at this limit, whatever the template does; nothing here could.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            encoded = json.dumps(answer(request)).encode()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(encoded + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
