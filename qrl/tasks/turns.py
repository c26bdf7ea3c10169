"""Where a turn of the model ends: what the chat template writes after an answer, and the tokens that end one.

Three files of a checkpoint name an end, and they need not agree. In Gemma's and Phi's checkpoints `eos_token` ends a
document, another token ends a turn, and the generation settings name both. What the template writes is what the model
has seen after an answer, so texts with a solution end with it. An answer ends at any token that one of the files names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from qrl.errors import BadInput
from qrl.tasks import sandbox

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Contents of a chat that no template writes by itself.
_SYSTEM, _QUESTION, _ANSWER, _NEXT_QUESTION = "QRL-SYSTEM", "QRL-QUESTION", "QRL-ANSWER", "QRL-NEXT-QUESTION"
_BLANKS = " \t\r\n\u2581"  # Gemma's tokenizer has runs of blanks and line breaks among its added tokens


@dataclass(frozen=True, slots=True)
class Closing:
    """What a chat template writes after an answer."""

    text: str  # up to the token, and with it
    token: str  # ends the turn


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What a tokenizer's closing depends on, and the tokenizer itself."""

    template: str
    special_tokens: tuple[tuple[str, str], ...]  # by name, as the template gets them
    size: int
    tokenizer: Any = field(compare=False)


def closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that follows a worked solution, up to and with the token that ends the turn.

    It is what the chat template writes there, or the tokenizer's end token if the template writes no token.

    Raises:
        BadInput: neither names a token.
    """
    return _closing(tokenizer).text


def closing_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the token that ends `closing`; raise BadInput as it does."""
    return _closing(tokenizer).token


def _closing(tokenizer: PreTrainedTokenizerBase) -> Closing:
    written = written_by_template(tokenizer)
    if written:
        return written
    if tokenizer.eos_token is None:
        raise BadInput(
            "Neither the chat template nor the tokenizer names an end token, which every training text needs: set "
            "eos_token in tokenizer_config.json."
        )
    return Closing(tokenizer.eos_token, tokenizer.eos_token)


def end_tokens(tokenizer: PreTrainedTokenizerBase, of_generation: Sequence[int]) -> list[int]:
    """Return the ids of all tokens that end an answer: for rollouts, evaluation and serving, by every engine.

    Args:
        of_generation: the ids that the checkpoint's generation settings name; they come first.
    """
    written = written_by_template(tokenizer)
    ends = list(of_generation)
    if written:
        ends.append(tokenizer.convert_tokens_to_ids(written.token))
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(ends))


def describe_disagreement(tokenizer: PreTrainedTokenizerBase, of_generation: Sequence[int]) -> str:
    """Return a sentence on the end that each file names and the ones that are taken; empty if the files agree.

    Args:
        of_generation: as for `end_tokens`.
    """
    written = written_by_template(tokenizer)
    named_by_generation = tokenizer.convert_ids_to_tokens(list(of_generation))
    closing_token = written.token if written else tokenizer.eos_token
    if closing_token is None:
        return ""
    if closing_token == tokenizer.eos_token and closing_token in named_by_generation:
        return ""

    template_part = f"writes {written.token}" if written else "writes no token"
    tokenizer_part = f"is {tokenizer.eos_token}" if tokenizer.eos_token else "is not set"
    generation_part = f"name {' and '.join(named_by_generation)}" if named_by_generation else "name none"
    ends = tokenizer.convert_ids_to_tokens(end_tokens(tokenizer, of_generation))
    return (
        f"The model's files name different ends of a turn: after an answer its chat template {template_part}, its "
        f"tokenizer's eos_token {tokenizer_part}, and its generation settings {generation_part}. Texts for training, "
        f"calibration and perplexity end with {closing_token}; answers end at {' or '.join(ends)}."
    )


def written_by_template(tokenizer: PreTrainedTokenizerBase) -> Closing | None:
    """Return what the tokenizer's chat template writes after an answer, up to the first token that ends the turn.

    None if it writes none there, fails, or does not exist.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError:  # none, or several without a default: rendering a prompt reports it
        return None
    special_tokens = tuple(sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()))
    return _written(_Vocabulary(template, special_tokens, len(tokenizer), tokenizer))


@lru_cache(maxsize=8)
def _written(vocabulary: _Vocabulary) -> Closing | None:
    """Return `written_by_template` of a tokenizer.

    Two chats are rendered, one that ends with the answer and one that goes on: some templates end only a last turn, and
    others only a turn that another follows. The first token after the answer ends the turn, unless it begins the next
    one. Then it also comes before the first message, or, where a template always begins another answer, before this
    answer but not before the next question.
    """
    tokenizer = vocabulary.tokenizer
    markers = _markers(tokenizer)
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    next_question = {"role": "user", "content": _NEXT_QUESTION}

    last_chat = _rendered(tokenizer, [question, answer])
    long_chat = _rendered(tokenizer, [question, answer, next_question])
    at_end = _first(markers, last_chat.rpartition(_ANSWER)[2]) if _ANSWER in last_chat else None
    between = None
    if _ANSWER in long_chat and _NEXT_QUESTION in long_chat:
        between = _first(markers, long_chat.rpartition(_ANSWER)[2].partition(_NEXT_QUESTION)[0])

    before_first_message = _opening(tokenizer, question, answer)
    before_answer = last_chat.partition(_QUESTION)[2].partition(_ANSWER)[0]
    if at_end and at_end.token == tokenizer.eos_token:
        return at_end
    if at_end and at_end.token not in before_first_message:
        is_written_in_both = between is not None and between.token == at_end.token
        if is_written_in_both or not long_chat or at_end.token not in before_answer:
            return at_end
    if between and between.token not in before_first_message:
        return between
    return None


def _opening(tokenizer: PreTrainedTokenizerBase, question: dict[str, str], answer: dict[str, str]) -> str:
    """Return what comes before the first message of a chat: a system message of its own, where there may be one."""
    # Without it, a template may write a system message of the model's makers, whose turn ends as any other.
    with_system = _rendered(tokenizer, [{"role": "system", "content": _SYSTEM}, question, answer])
    if _SYSTEM in with_system:
        return with_system.partition(_SYSTEM)[0]
    return _rendered(tokenizer, [question, answer]).partition(_QUESTION)[0]


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Return a chat without the start of another answer; empty if the template fails."""
    try:
        return sandbox.render(tokenizer, messages, {}, add_generation_prompt=False)
    except Exception:  # the template is a program: it can raise anything
        return ""


def _markers(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens that a template can end a turn with: special ones, and others that were added to the words."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return [token for token in dict.fromkeys([*tokenizer.all_special_tokens, *added]) if token.strip(_BLANKS)]


def _first(markers: Sequence[str], text: str) -> Closing | None:
    """Return a text up to the first of the markers in it; of two that begin at one place, the longer one counts."""
    places = [(text.index(marker), -len(marker), marker) for marker in markers if marker in text]
    if not places:
        return None
    start, _, marker = min(places)
    return Closing(text[: start + len(marker)], marker)
