"""What verl calls for each completion: qrl's own rewards, weighted and summed. It runs in verl's reward workers.

verl imports this module by the name in its configuration (`translate.REWARD`) and calls `compute_score` by keyword, so
the arguments have verl's names.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from qrl.recipe import reward_name
from qrl.tasks.thinking import Tags
from qrl.train import reward

_one_at_a_time = threading.Lock()  # verl calls from many threads, and the graders' pool of processes is shared


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    task: str,
    rewards: Sequence[str],
    weights: Sequence[float],
    thinking_tags: Sequence[Sequence[str]],
    thinking_begun: bool,
    **_: Any,
) -> dict[str, float]:
    """Return a completion's reward as verl expects it: `score`, and each reward by its name.

    Args:
        data_source: the task's label; not read, since `task` may be a file.
        solution_str: the completion, without special tokens.
        ground_truth: the gold answer.
        extra_info: holds `question`.
        task, rewards, weights: the recipe's, from verl's `reward_kwargs`.
        thinking_tags, thinking_begun: the fields of `Tags`, for the model and its prompts.

    Raises:
        QrlError: a reward of the user's failed.
    """
    batch = {"completions": [solution_str], "answer": [ground_truth], "question": [extra_info["question"]]}
    tags = Tags(tuple((opening, closing) for opening, closing in thinking_tags), thinking_begun)
    with _one_at_a_time:
        values = [function(**batch)[0] for function in reward.functions(task, list(rewards), tags=tags)]
    score = sum(value * weight for value, weight in zip(values, weights, strict=True))
    by_name = dict(zip(map(reward_name, rewards), values, strict=True))
    return {"score": score, **by_name}
