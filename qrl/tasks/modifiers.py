r"""Words and signs beside a number that modify it: `18x`, `18 thousand`, `half of 18`, `x - 18`.

A line `#### 18 km` states 18. `#### 18 squared` states another number, which the grader does not compute: the answer is
ambiguous and earns nothing. The words are listed, so that a unit modifies nothing. A rule matches the text before the
number or after it; its comment gives examples.
"""

import re

from qrl.tasks.number import span

_UNKNOWN = r"(?<![^\W_])[b-hj-z](?![^\W_])"  # a single letter; neither the article `a` nor `I`
_COUNT = (
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:a\s)?(?:half|quarter|third|dozen|hundred))\b"
)
_PART = r"(?:hal(?:f|ves)|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten)ths?)"
_LARGE = r"(?:tens|(?:hundred|thousand|million)(?:s|ths?)?|thou|(?:m|b|tr)illions?|[mb]il|lakhs?|crores?)"
_FUNCTION = r"(?:log|ln|lg|exp|(?:arc)?(?:sin|cos|tan)h?|cot|sqrt|cbrt)"
_OPENED = r"[\s(\[{*_$€£¥₹`\"'-]*$"  # between a word and its number, including a sign
_CLOSED = r"^[\s)\]{}*_$€£¥₹`\"']*"

_BEFORE = (
    rf"(?:[×÷·^]|\\(?:times|cdot|div)){_OPENED}",  # ×18, x^18
    rf"[^\W_]\s*\+{_OPENED}",  # tax + 18
    rf"(?:[^\W\d]\s*|[)\]])/{_OPENED}",  # x / 18
    r"[^\W_]_\{?\s*$",  # x_18
    rf"(?:{_UNKNOWN}\s*[-*]|{_COUNT}\s+-)[\s(\[{{$]*$",  # x - 18, one - 18
    r"(?<![^\W_])[a-z]\([\s$-]*$",  # f(18)
    rf"(?<![a-z]){_FUNCTION}{_OPENED}",  # log(18), sin 18
    rf"\b(?:{_PART}|squares?|cubes?|roots?|factorial|logarithm|reciprocal|inverse|double|triple|percent)"
    rf"\s+of\s{_OPENED}",  # half of 18
    rf"\b(?:half|twice|thrice|double|triple|times|not|{_LARGE}(?:\s+and)?)[\s-]{_OPENED}",  # twice 18, a hundred and 18
    rf"[^\W_]\s+plus\s{_OPENED}",  # one plus 18
    rf"(?:{_UNKNOWN}|{_COUNT})\s+minus\s{_OPENED}",  # x minus 18; `minus 18` alone is a sign
)
_AFTER = (
    r"^[)\]}*$]{0,3}[ \t]?(?:[xyzπ]|(?-i:[MB]))(?!\.?[^\W_])",  # 18x, $18M
    r"^[)\]}*$]{0,3}(?:[kin]|bn|mn)(?!\.?[^\W_])",  # 18k, 18i
    r"^[)\]}*$\s]*!",  # 18!
    r"\\(?:times|cdot|div)",  # 18 \times x
    rf"{_CLOSED}[+×÷·^][\s(\[{{*_$-]*[^\W_]",  # 18 + tax, 18^x
    r"^\s+\*\s+[^\W_]",  # 18 * x; `*18* eggs` is Markdown
    rf"{_CLOSED}[-*]\s*(?:{_UNKNOWN}|{_COUNT})",  # 18 - x, 18 - one
    rf"{_CLOSED}/\s*(?:[xyzn](?![^\W_])|{_COUNT})",  # 18/x; `18/hour` is a unit
    rf"{_CLOSED}-?\s*{_LARGE}\b",  # 18 thousand
    r"\b(?:plus|minus|divided|multiplied|squared|cubed|power|raised|increased|decreased|reduced|factorial"
    r"|halved|doubled|tripled|mod|modulo)\b",  # 18 squared
    rf"\b(?:times|less|and|or|to|over|point|add)[\s-]+{_COUNT}",  # 18 less one, 18 or nineteen, 18 and a half
    rf"\band[\s-]+(?:an?|{_COUNT})[\s-]+{_PART}\b",  # 18 and three quarters
)
_BEFORE_RULES = [re.compile(rule, re.IGNORECASE) for rule in _BEFORE]
_AFTER_RULES = [re.compile(rule, re.IGNORECASE) for rule in _AFTER]
_MAY_MODIFY = re.compile(r"[^\W\d_]|[-+×÷·^/*!\\]")  # most lines have none of these, which is quick to check


def is_modified(side: str) -> bool:
    """Return whether something modifies the number of a tidied answer line, or of one side of its equation."""
    if not _MAY_MODIFY.search(side):
        return False
    start, end = span(side)
    text_before = side[:start]
    text_after = side[end:]
    if any(rule.search(text_before) for rule in _BEFORE_RULES):
        return True
    return any(rule.search(text_after) for rule in _AFTER_RULES)
