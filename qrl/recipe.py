"""Typed recipes: the one source of parameters.

A field of these models, say `train.learning_rate`, *is* the command-line option, MLflow's `-P` key and the logged
parameter. A recipe is a YAML file of this package (by name) or of the user's (by path); options override it.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from qrl import names as known
from qrl.errors import BadInput

RECIPES = Path(__file__).parent / "recipes"
DEFAULT = "auto"  # `tiny`; where no recipe is named, `math` for that task, `instruct` for a model of the user's or gsm8k
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
PACKED = ("int8", "nf4")  # storages of a base as bitsandbytes' codes


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def _each_once(named: tuple[str, ...], what: str) -> tuple[str, ...]:
    if not named or len(set(named)) < len(named):
        raise ValueError(f"must name at least one {what}, and each once")
    return named


def _none_twice(named: tuple[str, ...], what: str) -> tuple[str, ...]:
    if len(set(named)) < len(named):
        raise ValueError(f"must name each {what} once")
    return named


class Train(_Section):
    """GRPO: how the policy is trained."""

    steps: Count = Field(20, description="optimizer steps")
    prompts_per_step: Count = Field(64, description="distinct questions in one optimizer step")
    generations: int = Field(8, ge=2, description="completions sampled per question: GRPO's group")
    micro_batch: Count = Field(512, description="completions in one forward and backward pass")
    questions: int = Field(4096, ge=1, le=1_000_000, description="training questions to draw prompts from, at most; all, where there are fewer")
    max_ngram_share: Fraction | None = Field(None, description="held-out questions that may share 13 words in a row with training ones; default: by task")
    learning_rate: float = Field(3e-5, gt=0, description="AdamW's peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of rollouts")
    max_completion_tokens: Count = Field(80, description="longest completion sampled, in tokens")
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = Field("dr_grpo", description="how token losses are averaged")
    importance_sampling: Literal["token", "sequence"] = Field("token", description="what is clipped: each token's ratio (GRPO), or the sequence's (GSPO)")
    iterations: Count = Field(1, description="optimizer steps on each batch of completions; above 1 the clip range matters")
    clip: float = Field(0.2, gt=0, lt=1, description="ratios are clipped to 1 − clip … 1 + clip_high")
    clip_high: float | None = Field(None, gt=0, description="upper clip range; default: clip")
    scale_rewards: Literal["none", "group", "batch"] = Field("none", description="what a reward's spread is divided by")
    rewards: tuple[Literal["correct", "format"], ...] = Field(("correct",), description="correct: the strict verdict; format: an answer in the asked form")
    reward_weights: tuple[float, ...] = Field((), description="one a reward, in order; none given: 1 each")
    beta: float = Field(0.0, ge=0, description="weight of the KL term to the reference policy; 0 keeps no reference")
    method: Literal["full", "lora", "qlora"] = Field("full", description="all weights, or a low-rank adapter that `merge` folds in; qlora: over a base in nf4")
    base_storage: Literal["auto", "fp32", "bf16", "int8", "nf4"] = Field("auto", description="the base in memory; auto: fp32 for full, train.dtype for lora, nf4 for qlora")
    lora_rank: Count | None = Field(None, description="rank of the adapter; default: 16")
    lora_alpha: Count | None = Field(None, description="scale of the adapter, over its rank; default: twice the rank")
    lora_targets: tuple[str, ...] = Field((), description="linears that get an adapter, q_proj,k_proj say; none named: all but the output head")
    dtype: Literal["auto", "fp32", "bf16"] = Field("auto", description="dtype of forward and backward; auto: bf16 over a base in bf16, int8 or nf4, else fp32; masters are fp32")
    gradient_checkpointing: bool = Field(False, description="recompute activations in backward to save memory")
    save_every: Count = Field(10, description="optimizer steps between two checkpoints to resume from")
    qat: Literal["none", "int8", "int8-attention", "int4", "nvfp4-a16", "nvfp4-a4", "fp8", "mxfp4"] = Field("none", description="train with linears that compute in this format; masters stay fp32, and its codes are stored beside them")
    teacher: str | None = Field(None, description="distil on-policy from this model instead of GRPO: the student samples, it scores")
    distill_top_k: Count = Field(64, description="distillation: the teacher's likeliest tokens that both are compared on, re-normalized")
    distill_reverse: Fraction = Field(0.5, description="distillation: weight of reverse KL against forward; 0: forward, 1: reverse")
    qat_calibration_samples: int = Field(128, ge=1, le=100_000, description="training texts that activation scales are calibrated on, and Q(W)'s gap measured on")
    qat_calibration_batch: Count = Field(16, description="calibration texts in one forward pass")
    qat_calibration_max_tokens: Count = Field(1024, description="longest calibration text, in tokens; longer ones are an error")
    completions_logged: Count = Field(8, description="completions a logged step puts into the table of samples")

    @field_validator("rewards")
    @classmethod
    def _once(cls, rewards: tuple[str, ...]) -> tuple[str, ...]:
        return _each_once(rewards, "reward")

    @field_validator("lora_targets")
    @classmethod
    def _targets_once(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        return _none_twice(targets, "linear")

    @property
    def adapter(self) -> bool:
        """Whether a low-rank adapter is trained, over a base that stays as it is."""
        return self.method != "full"

    @property
    def storage(self) -> str:
        """How the base lies in memory: `base_storage`, with `auto` resolved."""
        if self.base_storage != "auto":
            return self.base_storage
        return {"full": "fp32", "lora": "bf16" if self.dtype == "bf16" else "fp32", "qlora": "nf4"}[self.method]

    @property
    def variant(self) -> str:
        """What the trained weights are called: `grpo`, `qat-int4` where linears computed in few bits, `qad-int4` where distilled so."""
        if self.teacher:
            return "distilled" if self.qat == "none" else f"{known.QAD_PREFIX}{self.qat}"
        return known.GRPO if self.qat == "none" else f"{known.QAT_PREFIX}{self.qat}"

    @property
    def packed(self) -> bool:
        """Whether the base lies in memory as bitsandbytes' codes."""
        return self.storage in PACKED

    @property
    def compute(self) -> str:
        """Dtype of forward and backward: `dtype`, with `auto` resolved."""
        return self.dtype if self.dtype != "auto" else "fp32" if self.storage == "fp32" else "bf16"


