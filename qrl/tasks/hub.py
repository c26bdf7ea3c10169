"""Data sets on the Hugging Face Hub."""

from collections.abc import Iterator

from qrl.errors import BadInput


def rows(name: str, config: str | None, split: str) -> Iterator[tuple[str, dict]]:
    """Return (where, row) pairs of a data set, where `where` names the row; raise BadInput if it cannot be loaded."""
    import datasets

    try:
        table = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # a dozen kinds, by network, proxy and cache; the remedy is the same for all
        raise BadInput(
            f"{name} could not be loaded from the hub ({type(error).__name__}): "
            "connect to it, or pass a folder with train.jsonl and test.jsonl as data."
        ) from error
    return ((f"{name} {config or ''} {split}, row {index}", row) for index, row in enumerate(table))
