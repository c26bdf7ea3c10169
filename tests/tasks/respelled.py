"""Right answers in other spellings, and wrong ones beside them, from a seeded generator: one list for each kind.

A kind is a function of a random generator that returns an `Answer` whose verdict is known without a grader: the values
are compared exactly, or at one point with fifty digits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import mpmath

POINT = mpmath.mpf("1.37")  # of x
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
FULL_WIDTH = str.maketrans("0123456789(),+-", "０１２３４５６７８９（），＋－")
VULGAR = {
    (1, 2): "½",
    (1, 3): "⅓",
    (2, 3): "⅔",
    (1, 4): "¼",
    (3, 4): "¾",
    (1, 5): "⅕",
    (4, 5): "⅘",
    (5, 6): "⅚",
    (7, 8): "⅞",
}
IGNORED_SPACES = ("", " ", r"\,", r"\;", r"\!", "~", "  ")  # between parts of a formula; LaTeX gives them no meaning


@dataclass(frozen=True)
class Answer:
    """A completion, the gold answer, and whether the completion is right."""

    task: str
    completion: str
    gold: str
    is_right: bool


@dataclass(frozen=True)
class Spelled:
    """A value in LaTeX and in Unicode's signs."""

    latex: str
    unicode: str
    value: mpmath.mpf | tuple


def answers(kind: str, n: int, seed: int = 0) -> list[Answer]:
    """Return n answers of a kind, about half of them wrong."""
    draw = random.Random(f"{kind} {seed}")
    return [KINDS[kind](draw) for _ in range(n)]


def _boxed(text: str) -> str:
    return f"So it is $\\boxed{{{text}}}$."


def _thinking(draw: random.Random) -> Answer:
    """Drafts before `</think>`, an answer after it, or a text that was cut before."""
    right = draw.randrange(2, 1000)
    task = draw.choice(("math", "gsm8k", "arithmetic", "deepmath"))
    write = _boxed if task in ("math", "deepmath") else "\n#### {}\n".format

    drafts = " Wait, no. ".join(
        write(draw.choice((right, right + 1, draw.randrange(1000)))) for _ in range(draw.randrange(4))
    )
    opening = draw.choice(("<think>", "<think>\n", "", "Let me think. <think>"))
    final = draw.choice((right, right, right + draw.randrange(1, 50), None))
    stated = "I do not know." if final is None else f"The answer: {write(final)}"
    if draw.random() < 0.25 and opening:
        earlier = f"{opening}{drafts}</think>{stated}" if draw.random() < 0.3 else ""
        return Answer(task, f"{earlier}<think>{drafts}{stated}", str(right), False)  # cut within the thinking
    end = draw.choice(("", "<|im_end|>", "<|im_end|>\nuser\n</think>" + write(right)))
    return Answer(task, f"{opening}{drafts}\n</think>\n\n{stated}{end}", str(right), final == right)


def _expression(shape: random.Random, leaves: list[int], depth: int = 2) -> Spelled:
    """Return an expression of random shape; its numbers are taken from the leaves, one after the other."""
    form = shape.choice((*SIMPLE, *JOINED) if depth else SIMPLE)
    if form in SIMPLE:
        return _simple(form, shape, leaves)
    first = _expression(shape, leaves, depth - 1)
    second = _expression(shape, leaves, depth - 1)
    return _joined(form, shape.choice("×·⋅"), first, second)


def _simple(form: str, shape: random.Random, leaves: list[int]) -> Spelled:
    n = leaves.pop()
    match form:
        case "integer":
            latex, value = f"{n}", mpmath.mpf(n)
            written = f"{n}".translate(FULL_WIDTH) if shape.random() < 0.3 else f"{n}"
        case "root":
            a = leaves.pop()
            latex, written, value = rf"{a}\sqrt{{{n}}}", f"{a}√{n}", a * mpmath.sqrt(n)
        case "cube root":
            latex, written, value = rf"\sqrt[3]{{{n}}}", shape.choice((f"∛{n}", f"³√{n}")), mpmath.cbrt(n)
        case "power":
            exponent = (leaves.pop() % 7 + 2) * shape.choice((1, -1))
            latex, value = f"{n}^{{{exponent}}}", mpmath.mpf(n) ** exponent
            written = f"{n}{str(exponent).translate(SUPERSCRIPTS)}"
        case "power of x":
            exponent = leaves.pop() % 7 + 2
            latex, value = f"{n}x^{exponent}", n * POINT**exponent
            written = f"{n}x{str(exponent).translate(SUPERSCRIPTS)}"
        case "pi":
            latex, written, value = rf"{n}\pi", f"{n}π", n * mpmath.pi
        case "fraction":
            over, under = list(VULGAR)[n % len(VULGAR)]
            latex, written, value = rf"\frac{{{over}}}{{{under}}}", VULGAR[over, under], mpmath.mpf(over) / under
        case "logarithm":
            base = leaves.pop() % 8 + 2
            latex, value = rf"\log_{{{base}}}{{{n}}}", mpmath.log(n) / mpmath.log(base)
            written = f"log{str(base).translate(SUBSCRIPTS)}{shape.choice(('', ' '))}{n}"
    return Spelled(latex, written, value)


