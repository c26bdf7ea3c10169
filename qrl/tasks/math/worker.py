"""The work of a pool's process: grading answers with math-verify. Imported there only; free of torch.

math-verify's own time limit uses `signal.alarm`, which fails off the main thread and cannot interrupt one long
multiplication, so it is turned off here. Instead the kernel kills a worker that uses up its CPU time (`ITIMER_PROF`).
CPU time, not wall time, so that a busy machine reaches the same verdicts as an idle one.
"""

import gc
import logging
import math
import re
import resource
import signal
import warnings

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
from math_verify import grader, parse, verify
from math_verify.parser import parse_latex_cached
from sympy import Basic, Derivative, Eq, Float, I, MatrixBase, Rational, Unequality, log, nan, zoo
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core import random as sympy_random

from qrl.errors import first_line
from qrl.tasks.math import latex, units, values
from qrl.tasks.math.verdict import Claim, verdict
from qrl.tasks.question import Verdict

PLACES = 6  # significant digits, or decimal places, to which a decimal may approximate an exact number
_EITHER_SIGN = re.compile(r"\\pm(?![A-Za-z]) ?")
_DIGITS = 1000  # to which two exact numbers are compared, at most
_NORMAL = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="last", equations=False
)


def prepare(memory_bytes: int) -> None:
    """Set a new worker's limit of address space, and its signal handlers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler in Python would wait for the long multiplication
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # collections skip sympy's own objects, which makes verdicts a tenth faster


def grade(batch: list[Claim], cpu_s: float) -> list[Verdict]:
    """Return a verdict on each claim, one with a `fault` where algebra raised.

    A claim that exceeds its CPU time ends the process.
    """
    return [_grade_one(claim, cpu_s) for claim in batch]


def same(gold: str, stated: str) -> bool:
    """Return whether two normal answers are equal, by the rules for texts first, then by math-verify."""
    by_text = latex.same(gold, stated)
    if by_text is not None:
        return by_text
    gold, stated = latex.without_units(gold, stated)
    expected = _read(gold)
    if expected is None:
        return False
    return all(_equal(expected, _read(side)) for side in latex.claims(gold, stated))


def last_expression(text: str) -> str | None:
    """Return the last expression or number that math-verify extracts from prose, in normal form; None without one."""
    expressions = parse(text, parsing_timeout=None, raise_on_error=True)
    return latex.normal(str(expressions[-1])[: latex.LONGEST_ANSWER]) if expressions else None


def _equal(expected: Basic, stated: Basic | None) -> bool:
    if stated is None or expected.has(zoo, nan) or stated.has(zoo, nan):  # divided by zero
        return False
    if isinstance(expected, Unequality) or isinstance(stated, Unequality):  # math-verify fails on x ≠ 3
        both = isinstance(expected, Unequality) and isinstance(stated, Unequality)
        return both and _equal(Eq(*expected.args), Eq(*stated.args))
    if _verified(expected, stated):
        return True
    with_unit = _with_imaginary_unit(expected), _with_imaginary_unit(stated)
    return with_unit != (expected, stated) and _verified(*with_unit)


def _verified(expected: Basic, stated: Basic) -> bool:
    try:
        places = _places(expected)
        return verify([expected], [stated], float_rounding=places, timeout_seconds=None, raise_on_error=True)
    except ZeroDivisionError:
        return False


def _with_imaginary_unit(expression: Basic) -> Basic:
    """Return an expression with the imaginary unit for each letter i, which math-verify reads as one of two symbols."""
    if expression.has(ExprWithLimits):  # where i may count the terms of a sum
        return expression
    letters = {symbol: I for symbol in expression.free_symbols if str(symbol) == "i"}
    return expression.xreplace(letters) if letters else expression


_numerically_equal_in_library = grader.sympy_numeric_eq
_symbolically_equal_in_library = grader.sympy_symbolic_eq


def _numerically_equal(gold: Basic, stated: Basic, float_rounding: int, numeric_precision: int) -> bool:
    """Return whether two parts of answers have the same value, however small it is.

    math-verify takes a difference below about 1e-17 for none, so `2^{-61}` for `2^{-60}`.
    """
    equal = _numerically_equal_in_library(gold, stated, float_rounding, numeric_precision)
    return bool(equal) and not _differ(gold, stated)


def _symbolically_equal(gold: Basic, stated: Basic) -> bool:
    """Return whether two parts of answers are the same expression; numbers that differ need no search for a proof."""
    try:
        size = abs((gold - stated).evalf(15))
        if size.is_Float and size._prec > 1 and size > 10**-12:
            return False
    except Exception:  # no numbers: the library knows what to do with them, or fails on them itself
        pass
    return _symbolically_equal_in_library(gold, stated)


# math-verify compares the ends of intervals, the members of sets and the sides of equations by these functions of its
# own, so that a rule for small numbers has to be there.
grader.sympy_numeric_eq = _numerically_equal
grader.sympy_symbolic_eq = _symbolically_equal


def _differ(gold: Basic, stated: Basic) -> bool:
    """Return whether two expressions that math-verify takes for equal have different values.

    Those with symbols are compared at one point. Matrices are not: math-verify compared their entries one by one.
    """
    is_percent = any(grader.get_pct_val(side) is not None for side in (gold, stated))  # `9%` may stand for 9
    if is_percent or isinstance(gold, MatrixBase) or isinstance(stated, MatrixBase):
        return False
    symbols = sorted(gold.free_symbols | stated.free_symbols, key=str)
    point = {symbol: Rational(1_000_003 + 7919 * index, 777_767) for index, symbol in enumerate(symbols)}
    try:
        value = gold.subs(point)
        return _matters(value - stated.subs(point), value)
    except Exception:  # no numbers: a set, an equation, a function without a rule
        return False


def _matters(difference: Basic, value: Basic) -> bool:
    """Return whether a difference from a value makes another one.

    Exact numbers are compared to `_DIGITS` digits. Decimals are rounded, so two of them differ only where all of their
    digits are beyond the places that math-verify looks at.
    """
    if difference.has(Float):
        size = abs(value.evalf(PLACES * 3))
        return bool(size < 10**-PLACES and abs(difference.evalf(PLACES * 3)) > size / 10 ** (PLACES - 1))
    if difference.has(ExprWithLimits, Derivative):  # an integral or a sum to infinity could take long
        return False
    exact = difference.doit()
    if exact.is_Rational:
        return exact != 0
    size = abs(exact.evalf(15, maxn=_DIGITS))
    # A precision of one bit is how sympy marks a value whose digits all cancelled.
    return bool(size.is_Float and size._prec > 1 and size != 0)


def _grade_one(claim: Claim, cpu_s: float) -> Verdict:
    sympy_random.seed(0)  # sympy tests identities at random points
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return verdict(claim, same, last_expression)
    except Exception as error:  # of many kinds, from several libraries; the caller counts it
        return Verdict(None, False, False, "error", f"{type(error).__name__}: {first_line(error)[:200]}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read(answer: str) -> Basic | None:
    """Return an answer's expression; None if it cannot be read as one, but raise where memory or stack ran out."""
    expression = _parsed(answer)
    if (
        expression is None and len(_EITHER_SIGN.findall(answer)) == 1
    ):  # math-verify reads `1\pm x`, but not `(1\pm x)/2`
        return _parsed(",".join(_EITHER_SIGN.sub(sign, answer) for sign in "+-"))
    return expression


def _parsed(answer: str) -> Basic | None:
    content = normalize_latex(f"\\boxed{{{values.as_fractions(units.with_product(answer))}}}", config=_NORMAL)
    try:
        return parse_latex_cached(content)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return None


def _places(gold: Basic) -> int:
    """Return the decimal places to round to: more for a small number, or 0.0000673 would equal 0.0000672."""
    try:
        size = abs(float(gold))
    except Exception:  # an expression with symbols, a set, a matrix
        return PLACES
    if size == 0 and gold.doit() != 0:  # below the smallest float
        size = abs(gold.evalf(PLACES))
        return PLACES + int(-log(size, 10).evalf(PLACES * 2))
    if not 0 < size < 1:
        return PLACES
    leading_zeros = max(0, math.floor(-math.log10(size)))
    return PLACES + leading_zeros


warnings.filterwarnings("ignore")  # sympy warns about what some answers make it do
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its own time limit is off
for _expression in (r"\frac{x+1}{2}", r"\sqrt{2}\pi", "(1,2]", r"\begin{pmatrix}1\\2\end{pmatrix}"):
    same(_expression, _expression + "+1")  # fills ANTLR's tables once, before workers are forked