class Rollout(_Section):
    """Who draws the completions that GRPO learns from, and how far that engine may be from the model that is trained."""

    engine: Literal["transformers", "vllm"] = Field("transformers", description="what samples; vllm needs a GPU and runs the step in projects/vllm")
    mode: Literal["colocate", "server"] = Field("colocate", description="vLLM in the training process, or a server on other GPUs")
    quantization: Literal["none", "fp8"] = Field("none", description="how vLLM stores its weights; quantized anew from bf16 at every step")
    kv_cache: Literal["auto", "fp8"] = Field("auto", description="how vLLM stores keys and values; auto: as it computes, in bf16")
    gpu_memory_utilization: float = Field(0.3, gt=0, lt=1, description="share of the GPU's memory for a colocated engine, weights and KV cache")
    max_model_tokens: Count | None = Field(None, description="longest prompt and completion together; default: the checkpoint's")
    sleep: Literal["auto", "on", "off"] = Field("auto", description="give a colocated engine's memory back while training; auto: where memory asks for it")
    server: str = Field("http://127.0.0.1:8000", description="address of the server, in mode server")
    server_timeout_s: float = Field(240.0, gt=0, description="longest wait for the server")
    server_group_port: int = Field(51216, ge=1, le=65535, description="port over which weights reach the server")
    importance_sampling: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field("token_truncate", description="what corrects for the gap between engine and trainer; none neither corrects nor measures it")
    importance_sampling_max: float = Field(2.0, gt=0, description="weight at which a token or completion is truncated or masked")
    max_kl: float = Field(0.01, gt=0, description="warn above this KL of engine to trainer, k3, nats a token")
    min_effective_sample_size: Fraction = Field(0.9, description="warn below this effective sample size, a share of the tokens")