def _joined(form: str, sign: str, first: Spelled, second: Spelled) -> Spelled:
    match form:
        case "sum":
            latex, written = f"{first.latex}+{second.latex}", f"{first.unicode} + {second.unicode}"
            value = first.value + second.value
        case "difference":
            latex, written = rf"{first.latex}-\left({second.latex}\right)", f"{first.unicode}−({second.unicode})"
            value = first.value - second.value
        case "product":
            latex, value = rf"({first.latex})\cdot({second.latex})", first.value * second.value
            written = f"({first.unicode}){sign}({second.unicode})"
        case "root of a sum":
            latex, value = rf"\sqrt{{{first.latex}+{second.latex}}}", mpmath.sqrt(first.value + second.value)
            written = f"√({first.unicode}+{second.unicode})"
        case "quotient":
            latex, value = rf"\frac{{{first.latex}}}{{{second.latex}}}", first.value / second.value
            written = f"({first.unicode})/({second.unicode})"
    return Spelled(latex, written, value)


SIMPLE = ("integer", "root", "cube root", "power", "power of x", "pi", "fraction", "logarithm")
JOINED = ("sum", "difference", "product", "root of a sum", "quotient")


def _unicode(draw: random.Random) -> Answer:
    """An expression in Unicode's signs, right or with one number changed; also points, and angles in degrees."""
    seed = draw.random()
    leaves = [draw.randrange(2, 40) for _ in range(16)]
    changed = list(leaves)
    is_wrong = draw.random() < 0.5
    if is_wrong:
        changed[-1 - draw.randrange(3)] += draw.choice((1, 2, 11))

    with mpmath.workdps(50):
        gold = _expression(random.Random(seed), list(leaves))
        stated = _expression(random.Random(seed), list(changed))
        is_right = mpmath.almosteq(gold.value, stated.value, 1e-30)
    form = draw.randrange(6)
    if form == 0:
        second = draw.randrange(2, 99)
        other = second + draw.choice((0, 0, 1))
        text = f"（{stated.unicode}，{str(-other).translate(FULL_WIDTH)}）"
        return Answer("math", _boxed(text), f"({gold.latex},-{second})", is_right and second == other)
    if form == 1:
        degrees = draw.randrange(1, 180)
        other = degrees + draw.choice((0, 3))
        return Answer("math", _boxed(f"{other}°"), rf"{degrees}^\circ", degrees == other)
    return Answer("math", _boxed(stated.unicode), gold.latex, is_right)


def _tiny(draw: random.Random) -> Answer:
    """A product with a factor far below what a float can tell from nothing, its factors in another order."""
    with_sum = draw.random() < 0.3

    def factors() -> list[tuple[str, str, Fraction]]:
        base, power = draw.choice((2, 3, 5, 10)), draw.randrange(40, 120)
        chosen = [(f"{base}^{{-{power}}}", rf"\frac{{1}}{{{base}^{{{power}}}}}", Fraction(1, base**power))]
        n = draw.randrange(2, 60)
        chosen.append((f"{n}", rf"\frac{{{2 * n}}}{{2}}", Fraction(n)))
        if draw.random() < 0.5:
            m = draw.randrange(3, 9)
            chosen.append((f"{m}!", rf"{m}!", Fraction(mpmath.fac(m).__int__())))
        return chosen

    gold = factors()
    value = Fraction(1)
    for _, _, factor in gold:
        value *= factor
    stated = list(gold)
    draw.shuffle(stated)
    text = r" \cdot ".join(draw.choice(factor[:2]) for factor in stated)
    change = draw.choice(("", "", "sign", "factor", "half"))
    if change == "sign":
        text = f"-{text}"
    elif change == "factor":
        text = rf"{text} \cdot \frac{{{draw.randrange(2, 9)}}}{{11}}"
    elif change == "half":
        text = rf"\frac{{1}}{{2}} \cdot {text}"
    gold_text = r" \cdot ".join(factor[0] for factor in gold)
    if with_sum:
        return Answer(
            "math", _boxed(f"1-{text}" if change != "sign" else f"1+{text[1:]}"), f"1-{gold_text}", not change
        )
    return Answer("math", _boxed(text), gold_text, not change)


