"""A recipe: its top level, and the sections of the steps that follow training.

A field is a command-line option, MLflow's `-P` key and a logged parameter under `section.field`. Its description is the
option's help.
"""

import json
from typing import Annotated, Any, Literal

import yaml
from pydantic import JsonValue, ValidationInfo, field_validator

from qrl import names as known
from qrl.recipe.base import (
    JUDGES,
    NO_KEY,
    Count,
    Limit,
    NoKey,
    NotInKey,
    Section,
    Selection,
    compiles,
    once,
    one_of,
    option,
)
from qrl.recipe.layers import Layers
from qrl.recipe.stages import DEFAULT, Stage, completed
from qrl.recipe.training import Merge, Rollout, Train, Watch

Scheme = Literal[
    "nf4", "int8", "awq", "awq-ct", "gptq", "fp8", "nvfp4a16", "nvfp4", "w8a16", "w8a8", "mxfp4a16", "gptq-int3",
    "gptq-int2", "mxfp8", "fp8-block", "w4afp8", "autoround", "spinquant", "fp8-static", "w8a8-static", "rtn-int8",
    "rtn-int8-attention", "rtn-int4", "rtn-nvfp4-a16", "rtn-nvfp4-a4", "rtn-fp8", "rtn-mxfp4", "rtn-int3", "rtn-int2",
    "rtn-fp8-static", "rtn-int8-a8-static", "rtn-file",
]  # fmt: skip  # the same as names.QUANTIZED_SCHEMES, by test: a Literal takes no variable


_ALWAYS = "chat"  # the section that every step reads


class Quantize(Section):
    """Post-training quantization."""

    # A key covers one scheme and what applies to it, whichever schemes a study has.
    schemes: Annotated[tuple[Scheme, ...], once("scheme", at_least_one=True), NO_KEY] = option(
        ("nf4", "awq"), "schemes of the study, comma-separated"
    )
    group_size: Literal["auto", 32, 64, 128] = option(
        "auto",
        "input channels per scale, for awq*, gptq*, w8a16, autoround, spinquant, rtn-int4/3/2 and train.qat=int4/3/2; "
        "auto: the largest that divides every layer's inputs; other formats have a fixed size",
    )
    bits: Literal[4, 8] = option(4, "bits per weight for awq-ct and gptq; other schemes have them in their names")
    symmetric: bool | None = option(
        None, "no zero points, for awq-ct, gptq*, w8a16 and spinquant; default: only awq-ct has them"
    )
    calibration: str = option(
        "task",
        "calibration texts of awq*, gptq*, autoround, nvfp4, *-static and quantize.kv_cache: task, rollouts (its own "
        "answers), or a .jsonl file",
        min_length=1,
    )
    calibration_samples: int = option(128, "calibration texts, rendered as chats with the end token", ge=1, le=100_000)
    calibration_max_tokens: Count = option(512, "longest calibration text, in tokens; a longer one is an error")
    calibration_seed: int | None = option(None, "calibration seed; default: seed", ge=0, lt=2**31)
    format: str | None = option(
        None, "a compressed-tensors scheme, as FILE.yaml, for rtn-file", pattern=known.FORMAT_FILE
    )
    layers: Layers = option(
        (),
        "linears to store in few bits, comma-separated: mlp, attention, first:N or last:N blocks, a name such as "
        "down_proj, re:PATTERN; -TERM leaves out, TERM=FORMAT stores in another format; default: all but the output "
        "head",
    )
    kv_cache: Literal["auto", "fp8"] = option(
        "auto",
        "fp8: store calibrated scales of keys and values too, one per layer, for cells SCHEME+kv-fp8; auto: none, and "
        "vLLM divides by 1",
    )


