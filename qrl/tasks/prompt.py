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
from qrl.tasks import own, sandbox, thinking, turns
from qrl.tasks.question import Question

if TYPE_CHECKING:
    from qrl.recipe import Recipe


_WITHOUT_SYSTEM = "move `system` into `user` in the prompt's file"


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


def of_recipe(recipe: Recipe) -> Template:
    """Return a recipe's prompt with its `chat.template_kwargs`."""
    return replace(resolve(recipe.prompt), kwargs=recipe.chat.template_kwargs)


def resolve(template: str | Template) -> Template:
    """Return the template of a name, or of a user's own as JSON, as recipes hold it."""
    if isinstance(template, Template):
        return template
    if template.startswith("{"):
        fields = json.loads(template)
        tasks = tuple(fields["tasks"]) if "tasks" in fields else None
        return Template(fields["user"], fields.get("system"), tasks)
    if template not in TEMPLATES:
        names = ", ".join(TEMPLATES)
        raise BadInput(f"There is no prompt template '{template}': expected one of {names}, or a YAML file's path.")
    return TEMPLATES[template]


def messages(question: str, template: str | Template) -> list[dict[str, str]]:
    """Return the chat of a question: an optional system turn and the user's."""
    wording = resolve(template)
    user_turn = {"role": "user", "content": wording.user.replace("{question}", question)}
    if wording.system is None:
        return [user_turn]
    return [{"role": "system", "content": wording.system}, user_turn]


def render(tokenizer: Any, question: str, template: str | Template) -> list[int]:
    """Return the token ids of the prompt, up to the start of the model's own turn."""
    return tokenizer(_prompt(tokenizer, question, template), add_special_tokens=False)["input_ids"]


def training_text(tokenizer: Any, question: Question, template: str | Template) -> str:
    """Return prompt, solution and the end of the turn as one text; tokenize it without special tokens.

    Raises:
        BadInput: neither the chat template nor the tokenizer names an end token.
    """
    solution = thinking_tags(tokenizer, template).end_of_thinking + question.solution
    return _prompt(tokenizer, question.question, template) + solution + turns.closing(tokenizer)


def solution_ids(tokenizer: Any, solution: str, tags: thinking.Tags = thinking.TAGS) -> list[int]:
    """Return the token ids of a worked solution and the end of the turn, as they follow the prompt's.

    Args:
        tokenizer: the model's.
        solution: the text.
        tags: from `thinking_tags`: a thinking that the prompt began ends before the solution.

    Raises:
        BadInput: neither the chat template nor the tokenizer names an end token.
    """
    text = tags.end_of_thinking + solution + turns.closing(tokenizer)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def thinking_tags(tokenizer: Any, template: str | Template) -> thinking.Tags:
    """Return a model's tags around its thinking, and whether its prompts end within the thinking."""
    if not tokenizer.chat_template:
        return thinking.TAGS
    wording = resolve(template)
    chat_template = tokenizer.get_chat_template()
    try:
        example = sandbox.render(tokenizer, messages("1 + 1 = ?", wording), wording.kwargs)
    except Exception:  # of any kind, as in `_prompt`, which reports it for the questions
        example = ""
    return thinking.of_prompt(chat_template, example)


def check_task(task: str, template: str | Template) -> None:
    """Raise BadInput if a template requests a format that the task's grader does not read."""
    graded_tasks = resolve(template).tasks
    if graded_tasks is None or task in graded_tasks:
        return
    # The grader of a task file reads what its author likes; only a prompt of the user's own can contradict it.
    if own.is_file(task) and template in TEMPLATES:
        return

    fitting = [name for name, wording in TEMPLATES.items() if wording.tasks is None or task in wording.tasks]
    if template in TEMPLATES:
        mismatch = f"The prompt template '{template}' requests the answer format of {' and '.join(graded_tasks)}"
    else:
        mismatch = f"The prompt of your own is for {' and '.join(graded_tasks)}, as its `tasks` say"
    raise BadInput(f"{mismatch}, but the task is {task}: expected prompt={' or prompt='.join(fitting)}.")