def _arguments(draw: random.Random) -> Answer:
    """Arguments without braces and with spaces that LaTeX ignores, right or with one number changed."""
    a, b = draw.randrange(2, 10), draw.randrange(2, 10)
    off = draw.choice((0, 0, 1))
    c = b + off if b + off < 10 else b - off
    space = draw.choice((" ", "  ", r" "))
    forms = [
        (rf"\frac{{{a}}}{{{b}}}", rf"\frac{space}{a}{space}{c}"),
        (rf"\frac{{{a}}}{{{b}}}", rf"\frac{a}{c}"),
        (rf"\frac{{{a}}}{{{b}}}", rf"\dfrac {{ {a} }}{space}{{ {c} }}"),
        (rf"\frac{{{a}}}{{1{b}}}", rf"\frac{a}{{1{c}}}"),
        (rf"\log_{{{b}}}{{1{a}}}", rf"\log_{c} 1{a}"),
        (rf"\log_{{{b}}}{{1{a}}}", rf"\log _ {c}{{1{a}}}"),
        (rf"\log_{{1{b}}}{{{a}}}", rf"\log_{{1{c}}}{space}{a}"),
        (rf"\sqrt{{{b}}}", rf"\sqrt{space}{c}"),
        (rf"{a}\sqrt{{{b}}}", rf"{a} \sqrt{c}"),
        (rf"\sqrt[3]{{{b}}}", rf"\sqrt [3]{space}{c}"),
        (rf"\sqrt{{\frac{{{a}}}{{{b}}}}}", rf"\sqrt\frac{a}{c}"),
        (rf"x^{{\frac{{{a}}}{{{b}}}}}", rf"x^\frac{space}{a}{space}{c}"),
        (rf"\frac{{\pi}}{{{b}}}", rf"\frac\pi{c}"),
        (rf"\frac{{{a}\sqrt{{3}}}}{{{b}}}", rf"\frac{{{a}\sqrt3}}{c}"),
        (rf"{b}\vec{{v}}", rf"{c}\vec v"),
        (rf"\mathbf{{v}}+{b}", rf"\mathbf v+{c}"),
        (rf"({a},{b})", rf"\left( {a} ,\, {c} \right)"),
        (rf"x^{{{a}}}+{b}", rf"x ^ {a} + {c}"),
        (r"\emptyset" if off == 0 else r"\{0\}", r"\varnothing"),
    ]
    if a >= b >= c:
        forms += [(rf"\binom{{{a}}}{{{b}}}", rf"\binom {a} {c}"), (rf"\binom{{{a}}}{{{b}}}", rf"\binom{a}{c}")] * 3
    gold, stated = draw.choice(forms)
    is_right = c == b or (r"\varnothing" in stated and off == 0)
    if r"\binom" in gold:
        is_right = c in (b, a - b)
    if r"\varnothing" in stated:
        is_right = off == 0
    if r"\sqrt{\frac" not in gold and draw.random() < 0.3:
        pad = draw.choice(IGNORED_SPACES)
        stated = f"{pad}{stated}{pad}"
    return Answer("math", _boxed(stated), gold, is_right)


def _repeating(draw: random.Random) -> Answer:
    """A repeating decimal for a fraction, or for one with another period."""
    before = "".join(draw.choices("0123456789", k=draw.randrange(3)))
    period = "".join(draw.choices("0123456789", k=draw.randrange(1, 4)))
    whole = draw.randrange(20)
    nines = 10 ** len(period) - 1
    value = whole + Fraction(int(before or 0), 10 ** len(before)) + Fraction(int(period), nines * 10 ** len(before))
    value += draw.choice((0, 0, Fraction(1, nines), Fraction(1, 10 ** len(before) * 990)))
    command = draw.choice((r"\overline", r"\bar", r"\overline "))
    right = whole + Fraction(int(before or 0), 10 ** len(before)) + Fraction(int(period), nines * 10 ** len(before))
    argument = period if len(period) == 1 and command.endswith(" ") else f"{{{period}}}"
    text = f"{whole}.{before}{command}{argument}"
    if draw.random() < 0.2:
        text = f"{whole}.{before}" + "".join(f"{digit}\u0305" for digit in period)
    gold = draw.choice(
        (rf"\frac{{{value.numerator}}}{{{value.denominator}}}", f"{value.numerator}/{value.denominator}")
    )
    if value.denominator == 1:
        gold = str(value.numerator)
    return Answer("math", _boxed(text), gold, value == right)


