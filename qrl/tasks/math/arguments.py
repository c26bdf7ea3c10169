r"""TeX's arguments in braces: `\frac12`, `\frac 1 2` and `\frac{ 1 }{2}` are all `\frac{1}{2}`.

In TeX, a command's argument is a group in braces, or else the next character or command, and spaces between them are
ignored. Readers of LaTeX expect the braces. As people mean it, a command that is an argument takes its own arguments
along: `\sqrt\frac12`.
"""

import re

_NAME = re.compile(r"\\(?:([A-Za-z]+)|.?)", re.DOTALL)
_PLAIN = re.compile(r"[^\\^_{]+")
_OPTIONAL = re.compile(r"\s*\[([^\[\]]*)\]")
_GOES_ON = re.compile(r"\s+[\d.]")
_ARGUMENTS = {
    **dict.fromkeys(("frac", "binom", "dbinom", "tbinom"), 2),
    **dict.fromkeys(("sqrt", "vec", "hat", "bar", "dot", "tilde", "overline", "underline", "overrightarrow"), 1),
    **dict.fromkeys(("widehat", "widetilde", "mathbb", "mathcal", "mathbf", "boldsymbol", "bm", "pmod"), 1),
}
_WORDS = {"text", "mbox", "textbf", "textrm", "textit", "textnormal", "textsf", "mathrm", "operatorname"}  # in words
_FUNCTION = re.compile(
    r"(?<![A-Za-z])(log|ln|lg|exp|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc)(?=\s*(?:[\d_({\\^|]|[A-Za-z](?![A-Za-z])|$))"
)
_DEEPEST = 40  # groups within groups; what lies deeper stays as it is


def in_braces(text: str, depth: int = 0) -> str:
    """Return a formula with all arguments in braces and without spaces that TeX ignores beside them.

    Function names without their backslash get it where an argument follows: `log_2 3`.
    """
    if depth > _DEEPEST:
        return text
    pieces = []
    position = 0
    while position < len(text):
        piece, position = _token(text, position, depth)
        if piece[0] in "^_" and pieces:
            pieces[-1] = pieces[-1].rstrip()
        pieces.append(piece)
    return "".join(pieces)


def _token(text: str, start: int, depth: int) -> tuple[str, int]:
    """Return the token at a position with its arguments in braces, and where it ends."""
    first = text[start]
    if first == "\\":
        return _command(text, start, depth)
    if first in "^_":
        return _script(text, start, depth)
    if first == "{":
        content, end = _group(text, start)
        return f"{{{in_braces(content, depth + 1).strip()}}}", end
    plain = _PLAIN.match(text, start)
    follows = text[plain.end() : plain.end() + 1]
    # A function's name at the end of this run has its argument after it, if anything follows.
    with_functions = _FUNCTION.sub(lambda match: _function(match, bool(follows)), plain.group())
    return with_functions, plain.end()


def _function(match: re.Match, goes_on: bool) -> str:
    at_end = match.end() == len(match.string) or match.string[match.end() :].isspace()
    return match[0] if at_end and not goes_on else f"\\{match[1]}"


def _command(text: str, start: int, depth: int) -> tuple[str, int]:
    name = _NAME.match(text, start)
    end = name.end()
    if name[1] == "sqrt" and text[end : end + 1].isdigit():  # `\sqrt3`, which every reader knows
        return name[0] + text[end], end + 1
    if name[1] in _WORDS:
        opening = _after_spaces(text, end)
        if text[opening : opening + 1] != "{":
            return name[0], end
        content, end = _group(text, opening)
        return f"{name[0]}{{{content}}}", end

    piece = name[0]
    optional = _OPTIONAL.match(text, end) if name[1] == "sqrt" else None
    if optional:
        piece += f"[{optional[1].strip()}]"
        end = optional.end()
    for _ in range(_ARGUMENTS.get(name[1], 0)):
        argument, after = _argument(text, end, depth)
        if argument is None:
            break
        piece += f"{{{argument}}}"
        end = after
    if name[1] and name[1] not in _ARGUMENTS:
        opening = _after_spaces(text, end)
        end = opening if text[opening : opening + 1] == "{" else end
    return piece, end


def _argument(text: str, start: int, depth: int) -> tuple[str | None, int]:
    """Return the argument that begins at a position, without its braces, and where it ends; None without one."""
    position = _after_spaces(text, start)
    first = text[position : position + 1]
    if first in ("", "}", "&", "^", "_") or depth > _DEEPEST:
        return None, start
    if first == "{":
        content, end = _group(text, position)
        return in_braces(content, depth + 1).strip(), end
    if first == "\\":
        return _command(text, position, depth + 1)
    return first, position + 1


def _script(text: str, start: int, depth: int) -> tuple[str, int]:
    r"""Return a power or an index; in braces only where it would be read wrongly without: `x^\frac12`, `\log_2 3`."""
    argument, end = _argument(text, start + 1, depth)
    if argument is None:
        return text[start], start + 1
    was_group = text[start + 1 :].lstrip()[0] == "{"
    command = _NAME.match(argument)
    has_arguments = command is not None and command.end() < len(argument)
    if was_group or has_arguments or _GOES_ON.match(text, end):
        return f"{text[start]}{{{argument}}}", end
    return f"{text[start]}{argument}", end


def _after_spaces(text: str, start: int) -> int:
    while text[start : start + 1].isspace():
        start += 1
    return start


def _group(text: str, start: int) -> tuple[str, int]:
    """Return the content of the braces that open at a position, and where they end; all of it if they stay open."""
    depth = 0
    position = start
    while position < len(text):
        letter = text[position]
        if letter == "\\":  # `\{` opens nothing
            position += 2
            continue
        depth += letter == "{"
        depth -= letter == "}"
        position += 1
        if depth == 0:
            return text[start + 1 : position - 1], position
    return text[start + 1 :], len(text)