def check_chat(tokenizer: Any, template: str | Template) -> None:
    """Raise BadInput if the tokenizer's chat template cannot render a prompt, or leaves out its system turn."""
    wording = resolve(template)
    question = "1 + 1?"
    with_system = _prompt(tokenizer, question, wording)
    if wording.system is None or not wording.system.strip():
        return
    # Some templates skip roles that they do not know, so that the model would never read this turn.
    if with_system == _renders(tokenizer, question, replace(wording, system=None)):
        raise BadInput(
            f"The model's chat template has no system role and leaves the prompt's system turn out: {_WITHOUT_SYSTEM}."
        )


def check_kwargs(tokenizer: Any, template: str | Template) -> None:
    """Raise BadInput if the tokenizer's chat template has no variable of a name in the template's `kwargs`."""
    kwargs = resolve(template).kwargs
    settable = settable_variables(tokenizer) if kwargs else None
    if settable is None:
        return
    unknown = [name for name in kwargs if name not in settable]
    if unknown:
        variables_shown = f"which has {', '.join(settable)}" if settable else "which has none"
        raise BadInput(
            f"chat.template_kwargs sets '{unknown[0]}', but this is no variable of the model's chat template, "
            f"{variables_shown}: leave it out or use another model."
        )


def settable_variables(tokenizer: Any) -> list[str] | None:
    """Return the variables of the tokenizer's chat template that a recipe can set; None without a readable template."""
    from jinja2 import TemplateError

    try:
        variables = sandbox.variables(tokenizer.get_chat_template())
    except (ValueError, TemplateError):  # no template, or a broken one: rendering reports it
        return None
    return sorted(variables - _set_by_rendering(tokenizer))


def template_hash(template: str | Template) -> str:
    """Return the first 16 hex digits of the sha256 over a template's texts and kwargs, which every run records."""
    wording = resolve(template)
    texts = {"user": wording.user, "system": wording.system}
    if wording.kwargs:  # the hash of a template without variables stays what it was before there were any
        texts["kwargs"] = wording.kwargs
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def with_fixed_variables(chat_template: str, kwargs: Mapping[str, Any]) -> str:
    """Return a chat template whose variables have fixed values, for readers that set none: MLflow, `qrl.load`."""
    # Jinja reads Python's literals; `+` keeps a line break that the template begins with.
    return "".join(f"{{% set {name} = {value!r} +%}}" for name, value in sorted(kwargs.items())) + chat_template


def _set_by_rendering(tokenizer: Any) -> set[str]:
    """Return the names that a tokenizer itself gives to its chat template."""
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters
    return {"messages", *tokenizer.special_tokens_map, *arguments}


def _prompt(tokenizer: Any, question: str, template: str | Template) -> str:
    wording = resolve(template)
    if not tokenizer.chat_template:
        remedy = "use an instruction-tuned model, or add chat_template to its tokenizer_config.json"
        raise BadInput(f"The tokenizer has no chat template, which prompts need: {remedy}.")
    check_kwargs(tokenizer, wording)
    try:
        return sandbox.render(tokenizer, messages(question, wording), wording.kwargs)
    except Exception as error:  # the template is a program: it can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        if wording.system is not None and _renders(tokenizer, question, replace(wording, system=None)):
            raise BadInput(f"The model's chat template has no system role ({reason}): {_WITHOUT_SYSTEM}.") from None
        failure = f"The model's chat template fails on a single question ({reason})"
        raise BadInput(f"{failure}: repair it, or get it from the model's publisher.") from None


def _renders(tokenizer: Any, question: str, wording: Template) -> str:
    """Return a prompt, or an empty text if the model's chat template fails."""
    try:
        return sandbox.render(tokenizer, messages(question, wording), wording.kwargs)
    except Exception:  # the template is a program: it can raise anything
        return ""