class Watch(_Section):
    """What training warns of, and stops for if told to."""

    stop: tuple[Literal["entropy", "signal", "kl", "truncation", "probe", "rollout"], ...] = Field((), description="watchers that end training early, the weights so far kept; none named: all only warn")
    window: Count = Field(5, description="optimizer steps in a row that a watcher looks at")
    min_entropy_share: Fraction = Field(0.1, description="entropy: least share of the first window's nats a token")
    max_kl: float = Field(0.5, gt=0, description="kl: most nats a token from the reference; needs train.beta above 0")
    max_truncation: Fraction = Field(0.5, description="truncation: largest share of completions cut at train.max_completion_tokens")
    probe_every: int = Field(0, ge=0, description="probe: optimizer steps between two looks at held-out accuracy; 0: none")
    probe_n: int = Field(128, ge=2, le=100_000, description="probe: questions of the training split that are neither prompts nor held out")

    @field_validator("stop")
    @classmethod
    def _once(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        return _none_twice(stop, "watcher")


class Merge(_Section):
    """Folding an adapter into its base."""

    max_logit_diff: float = Field(0.25, gt=0, description="largest logit difference allowed, merged against adapter-on")
    into: Literal["auto", "full", "int8", "nf4"] = Field("auto", description="the original weights, or what int8 or nf4 unpack to; auto: what the adapter was trained over")


class Quantize(_Section):
    """How weights are stored in few bits."""

    schemes: tuple[Literal[known.QUANTIZED_SCHEMES], ...] = Field((known.NF4, known.AWQ), description="schemes of the study, comma-separated")
    group_size: Literal[32, 64, 128] = Field(128, description="input channels that share one scale, of awq, awq-ct, gptq, w8a16; other formats fix theirs")
    bits: Literal[4, 8] = Field(4, description="bits of a weight under awq-ct and gptq; other schemes' names say theirs")
    symmetric: bool | None = Field(None, description="no zero points, under awq-ct, gptq, w8a16; default: false under awq-ct, true under the others")
    calibration: str = Field("task", min_length=1, description="texts that awq, awq-ct, gptq, nvfp4 look at: task, rollouts (the policy's own answers), or a .jsonl file")
    calibration_samples: int = Field(128, ge=1, le=100_000, description="calibration texts, chat-rendered, end token included")
    calibration_max_tokens: Count = Field(512, description="longest calibration text, in tokens; longer ones are an error")
    calibration_seed: int | None = Field(None, ge=0, lt=2**31, description="seed of calibration; default: seed")

    @field_validator("schemes")
    @classmethod
    def _once(cls, schemes: tuple[str, ...]) -> tuple[str, ...]:
        return _each_once(schemes, "scheme")


class Evaluate(_Section):
    """Held-out questions, and when an accuracy counts."""

    engine: Literal["transformers", "vllm"] = Field("transformers", description="what answers: transformers here, or vLLM in its own environment; cells of both are never compared")
    deterministic: bool = Field(False, description="vLLM: batch-invariant kernels on a GPU, for the same answers whatever is asked beside them")
    gpu_memory_utilization: float = Field(0.9, gt=0, lt=1, description="vLLM: share of the GPU's memory for all engines at once, weights and KV cache")
    n: int = Field(2000, ge=2, le=1_000_000, description="held-out questions, at most, the same for every cell; all, where there are fewer")
    samples: int = Field(1, ge=1, le=1000, description="answers to each question; 1 is greedy, more are sampled")
    temperature: float = Field(1.0, gt=0, description="sampling temperature, where samples is above 1")
    batch_size: Count = Field(256, description="prompts decoded together")
    max_new_tokens: Count = Field(128, description="longest answer, in tokens")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="compute dtype; auto: bf16 on a GPU, fp32 on a CPU")
    min_eos_rate: Fraction = Field(0.95, description="least share of answers that end with the end token")
    max_truncation_rate: Fraction = Field(0.05, description="largest share of answers cut at max_new_tokens")
    min_parse_rate: Fraction = Field(0.90, description="least share of answers in the asked format")
    max_prompt_leak_rate: Fraction = Field(0.01, description="largest share of answers that repeat chat markers or the question")
    max_grader_fault_rate: Fraction = Field(0.01, description="largest share of answers that the grader had no time or memory for")
    samples_logged: Count = Field(20, description="completions shown as a table in each cell's run")


