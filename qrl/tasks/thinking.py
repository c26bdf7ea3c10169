"""What of a completion counts as its answer: the text before an end token and after the thinking.

A model that thinks writes `<think>`, a draft, `</think>`, and then its answer. Drafts state values that the model takes
back, so no grader reads them. A chat template may write the opening tag into the prompt: then a completion begins
within the thinking, and without a closing tag it was cut there and has no answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ENDS = re.compile(r"<(?:\|(?:im_end|endoftext|eot_id|end_of_text|end)\||/s|end_of_turn|eos)>")

# A tag that a chat template may name: <think>, [THINK], </seed:think>. A closing one has a slash.
_TAG = r"(?:<\|?|\[|◁)%s(?:[a-z]+:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?)(?:\|?>|\]|▷)"
_CLOSING = re.compile(_TAG % "/", re.IGNORECASE)
_LAST_OPENING = re.compile(_TAG % "" + r"\s*\Z", re.IGNORECASE)
_WORDED = {  # closing tag → opening tag, where they differ by more than a slash
    "<|end_of_thought|>": "<|begin_of_thought|>",
    "<|END_THINKING|>": "<|START_THINKING|>",
    "<channel|>": "<|channel>thought",
}
_LONGEST_TAG = 100  # characters, white space behind it included


@dataclass(frozen=True, slots=True)
class Tags:
    """A model's tags around its thinking.

    Attributes:
        pairs: (opening tag, closing tag), one or more.
        begun: whether the prompt ends with the first pair's opening tag, so that completions begin in the thinking.
    """

    pairs: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
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
    pairs += [(opening, closing) for closing, opening in _WORDED.items() if closing in chat_template]
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
    closed = 0
    for _, closing in tags.pairs:
        start = body.rfind(closing)
        if start >= 0:
            closed = max(closed, start + len(closing))
    if tags.begun and not closed:
        return len(body)
    for opening, _ in tags.pairs:
        if body.find(opening, closed) >= 0:  # opened again, and cut before it closed
            return len(body)
    return closed
