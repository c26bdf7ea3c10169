r"""Answers with a value that their text gives exactly: clock times, fractions, repeating decimals, degrees and minutes.

A time without a.m. or p.m. is read by the 24-hour clock: `11:00` is 11 a.m., `23:00` is 11 p.m. Where only the answer
leaves p.m. out, it is as right as an answer without its unit.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|mathit)\{([^{}]*)\}")
_CLOCK = re.compile(r"([0-9]{1,2})(?::([0-9][0-9]))?(?::([0-9][0-9]))?(am|pm|noon|midnight)?")
_MAY_BE_TIME = re.compile(r"[0-9]:[0-9][0-9]|[aApP]\.?\s?[mM]|noon|midnight|o'clock|in the |at night")
_NAMED_TIMES = {"noon": "12:00pm", "midnight": "12:00am", "24:00": "0:00"}
_SPELLINGS = [  # of parts of a time, before spaces and full stops are dropped
    (re.compile(r"(?<=[0-9])\.(?=[0-9]{2} ?[ap]\.? ?m)"), ":"),  # 3.30 p.m.
    (re.compile(r"o'clock"), ":00"),
    (re.compile(r"in the morning"), "am"),
    (re.compile(r"(?:in the (?:afternoon|evening)|at night)"), "pm"),
    (re.compile(r"\Aat "), ""),
]
_HOUR = re.compile(r"[1-9]|1[0-2]")
_HALF_DAY_S = 12 * 3600

_RATIO = re.compile(r"([-+]?)(?:\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}|([0-9]+)/([0-9]+))")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_REPEATING = re.compile(
    r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)\{([0-9]+)\}(?:([0-9]*)\\dot\{([0-9])\})?|\(([0-9]+)\)\Z)(?![0-9])"
)
_ANGLE = re.compile(  # degrees, minutes, seconds
    r"([0-9]+)\^\\circ ?(?:([0-9]+(?:\.[0-9]+)?) ?'(?!'))(?: ?([0-9]+(?:\.[0-9]+)?) ?(?:''|\"))?"
)
_RATIO_OF_PARTS = re.compile(r"[^:,=<>()\[\]]+(?::[^:,=<>()\[\]]+){2,}")
_MAY_BE_EXACT = re.compile(r"\.[0-9]*(?:\\(?:overline|bar|dot)|\([0-9]+\)\Z)|[0-9]\^\\circ ?[0-9]")
_DEGREES = re.compile(r" ?\^\\circ ?\Z")


@dataclass(frozen=True)
class Time:
    """A time of day."""

    seconds: int  # since midnight
    has_half: bool  # a.m. or p.m. is stated

    def accepts(self, stated: "Time") -> bool:
        """Return whether a stated time is this one, which may have lost its a.m. or p.m., but has no wrong one."""
        may_lack_half = 3600 <= stated.seconds < _HALF_DAY_S + 3600  # 0:30 and 13:00 are hours of the 24-hour clock
        if self.has_half and not stated.has_half and may_lack_half:
            return self.seconds % _HALF_DAY_S == stated.seconds % _HALF_DAY_S
        return self.seconds == stated.seconds


def clock_time(text: str) -> Time | None:
    r"""Return the time of a text such as `11:00`, `23:30` or `11:00\text{ a.m.}`; None for others."""
    if not _MAY_BE_TIME.search(text):
        return None
    plain = _WRAPPED.sub(r"\1", text).lower().strip()
    for pattern, spelling in _SPELLINGS:
        plain = pattern.sub(spelling, plain)
    plain = re.sub(r"[\s.~()]", "", plain)
    plain = _NAMED_TIMES.get(plain, plain)
    match = _CLOCK.fullmatch(plain)
    if match is None or not (match[2] or match[4]):
        return None
    hour, minute, second = (int(part or 0) for part in match.group(1, 2, 3))
    half = {"noon": "pm", "midnight": "am"}.get(match[4], match[4])
    latest = 12 if half else 23
    if hour > latest or minute > 59 or second > 59 or (half and hour == 0):
        return None
    if half:
        hour = hour % 12 + (12 if half == "pm" else 0)
    return Time(hour * 3600 + minute * 60 + second, bool(half))


def whole_hour(text: str) -> Time | None:
    """Return the time of a bare number of hours, 1 to 12; None for others."""
    return Time(int(text) * 3600, has_half=False) if _HOUR.fullmatch(text) else None


def is_exact_decimal(text: str) -> bool:
    r"""Return whether a text may be a repeating decimal, or degrees and minutes: not only an integer or a fraction."""
    return _MAY_BE_EXACT.search(text) is not None


def exact_value(text: str) -> Fraction | None:
    r"""Return the value of an integer, a fraction, a repeating decimal, or degrees and minutes; None for others.

    Examples: `-7`, `\frac{4}{11}`, `4/11`, `0.\overline{36}`, `45^\circ 30'`, each also with a degree sign.
    """
    text = _DEGREES.sub("", text)
    if _INTEGER.fullmatch(text):
        return Fraction(text)
    ratio = _RATIO.fullmatch(text)
    if ratio:
        numerator = int(ratio[2] or ratio[4])
        denominator = int(ratio[3] or ratio[5])
        if denominator == 0:
            return None
        value = Fraction(numerator, denominator)
        return -value if ratio[1] == "-" else value

    sign = text[:1] if text[:1] in "-+" else ""
    size = text[len(sign) :]
    repeating = _REPEATING.fullmatch(size)
    angle = _ANGLE.fullmatch(size)
    if repeating:
        value = _repeating_value(repeating)
    elif angle:
        value = _degrees(angle)
    else:
        return None
    return -value if sign == "-" else value


def as_fractions(text: str) -> str:
    r"""Return a formula with its repeating decimals, degrees and minutes as `\frac{…}{…}`, which algebra can read.

    A ratio of three or more parts, `3:4:5`, becomes a point: the ratios to its first part.
    """
    if _RATIO_OF_PARTS.fullmatch(text):
        first, *others = text.split(":")
        ratios = [rf"\frac{{{part}}}{{{first}}}" for part in others]
        return f"({','.join(ratios)})"
    if not is_exact_decimal(text):
        return text
    text = _ANGLE.sub(lambda match: _written(_degrees(match)), text)
    return _REPEATING.sub(lambda match: _written(_repeating_value(match)), text)


def _written(value: Fraction) -> str:
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _repeating_value(match: re.Match) -> Fraction:
    r"""Return the value of `0.1\overline{6}`, or of `0.\dot{1}4\dot{2}`, where the two dots enclose what repeats."""
    integer, before, period = match[1], match[2], match[3] or match[6]
    if match[5]:
        period += match[4] + match[5]
    nines = 10 ** len(period) - 1
    return Fraction(int(integer + before or 0)) / 10 ** len(before) + Fraction(int(period), nines * 10 ** len(before))


def _degrees(match: re.Match) -> Fraction:
    degrees, minutes, seconds = (Fraction(part or 0) for part in match.group(1, 2, 3))
    return degrees + minutes / 60 + seconds / 3600