class Diagnose(_Section):
    """What is measured of the weights."""

    bits: int = Field(4, ge=2, le=8, description="bits of the round-to-nearest proxy")
    group_size: Count = Field(128, description="input channels per scale of the proxy")
    outlier_multiplier: float = Field(6.0, gt=1, description="an outlier is larger than this times the median |w|")
    embeddings: bool = Field(False, description="measure embedding tables too")
    effective_rank: bool = Field(True, description="measure the effective rank of every update: the slowest measure of large models")
    behaviour: int = Field(0, ge=0, le=10_000, description="held-out texts to compare next-token distributions on, quantized against full precision; 0: none")


class Compare(_Section):
    """What counts as surviving."""

    margin: float | None = Field(None, gt=0, lt=1, description="loss of gain that still counts as survival; default: half the gain, at least 0.02")


class Promote(_Section):
    """What the gates ask for."""

    min_gain: float = Field(0.0, ge=-1, lt=1, description="grpo: the paired gain's lower 95 % bound must lie above this")
    max_loss: float = Field(0.05, gt=0, le=1, description="awq: the lower 95 % bound of awq − full precision must lie above minus this")


class Benchmark(_Section):
    """How speed and memory are measured."""

    batches: tuple[Count, ...] = Field((1, 16, 32, 64), description="prompts answered at once, comma-separated; against a server: clients")
    requests: Count = Field(32, description="prompts of one model in one mode and round, at least; whole batches of them")
    rounds: int = Field(5, ge=2, description="times that every model is asked in every mode, in turn; intervals are over rounds")
    new_tokens: Count = Field(64, description="length of an answer, in tokens; the longest one where length is natural")
    length: Literal["fixed", "natural"] = Field("fixed", description="fixed: every answer has new_tokens; natural: end tokens end it")

    @field_validator("batches")
    @classmethod
    def _once(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        if not batches or len(set(batches)) < len(batches):
            raise ValueError("must name at least one batch, and each once")
        return batches


class Recipe(_Section):
    """A whole study: one model, one task, every step's settings."""

    model: str = Field("qrl-tiny", min_length=1, description="qrl-tiny (shipped), a checkpoint folder, or a hub id")
    registered_name: str | None = Field(None, description="name in the registry; default: from the model's name")
    task: Literal["arithmetic", "gsm8k", "math", "deepmath"] = Field("arithmetic", description="what is asked")
    data: str | None = Field(None, description="folder with train.jsonl and test.jsonl; default: generated, or the hub")
    prompt: str = Field("answer-line", description="named prompt template")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of everything random")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where models run; auto takes a GPU if there is one")
    train: Train = Train()
    rollout: Rollout = Rollout()
    watch: Watch = Watch()
    merge: Merge = Merge()
    quantize: Quantize = Quantize()
    evaluate: Evaluate = Evaluate()
    diagnose: Diagnose = Diagnose()
    compare: Compare = Compare()
    promote: Promote = Promote()
    benchmark: Benchmark = Benchmark()

    def dump(self) -> str:
        """The resolved recipe as YAML, which `load` reads back to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def flat(self, *sections: str) -> dict[str, str]:
        """Dotted key → value as text, as `-P` takes it; all sections, or the top level and those named."""
        values = {}
        for key, value in self.model_dump(mode="json").items():
            if isinstance(value, dict):
                if not sections or key in sections:
                    values |= {f"{key}.{name}": _text(inner) for name, inner in value.items()}
            else:
                values[key] = _text(value)
        return values


def fields() -> dict[str, tuple[Any, str]]:
    """Every recipe field as dotted key → (type annotation, description); options are made from it."""
    found = {}
    for key, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            for name, inner in field.annotation.model_fields.items():
                found[f"{key}.{name}"] = (inner.annotation, inner.description or "")
        else:
            found[key] = (field.annotation, field.description or "")
    return found


def names() -> list[str]:
    """Names of the recipes that ship with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load(name_or_path: str = DEFAULT, overrides: dict[str, str] | None = None) -> Recipe:
    """A recipe by name or path, with dotted overrides applied and everything validated.

    Args:
        name_or_path: a name from `names()`, a path ending in .yaml, or `auto`.
        overrides: dotted key → text, as typed on the command line; values are read as YAML scalars.

    Raises:
        BadInput: unknown recipe or key, a wrong type or a number out of range; one sentence naming key and allowed values.
    """
    if name_or_path == DEFAULT:
        task = (overrides or {}).get("task")
        own = (overrides or {}).get("model", "qrl-tiny") != "qrl-tiny" or task == "gsm8k"
        name_or_path = "math" if task in ("math", "deepmath") else "instruct" if own else "tiny"
    path = RECIPES / f"{name_or_path}.yaml"
    if not path.is_file() and str(name_or_path).endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    if not path.is_file():
        raise BadInput(f"There is no recipe '{name_or_path}': expected one of {', '.join(names())}, or the path of a .yaml file.")
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"Recipe {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(document, dict):
        raise BadInput(f"Recipe {path} holds a {type(document).__name__}, but a mapping of keys to values was expected.")
    for key, text in (overrides or {}).items():
        _set(document, key, text)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise BadInput(_sentence(error)) from None