class Evaluate(Section):
    """Held-out questions, and the limits within which an accuracy counts."""

    engine: Literal["transformers", "vllm"] = option(
        "transformers", "what answers: transformers, or vLLM in its own environment; `compare` rejects a mixture"
    )
    deterministic: bool = option(
        False,
        "vLLM: batch-invariant kernels on a GPU (for w8a8, 1 or 2 answers of 1,000 may still depend on the batch)",
    )
    gpu_memory_utilization: NoKey[float] = option(
        0.9, "vLLM: share of GPU memory for all engines together, weights and KV cache", gt=0, lt=1
    )
    kv_cache_gib: NoKey[float | None] = option(
        None, "vLLM: fixed size of the KV cache, instead of that share: several evaluations can then share a GPU", gt=0
    )
    compile: Annotated[bool | None, NotInKey("compile", None)] = option(
        None,
        "vLLM on a GPU: torch.compile; false: CUDA graphs alone, so that an engine starts sooner; default: true for "
        "cells of up to 5 million tokens or more (n × samples × max_new_tokens)",
    )
    n: int = option(2000, "held-out questions, at most; the same for every cell", ge=2, le=1_000_000)
    samples: int = option(1, "answers to each question; 1 is greedy, more are sampled", ge=1, le=1000)
    temperature: Annotated[float, NotInKey("samples", 1)] = option(1.0, "temperature if samples is above 1", gt=0)
    batch_size: Count = option(256, "prompts decoded together")
    max_new_tokens: Count = option(128, "longest answer, in tokens")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option("auto", "compute dtype; auto: bf16 on a GPU, fp32 on a CPU")
    min_eos_rate: Limit = option(0.95, "smallest share of answers that end with the end token")
    max_truncation_rate: Limit = option(0.05, "largest share of answers cut at evaluate.max_new_tokens")
    min_parse_rate: Limit = option(0.90, "smallest share of answers in the required format")
    max_prompt_leak_rate: Limit = option(
        0.01, "largest share of answers that go on with a new prompt: chat markers, or the question"
    )
    max_grader_fault_rate: Limit = option(0.01, "largest share of answers with too much grader time or memory")
    samples_logged: Annotated[Count, JUDGES] = option(20, "completions in the table of each cell's run")
    selection: Selection = option(
        "random", "held-out questions to take: random (drawn by the seed) or first (the first rows of the file)"
    )
    kv_fp8: Annotated[tuple[Literal["full"] | Scheme, ...], once("scheme"), NO_KEY] = option(
        (), "vLLM: schemes with a second cell, SCHEME+kv-fp8, whose key-value cache is in FP8"
    )
    unpacked: Annotated[bool, NotInKey("unpacked", False)] = option(
        False, "vLLM: answer schemes of weights alone unpacked, with one engine for all, instead of by their kernels"
    )
    perplexity: bool = option(False, "perplexity of the worked solutions: reads each question and solution once more")
    tensor_parallel: Annotated[Count, NotInKey("tensor_parallel", 1)] = option(
        1, "vLLM, in evaluation and serving: GPUs that divide one model's weights"
    )

    @property
    def compiles(self) -> bool:
        """Whether vLLM compiles the model on a GPU: `compile`, or whether the tokens to come pay for it."""
        return compiles(self.compile, self.n * self.samples * self.max_new_tokens)


class Diagnose(Section):
    """What is measured of the weights."""

    bits: int = option(4, "bits of the round-to-nearest proxy", ge=2, le=8)
    group_size: Count = option(128, "input channels per scale of the proxy")
    outlier_multiplier: float = option(6.0, "a weight is an outlier above this multiple of the median |w|", gt=1)
    embeddings: bool = option(False, "measure embedding tables too")
    effective_rank: bool = option(True, "measure the effective rank of every update: slowest on large models")
    behaviour: int = option(
        0,
        "held-out texts to compare next-token distributions of quantized and full models on; 0: none",
        ge=0,
        le=10_000,
    )


class Compare(Section):
    """What counts as survival of the gain."""

    margin: float | None = option(
        None, "loss of gain that still counts as survival; default: a tenth of the gain, at least 0.01", gt=0, lt=1
    )


class Promote(Section):
    """The stages of a study, and the bounds of their gates."""

    min_gain: float = option(0.0, "least gain, as of grpo over base: its lower 95 % bound must be above", ge=-1, lt=1)
    max_loss: float = option(0.05, "largest loss, as of awq to grpo: lower 95 % bound above minus this", gt=0, le=1)
    min_gain_kept: float | None = option(
        None, "least share of the gain that a quantized stage keeps, by its lower 95 % bound; 0.8: 80 %", gt=0, le=1
    )
    max_length_growth: float | None = option(
        None, "largest growth of tokens per answer against the stage before, by its upper 95 % bound; 0.2: 20 %", ge=0
    )
    stages: tuple[Stage, ...] = option(
        (), "stages in order, STAGE=VARIANT:SCHEME,…; default: base=base:full,grpo=grpo:full,awq=grpo:awq"
    )
    min_n: NoKey[Count] = option(20, "least number of questions that an evaluation must have for any stage")
    sign_with: NoKey[tuple[str, ...]] = option(
        (), "private key (PEM) that signs versions that pass, or KEY,CERTIFICATE,CA; with OpenSSF's model-signing"
    )
    require_signature: NoKey[str] = option("", "public key or certificate (PEM) that must have signed a version")

    @field_validator("stages")
    @classmethod
    def _fit_together(cls, stages: tuple[Stage, ...], info: ValidationInfo) -> tuple[Stage, ...]:
        completed(stages)
        asks_for_share = info.data.get("min_gain_kept") is not None
        if stages and asks_for_share and not any(stage.can_keep_a_gain for stage in stages):
            raise ValueError(
                "must hold a trained model that is quantized, such as awq=grpo:awq, since promote.min_gain_kept is set"
            )
        return stages

    @property
    def declared(self) -> tuple[Stage, ...]:
        """The stages, complete: those of the recipe, or else base, grpo and awq."""
        return completed(self.stages) or DEFAULT


