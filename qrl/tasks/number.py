"""Numbers as people and models write them, parsed as exact fractions: `-$1,000.50`, `1 1/2`, `\\frac{3}{4}`, `18\\%`.

For short texts: an answer line or the end of a completion. An ambiguous number is None rather than a guess; each case
in tests/cases/grade.json gives its reason.
"""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

Number = int | Fraction

LONGEST = 60  # characters of one number: longer ones are not meant, and int() is quadratic

_THIN = "\u00a0\u2007\u2009\u202f"  # no-break, figure, thin and narrow no-break space: thousands separators
_CURRENCY = r"(?:(?:[A-Z]{1,3} ?)?[$€£¥₹]|\b(?:USD|EUR|GBP|INR)) ?"  # $, US$, € …

# Groups of thousands with one separator (`1,234,567`), Indian groups (`12,34,567`), or plain digits. No letter or digit
# directly before it: the 2 of `m2` is not a number. The parts are short, so no input makes this slow.
_NUMBER = re.compile(
    rf"""(?<![^\W_])(?<![^\W_]_)(?<!\.)(?:
        (?<![0-9][,{_THIN}])[1-9][0-9]{{0,2}}([,{_THIN}])[0-9]{{3}}(?:\1[0-9]{{3}})*+(?![0-9])(?:\.[0-9]++)?
      | (?<![0-9],)[1-9][0-9]?(?:,[0-9]{{2}})+,[0-9]{{3}}(?![0-9]|,[0-9])(?:\.[0-9]++)?
      | [0-9]++(?:\.[0-9]++)?
      | \.[0-9]++
    )""",
    re.VERBOSE,
)
_SPOILED = re.compile(r"\.[0-9]|[eE][-+]?[0-9]|[xX_][0-9]")  # 1.2.3, 1e3, 0x12, 3x6, 1_000
_NO_SEPARATORS = str.maketrans("", "", "," + _THIN)
_DIGIT = re.compile(r"[0-9]")
_SIGN = re.compile(rf"([-+])(\s*)(?:{_CURRENCY})?[*_`(\[{{\"']{{0,3}}(?:{_CURRENCY})?$")
_SIGN_WORD = re.compile(rf"\b(?:(negative)|minus)[\s-]+(?:{_CURRENCY})?$", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]{1,60})\}\s*\{([^{}]{1,60})\}|([0-9])\s*([0-9]))")
_SLASH = re.compile(r"\s?/\s?")
_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|fbox|left|right|displaystyle)(?![A-Za-z])\s*")
# `cm^2` is a unit and `^\circ` a degree, `18^2` a calculation.
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\}?\s*\^\s*\{?[23](?![0-9.])|\^\s*\{?\s*\\circ(?![A-Za-z])")
_RUPEES = re.compile(r"\bRs\.? ?(?=[-+0-9])")

# Look-alikes become plain signs. Invisible characters are dropped: zero-width ones and marks of direction.
_LOOKS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-")
    | {"\u2014": "--", "\u2015": "--", "\u2044": "/", "\u2215": "/", "\uff04": "$", "\uff0c": ", ", "\uff05": "%"}
    | dict.fromkeys([*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF, 0x00AD])
    | {char: " " + unicodedata.normalize("NFKC", char).replace("\u2044", "/") for char in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
)
_BEFORE_VULGAR = re.compile(r"(?<=[0-9]) (?=[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")  # `2 ½` is `2½`
_LATEX = {"{,}": ",", "\\,": "\u2009", "\\!": "", "\\$": "$", "\\%": "%", "\\;": " ", "\\:": " ", "\\ ": " "}


def tidy(line: str) -> str:
    """Return a short text in plain signs: look-alikes replaced, LaTeX's wrapping removed, `\\frac{a}{b}` as ` a/b`."""
    if not line.isascii():
        line = _BEFORE_VULGAR.sub("", line).translate(_LOOKS)
    if "\\" in line or "{" in line:
        for latex, plain in _LATEX.items():
            line = line.replace(latex, plain)
        line = _FRACTION.sub(_plain_fraction, line)
        line = _COMMAND.sub("", line)
    if "^" in line:
        line = _UNIT_POWER.sub("", line)
    return _RUPEES.sub("₹", line) if "Rs" in line else line


def numbers(line: str) -> list[Number | None]:
    """Return all numbers of a tidied text in order; a fraction or a mixed number counts as one.

    Args:
        line: at most a few hundred characters, as returned by `tidy`.

    Returns:
        The numbers; None for text that looks like a number but is not (`1.2.3`, `18/0`, a date).
    """
    values: list[Number | None] = []
    previous: list[re.Match] = []
    for parts in _joined_by_slashes(line):
        if _mixed(line, previous, parts):
            integer = values[-1]
            fraction = _ratio(line, parts)
            sign = -1 if _negative(line, previous[0].start()) else 1
            values[-1] = None if integer is None or fraction is None else integer + sign * fraction
        elif line[parts[0].start() - 1 : parts[0].start()] == "/":
            values.append(None)  # `x/2` is not 2
        elif len(parts) == 1:
            values.append(_value(line, parts[0]))
        else:
            values.append(_ratio(line, parts))
        previous = parts
    return values


def span(line: str) -> tuple[int, int]:
    """Return the start of a tidied text's first number and the end of its last one; (0, 0) without a number."""
    matches = list(_NUMBER.finditer(line))
    return (matches[0].start(), matches[-1].end()) if matches else (0, 0)


def text(number: Number) -> str:
    """Return the shortest plain spelling of a number: `18`, `2.5`, `1/3`."""
    if number.denominator == 1:
        return str(number.numerator)
    decimal = Decimal(number.numerator) / Decimal(number.denominator)
    return f"{decimal:f}" if Fraction(decimal) == number else str(number)


def _plain_fraction(match: re.Match) -> str:
    numerator, denominator = match.group(1, 2) if match[1] else match.group(3, 4)
    follows_digit = match.start() and match.string[match.start() - 1].isdigit()
    return (
        f" {numerator}/{denominator}" if follows_digit else f"{numerator}/{denominator}"
    )  # `1\\frac{1}{2}` is `1 1/2`


def _joined_by_slashes(line: str) -> list[list[re.Match]]:
    groups: list[list[re.Match]] = []
    for run in _NUMBER.finditer(line):
        if groups and _SLASH.fullmatch(line, groups[-1][-1].end(), run.start()):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _mixed(line: str, integer: list[re.Match], fraction: list[re.Match]) -> bool:
    """Return whether `integer fraction` is a mixed number like `1 1/2`: digits, one space, a fraction below one."""
    if len(integer) != 1 or len(fraction) != 2 or not line[integer[0].end() : fraction[0].start()].isspace():
        return False
    numerator = fraction[0].group()
    denominator = fraction[1].group()
    all_digits = integer[0].group().isdigit() and numerator.isdigit() and denominator.isdigit()
    one_space = fraction[0].start() - integer[0].end() == 1
    return all_digits and len(denominator) < LONGEST and one_space and int(numerator) < int(denominator)


def _ratio(line: str, parts: list[re.Match]) -> Fraction | None:
    """Return `a/b`; None for a division by zero, and for a date `a/b/c`."""
    values = [_value(line, part) for part in parts]
    if len(values) != 2 or values[0] is None or not values[1]:
        return None
    return Fraction(values[0]) / values[1]


def _value(line: str, run: re.Match) -> Number | None:
    """Return the number of a run of digits, with the sign before it."""
    digits = run.group()
    end = run.end()
    if len(digits) > LONGEST or _SPOILED.match(line, end) or line[end : end + 1].isnumeric():
        return None  # `18²` is a calculation, `1٨` mixes two scripts
    if run[1] or "," in digits:
        digits = digits.translate(_NO_SEPARATORS)
    value = Fraction(digits) if "." in digits else int(digits)
    return -value if _negative(line, run.start()) else value


def _negative(line: str, start: int) -> bool:
    """Return whether the number that begins at `start` has a minus sign before it, not a bar, dash or bullet.

    `10-5`, `(a)-5` and `--5` have no minus sign. With a space after it, a minus is a sign after `####`, `=` or `:`;
    elsewhere it is a bullet or a dash.
    """
    prefix = line[max(0, start - 30) : start]
    sign = _SIGN.search(prefix)
    if sign:
        head = prefix[: sign.start()]
        if sign[2]:
            is_unary = head.rstrip()[-1:] in ("#", "=", ":")
        else:
            is_unary = not (head and (head[-1].isalnum() or head[-1] in "_)].,%+-"))
        if is_unary:
            return sign[1] == "-"

    word = _SIGN_WORD.search(prefix)
    if not word:
        return False
    # `negative 5` is a sign anywhere; `minus 5` only without a number before it, from which it would be subtracted.
    word_start = max(0, start - len(prefix) + word.start())
    return bool(word[1]) or not _DIGIT.search(line, 0, word_start)
