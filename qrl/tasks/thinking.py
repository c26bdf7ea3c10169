"""What of a completion counts as its answer: the text before an end token and after the thinking.

A model that thinks writes `<think>`, a draft, `</think>`, and then its answer. Drafts state values that the model takes
back, so no grader reads them. A chat template may write the opening tag into the prompt: then a completion begins
within the thinking, and without a closing tag it was cut there and has no answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# A message of gpt-oss ends with <|end|>, and another one of the same turn may follow.
ENDS = re.compile(
    r"<(?:\|(?:im_end|endoftext|eot_id|end_of_text|end(?!\|><\|start\|>assistant)|return)\||/s|end_of_turn|eos)>"
)

# A tag that a chat template may name: <think>, [THINK], </seed:think>. A closing one has a slash.
_NAME = r"(?:[a-z]+[:_])?(?:think(?:ing)?|thoughts?|reason(?:ing)?)"
_TAG = rf"(?:<\|?|\[|◁)%s{_NAME}(?:\|?>|\]|▷)"
_CLOSING = re.compile(_TAG % "/", re.IGNORECASE)
_LAST_OPENING = re.compile(_TAG % "" + r"\s*\Z", re.IGNORECASE)
# A closing tag in words: <|END_THINKING|>, <|think_end|>. The opening one has another word in its place.
_CLOSING_IN_WORDS = re.compile(rf"<\|?(?:(end)_(?:of_)?{_NAME}|{_NAME}_(end))\|?>", re.IGNORECASE)
_CHANNELS = {  # what a chat template writes → (opening tag, closing tag), where they differ by more than a word
    "<channel|>": ("<|channel>thought", "<channel|>"),
    "<|inner_suffix|>": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "<|channel|>final<|message|>": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
_LONGEST_TAG = 100  # characters, white space behind it included


@dataclass(frozen=True, slots=True)
class Tags:
    """A model's tags around its thinking.

    Attributes:
        pairs: (opening tag, closing tag), one or more; upper and lower case are the same.
        begun: whether the prompt ends with the first pair's opening tag, so that completions begin in the thinking.
    """

    pairs: tuple[tuple[str, str], ...] = (
        *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning", "seed:think")),
        *(("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("<|think|>", "<|/think|>")),
        *(("<|begin_of_thought|>", "<|end_of_thought|>"), ("<|START_THINKING|>", "<|END_THINKING|>")),
        *_CHANNELS.values(),
        ("<|channel|>analysis<|message|>", "assistantfinal"),  # as a decoder leaves them that skips special tokens
    )
    begun: bool = False

    @property
    def end_of_thinking(self) -> str:
        """What precedes a worked solution after the prompt: an end of the thinking that the prompt began, or nothing.

        Without it, a model that learns from solutions would answer within the thinking, where no grader reads it.
        """
        return f"\n{self.pairs[0][1]}\n\n" if self.begun else ""

    def tokens(self, special_tokens: Sequence[str]) -> list[str]:
        """Return the special tokens that tags consist of; a decoder that skips special tokens drops them."""
        tags = [tag for pair in self.pairs for tag in pair]
        return [token for token in special_tokens if any(token and token in tag for tag in tags)]

    def text(self, text: str, raw: str, special_tokens: Sequence[str]) -> str:
        """Return a completion's text with its tags, also where these are special tokens.

        Args:
            text: the completion without special tokens.
            raw: the completion with special tokens.
            special_tokens: the tokenizer's.
        """
        own_tokens = self.tokens(special_tokens)
        if not any(token in raw for token in own_tokens):
            return text
        for token in special_tokens:
            if token and token not in own_tokens:
                raw = raw.replace(token, "")
        return raw


TAGS = Tags()  # where no chat template is known, or it names no tags


def of_prompt(chat_template: str, prompt: str) -> Tags:
    """Return the tags that a chat template names, and whether a prompt that it wrote leaves the thinking open.

    Args:
        chat_template: its text, in Jinja.
        prompt: any prompt, up to the start of the model's own turn.
    """
    pairs = [(closing.replace("/", "", 1), closing) for closing in _CLOSING.findall(chat_template)]
    pairs += [
        (_opening_in_words(match, chat_template), match[0]) for match in _CLOSING_IN_WORDS.finditer(chat_template)
    ]
    pairs += [pair for written, pair in _CHANNELS.items() if written in chat_template]
    last_opening = _LAST_OPENING.search(prompt[-_LONGEST_TAG:])
    if last_opening:  # a template that opens the thinking need not name the tag that closes it
        opening = last_opening.group().rstrip()
        closing = re.sub(r"[A-Za-z]", lambda letter: "/" + letter.group(), opening, count=1)
        pairs.append((opening, closing))
    pairs = list(dict.fromkeys(pairs)) or list(TAGS.pairs)
    begun_pairs = [pair for pair in pairs if prompt.rstrip().endswith(pair[0])]
    if begun_pairs:
        pairs.remove(begun_pairs[0])
        pairs.insert(0, begun_pairs[0])
    return Tags(tuple(pairs), begun=bool(begun_pairs))


def _opening_in_words(closing: re.Match, chat_template: str) -> str:
    """Return the opening tag beside a closing one such as `<|END_THINKING|>`: one that the template has, if any."""
    tag = closing[0]
    end_word = closing[1] or closing[2]
    words = ("begin", "start") if "_of_" in tag else ("start", "begin")
    openings = [tag.replace(end_word, word.upper() if end_word.isupper() else word) for word in words]
    return next((opening for opening in openings if opening in chat_template), openings[0])


def until_end(completion: str) -> str:
    """Return a completion up to its first end token."""
    return ENDS.split(completion, maxsplit=1)[0] if "<" in completion else completion


def answer(completion: str, tags: Tags = TAGS) -> str:
    """Return the part of a completion that is graded: up to an end token, after the thinking.

    Without a tag that is all of it. It is empty where the text was cut within the thinking.
    """
    body = until_end(completion)
    start = _answer_start(body, tags)
    return body[start:] if start else body


def length(completion: str, tags: Tags = TAGS) -> int:
    """Return how many characters of a completion precede its answer: its thinking; all, where it was cut there."""
    return _answer_start(until_end(completion), tags)


def _answer_start(body: str, tags: Tags) -> int:
    opening, closing = _patterns(tags.pairs)
    closed = 0
    for match in closing.finditer(body):
        closed = match.end()
    if tags.begun and not closed:
        return len(body)
    if opening.search(body, closed):  # opened again, and cut before it closed
        return len(body)
    return closed


@lru_cache(maxsize=64)
def _patterns(pairs: tuple[tuple[str, str], ...]) -> tuple[re.Pattern, re.Pattern]:
    """Return what finds any opening tag, and any closing one."""
    openings, closings = ("|".join(map(_either_case, tags)) for tags in zip(*pairs, strict=True))
    return re.compile(openings), re.compile(closings)


def _either_case(tag: str) -> str:
    """Return a pattern of a tag in upper and lower case, with its first character written out.

    A search then looks for those characters alone, two to four times as fast as if it tried each tag everywhere.
    """
    rest = re.escape(tag[1:])
    return "|".join(f"{re.escape(first)}(?i:{rest})" for first in dict.fromkeys((tag[0].lower(), tag[0].upper())))
