"""The one renderer of prompts: training, calibration and evaluation all ask through it, so all see the same token ids."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from qrl.errors import BadInput
from qrl.tasks.question import Question


@dataclass(frozen=True, slots=True)
class Template:
    """How a question becomes a chat.

    Args:
        user: the user's turn; `{question}` stands for the question.
        system: the system's turn; None leaves it out (or to the model's own chat template).
        tasks: those whose grader looks for the form that it asks for; None is for any.
    """

    user: str
    system: str | None = None
    tasks: tuple[str, ...] | None = None


TEMPLATES = {
    "answer-line": Template(
        "{question}\n\nReason step by step, then give the final answer on a last line of its own: #### number",
        tasks=("arithmetic", "gsm8k"),
    ),
    "boxed": Template(  # as Qwen2.5's instruction-tuned models are asked for MATH by their makers
        "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
        tasks=("math", "deepmath"),
    ),
    "plain": Template("{question}"),  # for a model that was trained to answer in the format without being told
}


def messages(question: str, template: str) -> list[dict[str, str]]:
    """The chat that asks a question: an optional system turn and the user's.

    Raises:
        BadInput: unknown template.
    """
    chosen = _template(template)
    user = {"role": "user", "content": chosen.user.replace("{question}", question)}
    return [user] if chosen.system is None else [{"role": "system", "content": chosen.system}, user]


def render(tokenizer: Any, question: str, template: str) -> list[int]:
    """Token ids of the prompt, up to where the model's own turn begins.

    Args:
        tokenizer: a transformers tokenizer with a chat template.

    Raises:
        BadInput: unknown template, or no chat template.
    """
    return tokenizer(_prompt(tokenizer, question, template), add_special_tokens=False)["input_ids"]


def training_text(tokenizer: Any, question: Question, template: str) -> str:
    """Prompt, solution and end token as one text, as calibration reads it; tokenize it without special tokens.

    Raises:
        BadInput: unknown template, no chat template, or no end token.
    """
    if tokenizer.eos_token is None:
        raise BadInput(
            "The tokenizer has no end token, so no training text can be written: set eos_token in its config."
        )
    return _prompt(tokenizer, question.question, template) + question.solution + tokenizer.eos_token


def check(task: str, template: str) -> None:
    """Refuses a template that asks for another form than the task's grader reads: every answer would be wrong.

    Raises:
        BadInput: unknown template, or one for other tasks.
    """
    meant = _template(template).tasks
    if meant is not None and task not in meant:
        fitting = [name for name, each in TEMPLATES.items() if each.tasks is None or task in each.tasks]
        raise BadInput(
            f"The prompt template '{template}' asks for answers as {' and '.join(meant)} are graded, but the task is {task}: "
            f"expected prompt={' or prompt='.join(fitting)}."
        )


def template_hash(template: str) -> str:
    """The first 16 hex digits of the sha256 over a template's texts, which every run records.

    Raises:
        BadInput: unknown template.
    """
    chosen = _template(template)
    texts = {"user": chosen.user, "system": chosen.system}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def _template(name: str) -> Template:
    if name not in TEMPLATES:
        raise BadInput(f"There is no prompt template '{name}': expected one of {', '.join(TEMPLATES)}.")
    return TEMPLATES[name]


def _prompt(tokenizer: Any, question: str, template: str) -> str:
    chat = messages(question, template)
    if not tokenizer.chat_template:
        raise BadInput(
            "The tokenizer has no chat template, but prompts are rendered through one: use an instruction-tuned model, "
            "or add chat_template to its tokenizer_config.json."
        )
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except (
        Exception
    ) as error:  # a program of the model's own, which transformers runs in Jinja's sandbox: anything can go wrong in it
        reason = " ".join(str(error).split())[:150]
        raise BadInput(
            f"The model's chat template fails on a single question ({type(error).__name__}: {reason}): repair it, or take it from the model's publisher."
        ) from None
