"""Answers as LaTeX: the boxes of a completion, their normal form, and comparisons that need no algebra.

Time is linear in a completion's length; only short texts, the content of one box, are examined more closely.
"""

import re
from fractions import Fraction

from qrl.tasks.math import arguments, signs, units, values

LONGEST_ANSWER = 1000  # characters in a box, and of a text to normalize; a longer content is not an answer

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\[\\{}]|[{}]")
_BARE = re.compile(r"\\(?:boxed|fbox)\s++([^\s\\{}$]{1,60})")  # TeX's short form, used in some of MATH's solutions
_FIRST_RULES = [  # pattern → spelling, in this order
    (r"\\(?:left|right|big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])\.?|\\(?:displaystyle|textstyle)(?![A-Za-z])|\\!", ""),
    (r"\\(?:negthinspace|negmedspace|negthickspace|limits|nolimits)(?![A-Za-z])", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:mbox|textbf|textrm|textit|textnormal|textsf)\s*\{", r"\\text{"),
    (r"\{([,:])\}|\\math(?:punct|ord|bin|rel)\{:\}", lambda match: match[1] or ":"),
    (r"(?<=\d) ?\\colon ?(?=\d)", ":"),
    (r"\\\\ ?\[[\d.]+ ?(?:pt|ex|em|mm|cm)\]", r"\\\\"),  # the distance between two rows of a matrix
    (r"\\(?:text|mathrm)\{ ?([€£¥₹]|USD|EUR|GBP|INR) ?\}", r"\1 "),
    (r"\\degree(?![A-Za-z])", r"^\\circ "),
    (r"\\(?:hspace|hskip|mspace)\*? ?\{[^{}]*\}|\\(?:thin|med|thick|en)space(?![A-Za-z])", " "),
    (r"(?<!\\)\\(?:[,;: >]|q?quad(?![A-Za-z]))|~|\s", " "),
]
_LAST_RULES = [
    (r"\^ ?\{ ?\\circ ?\}|\^ ?\\circ(?![A-Za-z]) ?", r"^\\circ "),
    (r"\^ ?\{? ?((?:\\prime(?![A-Za-z]) ?)+)\}?", lambda match: "'" * match[1].count("p")),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\\var(epsilon|theta|rho|phi|kappa)(?![A-Za-z])", r"\\\1"),
    (r"(?:(?<![A-Za-z])(?:US|CA|AU|HK))?\\?\$|[€£¥₹₩¢]|\\(?:pounds|euro|yen|textdollar|texteuro)(?![A-Za-z])", ""),
    (r"(?<![A-Za-z])(?:USD|EUR|GBP|INR|Rs\.?) ?(?=\d)", ""),
    (r"(?<!\\)%", r"\\%"),
    (r" ?(\\[{}]) ?", r"\1"),
    (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
    (r"(\d+!)\^", r"(\1)^"),  # math-verify does not read `13!^4`
    (  # math-verify reads `\sin x/(1+y)` as the sine of a fraction
        r"(?<![A-Za-z\\])(\\(?:sin|cos|tan|cot|sec|csc|ln|log)(?:\^\{?\d\}?)? ?(?:\\[a-z]+|[a-z]|\d+)) ?/(?=[(\\])",
        r"(\1)/",
    ),
    (r"\\(?:Long)?rightarrow(?![A-Za-z])", r"\\to"),
    (r"\\(?:implies|Longrightarrow)(?![A-Za-z])", r"\\Rightarrow"),
    (r"\\(wedge|vee|lnot)(?![A-Za-z])", lambda match: {"wedge": r"\land", "vee": r"\lor", "lnot": r"\neg"}[match[1]]),
    (r"\((?:\\(?:b?mod|text\{ ?mod ?\})|mod) ?([^()]+)\)", r"\\pmod{\1}"),
    (r"(?<![\w.)}/^])(\d+)/(\d+) (?=[A-Za-z\\(])", r"\\frac{\1}{\2} "),  # `4/3 \pi`; math-verify reads 4/(3\pi)
    (r"\\langle(?![A-Za-z])|\\lparen(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])|\\rparen(?![A-Za-z])", ")"),
    (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
    (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"(?<![\w.])(\d{1,3}(?: \d{3})+)(?![\w ])", lambda match: match[1].replace(" ", "")),  # `58\,500`
    (r"(\d) (\d+)/(\d+)", r"\1\\frac{\2}{\3}"),  # a mixed number
    (r"(\\log ?_) ?(1[0-9]+)(?=[ {(\\])", r"\1{\2}"),  # `\log_10 5`: there is no base 1
    (  # math-verify may read `\log_{9}29` as the logarithm of 2 + 9
        r"(\\log ?_(?:\{[^{}]*\}|\w)) ?([0-9]+(?:\.[0-9]+)?)(?=$|[-+=,;)\]}|&]| ?\\(?:cdot|times)(?![A-Za-z]))",
        r"\1{\2}",
    ),
    (r"\.(\d+?)\1+ ?(?:\.{3}|\\[lc]?dots(?![A-Za-z]))", r".\\overline{\1}"),  # 0.3636...
    (r"\.(\d+?)(\d+?)\2\2+ ?(?:\.{3}|\\[lc]?dots(?![A-Za-z]))", r".\1\\overline{\2}"),  # 0.58333...
    (r" +", " "),
    (r" ?([^\w\s\\{}]) ?", r"\1"),
]
_FIRST_SPELLINGS = [(re.compile(pattern), spelling) for pattern, spelling in _FIRST_RULES]
_LAST_SPELLINGS = [(re.compile(pattern), spelling) for pattern, spelling in _LAST_RULES]
_NESTED = re.compile(r"\\(?:boxed|fbox) ?\{(.*)\}")

_HAS_ARGUMENTS = re.compile(r"[\\^_{]|log|ln|lg|exp|sin|cos|tan|cot|sec|csc")

_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_BASED = re.compile(r"(-?[0-9][0-9A-Fa-f]*)_\{?(\d+)\}?")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|mathit)\{([^{}]*)\}")
_WORD = re.compile(r"[A-Z]?[a-z]{3,}(?: [a-z]+)*")
_SIDE_BY_SIDE = re.compile(r"\d \.?\d")
_ABOUT = re.compile(
    r"\\(?:approx|simeq|sim|cong|equiv|neq?|not|to|(?:long)?rightarrow|Rightarrow|implies|iff|mapsto)(?![A-Za-z])|≈|≠|→"
)
_SEPARATOR = re.compile(r",|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
# Words that change or retract the answer beside them.
_RETRACTS = re.compile(
    r"not?|never|isn't|is|are|was|wrong|incorrect|false|neither|nor|unknown|maybe|perhaps|plus|minus|times|half|twice"
    r"|double|triple|less|dozens?|squared|cubed|(?:hundred|thousand|[mb]illion|trillion|lakh|crore)s?"
)

_PERCENTAGE = re.compile(r"[^,;%]+\\%")
_SPACE_OF_TEX = re.compile(r"(\\[A-Za-z]+) (?![A-Za-z])| (?=\\[A-Za-z])")  # beside a command, which needs none
_VECTOR = re.compile(r"\\(?:vec|mathbf|overrightarrow|boldsymbol)(?![A-Za-z]).*\\(?:cdot|times)(?![A-Za-z])")
_ONE_SIGN = re.compile(r"([_^])\{(\w|[-+*])\}")

_SUCH_THAT = re.compile(r":|\\(?:mid|colon|vert)(?![A-Za-z])|\|")  # math-verify equates `\{x:x\}` with 1 and \infty
_EITHER_SIGN = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_ONE_SET = re.compile(r"[(\[]|\\mathbb|\\infty")  # an interval, a point, all numbers: not a list of two signs
_SEVERAL_VALUES = re.compile(r",|\\(?:pm|cup)(?![A-Za-z])")
_THOUSANDS = re.compile(r"\d ?\\(?:text|mathrm)\{ ?k ?\}")
_COMMANDS = re.compile(r"\\(?:text|mathrm|mathbf)\{[^{}]*\}|\\[A-Za-z]+")


def boxes(text: str) -> list[str]:
    r"""Return the contents of all \boxed{} of a text, in order, outermost only; an unclosed box is ignored."""
    opened: list[tuple[int, int] | None] = []  # for each open brace: where its box and its content begin, or no box
    closed: list[tuple[int, int, int]] = []  # start of the box, start of its content, end
    for token in _BRACES.finditer(text):
        mark = token.group()
        is_escaped = len(mark) == 2  # `\{`, `\}` and `\\` open and close nothing
        if mark.endswith("{") and not is_escaped:
            opened.append(token.span() if len(mark) > 2 else None)
        elif mark == "}" and opened:
            box = opened.pop()
            if box is None:
                continue
            while closed and closed[-1][0] > box[0]:  # boxes within this one
                closed.pop()
            closed.append((*box, token.start()))
    closed += [(match.start(), *match.span(1)) for match in _BARE.finditer(text)]
    return [text[start : min(end, start + LONGEST_ANSWER + 1)] for _, start, end in sorted(closed)]


def normal(text: str) -> str:
    """Return an answer's LaTeX in one spelling.

    Unicode's signs are commands and arguments are in braces; sizes, dollar signs, needless spaces and a final full stop
    are left out.
    """
    text = signs.as_latex(text).strip()
    while match := _NESTED.fullmatch(text):
        text = match[1]
    for pattern, spelling in _FIRST_SPELLINGS:
        text = pattern.sub(spelling, text)
    if _HAS_ARGUMENTS.search(text):
        text = arguments.in_braces(text)
    for pattern, spelling in _LAST_SPELLINGS:
        text = pattern.sub(spelling, text)
    return text.strip().rstrip(".,;:").strip()


def same(gold: str, stated: str) -> bool | None:
    """Return whether two normal texts are equal, as far as texts and plain numbers decide; None leaves it to algebra.

    These rules precede math-verify's where those err: it drops the base of `52_8`, confuses `R` with `r`, adds up two
    adjacent numbers, and accepts `[15,-29]` or a set for the point `(15,-29)`.
    """
    plainly = _same_plainly(gold, stated)
    if plainly is not None:
        return plainly
    bare_gold, bare_stated = without_units(gold, stated)
    if (bare_gold, bare_stated) != (gold, stated):
        return same(bare_gold, bare_stated)
    if _adds_or_retracts(gold, stated) or not _comparable(gold, stated):
        return False

    sides = claims(gold, stated)
    if len(sides) < 2:
        return None
    verdicts = [same(gold, side) for side in sides]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def without_units(gold: str, stated: str) -> tuple[str, str]:
    r"""Return two normal answers without units that do not matter, and without a `\%` that both have."""
    gold, stated = units.dropped(gold, stated)
    if _PERCENTAGE.fullmatch(gold) and _PERCENTAGE.fullmatch(stated):
        return gold[:-2], stated[:-2]
    return gold, stated


def claims(gold: str, stated: str) -> list[str]:
    """Return the texts that must all equal the gold answer: the answer, or each numeric side of equations (`17=18`)."""
    if "=" in gold or "=" not in stated:
        return [stated]
    with_digits = [side for side in stated.split("=") if re.search(r"\d", side)]
    sides = [side for side in with_digits if not re.search(r"[A-Za-z]", _COMMANDS.sub("", side))]
    return sides if len(sides) > 1 else [stated]


def _same_plainly(gold: str, stated: str) -> bool | None:
    """Return whether two answers are equal if they are the same text, or numbers or words; None for others."""
    if gold == stated or _tight(gold) == _tight(stated):
        return True
    gold_number = _number(gold)
    stated_number = _number(stated)
    if gold_number is not None and stated_number is not None:
        return gold_number == stated_number
    by_value = _same_value(gold, stated)
    if by_value is not None:
        return by_value
    gold_base = _BASED.fullmatch(gold)
    stated_base = _BASED.fullmatch(stated)
    if gold_base or stated_base:
        return _same_in_base(gold, stated, gold_base, stated_base)
    words = _words(gold)
    return words == _squeezed(stated) if words else None


def _tight(text: str) -> str:
    """Return an answer without spaces and braces that TeX ignores, but for those between digits or letters."""
    text = text.replace(r"\mid ", "|").replace(r"\mid", "|")
    return _ONE_SIGN.sub(r"\1\2", _SPACE_OF_TEX.sub(r"\1", text))


def _same_value(gold: str, stated: str) -> bool | None:
    """Return whether two answers are the same time, or numbers of which one is a repeating decimal or an angle.

    None for others. A decimal may approximate a number, so one that differs is left to algebra, as fractions are.
    """
    gold_time = values.clock_time(gold)
    stated_time = values.clock_time(stated)
    if gold_time and gold_time.has_half and not stated_time:  # `5` for `5 p.m.`, as a unit may be left out
        stated_time = values.whole_hour(stated)
    if gold_time and stated_time:
        return gold_time.accepts(stated_time)
    if (gold_time and gold_time.has_half) or (stated_time and stated_time.has_half):
        return False

    if not (values.is_exact_decimal(gold) or values.is_exact_decimal(stated)):
        return None
    gold_value = values.exact_value(gold)
    stated_value = values.exact_value(stated)
    if gold_value is not None and stated_value is not None:
        return gold_value == stated_value
    return None


def _adds_or_retracts(gold: str, stated: str) -> bool:
    r"""Return whether an answer retracts itself or says more than one thing.

    Examples: `18\text{ is wrong}`, `18\text{ or 19}`, `17\approx18`, `1,1,2`, `\{x:x\}`.
    """
    if any(mark.search(stated) and not mark.search(gold) for mark in (_ABOUT, _SUCH_THAT, _THOUSANDS)):
        return True
    if _EITHER_SIGN.search(stated) and not _EITHER_SIGN.search(gold) and _ONE_SET.search(gold):
        return True
    new_words = set(_plain_words(stated)) - set(_plain_words(gold))
    if any(_RETRACTS.fullmatch(word) for word in new_words):
        return True
    if "or" in new_words and not _SEVERAL_VALUES.search(gold):
        return True
    return _brackets(stated) is None and _repeats(stated) and not _repeats(gold)


def _plain_words(text: str) -> list[str]:
    return re.findall(r"[a-z']{2,}", re.sub(r"\\[A-Za-z]+", " ", text).lower())


def _repeats(text: str) -> bool:
    """Return whether a list has an item twice."""
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", _WRAPPED.sub(r" \1 ", text))  # `1,000,000` is not a list
    items = [item.strip() for item in _SEPARATOR.split(plain)]
    values = [_number(item) or item for item in items if item]
    return len(set(values)) < len(values)


def _comparable(gold: str, stated: str) -> bool:
    """Return whether math-verify can compare them; it misreads adjacent numbers, which are neither sum nor product."""
    if _SIDE_BY_SIDE.search(stated) or _SIDE_BY_SIDE.search(gold) or units.end_in_another_variable(gold, stated):
        return False
    if _VECTOR.search(gold) and _products(gold) != _products(stated):
        return False
    if not _same_case(gold, stated) or _primed(gold) != _primed(stated):
        return False
    gold_brackets = _brackets(gold)
    stated_brackets = _brackets(stated)
    return gold_brackets is None or stated_brackets is None or gold_brackets == stated_brackets


def _products(text: str) -> tuple[int, int]:
    """Return how many dot and cross products a formula of vectors has; math-verify takes both for multiplication."""
    return text.count(r"\cdot"), text.count(r"\times")


def _number(text: str) -> Fraction | None:
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return Fraction(text) if _DECIMAL.fullmatch(text) else None


def _same_in_base(gold: str, stated: str, gold_base: re.Match | None, stated_base: re.Match | None) -> bool:
    """Compare `52_8` with itself or its bare digits; bare digits are base ten if only the other answer has a base."""
    if gold_base and stated_base:
        return int(gold_base[2]) == int(stated_base[2]) and gold_base[1].lower() == stated_base[1].lower()
    if gold_base:
        return stated.lower() == gold_base[1].lower()
    return int(stated_base[2]) == 10 and stated_base[1] == gold


def _words(text: str) -> str | None:
    r"""Return the letters of an answer in words (`\text{Evelyn}`, `\text{(C)}`, `no solution`), None for others."""
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped and not re.search(r"\d", wrapped[1]):
        return _squeezed(wrapped[1])
    return _squeezed(text) if _WORD.fullmatch(text) else None


def _squeezed(text: str) -> str:
    return re.sub(r"[\s()'\"]", "", _WRAPPED.sub(r"\1", text)).casefold()


def _same_case(gold: str, stated: str) -> bool:
    """Return False if letters differ only in case (`3R^2`, `3r^2`), or if the gold answer has one in both cases."""
    gold_letters = _letters(gold)
    stated_letters = _letters(stated)
    gold_lower = {letter.lower() for letter in gold_letters}
    stated_lower = {letter.lower() for letter in stated_letters}
    if len(gold) > 1 and len(gold_lower) < len(gold_letters):
        return False
    return len(gold) == 1 or gold_lower != stated_lower or gold_letters == stated_letters


def _primed(text: str) -> set[str]:
    """Return the ends of an answer's names with primes: `f'(x)` has `f'`; minutes and feet are units."""
    return set(re.findall(r"[A-Za-z)}]'+", _WRAPPED.sub(" ", text)))


def _letters(text: str) -> set[str]:
    """Return the letters of an answer outside of LaTeX's commands."""
    return set(re.findall(r"[A-Za-z]", _COMMANDS.sub(" ", text)))


def _brackets(text: str) -> str | None:
    r"""Return the brackets `()`, `(]`, `{}`… around a list, interval or point; None for others, like `(a+5)(b+2)`."""
    text = text.replace(r"\{", "\x01").replace(r"\}", "\x02")
    pairs = {"(": ")", "[": "]", "\x01": "\x02"}
    if len(text) < 3 or text[0] not in pairs or text[-1] not in pairs.values():
        return None
    depth = 0
    has_comma = False
    for index, letter in enumerate(text):
        depth += letter in pairs
        depth -= letter in pairs.values()
        if letter == "," and depth == 1:
            has_comma = True
        if depth == 0 and index < len(text) - 1:  # the first bracket closes before the end
            return None
    return text[0] + text[-1] if has_comma and depth == 0 else None
