"""The spelling of `quantize.layers` and `train.qat_layers`: which linears are stored in few bits, and in which format.

A plan is a list of terms. None: all linears but the output head, in the scheme's own format. What the terms match in a
model is decided by `qrl.formats.layers`; here is only what can be said without one.

    mlp                 only these: several such terms add up
    -first:2, -last:2   not these: they stay in full precision, whatever other terms say
    down_proj=int8      these in another format, whatever terms without a format say; the first that matches decides
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from qrl import names
from qrl.recipe.base import once

ATTENTION, MLP = "attention", "mlp"
FIRST, LAST = "first", "last"
REGEX = "re:"
FULL = "full"  # in a mapping: the pattern stays in full precision
OWN = "own"  # in a mapping: the scheme's own format
# Formats that a term may name: those that need no calibration, for all linears that they are given.
FORMATS = tuple(name for name in names.FORMATS if name not in ("int8-attention", *names.CALIBRATED_FORMATS))
SPELLING = "mlp, attention, first:N, last:N, a name such as down_proj or layers.3, or re:PATTERN"
_ENDS = re.compile(rf"({FIRST}|{LAST}):([1-9]\d{{0,3}})")
_NAME = re.compile(r"\w+(\.\w+)*")
_SHELL_PATTERN = re.compile(r"[\w.*?\[\]-]*[*?\[][\w.*?\[\]-]*")
_LONGEST_SLUG = 40


@dataclass(frozen=True)
class Term:
    """One term of a plan."""

    text: str  # as typed
    pattern: str  # what it matches
    is_left_out: bool = False
    format: str | None = None  # other than the scheme's own

    @property
    def blocks(self) -> tuple[str, int] | None:
        """`first` or `last`, and a number of decoder blocks; None for other patterns."""
        ends = _ENDS.fullmatch(self.pattern)
        return (ends[1], int(ends[2])) if ends else None


def parse(text: str) -> Term:
    """Return a term; raise ValueError, as a pydantic validator does, if it cannot be one."""
    is_left_out = text.startswith("-")
    pattern, equals, format_name = text.removeprefix("-").partition("=")
    if text.startswith("-") and equals:
        raise ValueError(f"'{text}' leaves linears out and gives them a format: choose one")
    if equals and format_name not in FORMATS:
        raise ValueError(
            f"the format of '{text}' must be one of {', '.join(FORMATS)}, or {FULL}; one that calibrates activations "
            "can only be the scheme's own"
        )
    _check_pattern(text, pattern)
    return Term(text, pattern, is_left_out, format_name or None)


def _check_pattern(text: str, pattern: str) -> None:
    if pattern.startswith(REGEX):
        try:
            re.compile(pattern.removeprefix(REGEX))
        except re.error as error:
            raise ValueError(f"'{text}' is no regular expression ({error})") from None
        if pattern == REGEX:
            raise ValueError(f"'{text}' is without a pattern: give a regular expression after {REGEX}")
        return
    if not _ENDS.fullmatch(pattern) and not _NAME.fullmatch(pattern):
        raise ValueError(
            f"a term must be {SPELLING}, with - before it or =FORMAT after it, not '{text}'{_regex_hint(pattern)}"
        )


def _regex_hint(pattern: str) -> str:
    """Return what a shell's pattern with `*` is as a regular expression; empty for other patterns."""
    if not _SHELL_PATTERN.fullmatch(pattern):
        return ""
    expression = pattern.replace(".", r"\.").replace("*", ".*").replace("?", ".")
    if pattern.startswith(".*"):
        expression = pattern
    elif not expression.startswith((".*", "model")):
        expression = f".*{expression}"
    return f"; as a regular expression it is {REGEX}{expression}"


def parse_all(terms: tuple[str, ...]) -> list[Term]:
    """Return a plan's terms."""
    return [parse(text) for text in terms]


def from_mapping(value: Any) -> Any:
    """Return a mapping of pattern → format, as YAML may write a plan, as a list of terms; other values as they are."""
    if not isinstance(value, dict):
        return value
    terms = []
    for pattern, format_name in value.items():
        if format_name == FULL:
            terms.append(f"-{pattern}")
        elif format_name == OWN:
            terms.append(str(pattern))
        else:
            terms.append(f"{pattern}={format_name}")
    return tuple(terms)


def _typed(terms: tuple[str, ...]) -> tuple[str, ...]:
    """Return terms with a format as a mapping names it, `mlp=own` or `first:2=full`, in the usual spelling."""
    usual = []
    for term in terms:
        pattern, _, format_name = term.partition("=")
        is_included = not pattern.startswith("-")
        if is_included and format_name == FULL:
            usual.append(f"-{pattern}")
        elif is_included and format_name == OWN:
            usual.append(pattern)
        else:
            usual.append(term)
    return tuple(usual)


def _check(terms: tuple[str, ...]) -> tuple[str, ...]:
    parsed = parse_all(terms)
    if any("," in term.text for term in parsed):  # a list in YAML can hold one, but a command line could not pass it on
        raise ValueError("no term may have a comma: write alternatives as re:(a|b), or as two terms")
    return terms


# The type of a recipe's field.
Layers = Annotated[
    tuple[str, ...], BeforeValidator(from_mapping), AfterValidator(_typed), once("term"), AfterValidator(_check)
]


def text_of(terms: tuple[str, ...]) -> str:
    """Return a plan on one line, as it is typed; empty for all linears."""
    return ",".join(terms)


def has_formats(terms: tuple[str, ...]) -> bool:
    """Return whether a term names a format of its own."""
    return any(term.format for term in parse_all(terms))


def has_groups(terms: tuple[str, ...]) -> bool:
    """Return whether a term names a format in which the recipe chooses how many inputs share a scale."""
    return any(term.format in names.GROUPED_FORMATS for term in parse_all(terms))


def slug(terms: tuple[str, ...]) -> str:
    """Return a plan as a part of a variant's name: `mlp.no-first2.no-last2`; a digest for a long one or a regex."""
    import hashlib

    text = text_of(terms)
    is_plain = re.fullmatch(r"[\w.:,=-]*", text) and REGEX not in text
    if is_plain and len(text) <= _LONGEST_SLUG:
        words = [f"no-{term[1:]}" if term.startswith("-") else term for term in terms]
        return ".".join(word.replace(":", "").replace("=", "-in-") for word in words)
    return f"layers-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
