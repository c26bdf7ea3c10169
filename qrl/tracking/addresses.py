"""Where the address of a model or an adapter leads: the store, a folder, or the hub."""

from __future__ import annotations

from pathlib import Path

from qrl import names, source
from qrl.tracking import contents, models, store


def folder(address: str) -> Path:
    """The folder of a model or an adapter: `models:/…` and `runs:/RUN/PATH` in place, else as `source.locate` finds it.

    Raises:
        BadInput: nothing is there, or the store cannot be used.
    """
    if not address.startswith(("models:/", "runs:/")):
        return source.locate(address)
    store.prepare()
    if address.startswith("models:/"):
        return models.local_path(address)
    run_id, _, path = address.removeprefix("runs:/").partition("/")
    return contents.artifact(run_id, path)


def scheme(address: str) -> str | None:
    """The scheme that `quantize` stored a model of the store under; None for models that it did not make, and for other addresses."""
    if not address.startswith("models:/m-"):
        return None
    found = models.params(address)
    return names.scheme(found["scheme"]) if names.SETTINGS in found else None
