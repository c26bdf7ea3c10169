"""What a recipe for one model sets and another model lacks: a recipe for Qwen3 can be tried on the shipped model.

Only settings of the recipe itself are replaced, each with a line that says why. What is typed stays as it is, and is
refused where it does not fit. So is everything in a recipe that names this model itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from qrl import checkpoint, source
from qrl import recipe as recipes
from qrl.errors import BadInput
from qrl.recipe import Recipe, Rollout
from qrl.recipe.sections import as_text
from qrl.study import auto


class Replacement(NamedTuple):
    """A setting of a recipe that a model lacks."""

    key: str
    text: str  # its new value, as typed
    reason: str  # what the model lacks


def replacements(name: str, overrides: dict[str, str]) -> dict[str, str]:
    """Return settings, as typed, in the place of those that a recipe itself makes and the typed model lacks; print why.

    Args:
        name: of the recipe, or its path.
        overrides: as typed; `model` is among them.

    Raises:
        BadInput: there is no such recipe, or the model is damaged.
    """
    model = overrides["model"]
    own = recipes.load(name)
    # A model of the hub is not downloaded for this, and a recipe for this very model says what it means.
    is_local = model in source.SHIPPED or Path(model).is_dir()
    if not is_local or own.model == model:
        return {}

    folder = source.locate(model)
    found = [
        *_task(own, model, overrides),
        *_template_variables(own, model, folder, overrides),
        *_machine(own, model, overrides),  # before the lengths: without vLLM its window means nothing
        *_lengths(own, folder),
        *_adapter(own, folder),
        *_teacher(own, model),
    ]
    values = own.flat()
    replaced = {}
    for key, text, reason in found:
        if key in overrides or key in replaced or values[key] == text:
            continue
        replaced[key] = text
        was = f"{key} = {values[key]} of recipe {name}, which is for {own.model}"
        click.secho(f"qrl: {was}, is left out, since {reason}: {text or 'none'} instead.", fg="yellow", err=True)
    return replaced


def _task(own: Recipe, model: str, overrides: dict[str, str]) -> list[Replacement]:
    """Replace task and prompt for the shipped model, which knows one task."""
    if model not in source.SHIPPED:
        return []
    from qrl.tasks import prompt

    shipped = recipes.load(recipes.default({}))
    found = []
    task = overrides.get("task", own.task)
    if task != shipped.task and not {"task", "data"} & overrides.keys():
        task = shipped.task
        reason = f"{model} knows {task} only"
        found.append(Replacement("task", task, reason))
        # Limits and selections are those of the recipe's data.
        found.append(Replacement("data", "null", reason))
        found.append(Replacement("train.max_ngram_share", "null", f"the limit is that of {own.task}"))
        for key in ("train.selection", "evaluate.selection"):
            found.append(Replacement(key, "random", f"questions of {task} are drawn"))
    try:
        prompt.check_task(task, own.prompt)
    except BadInput:
        found.append(Replacement("prompt", shipped.prompt, f"it requests another form than {task} grades"))
    return found


def _template_variables(own: Recipe, model: str, folder: Path, overrides: dict[str, str]) -> list[Replacement]:
    """Leave out variables that the model's chat template does not have."""
    kwargs = own.chat.template_kwargs
    if not kwargs or "chat.template_kwargs" in overrides:
        return []
    from qrl.engine import hf
    from qrl.tasks import prompt

    settable = prompt.settable_variables(hf.tokenizer(folder))
    if settable is None:
        return []
    known = {name: value for name, value in kwargs.items() if name in settable}
    missing = ", ".join(name for name in kwargs if name not in settable)
    return [Replacement("chat.template_kwargs", as_text(known), f"the chat template of {model} has no {missing}")]


def _lengths(own: Recipe, folder: Path) -> list[Replacement]:
    """Shorten answers that would fill all of the model's positions to half of them: a prompt needs some too."""
    positions = checkpoint.positions(folder)
    if not positions:
        return []
    reason = f"the model has {positions:,} positions"
    answers = {
        "train.max_completion_tokens": own.train.max_completion_tokens,
        "evaluate.max_new_tokens": own.evaluate.max_new_tokens,
    }
    found = [Replacement(key, str(positions // 2), reason) for key, tokens in answers.items() if tokens >= positions]
    if (own.rollout.max_model_tokens or 0) > positions:
        found.append(Replacement("rollout.max_model_tokens", str(positions), reason))
    return found


def _adapter(own: Recipe, folder: Path) -> list[Replacement]:
    """Extend all linears instead of those that the model does not have."""
    if not own.train.lora_targets:
        return []
    from qrl.train import policy

    leaves = policy.linear_names(checkpoint.entries(folder))
    missing = [target for target in own.train.lora_targets if target.rpartition(".")[2] not in leaves]
    if not missing:
        return []
    return [Replacement("train.lora_targets", ",".join(leaves), f"the model has no linear {missing[0]}")]


def _teacher(own: Recipe, model: str) -> list[Replacement]:
    """Let a model be its own teacher where the recipe's model is, of another family maybe, and not at hand."""
    if own.train.teacher != own.model or own.train.teacher in source.SHIPPED:
        return []
    return [Replacement("train.teacher", model, "there the model teaches itself")]


def _machine(own: Recipe, model: str, overrides: dict[str, str]) -> list[Replacement]:
    """Sample with transformers and train in one process where a recipe for GPUs is tried with the shipped model."""
    needs_gpu = own.rollout.engine == "vllm" or own.train.parallel != "none"
    is_typed = any(key.startswith("rollout.") or key == "train.parallel" for key in overrides)
    if model not in source.SHIPPED or not needs_gpu or is_typed:
        return []
    if auto.device_of(overrides.get("device", own.device)) != "cpu":
        return []
    reason = "there is no GPU here"
    usual = Recipe(rollout=Rollout()).flat()
    found = [Replacement(key, usual[key], reason) for key in usual if key.startswith("rollout.")]
    found.append(Replacement("train.parallel", "none", reason))
    return found
