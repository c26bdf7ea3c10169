r"""Unicode's mathematical signs as LaTeX: `√3` as `\sqrt{3}`, `x²` as `x^{2}`, `½` as `\frac{1}{2}`, `（` as `(`.

Which characters are superscripts, subscripts, fractions, full-width or styled letters is read from Unicode's own
decompositions, so there is no list of them here. Digits of other scripts are not read.
"""

import re
import unicodedata
from functools import lru_cache
from itertools import groupby

_SIGNS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-")  # minus, hyphens, en dash
    | dict.fromkeys("\u2032\u2019\u02b9\uff07", "'")
    | {"\u2033": "''", "\u2034": "'''"}
    | dict.fromkeys("\u2044\u2215\u00f7", "/")
    | dict.fromkeys("\u00b7\u22c5\u2219\u2022", r"\cdot ")
    | {"\u00d7": r"\times ", "\u2217": "*", "\u2236": ":", "\u2223": "|", "\u00b1": r"\pm ", "\u2213": r"\mp "}
    | dict.fromkeys("\u00b0\u00ba\u02da", r"^\circ ")
    | {"\u2264": r"\le ", "\u2265": r"\ge ", "\u2a7d": r"\le ", "\u2a7e": r"\ge ", "\u2260": r"\ne "}
    | {"\u2248": r"\approx ", "\u2261": r"\equiv ", "\u2245": r"\cong ", "\u2192": r"\to ", "\u221e": r"\infty "}
    | {"\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2209": r"\notin ", "\u2216": r"\setminus "}
    | {"\u2282": r"\subset ", "\u2286": r"\subseteq ", "\u2205": r"\emptyset ", "\u2300": r"\emptyset "}
    | {"\u2220": r"\angle ", "\u25b3": r"\triangle ", "\u2211": r"\sum ", "\u222b": r"\int ", "\u2202": r"\partial "}
    | {
        "\u2026": r"\ldots ",
        "\u22ef": r"\cdots ",
        "\u2225": r"\|",
        "\u2016": r"\|",
        "\u2113": r"\ell ",
        "\u210f": r"\hbar ",
    }
    | {
        "\u21d2": r"\Rightarrow ",
        "\u27f9": r"\Rightarrow ",
        "\u21d4": r"\iff ",
        "\u27fa": r"\iff ",
        "\u22a5": r"\perp ",
    }
    | {"\u2227": r"\land ", "\u2228": r"\lor ", "\u00ac": r"\neg ", "\u2200": r"\forall ", "\u2203": r"\exists "}
    | {"\u220f": r"\prod ", "\u222e": r"\oint ", "\u2295": r"\oplus ", "\u2297": r"\otimes ", "\u2224": r"\nmid "}
    | {"\u21a6": r"\mapsto ", "\u2190": r"\leftarrow ", "\u2194": r"\leftrightarrow ", "\u21d0": r"\Leftarrow "}
    | {"\u2191": r"\uparrow ", "\u2193": r"\downarrow ", "\u226a": r"\ll ", "\u226b": r"\gg ", "\u221d": r"\propto "}
    | {"\u2283": r"\supset ", "\u2287": r"\supseteq ", "\u228a": r"\subsetneq ", "\u2284": r"\not\subset "}
    | {"\u223c": r"\sim ", "\u2243": r"\simeq ", "\u2218": r"\circ ", "\u25e6": r"\circ ", "\u2204": r"\nexists "}
    | {"\u22c2": r"\bigcap ", "\u22c3": r"\bigcup ", "\u2235": r"\because ", "\u2135": r"\aleph "}
    | {"\u211c": r"\Re ", "\u2111": r"\Im ", "\u2715": r"\times ", "\u2a2f": r"\times "}
    | {"\u2207": r"\nabla ", "\u2234": r"\therefore ", "\u27c2": r"\perp ", "\u2266": r"\le ", "\u2267": r"\ge "}
    | {"\u230a": r"\lfloor ", "\u230b": r"\rfloor ", "\u2308": r"\lceil ", "\u2309": r"\rceil "}
    | dict.fromkeys("\u27e8\u2329\u3008", "(")
    | dict.fromkeys("\u27e9\u232a\u3009", ")")
    | {char: rf"\mathbb{{{letter}}}" for char, letter in zip("\u2115\u2124\u211a\u211d\u2102", "NZQRC", strict=True)}
    | {"\u3001": ",", "\u3002": ".", "\uff05": r"\%", "\uff04": r"\$", "\uff5b": r"\{", "\uff5d": r"\}"}
)
_SECONDS = re.compile(r"(?<=\d)\s?\u201d")  # 20”
_PARALLEL = re.compile("[^\u2225]+\u2225[^\u2225]+")  # `AB ∥ CD`; two signs are a norm
_DEGREE_RING = re.compile(r"(?<=\d)\s?[\u2218\u1d52]|\^\s?\u2218")  # `90∘` and `90ᵒ`; elsewhere `f∘g` composes

