"""What can go wrong, and the exit code that says so.

    QrlError            1  a step failed
    ├── UnhealthyCell   1  a cell broke a limit of the recipe; its accuracy does not count
    ├── BadInput        2  the user can mend it: the sentence says what was wrong, expected, and to do
    └── GateRefused     3  a promotion was decided against; the pointers stand where they stood

Each carries one sentence; the command line prints it without a traceback, and the run keeps it in the tag `qrl.reason`.
"""


class QrlError(Exception):
    """A step failed for a reason that a sentence can tell."""

    exit_code = 1
    told = False  # set where a launched step has printed the sentence already


class UnhealthyCell(QrlError):
    """A cell's completions broke a health limit, so its accuracy means nothing."""


class BadInput(QrlError):
    """Something the user gave is wrong; nothing was changed."""

    exit_code = 2


class GateRefused(QrlError):
    """A gate decided against a promotion."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """The first line of what an error says, which may be many lines or nothing."""
    return (str(error).strip() or "no message").splitlines()[0]