class Benchmark(Section):
    """How speed and memory are measured."""

    batches: Annotated[tuple[Count, ...], once("batch", at_least_one=True)] = option(
        (1, 16, 32, 64), "prompts answered at once, comma-separated; against a server: concurrent clients"
    )
    requests: Count = option(32, "prompts per model, mode and round, at least; rounded up to whole batches")
    rounds: int = option(5, "rounds, each of which measures every model in every mode; intervals are over rounds", ge=2)
    new_tokens: Count = option(64, "length of an answer, in tokens; its upper limit with benchmark.length=natural")
    length: Literal["fixed", "natural"] = option("fixed", "fixed: all have new_tokens; natural: the end token ends it")
    latency_limit_s: float = option(
        5, "with --capacity: largest 95th percentile of a request's latency, in seconds", gt=0
    )
    round_s: float = option(10, "with --capacity: seconds of arrivals a round, at least", gt=0)


class Chat(Section):
    """How every chat is rendered, wherever the recipe's model reads one."""

    template_kwargs: Annotated[dict[str, JsonValue], NotInKey("template_kwargs", {})] = option(
        {}, "variables of the model's chat template, such as {enable_thinking: false} for Qwen3"
    )


class Recipe(Section):
    """A whole study: one model, one task, and the settings of every step."""

    # Keys cover the digests of model and data instead of their addresses, and the device class that was chosen.
    model: NoKey[str] = option("qrl-tiny", "qrl-tiny (shipped), a folder, or a hub id", min_length=1)
    registered_name: NoKey[str | None] = option(None, "name in the registry; default: by the model's name")
    task: Annotated[str, one_of(("arithmetic", "gsm8k", "math", "deepmath"), "FILE.py")] = option(
        "arithmetic", "questions and their grading: arithmetic, gsm8k, math, deepmath, or FILE.py with load and grade"
    )
    data: NoKey[str | None] = option(
        None, "folder of train.jsonl and test.jsonl, or of the hub's repositories; default: generated, or the hub's"
    )
    prompt: str = option(
        "answer-line",
        "prompt: answer-line, boxed or plain; or a YAML file of your own with user (a text with {question}) and, "
        "optionally, system and tasks",
    )
    seed: int = option(0, "seed of everything random", ge=0, lt=2**31)
    device: NoKey[Literal["auto", "cpu", "cuda"]] = option("auto", "auto uses a GPU if there is one")
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
    chat: Chat = Chat()

    def dump(self) -> str:
        """Return the resolved recipe as YAML, which `load` reads back to an equal recipe."""
        document = self.model_dump(mode="json")
        if self.prompt.startswith("{"):
            document["prompt"] = json.loads(self.prompt)
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)

    def flat(self, *sections: str) -> dict[str, str]:
        """Return dotted key → value as text, as `-P` takes it: of all sections, or of the top level and those named."""
        values = {}
        for key, value in self.model_dump(mode="json").items():
            if not isinstance(value, dict):
                values[key] = as_text(value)
            elif not sections or key in (*sections, _ALWAYS):
                values |= {f"{key}.{name}": as_text(inner) for name, inner in value.items()}
        return values

    def key_settings(self, *sections: str, judging: bool = True) -> dict[str, str]:
        """Return the part of `flat` that a cache key covers: of the top level, and of the sections named.

        `judging` as in `Section.in_key`.
        """
        covered = {key for key in self.in_key() if not isinstance(getattr(self, key), Section)}
        for section in (*sections, _ALWAYS):
            covered |= {f"{section}.{name}" for name in getattr(self, section).in_key(judging=judging)}
        return {key: value for key, value in self.flat().items() if key in covered}


def as_text(value: Any) -> str:
    """Return a field's value as `-P` takes it; `value` is as JSON has it."""
    if isinstance(value, list):
        return ",".join(str(Stage(**item) if isinstance(item, dict) else item) for item in value)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    return "null" if value is None else str(value)
