"""Where the address of a model or an adapter leads: the store, a folder, or the hub."""

from pathlib import Path

from qrl import names, source
from qrl.tracking import contents, models, store


def folder(address: str) -> Path:
    """Return the folder of a model or an adapter: `models:/…`, `runs:/RUN/PATH`, or what `source.locate` finds.

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
    """Return the scheme of a model in the store that `quantize` made; None for any other address."""
    if not address.startswith("models:/m-"):
        return None
    params = models.params(address)
    return names.scheme(params["scheme"]) if names.SETTINGS in params else None
