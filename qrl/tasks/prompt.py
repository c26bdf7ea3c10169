"""The only renderer of prompts: training, calibration and evaluation use it, so all three see the same token ids.

Every function raises BadInput if the template is unknown, or if the tokenizer's chat template is missing or fails.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from qrl.errors import BadInput
from qrl.tasks import own
from qrl.tasks.question import Question


@dataclass(frozen=True, slots=True)
class Template:
    """The wording of a prompt."""

    user: str  # the user's turn; `{question}` is replaced by the question
    system: str | None = None  # the system's turn; None leaves it out (or to the model's own chat template)
    tasks: tuple[str, ...] | None = None  # tasks with a grader that reads the requested format; None means any task


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


def messages(question: str, template: str) -> list[dict[str, str]]:
    """Return the chat of a question: an optional system turn and the user's."""
    wording = _template(template)
    user = {"role": "user", "content": wording.user.replace("{question}", question)}
    return [user] if wording.system is None else [{"role": "system", "content": wording.system}, user]


def render(tokenizer: Any, question: str, template: str) -> list[int]:
    """Return the token ids of the prompt, up to the start of the model's own turn."""
    return tokenizer(_prompt(tokenizer, question, template), add_special_tokens=False)["input_ids"]


def training_text(tokenizer: Any, question: Question, template: str) -> str:
    """Return prompt, solution and end token as one text, for calibration; tokenize it without special tokens.

    Raises:
        BadInput: the tokenizer has no end token.
    """
    if tokenizer.eos_token is None:
        raise BadInput("The tokenizer has no end token, which every training text needs: set eos_token in its config.")
    return _prompt(tokenizer, question.question, template) + question.solution + tokenizer.eos_token


def check(task: str, template: str) -> None:
    """Raise BadInput if a template requests a format that the task's grader does not read."""
    tasks = _template(template).tasks
    if tasks is not None and task not in tasks and not own.is_file(task):  # a file's grader reads what it likes
        fitting = [name for name, other in TEMPLATES.items() if other.tasks is None or task in other.tasks]
        what = f"The prompt template '{template}' requests the answer format of {' and '.join(tasks)}"
        raise BadInput(f"{what}, but the task is {task}: expected prompt={' or prompt='.join(fitting)}.")


def template_hash(template: str) -> str:
    """Return the first 16 hex digits of the sha256 over a template's texts, which every run records."""
    wording = _template(template)
    texts = {"user": wording.user, "system": wording.system}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def _template(name: str) -> Template:
    if name not in TEMPLATES:
        raise BadInput(f"There is no prompt template '{name}': expected one of {', '.join(TEMPLATES)}.")
    return TEMPLATES[name]


def _prompt(tokenizer: Any, question: str, template: str) -> str:
    chat = messages(question, template)
    if not tokenizer.chat_template:
        remedy = "use an instruction-tuned model, or add chat_template to its tokenizer_config.json"
        raise BadInput(f"The tokenizer has no chat template, which prompts need: {remedy}.")
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # the template is a program, run in Jinja's sandbox: it can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        what = f"The model's chat template fails on a single question ({reason})"
        raise BadInput(f"{what}: repair it, or get it from the model's publisher.") from None
