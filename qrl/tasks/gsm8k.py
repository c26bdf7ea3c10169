"""GSM8K from the hub (Cobbe et al., arXiv 2110.14168): 7,473 training and 1,319 test questions."""

from qrl.errors import BadInput
from qrl.tasks import jsonl
from qrl.tasks.question import Question

HUB, CONFIG = "openai/gsm8k", "main"


def load(split: str, n: int | None, seed: int) -> list[Question]:
    """A seeded subset of a split, or all of it; the held-out split is the hub's `test`.

    Raises:
        BadInput: the hub cannot be reached.
    """
    import datasets

    name = "test" if split == "heldout" else "train"
    try:
        table = datasets.load_dataset(HUB, CONFIG, split=name)
    except Exception as error:  # a dozen kinds, by network, proxy and cache: the way out is the same for all
        raise BadInput(
            f"{HUB} could not be loaded from the hub ({type(error).__name__}): "
            "connect to it, or name a folder with train.jsonl and test.jsonl as data."
        ) from error
    rows = ((f"{HUB} {name}, row {index}", row) for index, row in enumerate(table))
    return jsonl.subset(jsonl.questions("gsm8k", split, rows), n, seed, f"{HUB} {name}")
