"""Whether an answer that is wrong, or missing, had stated the right value before.

Numeric tasks: the gold number is a number of the text before the last `####`, or of all of it if there is none. Boxed
tasks: the gold answer is a whole side of an equation, a whole formula or box before the last `\\boxed{}`, or anywhere
if there is none, compared as text and plain numbers without algebra. Thinking is text before the answer, whatever
`####` or box it has: a value that a thought stated counts, also where the text was cut there. A value that the question
states in the same way does not count, since a copy of it is no result. So a value that is right by chance counts, and
one in words does not: compare cells by the rate, whose errors they share, and do not read it as an accuracy.
"""

import re
from collections.abc import Iterator

from qrl.tasks import numeric, thinking
from qrl.tasks.math import latex
from qrl.tasks.math import verdict as boxed
from qrl.tasks.number import Number, numbers, tidy
from qrl.tasks.thinking import TAGS, Tags

_PIECES = re.compile(r"[^\n]{1,400}(?!\S)|[^\n]{400}")  # `numbers` expects short texts
_ENDS_FORMULA = re.compile(
    r"=|\$+|\n|\\\\|\\[\[\]()]|&|\\(?:approx|implies|Rightarrow|boxed|fbox)(?![A-Za-z])|[.,;:](?=\s|$)"
)
_LAST_MARKER = re.compile(r".*####", re.DOTALL)
_LAST_BOX = re.compile(r".*\\(?:boxed|fbox)", re.DOTALL)
_LONGER = 40  # characters by which a spelling of the gold answer may exceed it


def numerically(completion: str, answer: str, question: str, tags: Tags = TAGS) -> bool:
    """Return whether a wrong or missing answer to a numeric task had stated the gold number before."""
    gold = numeric.strict(f"#### {answer}")
    reasoning = _reasoning(completion, tags, _LAST_MARKER)
    return gold is not None and gold in _numbers(reasoning) and gold not in _numbers(question)


def in_latex(completion: str, answer: str, question: str, tags: Tags = TAGS) -> bool:
    r"""Return whether a wrong or missing answer to a task with \boxed{} had stated the gold answer before."""
    gold = boxed.gold(answer)
    reasoning = _reasoning(completion, tags, _LAST_BOX)
    return _states(reasoning, gold) and not _states(question, gold)


def _reasoning(completion: str, tags: Tags, last_answer: re.Pattern) -> str:
    """Return the text before the stated answer, thinking included; all of it if no answer is stated after that."""
    body = thinking.until_end(completion)
    match = last_answer.match(body, thinking.length(completion, tags))
    return body[: match.end()] if match else body


def _numbers(text: str) -> set[Number | None]:
    values = set()
    for piece in _PIECES.findall(text):
        values.update(numbers(tidy(piece)))
    return values


def _states(text: str, gold: str) -> bool:
    return any(latex.same(gold, latex.normal(formula)) for formula in _formulas(text, len(gold) + _LONGER))


def _formulas(text: str, longest: int) -> Iterator[str]:
    """Yield each different short piece between equality signs, dollars, boxes, full stops and line ends."""
    pieces = (*latex.boxes(text), *_ENDS_FORMULA.split(text))
    short = [piece.strip() for piece in pieces if len(piece) <= longest]
    yield from dict.fromkeys(filter(None, short))
