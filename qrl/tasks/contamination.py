"""Whether held-out questions were trained on: the same question, or the same 13 words in a row.

What is compared is questions, not answers. A question that was trained on says nothing when it is asked again, so one is
enough to fail a run. Thirteen words in a row are a hint, no proof: generated questions share their sentences by design, and
word problems share stock phrases. Their share has a limit in the recipe.
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qrl.errors import BadInput
from qrl.tasks.question import Question

WORDS = 13
SHOWN = 10  # example pairs of each kind
LIMIT = 0.01  # share of held-out questions; real GSM8K's test set has 3 of 1,319, which is 0.0023
# A generator's questions are made of the same few sentences: only whole ones count. MATH's are terse and worded alike: one pair
# among MATH-500 itself, of 124,750, lets expect some fifty with a training set of 12,000, which was not at hand to be compared.
LIMITS = {"arithmetic": 1.0, "math": 0.2, "deepmath": 0.2}

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Overlap:
    """What held-out questions share with training questions.

    Args:
        trained: training questions compared.
        heldout: held-out questions compared.
        exact: held-out questions that are a training question, but for case and white space.
        shared: held-out questions with `WORDS` words in a row of a training question; those of `exact` that are long enough too.
        pairs: examples, exact ones first: `kind`, `heldout`, `heldout_question`, `train`, `train_question`, `words`.
    """

    trained: int
    heldout: int
    exact: int
    shared: int
    pairs: tuple[dict[str, str], ...]

    @property
    def share(self) -> float:
        """Share of the held-out questions with `WORDS` words in a row of a training question."""
        return self.shared / self.heldout

    def metrics(self, prefix: str = "contamination/") -> dict[str, float]:
        """The counts by metric name."""
        counts = {"train_n": self.trained, "heldout_n": self.heldout, "exact": self.exact, f"ngram{WORDS}": self.shared}
        return {prefix + name: float(count) for name, count in (counts | {f"ngram{WORDS}_share": self.share}).items()}


def overlap(trained: Sequence[Question], heldout: Sequence[Question]) -> Overlap:
    """Compares every held-out question with every training question, in time linear in their words.

    Words are lowercased, stripped of punctuation and split at white space; questions of fewer words than `WORDS` can only be
    found exactly. Exact means equal without white space and case, punctuation kept: `x - 1` is not `x + 1`.

    Source: Brown et al., "Language Models are Few-Shot Learners", arXiv 2005.14165, appendix C; 13 is its largest N.

    Args:
        trained: training questions, in any number.
        heldout: held-out questions.
    """
    whole = {_bare(question.question): question for question in reversed(trained)}
    same = [(question, whole[bare]) for question in heldout if (bare := _bare(question.question)) in whole]
    asked: dict[tuple[str, ...], list[int]] = {}
    for i, question in enumerate(heldout):
        for gram in _grams(question.question):
            asked.setdefault(gram, []).append(i)
    found: dict[int, tuple[Question, str]] = {}
    for question in trained:
        for gram in _grams(question.question):
            for i in asked.get(gram, ()):
                found.setdefault(i, (question, " ".join(gram)))
    pairs = [_pair("exact", question, twin) for question, twin in same[:SHOWN]]
    pairs += [_pair(f"{WORDS} words", heldout[i], *found[i]) for i in sorted(found)[:SHOWN]]
    return Overlap(len(trained), len(heldout), len(same), len(found), tuple(pairs))


def check(found: Overlap, task: str, limit: float | None = None, *, of: str = "the training questions") -> None:
    """Refuses an overlap that makes an accuracy mean nothing.

    Args:
        found: what `overlap` gave.
        task: whose limit holds where none is given.
        limit: largest share of held-out questions with `WORDS` words in a row of a training question.
        of: what the held-out questions were compared with, for the sentence.

    Raises:
        BadInput: a held-out question is a training question, or the share is above the limit.
    """
    limit = LIMITS.get(task, LIMIT) if limit is None else limit
    if found.exact:
        pair = found.pairs[0]
        raise BadInput(
            f"{found.exact} of {found.heldout:,} held-out questions are among {of} word for word: the first is {pair['heldout']} "
            f"({pair['heldout_question'][:80]!r}), which is {pair['train']}. What was trained on says nothing when it is asked again: "
            "take them out of one of the two sets."
        )
    if found.share > limit:
        pair = found.pairs[0]
        raise BadInput(
            f"{found.shared} of {found.heldout:,} held-out questions ({found.share:.4f}) share {WORDS} words in a row with {of}, more than "
            f"train.max_ngram_share = {limit:g} allows: {pair['heldout']} and {pair['train']} share {pair['words']!r}. Take such questions out "
            "of one of the two sets, or raise train.max_ngram_share if they are only worded alike."
        )


def _bare(question: str) -> str:
    return "".join(question.casefold().split())


def _grams(question: str) -> Iterator[tuple[str, ...]]:
    words = question.lower().translate(_NO_PUNCTUATION).split()
    return zip(*(words[i:] for i in range(WORDS)), strict=False)


def _pair(kind: str, heldout: Question, trained: Question, words: str = "") -> dict[str, str]:
    return {
        "kind": kind,
        "heldout": heldout.id,
        "heldout_question": heldout.question,
        "train": trained.id,
        "train_question": trained.question,
        "words": words,
    }
