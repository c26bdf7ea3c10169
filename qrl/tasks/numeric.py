"""The grader of numeric answers: reward in training, verdict in evaluation.

Strict: the number on a line `#### x`. All such lines of a completion must state the same single number. Conflicting
numbers score zero, so that listing candidates earns nothing; so does a number that the rest of its line modifies
(`modifiers.py`). Flexible: the last number anywhere. What precedes the end of the thinking counts for neither
(`thinking.py`). Numbers are compared as exact fractions. Time is linear in the text's length, and no text can raise.
"""

import re

from qrl.errors import BadInput
from qrl.tasks.modifiers import is_modified
from qrl.tasks.number import Number, numbers, text, tidy
from qrl.tasks.question import Verdict
from qrl.tasks.thinking import TAGS, Tags
from qrl.tasks.thinking import answer as answer_part

LONGEST_LINE = 200  # characters after `####`; a longer line is prose, not an answer

# More than four hashes are a heading; the literal prefix makes the search fast.
_MARKER = re.compile(r"####(#*+)([^\n\r#]*+)")
_SIMPLE = re.compile(r"[ \t]*+(-?[0-9]{1,18})[ \t\n]*+")  # most answers: they skip the other rules
_LAST_DIGIT = re.compile(r".*[0-9½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", re.DOTALL)
# Characters before and after the last digit that can belong to its number.
_REACH_BEFORE = 200
_REACH_AFTER = 20
_TWO_CLAIMS = re.compile(r"[;,]\s|\b(?:or|and)\b")  # `x = 5, y = 18` states two numbers, `9 * 2 = 18` one

# Modifies the number beside it: roots, powers, `±`, double signs, negated and one-sided relations, unknown LaTeX.
_UNREAD = re.compile(
    r"[√∛^±≠≤≥]|[!<>]=|(?:--|\+-|-\+)\s*\S{0,2}[0-9.]"
    r"|\\(?!(?:times|cdot|div|approx|quad|qquad|circ|degree|pounds|euro|textdollar)(?![A-Za-z]))[A-Za-z]"
)

_WORDED = re.compile(r"[^\W\d_]|%")  # `1 dozen = 12` and `18% = 0.18` compare different units
_BEGUN = re.compile(r"####[\s:$€£¥₹*_`(\[{\"'~≈→+-]*\.?[0-9]")

_NOTHING = object()  # no number is stated; None means that the number is ambiguous


def grade(completion: str, answer: str, tags: Tags = TAGS) -> Verdict:
    """Return the strict and flexible verdict on one completion.

    Args:
        completion: the model's text after the prompt; thinking, and text after an end token, are ignored.
        answer: the gold answer: a number as text, or a worked solution that ends in `#### x`.
        tags: the model's tags around its thinking.

    Raises:
        BadInput: the gold answer is not a number.
    """
    gold = gold_number(answer)
    if gold is None:
        raise BadInput(f"The gold answer {answer[:80]!r} is not a number: expected one like 18, 1,000, 2.5 or 3/4.")
    body = answer_part(completion, tags)
    stated = _agreed_number(body)
    parsed = None if stated is None else text(stated)
    return Verdict(parsed, stated == gold, _last_number(body) == gold)


def gold_number(answer: str) -> Number | None:
    """Return the number of a gold answer, a worked solution that ends in `#### x` or a number as text; else None."""
    if "####" in answer:
        return strict(answer)
    number = _stated(answer[:LONGEST_LINE])
    return None if number is _NOTHING else number


def strict(completion: str, tags: Tags = TAGS) -> Number | None:
    """Return the number that all `####` lines agree on; None without one, or if they conflict."""
    return _agreed_number(answer_part(completion, tags))


def flexible(completion: str, tags: Tags = TAGS) -> Number | None:
    """Return the last number of a completion, wherever it is; None without one."""
    return _last_number(answer_part(completion, tags))


def _agreed_number(body: str) -> Number | None:
    agreed = _NOTHING
    earlier_lines = set()
    # Numbers that begin lines too long for an answer: they state none, but may contradict the one that is agreed on.
    begun_numbers = set()
    for hashes, line in _MARKER.findall(body):
        if hashes or line in earlier_lines:
            continue
        earlier_lines.add(line)
        number = _stated(line)
        if number is _NOTHING:
            if len(line) > LONGEST_LINE:
                begun_numbers.add(_begun(line))
            continue
        if number is None or agreed not in (_NOTHING, number):
            return None
        agreed = number
    if agreed is _NOTHING or begun_numbers - {_NOTHING, agreed}:
        return None
    return agreed


def _last_number(body: str) -> Number | None:
    simple = _SIMPLE.fullmatch(body.rpartition("####")[2])
    if simple:
        return int(simple[1])

    end = len(body)
    while last_digit := _LAST_DIGIT.match(body, 0, end):
        stop = last_digit.end()
        line_start = body.rfind("\n", max(0, stop - _REACH_BEFORE), stop) + 1
        end = max(stop - _REACH_BEFORE, line_start)
        line = body[end : stop + _REACH_AFTER].partition("\n")[0]
        values = numbers(tidy(line))
        if values:
            return values[-1]  # else its digits are glued to letters: search before them
    return None


def _stated(line: str) -> Number | object | None:
    """Return the one number that a line after `####` states: `_NOTHING` without a number, None if it is ambiguous."""
    simple = _SIMPLE.fullmatch(line)
    if simple:
        return int(simple[1])
    if len(line) > LONGEST_LINE:
        return _NOTHING
    line = tidy(f"####{line}")  # `####` marks a minus after it as a sign, at any distance
    values = numbers(line)
    if not values:
        return _NOTHING

    answer = line
    is_equation = "=" in line and not (len(values) > 1 and _TWO_CLAIMS.search(line))
    if is_equation:
        sides = ["=" + side for side in line.split("=")]
        # Of several numbers, the last side has the answer; a single one may be on any side (`18 = x`).
        answer = sides[-1] if len(values) > 1 else next(filter(numbers, sides), line)
        values = numbers(answer)
        bare_values = [_bare(side) for side in sides]
        if any(bare_value and bare_value != values for bare_value in bare_values):
            return None
    if len(values) != 1 or _UNREAD.search(line) or is_modified(answer):
        return None
    return values[0]


def _bare(side: str) -> list[Number]:
    """Return the number of an equation's side that is one bare number; empty for a calculation, or with words."""
    values = [] if _WORDED.search(side) else numbers(side)
    return values if len(values) == 1 and values != [None] else []


def _begun(line: str) -> Number | object | None:
    """Return the number that starts a line too long for an answer: not an answer, but it may conflict with one."""
    line = tidy(f"####{line.lstrip()[:LONGEST_LINE]}")
    return numbers(line)[0] if _BEGUN.match(line) and numbers(line) else _NOTHING
