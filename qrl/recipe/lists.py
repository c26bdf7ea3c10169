"""Lists in options: items separated by commas, NAME=VALUE pairs, and the cells `VARIANT:SCHEME` that they name."""

import re

from qrl import names
from qrl.errors import BadInput

_VARIANT = re.compile(r"\w[\w.+-]{0,99}")


def parse_list(label: str, text: str) -> list[str]:
    """Return the items of a comma-separated list; spaces and a trailing comma, as copying leaves them, are ignored.

    Args:
        label: how errors call the list, such as `--stage`.
        text: the list.

    Raises:
        BadInput: there is no item.
    """
    items = [part.strip() for part in text.split(",") if part.strip()]
    if not items:
        raise BadInput(f"{label} is '{text}', which names nothing: give one name, or several by comma.")
    return items


def parse_pairs(label: str, text: str, value: str = "VALUE") -> dict[str, str]:
    """Return `a=x,b=y` as a mapping.

    Args:
        label: how errors call the list, such as `--columns`.
        text: the list.
        value: what errors call the part after `=`.

    Raises:
        BadInput: there is no item, an item has no name or no value, or a name is repeated.
    """
    pairs: dict[str, str] = {}
    for item in parse_list(label, text):
        name, _, item_value = (part.strip() for part in item.partition("="))
        if not (name and item_value):
            raise BadInput(f"{label} has the item '{item}': expected NAME={value}, several by comma.")
        if name in pairs:
            raise BadInput(f"{label} is '{text}', which repeats a name: give each name once.")
        pairs[name] = item_value
    return pairs


def parse_cell(text: str) -> tuple[str, str]:
    """Return variant and scheme of `variant:scheme`.

    Raises:
        BadInput: the scheme is missing or unknown, or the variant cannot be a name.
    """
    variant, colon, typed_scheme = text.partition(":")
    if not colon:
        raise BadInput(f"'{text}' is not a cell: expected VARIANT:SCHEME, such as base:full or grpo:awq.")
    scheme = names.scheme(typed_scheme)
    if names.stored(scheme) not in names.SCHEMES:
        expected = f"expected one of {', '.join(names.SCHEMES)}, under vLLM perhaps with {names.KV_FP8} at its end"
        raise BadInput(f"There is no scheme '{typed_scheme}'{names.scheme_hint(typed_scheme)}: {expected}.")
    return check_variant(variant), scheme


def check_variant(variant: str) -> str:
    """Return the variant; raise BadInput if it cannot be part of a metric's, a column's and a folder's name."""
    if not _VARIANT.fullmatch(variant):
        raise BadInput(
            f"'{variant}' is no name for a variant: expected up to 100 letters, digits and . _ + -, as in base."
        )
    return variant