_GREEK = re.compile("[\u00b5\u0370-\u03ff]")
_GREEK_NAME = re.compile(r"(?:GREEK (?:(SMALL|CAPITAL) LETTER |LUNATE )?|MICRO SIGN)(\w*)(?: SYMBOL)?")
_GREEK_COMMANDS = {
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
    "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega",
}  # fmt: skip

_VINCULUM = "\u0304\u0305"  # combining macron and overline: a bar over the character before them
_ROOT_BAR = re.compile(rf"([\u221a-\u221c])((?:[^\s{_VINCULUM}][{_VINCULUM}])+)")
_REPEATING = re.compile(rf"(?:[0-9][{_VINCULUM}])+")
_ACCENTS = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar", "\u0305": "overline", "\u0307": "dot", "\u20d7": "vec"}
_ACCENTED = re.compile("|".join(f"(?:[^\\W_]{mark})+" for mark in _ACCENTS))
_LONE_LETTER = re.compile(r"(?<![^\W\d_])[^\W\d_](?![^\W\d_])")
_BARS = str.maketrans("", "", _VINCULUM)
_SLASHED_SCRIPTS = re.compile(r"\^\{(\d+)\}/_\{(\d+)\}")  # ¹⁄₂
_MIXED = re.compile(r"(?<![0-9.,^_])([0-9]{1,18}) ?\\frac\{([0-9]{1,18})\}\{([0-9]{1,18})\}")  # 1½, also in `1½x`
_POWER_OF_UNIT = re.compile(r"(?<=m)([23])\Z")  # ㎠
_POWER_OF_POWER = re.compile(r"\^(\w)\^(\{[^{}]*\})")  # e^x²

_ROOT = re.compile(r"(?:(?<![\w)}\]'])\^\{(\w+)\})?([\u221a-\u221c])\s*")
_ROOT_INDEX = {"\u221a": "", "\u221b": "[3]", "\u221c": "[4]"}
_CLOSING = {"(": ")", "{": "}"}
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\[[^\[\]]*\])?")
_SCRIPTS = re.compile(r"(?:[_^](?:\{[^{}]*\}|\w))*")


def as_latex(text: str) -> str:
    """Return an answer with Unicode's mathematical signs written as LaTeX; other characters stay."""
    if text.isascii():
        return text
    if text.strip() == "\u00d8":  # Ø, which also begins names
        return r"\emptyset"
    text = "".join(char for char in text if unicodedata.category(char) != "Cf")  # invisible ones
    text = _LONE_LETTER.sub(lambda match: unicodedata.normalize("NFD", match[0]), text)  # `î`, but not in a name
    text = _SECONDS.sub("''", text)
    if _PARALLEL.fullmatch(text):
        text = text.replace("\u2225", r"\parallel ")
    text = _ROOT_BAR.sub(lambda match: f"{match[1]}({match[2].translate(_BARS)})", text)
    text = _REPEATING.sub(lambda match: rf"\overline{{{match[0].translate(_BARS)}}}", text)
    text = _ACCENTED.sub(lambda match: rf"\{_ACCENTS[match[0][1]]}{{{match[0][::2]}}}", text)
    text = _DEGREE_RING.sub(r"^\\circ ", text).translate(_SIGNS)
    text = "".join(_decomposed(kind, "".join(chars)) for kind, chars in groupby(text, _kind))
    text = _GREEK.sub(lambda match: _greek(match[0]), text)
    text = _SLASHED_SCRIPTS.sub(r"\\frac{\1}{\2}", text)
    text = _MIXED.sub(_improper, text)
    text = _POWER_OF_POWER.sub(r"^{\1^\2}", text)
    return _with_roots(text)


