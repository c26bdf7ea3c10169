r"""Units and currencies beside a number, written without `\text`: `25 cm^2`, `60 km/h`, `5.50 dollars`, `70^\circ F`.

Units are not graded, since models omit them. Within `\text` math-verify drops them; elsewhere it takes `cm` for a
product of two variables, and drops letters such as the `t` of `7t`, which may be one. A unit here has a name, follows a
number, and ends the answer; its letters are none of the other answer's variables.
"""

import re

_PREFIX = r"(?:(?:square|cubic|sq|cu)\.? ?)?"
_NAMES = (
    r"(?:centi|kilo|milli|deci|micro|nano)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?|seconds?|watts?|hertz)"
    r"|feet|foot|yards?|miles?|inch(?:es)?|pounds?|ounces?|gallons?|tons?|tonnes?|acres?|hectares?"
    r"|minutes?|hours?|days?|weeks?|months?|years?|radians?|units?|newtons?|joules?|volts?|amperes?|ohms?|moles?"
    r"|cups?|degrees?(?: ?(?:Celsius|Fahrenheit))?|dollars?|cents?|euros?|rupees?|yen|USD|EUR|GBP|INR|CAD|AUD"
)
_SYMBOLS = (
    r"[kcmdn]m|ft|yd|in|mi|[km]g|lbs?|oz|m[lL]|cc|gal|hrs?|mins?|secs?|ms|mph|km?ph|[kMG]?Hz|k?Wh?|mol|k?Pa|k?J"
    r"|rad|deg|rpm|\\mu ?[mgs]|\\Omega|\\degree ?[CF]|\^\\circ ?(?:[CF](?![A-Za-z])|\\(?:text|mathrm)\{ ?[CF] ?\})"
)
_LETTERS = "[mgshLNJWV]"  # each of them is a unit, and may be a variable
_POWER = r"(?:\^(?:\{-?[1-9]\}|[1-9]))"


def _written(units: str) -> str:
    return rf"(?:{units}|\\(?:text|mathrm|mbox)\{{ ?(?:{units}) ?\}})"


_ANY = rf"(?:{_PREFIX}{_written(f'{_NAMES}|{_SYMBOLS}|{_LETTERS}')}(?![A-Za-z]){_POWER}?)"
_TIMES = r" ?(?:/|per (?=[a-zA-Z])|\\cdot ?|\\times ?|\*| ) ?"
_FRACTION = rf"\\frac\{{{_ANY}\}}\{{{_ANY}\}}"
_UNIT = rf"(?:{_FRACTION}|{_ANY}(?:{_TIMES}{_ANY}){{0,3}})"
_AFTER_NUMBER = re.compile(rf"(?:(?<=[0-9)}}])|(?<=\\pi)) ?({_UNIT})\Z")
_MAY_END_IN_UNIT = re.compile(r"[A-Za-z][}\]0-9^]*\Z|\^\{-?[1-9]\}\Z|\}\}\Z")
_GLUED_LETTER = re.compile(rf"{_LETTERS}{_POWER}?")
_VARIABLE = re.compile(
    r"(?:(?<=[0-9)}])|(?<=\\pi)) ?(?!th|st|nd|rd|d[a-z])([a-z]{1,2})\Z"
)  # `5th` is 5, `dx` no product
_FUNCTION = re.compile(r"log|ln|exp|sin|cos|tan|cot|sec|csc")
_DROPPED_FACTOR = re.compile(  # letters that math-verify takes for units
    r"((?<![\w.^_{])[0-9]+(?:\.[0-9]+)?|\)|\\pi|\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\}) ?([cdghlmost]|ab|bc)\Z"
)
_DROPPED_ARGUMENT = re.compile(r"(?:(?<=[0-9}]) ?| )([cdghlmost])\Z")
_WORDS = re.compile(r"\\(?:text|mathrm|mathbf)\{[^{}]*\}|\\[A-Za-z]+")


def dropped(gold: str, stated: str) -> tuple[str, str]:
    """Return two normal answers without the units that only one of them has, or that both have in their own spelling.

    An answer of letters alone keeps them: `5m` is 5 m to a gold answer 5, but the gold answer `5m` is five times m.
    """
    bare_gold, gold_unit = _split(gold)
    bare_stated, stated_unit = _split(stated)
    if gold_unit and _bare_name(gold_unit) == _bare_name(stated_unit):  # `5m` and `5\text{ m}`
        return bare_gold, bare_stated
    if stated_unit and _variables(bare_stated) == _variables(gold):
        is_unit = not _variables(gold) or _is_certain(stated, bare_stated, stated_unit)
        return gold, bare_stated if is_unit else stated
    if _is_certain(gold, bare_gold, gold_unit):
        if _variables(bare_gold) == _variables(stated):
            return bare_gold, stated
        if stated_unit and _variables(bare_gold) == _variables(bare_stated):
            return bare_gold, bare_stated
    return gold, stated


def end_in_another_variable(gold: str, stated: str) -> bool:
    """Return whether one answer ends in variables that the other lacks, such as `7t` or `7ab` beside 7."""
    return any(
        last is not None and not set(last[1]) <= _variables(_unwrapped(other))
        for last, other in ((_VARIABLE.search(gold), stated), (_VARIABLE.search(stated), gold))
    )


def with_product(text: str) -> str:
    r"""Return an answer with a variable at its end as a factor, `7\cdot{t}`: math-verify drops the t of `7t`.

    In `\sin^2 t` and `\log_2 t`, it is the argument of a function, which gets braces.
    """
    if _FUNCTION.search(text):
        return _DROPPED_ARGUMENT.sub(r"{\1}", text)
    return _DROPPED_FACTOR.sub(r"\1\\cdot{\2}", text)


def _bare_name(unit: str) -> str:
    return re.sub(r"[\s{}]", "", _unwrapped(unit))


def _split(text: str) -> tuple[str, str]:
    """Return an answer without the unit at its end, and the unit; an empty one if it has none."""
    if not _MAY_END_IN_UNIT.search(text):
        return text, ""
    match = _AFTER_NUMBER.search(text)
    return (text[: match.start()], match[1]) if match else (text, "")


def _is_certain(text: str, bare: str, unit: str) -> bool:
    """Return whether a unit is one, rather than a variable: `5 m` and `5m/s`, but not `5m`."""
    is_apart = text[len(bare) : len(bare) + 1] == " "
    return bool(unit) and (is_apart or not _GLUED_LETTER.fullmatch(unit))


def _variables(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", _WORDS.sub(" ", text)))


def _unwrapped(text: str) -> str:
    return re.sub(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
