"""Overlap of held-out questions with the training set: the same question, or the same 13 words in a row.

Questions are compared, not answers. A question from the training set measures nothing, so one of them is enough to fail
a run. Thirteen shared words are a hint, not proof: generated questions share their sentences by design, and word
problems share stock phrases. The recipe limits the share of such questions.
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qrl.errors import BadInput
from qrl.tasks.question import Question, normalized_text

WORDS = 13
SHOWN = 10  # example pairs of each kind
LIMIT = 0.01  # share of held-out questions; GSM8K's test set has 3 of 1,319, which is 0.0023
# Generated questions consist of the same few sentences: only whole ones count. MATH's questions are short and worded
# alike. MATH-500 itself has one such pair of 124,750, which predicts about fifty against a training set of 12,000; that
# set was not available for a comparison.
LIMITS = {"arithmetic": 1.0, "math": 0.2, "deepmath": 0.2}

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Overlap:
    """The overlap of held-out questions with training questions."""

    training: int  # number of training questions
    heldout: int  # number of held-out questions
    exact: int  # held-out questions equal to a training question, apart from case and white space
    shared: int  # held-out questions with `WORDS` words in a row of a training question, exact copies included
    pairs: tuple[dict[str, str], ...]  # examples, exact ones first, as `_pair` returns them

    @property
    def share(self) -> float:
        """Share of the held-out questions with `WORDS` words in a row of a training question."""
        return self.shared / self.heldout

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the counts by metric name."""
        counts = {"train_n": self.training, "heldout_n": self.heldout, "exact": self.exact}
        counts |= {f"ngram{WORDS}": self.shared, f"ngram{WORDS}_share": self.share}
        return {prefix + name: float(count) for name, count in counts.items()}


def overlap(trained: Sequence[Question], heldout: Sequence[Question]) -> Overlap:
    """Compare every held-out question with every training question, in time linear in their words.

    Words are lowercased, stripped of punctuation and split at white space; a question with fewer than `WORDS` words can
    only match exactly. Exact means equal without white space and case, but with punctuation: `x - 1` is not `x + 1`.

    Source: Brown et al., "Language Models are Few-Shot Learners", arXiv 2005.14165, appendix C; 13 is its largest N.
    """
    by_text = {normalized_text(question.question): question for question in reversed(trained)}
    copies = []
    for question in heldout:
        twin = by_text.get(normalized_text(question.question))
        if twin is not None:
            copies.append((question, twin))

    # Held-out questions are the smaller set: their word sequences are kept, and the training set's pass by.
    heldout_by_gram: dict[tuple[str, ...], list[int]] = {}
    for index, question in enumerate(heldout):
        for gram in grams(question.question):
            heldout_by_gram.setdefault(gram, []).append(index)
    matches: dict[int, tuple[Question, str]] = {}  # index of a held-out question → training question, shared words
    for question in trained:
        for gram in grams(question.question):
            for index in heldout_by_gram.get(gram, ()):
                matches.setdefault(index, (question, " ".join(gram)))

    pairs = [_pair("exact", question, twin) for question, twin in copies[:SHOWN]]
    for index in sorted(matches)[:SHOWN]:
        training_question, words = matches[index]
        pairs.append(_pair(f"{WORDS} words", heldout[index], training_question, words))
    return Overlap(len(trained), len(heldout), len(copies), len(matches), tuple(pairs))


def check_overlap(
    overlap: Overlap, task: str, limit: float | None = None, *, of: str = "the training questions"
) -> None:
    """Reject an overlap that invalidates an accuracy.

    Args:
        limit: largest share of held-out questions with `WORDS` words in a row of a training question; None: the task's.
        of: name of the training set, for the error.

    Raises:
        BadInput: a held-out question is a training question, or the share is above the limit.
    """
    if limit is None:
        limit = LIMITS.get(task, LIMIT)
    pair = overlap.pairs[0] if overlap.pairs else {}
    if overlap.exact:
        raise BadInput(
            f"{overlap.exact} of {overlap.heldout:,} held-out questions are among {of} word for word: the first is "
            f"{pair['heldout']} ({pair['heldout_question'][:80]!r}), which is {pair['train']}. Accuracy on questions "
            "from the training set measures nothing: remove them from one of the two sets."
        )
    if overlap.share > limit:
        raise BadInput(
            f"{overlap.shared} of {overlap.heldout:,} held-out questions ({overlap.share:.4f}) share {WORDS} words in "
            f"a row with {of}, more than train.max_ngram_share = {limit:g} allows: {pair['heldout']} and "
            f"{pair['train']} share {pair['words']!r}. Remove such questions from one of the two sets, or raise "
            "train.max_ngram_share if only their wording is alike."
        )


def grams(question: str) -> Iterator[tuple[str, ...]]:
    """Yield every `WORDS` words in a row of a question, in lower case and without punctuation."""
    words = question.lower().translate(_NO_PUNCTUATION).split()
    return zip(*(words[i:] for i in range(WORDS)), strict=False)


def _pair(kind: str, heldout: Question, trained: Question, words: str = "") -> dict[str, str]:
    texts = {"heldout_question": heldout.question, "train": trained.id, "train_question": trained.question}
    return {"kind": kind, "heldout": heldout.id, **texts, "words": words}