def _set(document: dict, key: str, text: str) -> None:
    annotations = fields()
    if key not in annotations:
        raise BadInput(_unknown(key))
    *section, name = key.split(".")
    if section and not isinstance(document.setdefault(section[0], {}), dict):
        raise BadInput(f"'{section[0]}' is a section of the recipe, but its value is {document[section[0]]!r}: write its keys below it.")
    target = document[section[0]] if section else document
    target[name] = _parse(text, annotations[key][0])
    if target[name] == () and isinstance(text, str) and text.strip():
        raise BadInput(f"'{key}' is {text!r}, which names nothing: name something, separated by commas, or leave it out.")


def _parse(text: str, annotation: Any) -> Any:
    """Text to what pydantic should judge: lists by comma, null, booleans; numbers are left to pydantic's own reading."""
    if not isinstance(text, str):
        return text
    if typing.get_origin(annotation) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if text.lower() in ("null", "none", "") and type(None) in typing.get_args(annotation):
        return None
    if typing.get_origin(annotation) is Literal and all(isinstance(option, int) for option in typing.get_args(annotation)):
        return int(text) if text.isdigit() else text
    return text


def _unknown(key: str) -> str:
    import difflib

    close = difflib.get_close_matches(key, fields(), n=1, cutoff=0.0)[0]
    section = key.split(".", maxsplit=1)[0]
    siblings = [name for name in fields() if name.startswith(f"{section}.")] or [name for name in fields() if "." not in name]
    return f"'{key}' is not a key of a recipe: did you mean '{close}'? Allowed here: {', '.join(siblings)}."


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part != "tagged-union")
    if first["type"] == "extra_forbidden":
        return _unknown(key)
    given = ",".join(map(str, first["input"])) if isinstance(first["input"], tuple) else first["input"]  # a list, as it was written
    return f"'{key}' is {given!r}, but {_allowed(key, first)}."


def _allowed(key: str, first: dict) -> str:
    message = first["msg"].removeprefix("Value error, ")
    message = (message[0].lower() + message[1:]).partition(", unable")[0]
    return message.replace("input should be", "must be").replace("input should have", "must have").replace("unable to parse string as an", "must be an").replace("unable to parse string as a", "must be a")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "null" if value is None else str(value)


def type_name(annotation: Any) -> str:
    """How `--help` shows a field's type: `int`, `float`, `a|b`, `text`."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if origin is Annotated:
        return type_name(typing.get_args(annotation)[0])
    if origin is tuple:
        return "list"
    if origin in (typing.Union, types.UnionType):
        return type_name(next(part for part in typing.get_args(annotation) if part is not type(None)))
    return "text" if annotation is str else annotation.__name__