@lru_cache(maxsize=4096)
def _kind(char: str) -> str:
    """Return how Unicode derives a character from others: "super", "sub", "fraction", "square"…; "" for others."""
    tag, mark, _ = unicodedata.decomposition(char).partition(">")
    return tag[1:] if mark else ""


def _decomposed(kind: str, run: str) -> str:
    """Return a run of characters of one kind in plain ones."""
    if kind not in ("super", "sub", "fraction", "wide", "narrow", "small", "font", "compat", "square", "circle"):
        return run
    if kind == "square":  # units and functions: ㎠, ㏑
        return "".join(_POWER_OF_UNIT.sub(r"^\1", unicodedata.normalize("NFKC", char)) for char in run)
    if kind == "fraction":
        return "".join(_fraction(char) for char in run)
    plain = unicodedata.normalize("NFKC", run).translate(_SIGNS)
    if kind == "small":  # ﹛ is written, { is not
        plain = re.sub(r"[{}%$]", r"\\\g<0>", plain)
    if kind == "super":
        return f"^{{{plain}}}"
    return f"_{{{plain}}}" if kind == "sub" else plain


def _fraction(char: str) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", char).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}" if denominator else char


def _improper(match: re.Match) -> str:
    """Return a mixed number as one fraction; a fraction of one or more after a number is left as it is."""
    whole, numerator, denominator = (int(part) for part in match.groups())
    if numerator >= denominator:
        return match[0]
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


@lru_cache(maxsize=256)
def _greek(char: str) -> str:
    r"""Return a Greek letter's command, such as `\theta `, or the letter itself where LaTeX has none."""
    match = _GREEK_NAME.fullmatch(unicodedata.name(char, ""))
    if match is None:
        return char
    name = (match[2] or "mu").lower().replace("lamda", "lambda")
    if match[1] == "CAPITAL":
        name = name.capitalize()
    return f"\\{name} " if name in _GREEK_COMMANDS else char


def _with_roots(text: str) -> str:
    r"""Return a text with each root sign and what it covers as `\sqrt{…}`; a sign that covers nothing stays.

    A root covers brackets, or one number, letter or command with its indices and powers: `√2x` is `\sqrt{2}x`.
    """
    for match in reversed(list(_ROOT.finditer(text))):  # the last one first: `√√2`
        radicand, end = _radicand(text, match.end())
        if radicand:
            index = f"[{match[1]}]" if match[1] else _ROOT_INDEX[match[2]]
            text = f"{text[: match.start()]}\\sqrt{index}{{{radicand}}}{text[end:]}"
    return text


def _radicand(text: str, start: int) -> tuple[str, int]:
    """Return what the root before `start` covers, and where that ends; an empty text if it covers nothing."""
    first = text[start : start + 1]
    if first in _CLOSING:
        end = _after_closing(text, start)
        return text[start + 1 : end - 1], end
    if first == "|":
        end = text.find("|", start + 1) + 1
        return (text[start:end], end) if end else ("", start)
    if first == "-":
        radicand, end = _radicand(text, start + 1) if text[start + 1 : start + 2] != "-" else ("", start)
        return (f"-{radicand}", end) if radicand else ("", start)

    command = _COMMAND.match(text, start)
    number = _NUMBER.match(text, start)
    end = start
    if command:
        end = command.end()
        while text[end : end + 1] == "{":
            end = _after_closing(text, end)
    elif number:
        end = number.end()
    elif first.isalpha():
        end = start + 1
    if end > start:
        end = _SCRIPTS.match(text, end).end()
    return text[start:end], end


def _after_closing(text: str, start: int) -> int:
    """Return the position behind the bracket that closes the one at `start`, or the text's end."""
    opening = text[start]
    depth = 0
    for position in range(start, len(text)):
        depth += text[position] == opening
        depth -= text[position] == _CLOSING[opening]
        if depth == 0:
            return position + 1
    return len(text) + 1