def _clock(draw: random.Random) -> Answer:
    """A time of day in another spelling, or another time, or half a day off."""
    hour, minute = draw.randrange(24), draw.randrange(60)
    off = draw.choice((0, 0, 1, 60, 12 * 60))
    total = (hour * 60 + minute + off) % (24 * 60)

    def spelled(minutes: int) -> str:
        of_day, past = divmod(minutes, 60)
        half = draw.choice(("a.m.", "am", "AM") if of_day < 12 else ("p.m.", "pm", "PM"))
        face = f"{of_day % 12 or 12}:{past:02}"
        return draw.choice(
            (f"{of_day}:{past:02}", rf"{face}\text{{ {half}}}", rf"{face}\ \mathrm{{{half}}}", f"{face} {half}")
        )

    gold = rf"{hour % 12 or 12}:{minute:02}\text{{ {'a.m.' if hour < 12 else 'p.m.'}}}"
    if draw.random() < 0.5:
        gold = f"{hour}:{minute:02}"
    stated = spelled(total)
    forgets_half = "text" in gold and not any(letter in stated.lower() for letter in "ap") and 1 <= total // 60 <= 12
    is_right = off == 0 or (forgets_half and off == 12 * 60)
    return Answer("math", _boxed(stated), gold, is_right)


def _units(draw: random.Random) -> Answer:
    """A number with its unit in the one or the other spelling, or another number, or a variable for the unit."""
    value = draw.randrange(2, 999)
    off = draw.choice((0, 0, 0, 1, 10, -1))
    size, stated = draw.choice(
        (
            (str(value), str(value + off)),
            (rf"{value}\pi", f"{value + off}π"),
            (rf"\frac{{{value}}}{{7}}", f"({value + off}/7)"),
        )
    )
    latex, written = draw.choice(
        (
            *((r"\text{ cm}^2", spelled) for spelled in (" cm²", "cm^2", " cm^{2}", " square centimeters", "")),
            *((r"\text{ km/h}", spelled) for spelled in (" km/h", r"\,\mathrm{km/h}", r" \text{km}/\text{h}")),
            *((r"\text{ m}", spelled) for spelled in (" m", " meters", r"\text{ m}")),
            *((r"^\circ\text{F}", spelled) for spelled in ("°F", "℉", " degrees Fahrenheit")),
            *(("", spelled) for spelled in (" kg", " ft³", " dollars", " m/s²", " µm")),
            *((f" {letter}", f" {letter}") for letter in "xtnabcl"),
        )
    )
    return Answer("math", _boxed(stated + written), size + latex, off == 0)


def _variables(draw: random.Random) -> Answer:
    """A multiple of a variable beside the bare number, which math-verify takes for a number and its unit."""
    value, letter = draw.randrange(2, 99), draw.choice(("a", "b", "c", "d", "l", "n", "t", "x", "ab", "bc", "m", "h"))
    is_right = draw.random() < 0.5
    return Answer("math", _boxed(f"{value}{letter}" if is_right else str(value)), f"{value}{letter}", is_right)


def _zero(draw: random.Random) -> Answer:
    """A division by zero, which is wrong whatever the answer is."""
    n, x = draw.randrange(1, 99), draw.choice(("1-1", "0", "3-3", "0\\cdot 5"))
    stated = draw.choice(
        (rf"\frac{{{n}}}{{{x}}}", f"{n}/0", rf"\{{{n}, \frac{{1}}{{0}}\}}", rf"(\frac{{{n}}}{{0}},{n})", "0^{-1}")
    )
    gold = draw.choice(
        (f"{n}", rf"\frac{{{n}}}{{7}}", rf"\{{{n},1\}}", f"({n},{n})", "x+1", r"\infty", f"{n}:30", "12:00")
    )
    return Answer("math", _boxed(stated), gold, False)


KINDS: dict[str, Callable[[random.Random], Answer]] = {
    "thinking": _thinking,
    "unicode": _unicode,
    "tiny factors": _tiny,
    "arguments": _arguments,
    "repeating decimals": _repeating,
    "clock times": _clock,
    "units": _units,
    "variables": _variables,
    "division by zero": _zero,
}
