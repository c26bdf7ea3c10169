"""The grader under attack: texts designed to earn a reward, to crash the grader, or to slow it down."""

import time

import pytest

from qrl.tasks.numeric import grade
from qrl.train import reward

pytestmark = pytest.mark.process

ANSWERS = ("0", "1", "7", "18", "100", "-5", "0.5", "99999")
MEGABYTE = 1_000_000
UNITS = {
    "digits": "1", "ones apart": "1 ", "commas": ",", "digits and commas": "1,", "digits and points": "1.",
    "groups": "1,111,", "thin groups": "1\u2009111\u2009", "lakhs": "11,11,111,", "hashes": "#", "markers": "####",
    "markers apart": "#### ", "empty answer lines": "####\n", "answers": "#### 1 ", "answer lines": "#### 1\n",
    "slow answer lines": "#### $1.0 eggs\n", "spaces": " ", "no-break spaces": "\u00a0", "new lines": "\n",
    "carriage returns": "\r", "backslashes": "\\", "opening braces": "{", "nested braces": "{}}{",
    "fractions": "\\frac{", "fractions cut": "\\frac{1}{", "whole fractions": "\\frac{1}{2}", "boxes": "\\boxed{",
    "slashes": "1/", "minuses": "-", "signed": "-1", "spaced signs": "- ", "dollars": "$", "equations": "=",
    "sums": "1=", "carets": "^", "glued": "m2 ", "letters": "a", "accents": "é", "end tokens cut": "<|im_end|",
    "angles": "<", "calculators": "<<1=1>>", "NULs": "\0", "surrogates": "\udcff", "Arabic digits": "٣",
    "full-width digits": "１", "vulgar fractions": "½", "marks of direction": "\u200f", "words": "minus ",
    "exponents": "1e", "underscores": "1_", "points": ".", "spoiled": "1.1.",
}  # fmt: skip


def rewarded(completion: str, *answers: str) -> list[str]:
    """Return the gold answers for which a completion earns a reward, by the reward function of training."""
    (correct,) = reward.functions("gsm8k")
    return [answer for answer in answers or ANSWERS if correct([completion], [answer]) != [0.0]]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "\n".join(f"#### {i}" for i in range(1000)),
        "\n".join(f"#### {i}" for i in range(100_000)),
        "\n".join(f"#### {answer}" for answer in ANSWERS),
        "#### " + " ".join(map(str, range(60))),
        "#### " + ",".join(map(str, range(60))),
        "#### " + "/".join(ANSWERS),
        "#### " + " = ".join(map(str, range(60))) + " = x",
        "#### 0, 1, x = 18",
        "#### " + "".join(map(str, range(60))),
        "####" * 100_000,
        "#### \n" * 100_000,
        "#### x\n" * 100_000,
        " ".join(map(str, range(100_000))),
        "Tom has 18 eggs, 7 of them brown. He sells 1 for $100. How many are left?",
        "#### Tom has 18 eggs, 7 of them brown. How many are left?",
        "\\boxed{" + "}\\boxed{".join(ANSWERS) + "}",
        "#### \\boxed{18}\\boxed{7}",
        "#### 1\u200f #### 18",
        "#### ١٨",
        "#### １８",
        "#### 1\x008",
        "<|im_end|>#### 18",
    ],
    ids=lambda completion: ascii(completion[:40]),
)
def test_nothing_but_one_answer_earns_a_reward(completion):
    assert rewarded(completion) == []


@pytest.mark.parametrize("errors", ["replace", "surrogateescape", "backslashreplace", "ignore"])
@pytest.mark.parametrize(
    "raw", [b"\xff\xfe\x00", b"#### \xff\xfe", b"\x80" * 1000, bytes(range(256)) * 10, b"####\xc0\xaf\n\xed\xa0\x80"]
)
def test_bytes_that_are_not_text_earn_nothing_and_crash_nothing(raw, errors):
    text = raw.decode("utf-8", errors)
    assert rewarded(text) == []
    verdict = grade(text + "\n#### 18\n" + text[:0], "18")
    assert verdict == grade(text + "\n#### 18\n", "18") and verdict.flexible


def test_broken_bytes_around_an_answer_do_not_hide_it():
    for errors in ("replace", "surrogateescape"):
        text = b"\xff\xfe so\n#### 18 \xed\xa0\x80".decode("utf-8", errors)
        assert rewarded(text) == ["18"]


def seconds(completion: str) -> float:
    began = time.process_time()
    grade(completion, "18")
    return time.process_time() - began


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("shape", ["{}", "#### {}", "{}\n#### 18", "#### 18\n{}"])
def test_time_grows_with_the_length_and_not_faster(unit, shape):
    def text(size: int) -> str:
        return shape.format((unit * (size // len(unit) + 1))[:size])

    # Four times the length takes four times as long where time is linear, sixteen times where it is quadratic: minutes
    # for a megabyte. The hundredth of a second allows for coarse clocks, the second and third time for a busy machine.
    quarter_s = min(seconds(text(MEGABYTE // 4)) for _ in range(3))
    assert any(seconds(text(MEGABYTE)) < 9 * quarter_s + 0.01 for _ in range(3))


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_a_megabyte_of_anything_before_one_answer_line_earns_only_that_answer(unit):
    spam = unit * (MEGABYTE // len(unit))
    assert rewarded(spam + "\n#### 7", "1", "7", "11") in ([], ["7"])
    assert rewarded(spam, "1", "7", "11") in ([], ["1"])  # repeated `#### 1` states 1
