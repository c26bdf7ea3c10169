"""What tasks and graders exchange: a question with its gold answer, and the verdict on a completion."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from qrl.tasks import thinking
from qrl.tasks.thinking import TAGS, Tags

# A line that opens a turn: "user", "Question:", "### Problem 2:", "Q."
_TURN = re.compile(r"[\W_]*(user|human|question|problem|prompt|instruction|q)[\W\d_]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its gold answer."""

    id: str  # unique within its task; the cells of a study are paired by it
    question: str  # its text, without any instruction
    solution: str  # worked reasoning that ends in the form that its task grades: a line `#### x`, or `\boxed{x}`
    answer: str  # x, as the grader normalizes it
    subject: str | None = None  # its topic, where the data set gives one
    level: int | None = None  # its difficulty, from 1, where the data set gives one


def normalized_text(question: str) -> str:
    """Return a question's text without white space and case; two texts that differ in nothing else are one question."""
    return "".join(question.casefold().split())


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grader's verdict on one completion."""

    parsed: str | None  # the strict answer, normalized (`1,000.0` → `1000`); None if there is none, or several
    strict: bool  # the strict answer equals the gold answer
    flexible: bool  # the last number anywhere equals the gold answer
    fault: str | None = None  # "timeout" or "error" where the grader itself failed, which counts as wrong
    fault_cause: str | None = field(default=None, compare=False)  # what it raised, in words


def leaked(question: str, text: str, raw: str, markers: Sequence[str], tags: Tags = TAGS) -> bool:
    """Return whether a completion continues, after the answer, with a new prompt: chat markers, or the question again.

    An answer may quote the question ("The answer to the question … is 37") or begin with it, and thinking may repeat it
    in any way: neither is a new prompt.

    Args:
        question: its text.
        text: the completion without special tokens.
        raw: the completion with special tokens, but without the end token.
        markers: the tokenizer's special tokens.
        tags: the model's tags around its thinking.
    """
    own_tokens = tags.tokens(markers)
    if any(marker in raw for marker in markers if marker not in own_tokens):
        return True
    text = tags.text(text, raw, markers)
    return _asked_again(question.strip(), text[thinking.length(text, tags) :])


def _asked_again(question: str, text: str) -> bool:
    """Return whether a text has the question in a turn of its own: under a label, or alone on its lines."""
    for match in re.finditer(re.escape(question), text):
        lines_before, _, same_line_before = text[: match.start()].rpartition("\n")
        same_line_after = text[match.end() :].partition("\n")[0]
        earlier_lines, _, line_above = lines_before.rstrip().rpartition("\n")

        # A label is on the line of the question ("Question: …") or on the line above it.
        answer = lines_before
        is_labelled = False
        if same_line_before.strip():
            is_labelled = bool(_TURN.fullmatch(same_line_before))
        elif _TURN.fullmatch(line_above):
            is_labelled = True
            answer = earlier_lines

        is_introduced = answer.rstrip().endswith(":")  # "The question is:", and then the answer
        is_alone = not (same_line_before.strip() or same_line_after.strip() or is_introduced)
        if answer.strip() and (is_labelled or is_alone):
            return True
    return False
