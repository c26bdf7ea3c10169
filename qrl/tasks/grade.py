"""The one grader: reward in training, verdict in evaluation.

Strict: the number on a line `#### x`. Every such line of a completion must say the same number, and one number only; two
different ones are no answer, so that listing candidates earns nothing, and nor is a number that the rest of its line changes
(`changed`). Flexible: the last number anywhere. Numbers are compared as exact fractions. Time is linear in the text's length,
and nothing in a text can raise.
"""

import re
from dataclasses import dataclass

from qrl.errors import BadInput
from qrl.tasks.changed import changed
from qrl.tasks.number import Number, numbers, text, tidy

__all__ = ["Verdict", "flexible", "grade", "strict", "text"]

ENDS = re.compile(r"<(?:\|(?:im_end|endoftext|eot_id|end_of_text|end)\||/s|end_of_turn|eos)>")
LONGEST_LINE = 200  # characters after `####`: a longer line is prose, not an answer

_MARKER = re.compile(r"####(#*+)([^\n\r#]*+)")  # more than four are a heading; the literal prefix makes the search fast
_SIMPLE = re.compile(r"[ \t]*+(-?[0-9]{1,18})[ \t\n]*+")  # most answers: read without the rules for all the others
_LAST_DIGIT = re.compile(r".*[0-9½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", re.DOTALL)
_BEFORE, _BEHIND = 200, 20  # characters around the last digit that can belong to its number
_TWO_CLAIMS = re.compile(r"[;,]\s|\b(?:or|and)\b")  # `x = 5, y = 18` states two numbers, `9 * 2 = 18` one

# What changes the number beside it: roots, powers, `±`, double signs, negated and one-sided relations, LaTeX not known.
_UNREAD = re.compile(
    r"[√∛^±≠≤≥]|[!<>]=|(?:--|\+-|-\+)\s*\S{0,2}[0-9.]"
    r"|\\(?!(?:times|cdot|div|approx|quad|qquad|circ|degree|pounds|euro|textdollar)(?![A-Za-z]))[A-Za-z]"
)

_WORDED = re.compile(r"[^\W\d_]|%")  # `1 dozen = 12` and `18% = 0.18` compare unlike things
_BEGUN = re.compile(r"####[\s:$€£¥₹*_`(\[{\"'~≈→+-]*\.?[0-9]")

_NOTHING = object()  # no number stated; None is a number that cannot be told


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
    gold = strict(answer) if "####" in answer else _stated(answer[:LONGEST_LINE])
    if gold is None or gold is _NOTHING:
        raise BadInput(f"The gold answer {answer[:80]!r} is no number: expected one like 18, 1,000, 2.5 or 3/4.")
    said = strict(completion)
    return Verdict(None if said is None else text(said), said == gold, flexible(completion) == gold)


def strict(completion: str) -> Number | None:
    """The number that all `####` lines agree on; None without one, or with two different ones."""
    agreed, seen, begun = _NOTHING, set(), set()
    for hashes, line in _MARKER.findall(_until_end(completion)):
        if hashes or line in seen:
            continue
        seen.add(line)
        said = _stated(line)
        if said is _NOTHING:
            begun.add(_begun(line) if len(line) > LONGEST_LINE else _NOTHING)
            continue
        if said is None or agreed not in (_NOTHING, said):
            return None
        agreed = said
    return None if agreed is _NOTHING or begun - {_NOTHING, agreed} else agreed


def flexible(completion: str) -> Number | None:
    """The last number of a completion, wherever it stands; None without one."""
    body = _until_end(completion)
    if simple := _SIMPLE.fullmatch(body.rpartition("####")[2]):
        return int(simple[1])
    end = len(body)
    while last := _LAST_DIGIT.match(body, 0, end):
        stop = last.end()
        end = max(stop - _BEFORE, body.rfind("\n", max(0, stop - _BEFORE), stop) + 1)
        line = body[end : stop + _BEHIND].partition("\n")[0]
        if found := numbers(tidy(line)):
            return found[-1]  # else its digits are glued to letters: the number is one before them
    return None


def _stated(line: str) -> Number | object | None:
    """The one number that a line after `####` states: `_NOTHING` where there is none, None where it is unclear which."""
    if simple := _SIMPLE.fullmatch(line):
        return int(simple[1])
    if len(line) > LONGEST_LINE:
        return _NOTHING
    line = tidy(f"####{line}")  # whose end says that a minus after it is a sign, however far off
    found = numbers(line)
    if not found:
        return _NOTHING
    said = line
    if "=" in line and not (len(found) > 1 and _TWO_CLAIMS.search(line)):
        sides = ["=" + side for side in line.split("=")]
        said = sides[-1] if len(found) > 1 else next(filter(numbers, sides), line)
        found = numbers(said)
        if any(side != found for side in map(_bare, sides) if side):
            return None
    return None if len(found) != 1 or _UNREAD.search(line) or changed(said) else found[0]


def _bare(side: str) -> list[Number]:
    """The number of a side of an equation that is one number and nothing else; empty for a calculation, or with words."""
    found = [] if _WORDED.search(side) else numbers(side)
    return found if len(found) == 1 and found != [None] else []


def _begun(line: str) -> Number | object | None:
    """The number that a line too long for an answer begins with; `_NOTHING` without one. It is no answer, but differs from one."""
    line = tidy(f"####{line.lstrip()[:LONGEST_LINE]}")
    return numbers(line)[0] if _BEGUN.match(line) and numbers(line) else _NOTHING


def _until_end(completion: str) -> str:
    return ENDS.split(completion, maxsplit=1)[0] if "<" in completion else completion
