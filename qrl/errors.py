"""Errors that carry a sentence for the user, and the exit code of each.

    QrlError            1  a step failed
    ├── UnhealthyCell   1  a cell is void: its answers broke a limit of health, and its accuracy does not count
    ├── BadInput        2  the user can correct it: the sentence says what was wrong, what was expected, and what to do
    ├── GateRefused     3  a gate refused a promotion; every stage stays where it was
    └── VerdictFailed   3  `compare --fail-on` names a verdict that the comparison reached

The command line prints the sentence without a traceback, unless it `is_printed` already, and the run keeps it in the
tag `qrl.reason`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

PANIC = "PanicException"  # the name of what pyo3 raises, no Exception, where a library in Rust fails
_T = TypeVar("_T")
_MAX_SENTENCE = 6000  # characters
_MAX_WORD = 1000  # characters of a name in a sentence that somebody else chose


class QrlError(Exception):
    """A step failed for a reason that one sentence explains."""

    exit_code = 1

    def __init__(self, sentence: object = "", *, is_printed: bool = False) -> None:
        """Keep the sentence, fit for a terminal: control characters are escaped, and long names are cut.

        Args:
            sentence: what was wrong, what was expected, and what to do.
            is_printed: the terminal has it already, from a step that was launched or cell by cell, so that the
                command that ends with this error does not print it again.
        """
        text = str(sentence)[: 100 * _MAX_SENTENCE]
        text = re.sub(rf"\S{{{_MAX_WORD},}}", lambda word: f"{word[0][:60]}…", text)[:_MAX_SENTENCE]
        printable = (char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
        super().__init__("".join(printable))
        self.is_printed = is_printed


class UnhealthyCell(QrlError):
    """A cell is void: its answers broke a limit of health, and nothing shows that quantization did it."""


class BadInput(QrlError):
    """The user's input is wrong; nothing was changed."""

    exit_code = 2

    def __init__(
        self, sentence: object = "", *, field: str = "", rule: str = "", causes: Sequence["BadInput"] = ()
    ) -> None:
        """Keep the sentence, and what a program needs to know of it.

        Args:
            sentence: for the user.
            field: the recipe's key that is wrong, such as `train.qat`; empty where it is not one of the recipe's.
            rule: the rule of `recipe/rules.py` that it breaks, by name; empty where it is another error.
            causes: the errors that this one lists; empty where it is one by itself.
        """
        super().__init__(sentence)
        self.field = field
        self.rule = rule
        self.causes = tuple(causes) or (self,)

    @property
    def rules(self) -> list[str]:
        """Return the names of all rules that are broken, its own or those of the errors that it lists."""
        return [cause.rule for cause in self.causes if cause.rule]


class GateRefused(QrlError):
    """A gate refused a promotion."""

    exit_code = 3


class VerdictFailed(QrlError):
    """A scheme got a verdict on which the user wants `compare` to fail; the table is complete."""

    exit_code = 3


class StopReported(KeyboardInterrupt):
    """A stop signal that ended a launched step too, which has printed the sentence about it."""

    def __init__(self, stop: KeyboardInterrupt) -> None:
        """Keep the signal's sentence and exit code."""
        super().__init__(str(stop))
        self.code = getattr(stop, "code", 130)  # as `signals.exit_code` reads it: 128 + the signal's number


class Objections:
    """All that is wrong with a command, gathered by several checks and reported as one list."""

    def __init__(self) -> None:
        """Start without any."""
        self.errors: list[BadInput] = []

    @property
    def sentences(self) -> list[str]:
        """Return what the user would be told, a sentence for each objection."""
        return [str(error) for error in self.errors]

    def keep(self, look: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T | None:
        """Return what `look` returns; keep the sentence of its BadInput and return None.

        Another error is raised, unless there is an objection already: it may well follow from that one.
        """
        try:
            return look(*arguments, **keywords)
        except BadInput as error:
            self.add(*error.causes)
        except Exception:
            if not self.errors:
                raise
        return None

    def add(self, *objections: BadInput | str) -> None:
        """Keep objections, errors or only their sentences, each sentence once."""
        for objection in objections:
            error = objection if isinstance(objection, BadInput) else BadInput(objection)
            if str(error) not in self.sentences:
                self.errors.append(error)

    def insist(self) -> None:
        """Raise BadInput with all sentences; do nothing without any."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            listed = [f"- {sentence}" for sentence in self.sentences]
            heading = f"{len(listed)} things to correct:"
            raise BadInput("\n".join([heading, *listed]), causes=self.errors)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the next if it ends with a colon; "no message" if empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip("# ")]
    if not lines:
        return "no message"
    if not lines[0].endswith(":"):
        return lines[0]
    causes = [line for line in lines[1:] if not line.startswith("#")]  # MLflow heads each failed download with #
    return f"{lines[0]} {causes[0]}" if causes else lines[0]
