"""The only renderer of prompts: training, calibration and evaluation use it, so all three see the same token ids.

Every function raises BadInput if the template is unknown, or if the tokenizer's chat template is missing, fails, or has
no variable of a name in `chat.template_kwargs`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qrl.errors import BadInput
from qrl.tasks import own, sandbox
from qrl.tasks.question import Question

if TYPE_CHECKING:
    from qrl.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Template:
    """The wording of a prompt."""

    user: str  # the user's turn; `{question}` is replaced by the question
    system: str | None = None  # the system's turn; None leaves it out (or to the model's own chat template)
    tasks: tuple[str, ...] | None = None  # tasks with a grader that reads the requested format; None means any task
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the model's chat template


TEMPLATES = {
    "answer-line": Template(
        "{question}\n\nReason step by step, then give the final answer on a last line of its own: #### number",
        tasks=("arithmetic", "gsm8k"),
    ),
    "boxed": Template(  # the prompt that Qwen2.5's makers use for MATH with their instruction-tuned models
        "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
        tasks=("math", "deepmath"),
    ),
    "plain": Template("{question}"),  # for a model trained to answer in the format without an instruction
}


def of(recipe: Recipe) -> Template:
    """Return a recipe's prompt with its `chat.template_kwargs`."""
    return replace(resolve(recipe.prompt), kwargs=recipe.chat.template_kwargs)


def resolve(template: str | Template) -> Template:
    """Return the template of a name, or of a user's own as JSON, as recipes hold it."""
    if isinstance(template, Template):
        return template
    if template.startswith("{"):
        given = json.loads(template)
        return Template(given["user"], given.get("system"), tuple(given["tasks"]) if "tasks" in given else None)
    if template not in TEMPLATES:
        names = ", ".join(TEMPLATES)
        raise BadInput(f"There is no prompt template '{template}': expected one of {names}, or a YAML file's path.")
    return TEMPLATES[template]


def messages(question: str, template: str | Template) -> list[dict[str, str]]:
    """Return the chat of a question: an optional system turn and the user's."""
    wording = resolve(template)
    user = {"role": "user", "content": wording.user.replace("{question}", question)}
    return [user] if wording.system is None else [{"role": "system", "content": wording.system}, user]


def render(tokenizer: Any, question: str, template: str | Template) -> list[int]:
    """Return the token ids of the prompt, up to the start of the model's own turn."""
    return tokenizer(_prompt(tokenizer, question, template), add_special_tokens=False)["input_ids"]


def training_text(tokenizer: Any, question: Question, template: str | Template) -> str:
    """Return prompt, solution and end token as one text, for calibration; tokenize it without special tokens.

    Raises:
        BadInput: the tokenizer has no end token.
    """
    if tokenizer.eos_token is None:
        raise BadInput("The tokenizer has no end token, which every training text needs: set eos_token in its config.")
    return _prompt(tokenizer, question.question, template) + question.solution + tokenizer.eos_token


def check(task: str, template: str | Template) -> None:
    """Raise BadInput if a template requests a format that the task's grader does not read."""
    tasks = resolve(template).tasks
    # A file's grader reads what it likes.
    if tasks is not None and task not in tasks and not (own.is_file(task) and template in TEMPLATES):
        fitting = [name for name, other in TEMPLATES.items() if other.tasks is None or task in other.tasks]
        what = f"The prompt template '{template}' requests the answer format of {' and '.join(tasks)}"
        if template not in TEMPLATES:
            what = f"The prompt of your own is for {' and '.join(tasks)}, as its `tasks` say"
        raise BadInput(f"{what}, but the task is {task}: expected prompt={' or prompt='.join(fitting)}.")


def check_kwargs(tokenizer: Any, template: str | Template) -> None:
    """Raise BadInput if the tokenizer's chat template has no variable of a name in the template's `kwargs`."""
    kwargs = resolve(template).kwargs
    if not kwargs:
        return
    from jinja2 import TemplateError

    try:
        known = sorted(sandbox.variables(tokenizer.get_chat_template()) - _set_by_rendering(tokenizer))
    except (ValueError, TemplateError):  # no template, or a broken one: rendering says so
        return
    if unknown := [name for name in kwargs if name not in known]:
        has = f"which has {', '.join(known)}" if known else "which has none"
        raise BadInput(
            f"chat.template_kwargs sets '{unknown[0]}', but this is no variable of the model's chat template, {has}: "
            "leave it out or use another model."
        )


def template_hash(template: str | Template) -> str:
    """Return the first 16 hex digits of the sha256 over a template's texts and kwargs, which every run records."""
    wording = resolve(template)
    texts = {"user": wording.user, "system": wording.system}
    texts |= {"kwargs": wording.kwargs} if wording.kwargs else {}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def fixed(chat_template: str, kwargs: Mapping[str, Any]) -> str:
    """Return a chat template whose variables have fixed values, for readers that set none: MLflow, `qrl.load`."""
    # Jinja reads Python's literals; `+` keeps a line break that the template begins with.
    return "".join(f"{{% set {name} = {value!r} +%}}" for name, value in sorted(kwargs.items())) + chat_template


def _set_by_rendering(tokenizer: Any) -> set[str]:
    """Return the names that a tokenizer itself gives to its chat template."""
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters
    return {"messages", *tokenizer.special_tokens_map, *arguments}


def _prompt(tokenizer: Any, question: str, template: str | Template) -> str:
    chat, kwargs = messages(question, template), resolve(template).kwargs
    if not tokenizer.chat_template:
        remedy = "use an instruction-tuned model, or add chat_template to its tokenizer_config.json"
        raise BadInput(f"The tokenizer has no chat template, which prompts need: {remedy}.")
    check_kwargs(tokenizer, template)
    sandbox.limit()
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **kwargs)
    except Exception as error:  # the template is a program: it can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        what = f"The model's chat template fails on a single question ({reason})"
        raise BadInput(f"{what}: repair it, or get it from the model's publisher.") from None
