"""What MLflow reads besides a checkpoint: MLmodel, the environment's files, and the tokenizer for MLflow's flavor."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from mlflow import pyfunc
from mlflow.entities import LoggedModel
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, Schema
from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA
from mlflow.types.schema import AnyType

from qrl import checkpoint, names, process
from qrl.engine import hf
from qrl.tasks import prompt
from qrl.tracking import keys

_CHAT = "llm/v1/chat"
_NEEDS = {
    **dict.fromkeys(names.BITSANDBYTES, ("bitsandbytes",)),
    names.AWQ: ("gptqmodel",),
    **dict.fromkeys((*names.COMPRESSED, *names.ROUNDED), ("compressed-tensors",)),
}
# OpenAI's fields that MLflow's signature lacks; it drops such fields with a warning, where `pyfunc_chat` refuses them.
_MORE = ("model", "user", "seed", "logprobs", "top_logprobs", "logit_bias", "max_completion_tokens", "response_format")
_MORE += ("stream_options", "tool_choice")
CHAT = "chat_template_kwargs"  # among a model's facts, as JSON: the variables that its flavor's tokenizer fixes
_CODE = "code"  # the folder that MLflow puts on Python's path
_LOADER = Path(__file__).with_name("pyfunc_chat.py")  # not imported: it imports torch, which not every command needs


def write(folder: Path, model: LoggedModel, facts: Mapping[str, Any]) -> None:
    """Write MLmodel and its environment files next to `model/`, and the tokenizer where the flavor looks for it."""
    tokenizer = folder / "components" / "tokenizer"
    tokenizer.mkdir(parents=True)
    for name in ("config.json", *checkpoint.text_files(folder / "model")):
        (tokenizer / name).parent.mkdir(exist_ok=True)
        put(folder / "model" / name, tokenizer / name, link=True)
    # MLflow's flavor passes no variables to the chat template, so they are written into a template of its own.
    chat = facts.get(CHAT)
    if chat:
        template = prompt.with_fixed_variables(
            hf.tokenizer(folder / "model").get_chat_template(), json.loads(str(chat))
        )
        (tokenizer / checkpoint.CHAT_TEMPLATES[0]).unlink(missing_ok=True)  # a link to the checkpoint's own
        (tokenizer / checkpoint.TEMPLATES / "default.jinja").unlink(missing_ok=True)  # transformers would prefer it
        (tokenizer / checkpoint.CHAT_TEMPLATES[0]).write_text(template, encoding="utf-8")
    (folder / _CODE).mkdir()
    put(_LOADER, folder / _CODE / _LOADER.name, link=False)
    inputs = Schema([*CHAT_MODEL_INPUT_SCHEMA.inputs, *(ColSpec(AnyType(), name, required=False) for name in _MORE)])
    described = Model(
        artifact_path=model.artifact_location,
        run_id=model.source_run_id,
        model_uuid=model.model_id,
        model_id=model.model_id,
        signature=ModelSignature(inputs=inputs, outputs=CHAT_MODEL_OUTPUT_SCHEMA),
        metadata={"task": _CHAT, "qrl": dict(facts)},
        model_size_bytes=sum(file.stat().st_size for file in (folder / "model").rglob("*") if file.is_file()),
    )
    # With Auto classes, any version of transformers picks its own class by config.json; none runs code from the folder.
    packages = requirements(str(facts["scheme"]))
    described.add_flavor(
        "transformers",
        transformers_version=next(line.partition("==")[2] for line in packages if line.startswith("transformers")),
        code=None,
        task="text-generation",
        inference_task=_CHAT,
        instance_type="TextGenerationPipeline",
        pipeline_model_type="AutoModelForCausalLM",
        source_model_name=f"{model.artifact_location}/model",
        model_binary="model",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
    )
    pyfunc.add_to_model(
        described,
        loader_module=_LOADER.stem,
        code=_CODE,
        conda_env="conda.yaml",
        python_env="python_env.yaml",
        model_config=_generation(folder / "model"),
    )
    described.save(str(folder / "MLmodel"))
    _write_environment(folder, packages)


def _generation(path: Path) -> dict[str, Any]:
    """Return how MLflow's model generates: greedily, up to a token that ends an answer, as it was evaluated."""
    settings: dict[str, Any] = {"do_sample": False}
    if not hf.names_all_ends(path):
        settings["eos_token_id"] = hf.end_tokens(None, path)
    return settings


def requirements(scheme: str) -> list[str]:
    """Return a model's pip requirements: the pins of the project's conda.yaml, or what is installed without one."""
    pins = keys.pins()
    packages = ("mlflow", "torch", "transformers", "accelerate", *_NEEDS.get(scheme, ()))
    return [f"{package}=={pins[package]}" if package in pins else _installed(package) for package in packages]


def put(source: Path, target: Path, *, link: bool) -> None:
    """Put a file at another place, by hard link if wanted and possible, else by copy."""
    source = source.resolve()  # the hub's cache holds links
    if link:
        with suppress(OSError):  # another file system, or one without hard links
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _write_environment(folder: Path, packages: list[str]) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    dependencies = [f"python={python}", "pip", {"pip": packages}]
    conda = {"name": "mlflow-env", "channels": ["conda-forge"], "dependencies": dependencies}
    (folder / "conda.yaml").write_text(yaml.safe_dump(conda, sort_keys=False))
    (folder / "python_env.yaml").write_text(yaml.safe_dump({"python": python, "dependencies": ["-r requirements.txt"]}))
    (folder / "requirements.txt").write_text("\n".join(packages) + "\n")


def _installed(package: str) -> str:
    release = process.installed(package)
    return f"{package}=={release.partition('+')[0]}" if release else package  # no index has 2.13.0+cpu
