"""The one grader: reward in training, verdict in evaluation.

Strict: the number on a line `#### x`. Every such line of a completion must say the same number; two different ones
are no answer, so that listing candidates earns nothing. Flexible: the last number anywhere. Numbers are compared as
exact fractions. Time is linear in the text's length, and nothing in a text can raise.
"""

import re
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from qrl.errors import BadInput

MARKER = re.compile(r"(?<!#)####(?!#)([^\n\r#]*)")
ENDS = re.compile(r"<\|(?:im_end|endoftext|eot_id|end)\|>|</s>")
LONGEST_LINE = 200  # characters after `####`: a longer line is prose, not an answer
LONGEST_NUMBER = 60  # digits and separators: int() is quadratic

# A run of digits with separators, glued to no letter before it: the 2 of `m2` is no number. Possessive, so linear.
_RUN = re.compile(r"(?<![\w.])(?:[0-9][0-9.,\u00a0\u2009\u202f]*+|\.[0-9]++)")
_SEPARATORS = ".,\u00a0\u2009\u202f"
_PLAIN = re.compile(r"[0-9]++(?:\.[0-9]++)?|\.[0-9]++")
_GROUPED = re.compile(r"[0-9]{1,3}([,\u00a0\u2009\u202f])[0-9]{3}(?:\1[0-9]{3})*(?:\.[0-9]++)?")
_EXPONENT = re.compile(r"[eE][-+]?[0-9]")
_SIGN = re.compile(r"(?:^|[^\w)\]}.,%])([-+])(?:\\?[$€£¥₹])?$")  # `-5`, `-$5`, `$-5`; the bar of `10-12` is none
_LEADING_SIGN = re.compile(r"^\s*([-+])\s+")
_FRACTION = re.compile(r"\\[dt]?frac ?\{([^{}]{1,60})\} ?\{([^{}]{1,60})\}")
_OVER = re.compile(r"\s?/\s?")
_MINUSES = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a grader says of one completion.

    Args:
        parsed: the strict answer, normalized (`1,000.0` → `1000`); None where there is none, or several.
        strict: the strict answer equals the gold one.
        flexible: the last number anywhere equals the gold one.
        fault: "timeout" or "error" where the grader itself failed, which counts as wrong and is reported; None is a verdict.
    """

    parsed: str | None
    strict: bool
    flexible: bool
    fault: str | None = None


def grade(completion: str, answer: str) -> Verdict:
    """The strict and flexible verdict on one completion.

    Args:
        completion: what the model wrote after the prompt; what follows an end token is not read.
        answer: the gold answer: a number as text, or a worked solution that ends in `#### x`.

    Raises:
        BadInput: the gold answer is no number.
    """
    gold = strict(answer) if "####" in answer else _only(answer)
    if gold is None:
        raise BadInput(f"The gold answer {answer[:80]!r} is no number: expected one like 18, 1,000, 2.5 or 3/4.")
    said = strict(completion)
    return Verdict(None if said is None else text(said), said == gold, flexible(completion) == gold)


def strict(completion: str) -> Fraction | None:
    """The number that all `####` lines agree on; None without one, or with two different ones."""
    answers = set()
    for line in set(MARKER.findall(_until_end(completion))):
        numbers = _numbers(line) if len(line) <= LONGEST_LINE else []
        if len(numbers) > 1 and "=" in line:  # `3 * 6 = 18` states the number after its last sign
            numbers = _numbers(line.rpartition("=")[2])
        answers.update(numbers)
    return answers.pop() if len(answers) == 1 else None


def flexible(completion: str) -> Fraction | None:
    """The last number of a completion, wherever it stands; None without one."""
    body = _until_end(completion)
    last = deque(_RUN.finditer(body), maxlen=1)
    return _value(body, last[0], of_a_list=True) if last else None


def text(number: Fraction) -> str:
    """The shortest plain way to write a number: `18`, `2.5`, `1/3`."""
    if number.denominator == 1:
        return str(number.numerator)
    decimal = Decimal(number.numerator) / Decimal(number.denominator)
    return f"{decimal:f}" if Fraction(decimal) == number else str(number)


def _until_end(completion: str) -> str:
    return ENDS.split(completion, maxsplit=1)[0]


def _only(answer: str) -> Fraction | None:
    numbers = _numbers(answer[:LONGEST_LINE])
    return numbers[0] if len(numbers) == 1 else None


def _numbers(line: str) -> list[Fraction | None]:
    """All numbers of a short line, `a/b` as one; None stands for what looks like a number and is none (`1.2.3`)."""
    line = _LEADING_SIGN.sub(r"\1", _FRACTION.sub(r"\1/\2", line.translate(_MINUSES)))
    found: list[Fraction | None] = []
    end = None
    for run in _RUN.finditer(line):
        value = _value(line, run)
        if value and end is not None and found[-1] is not None and _OVER.fullmatch(line, end, run.start()):
            found[-1] /= value
        else:
            found.append(value)
        end = run.end()
    return found


def _value(body: str, run: re.Match, of_a_list: bool = False) -> Fraction | None:
    """The number that a run of digits writes, with the sign before it; of `1,2,3` in a list the last."""
    digits = run.group().rstrip(_SEPARATORS)
    if of_a_list and "," in digits and not _GROUPED.fullmatch(digits):
        digits = digits.rpartition(",")[2]
    if len(digits) > LONGEST_NUMBER or _EXPONENT.match(body, run.end()):
        return None
    if _GROUPED.fullmatch(digits):
        digits = re.sub(f"[{_SEPARATORS[1:]}]", "", digits)
    elif not _PLAIN.fullmatch(digits):
        return None
    before = body[max(0, run.start() - 4) : run.start()].translate(_MINUSES)
    sign = _SIGN.search(before)
    value = Fraction(int(digits) if digits.isdigit() else digits)
    return -value if sign and sign.group(1) == "-" else value
