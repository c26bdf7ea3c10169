"""Prompts of the user: a YAML file with `user`, and optionally `system` and `tasks`, becomes the setting's value.

A recipe holds the contents, as JSON: they go into cache keys and every run's recipe.yaml, and the file may then change
or vanish.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.recipe import documents

SUFFIXES = (".yaml", ".yml")
LONGEST = 6000  # characters as JSON: MLflow keeps no longer param
SLOT = "{question}"
_KEYS = ("user", "system", "tasks")


def resolve(value: Any, folder: Path) -> Any:
    """Return a prompt's name as it is, and a prompt's contents, given as a file or a mapping, as JSON.

    Args:
        value: a name, the path of a YAML file, a mapping, or a mapping as text.
        folder: where relative paths begin.

    Raises:
        BadInput: the file is missing or no YAML, a key is unknown, `user` lacks `{question}`, a value has another form,
            or all is too long.
    """
    if isinstance(value, Mapping):
        return _checked(dict(value), "The prompt")
    if not isinstance(value, str):
        return value  # pydantic refuses it
    if value.lstrip().startswith("{"):
        return _checked(documents.parse(value, "The prompt"), "The prompt")
    if not value.endswith(SUFFIXES):
        return value
    path = folder / value
    title = f"The prompt file {value}"
    if not path.is_file():
        raise BadInput(
            f"There is no prompt file {path.absolute()}: expected a YAML file with `user`, a text with {SLOT}."
        )
    if path.stat().st_size > 10 * LONGEST:
        raise _too_long(title, path.stat().st_size, "bytes")
    return _checked(documents.parse(path, title), title)


def _checked(contents: dict, title: str) -> str:
    prompt = {key: value for key, value in contents.items() if value is not None}
    unknown = [str(key) for key in prompt if key not in _KEYS]
    if unknown:
        raise BadInput(
            f"{title} has the key '{unknown[0]}', but only user, system and tasks were expected: correct it."
        )
    if not isinstance(prompt.get("user"), str) or SLOT not in prompt["user"]:
        raise BadInput(f"{title} has no `user` with {SLOT}: write a text in which {SLOT} stands for the question.")
    system = prompt.get("system", SLOT)
    tasks = prompt.get("tasks", [SLOT])
    if not isinstance(system, str) or not system.strip():
        raise BadInput(f"{title} has a `system` that is empty or no text: write a text, or leave the key out.")
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) and task.strip() for task in tasks):
        raise BadInput(f"{title} has `tasks` that are no list of names: write [gsm8k], say, or leave the key out.")
    text = json.dumps(prompt, ensure_ascii=False, sort_keys=True)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{title} has half of a surrogate pair, which is no character: remove it.") from None
    if len(text) > LONGEST:
        raise _too_long(title, len(text), "characters")
    return text


def _too_long(title: str, size: int, unit: str) -> BadInput:
    return BadInput(
        f"{title} is too long: {size:,} {unit}, but at most {LONGEST:,} characters were expected: shorten it."
    )
