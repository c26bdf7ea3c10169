"""GSM8K from the hub (Cobbe et al., arXiv 2110.14168): 7,473 training and 1,319 test questions."""

from qrl.tasks import hub, jsonl
from qrl.tasks.question import Question

HUB, CONFIG = "openai/gsm8k", "main"


def load(split: str, n: int | None, seed: int) -> list[Question]:
    """Return all questions of a split, or a seeded subset; the held-out split is the hub's `test`."""
    rows = hub.rows(HUB, CONFIG, "test" if split == "heldout" else "train")
    return jsonl.subset(jsonl.questions("gsm8k", split, rows), n, seed, HUB)
