"""The speed of the graders and of the contamination check, and the overlap that the check finds.

    python tests/benchmarks/graders.py [FOLDER]    # with GSM8K's train.jsonl and test.jsonl; else generated questions

Verdicts per second on one core for whole solutions in four spellings, beside the regular expressions of
lm-evaluation-harness for GSM8K (strict-match and flexible-extract) on the same texts.
"""

import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl.tasks import contamination, load
from qrl.tasks.numeric import grade
from qrl.tiny import corpus

ROUNDS = 9
STYLES = {
    "`#### 18`, as requested": "{reasoning}#### {answer}",
    "`#### $1,000.`": "{reasoning}#### ${grouped}.",
    "`\\boxed{18}`, no answer line": "{reasoning}The answer is \\(\\boxed{{{answer}}}\\).",
    "cut before the answer": "{reasoning}",
}
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def plain(completion: str, answer: str) -> tuple[bool, bool]:
    """Return strict and flexible verdicts as lm-evaluation-harness's gsm8k.yaml: text equality without `,` and `$`."""
    strict = STRICT.search(completion)
    matches = FLEXIBLE.findall(completion)
    answers = [strict[1] if strict else "", next(filter(None, matches[-1])) if matches else ""]
    return tuple(re.sub(r"[,$]|\.$", "", text) == answer for text in answers)


def rate(judge, pairs: list[tuple[str, str]]) -> float:
    began = time.process_time()
    for completion, answer in pairs:
        judge(completion, answer)
    return len(pairs) / (time.process_time() - began)


def speed(questions) -> None:
    for name, style in STYLES.items():
        pairs = []
        for question in questions:
            reasoning = question.solution.rpartition("####")[0]
            number = question.answer
            grouped = f"{int(number):,}" if number.lstrip("-").isdigit() else number
            pairs.append((style.format(reasoning=reasoning, answer=number, grouped=grouped), number))
        # In turn, so that a slow machine slows both; the first round warms up.
        rates = [(rate(grade, pairs), rate(plain, pairs)) for _ in range(ROUNDS + 1)][1:]
        ours, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
        ratio = statistics.median(a / b for a, b in rates)
        right = [
            sum(judge(*pair)[i] for pair in pairs) for i, judge in ((0, lambda c, a: (grade(c, a).strict,)), (0, plain))
        ]
        print(
            f"{name:32} {ours:9,.0f} verdicts/s, plain regular expressions {theirs:9,.0f}; ratio {ratio:.2f}; "
            f"strictly right {right[0]} and {right[1]} of {len(pairs)}"
        )


def overlaps(name: str, trained, heldout) -> None:
    began = time.process_time()
    overlap = contamination.overlap(trained, heldout)
    took = time.process_time() - began
    print(
        f"{name:32} {overlap.training:,} × {overlap.heldout:,} in {took:.2f} s: {overlap.exact} whole questions, "
        f"{overlap.shared} with {contamination.WORDS} words in a row ({overlap.share:.4f})"
    )
    for pair in [pair for pair in overlap.pairs if pair["words"]][:3]:
        print(f"    {pair['heldout']} and {pair['train']}: {pair['words']}")


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    heldout = load("arithmetic", "heldout", 2000, 0)
    if folder:
        train, test = load("gsm8k", "train", data=folder), load("gsm8k", "heldout", data=folder)
        for question in train + test:
            assert grade(question.solution, question.answer).strict
        print(f"{len(train) + len(test):,} gold solutions grade as right against their own answers")
    speed(test if folder else heldout)
    if folder:
        overlaps("gsm8k", train, test)
    overlaps("arithmetic", load("arithmetic", "train", 4096, 0), heldout)
    overlaps("arithmetic, base's corpus", corpus.sample_questions(), heldout)
