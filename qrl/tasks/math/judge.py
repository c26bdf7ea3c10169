"""What a worker of the pool does: it judges answers with math-verify. Imported there only; no torch, no signals of its own.

math-verify's own time limit is `signal.alarm`, which dies off the main thread and cannot interrupt one long multiplication.
It is turned off here. The kernel ends a worker whose CPU time is over instead (`ITIMER_PROF`): CPU and not wall time, so
that a busy machine reaches the same verdicts as an idle one.
"""

from __future__ import annotations

import gc
import logging
import math
import resource
import signal
import warnings

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
from math_verify import parse, verify
from math_verify.parser import parse_latex_cached
from sympy import Basic
from sympy.core import random as sympy_random

from qrl.tasks.grade import Verdict
from qrl.tasks.math import text as math_text
from qrl.tasks.math.rule import Asked, verdict

PLACES = 6  # significant digits, or decimal places, to which a decimal may stand for an exact number
_NORMAL = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="last", equations=False
)


def prepare(memory_bytes: int) -> None:
    """Sets a fresh worker's limits: bytes of address space, and what signals do."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler in Python would wait for the long multiplication
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # sympy's own objects stay: not walked over again at every collection, verdicts come a tenth faster


def judge(batch: list[Asked], cpu_s: float) -> list[Verdict | None]:
    """The verdict on each; None where algebra failed with an error. An answer over its CPU seconds ends the process."""
    return [_one(asked, cpu_s) for asked in batch]


def same(gold: str, said: str) -> bool:
    """Whether two normal answers are equal, by the rules of texts first, then as math-verify sees it."""
    told = math_text.same(gold, said)
    if told is not None:
        return told
    expected = _read(gold)
    return expected is not None and all(_equal(expected, _read(claim)) for claim in math_text.claims(gold, said))


def last_expression(text: str) -> str | None:
    """The last expression or number that math-verify extracts from running text, in normal form; None without one."""
    found = parse(text, parsing_timeout=None, raise_on_error=True)
    return math_text.normal(str(found[-1])[: math_text.LONGEST_ANSWER]) if found else None


def _equal(expected: Basic, found: Basic | None) -> bool:
    if found is None:
        return False
    return verify([expected], [found], float_rounding=_places(expected), timeout_seconds=None, raise_on_error=True)


def _one(asked: Asked, cpu_s: float) -> Verdict | None:
    sympy_random.seed(0)  # sympy tries identities at random points
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return verdict(asked, same, last_expression)
    except Exception:  # of a dozen libraries' kinds; the caller counts it
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read(answer: str) -> Basic | None:
    """An answer's expression; None where it is not readable as one.

    Raises:
        MemoryError, RecursionError: reading it took more than a worker has.
    """
    latex = normalize_latex(f"\\boxed{{{answer}}}", config=_NORMAL)
    try:
        return parse_latex_cached(latex)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return None


def _places(gold: Basic) -> int:
    """Decimal places that a decimal is rounded to: more for a small number, or 0.0000673 would equal 0.0000672."""
    try:
        size = abs(float(gold))
    except Exception:  # an expression with symbols, a set, a matrix
        return PLACES
    return PLACES + max(0, math.floor(-math.log10(size))) if 0 < size < 1 else PLACES


warnings.filterwarnings("ignore")  # sympy's, about what answers make it do
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its own time limit is off
for _warm in (r"\frac{x+1}{2}", r"\sqrt{2}\pi", "(1,2]", r"\begin{pmatrix}1\\2\end{pmatrix}"):
    same(_warm, _warm + "+1")  # ANTLR's tables are filled once, before workers are forked
