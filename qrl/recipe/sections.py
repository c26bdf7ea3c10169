"""The sections of a recipe: what each step can be told, and within which bounds.

A field is a command-line option, MLflow's `-P` key and a logged parameter under `section.field`; its description is what `--help` says.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from qrl import names as known

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
PACKED = ("int8", "nf4")  # storages of a base as bitsandbytes' codes


class Section(BaseModel):
    """Fields that are checked, known by name, and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def _each_once(named: tuple[str, ...], what: str) -> tuple[str, ...]:
    if not named or len(set(named)) < len(named):
        raise ValueError(f"must name at least one {what}, and each once")
    return named


def _none_twice(named: tuple[str, ...], what: str) -> tuple[str, ...]:
    if len(set(named)) < len(named):
        raise ValueError(f"must name each {what} once")
    return named


class Train(Section):
    """GRPO: how the policy is trained."""

    steps: int = Field(20, ge=1, le=1_000_000, description="optimizer steps")
    prompts_per_step: Count = Field(64, description="distinct questions in one optimizer step")
    generations: int = Field(8, ge=2, le=4096, description="completions sampled per question: GRPO's group")
    micro_batch: Count = Field(512, description="completions in one forward and backward pass")
    questions: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="training questions to draw prompts from, at most; all, where there are fewer",
    )
    max_ngram_share: Fraction | None = Field(
        None, description="held-out questions that may share 13 words in a row with training ones; default: by task"
    )
    learning_rate: float = Field(3e-5, gt=0, le=1, description="AdamW's peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of rollouts")
    max_completion_tokens: Count = Field(80, description="longest completion sampled, in tokens")
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = Field("dr_grpo", description="how token losses are averaged")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="what is clipped: each token's ratio (GRPO), or the sequence's (GSPO)"
    )
    num_iterations: Count = Field(
        1, description="optimizer steps on each batch of completions; above 1 the clip range matters"
    )
    epsilon: float = Field(0.2, gt=0, lt=1, description="ratios are clipped to 1 − epsilon … 1 + epsilon_high")
    epsilon_high: float | None = Field(None, gt=0, description="upper clip range; default: epsilon")
    scale_rewards: Literal["none", "group", "batch"] = Field("none", description="what a reward's spread is divided by")
    rewards: tuple[Literal["correct", "format"], ...] = Field(
        ("correct",), description="correct: the strict verdict; format: an answer in the asked form"
    )
    reward_weights: tuple[float, ...] = Field((), description="one a reward, in order; none given: 1 each")
    beta: float = Field(0.0, ge=0, description="weight of the KL term to the reference policy; 0 keeps no reference")
    method: Literal["full", "lora", "qlora"] = Field(
        "full", description="all weights, or a low-rank adapter that `merge` folds in; qlora: over a base in nf4"
    )
    base_storage: Literal["auto", "fp32", "bf16", "int8", "nf4"] = Field(
        "auto", description="the base in memory; auto: fp32 for full, train.dtype for lora, nf4 for qlora"
    )
    lora_rank: Count | None = Field(None, description="rank of the adapter; default: 16")
    lora_alpha: Count | None = Field(None, description="scale of the adapter, over its rank; default: twice the rank")
    lora_targets: tuple[str, ...] = Field(
        (), description="linears that get an adapter, q_proj,k_proj say; none named: all but the output head"
    )
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="dtype of forward and backward; auto: bf16 over a base in bf16, int8 or nf4, else fp32; masters are fp32",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in backward to save memory")
    save_every: Count = Field(10, description="optimizer steps between two checkpoints to resume from")
    qat: Literal["none", "int8", "int8-attention", "int4", "nvfp4-a16", "nvfp4-a4", "fp8", "mxfp4"] = Field(
        "none",
        description="train with linears that compute in this format; masters stay fp32, and its codes are stored beside them",
    )
    teacher: str | None = Field(
        None, description="distil on-policy from this model instead of GRPO: the student samples, it scores"
    )
    distill_top_k: Count = Field(
        64, description="distillation: the teacher's likeliest tokens that both are compared on, re-normalized"
    )
    distill_reverse: Fraction = Field(
        0.5, description="distillation: weight of reverse KL against forward; 0: forward, 1: reverse"
    )
    qat_calibration_samples: int = Field(
        128,
        ge=1,
        le=100_000,
        description="training texts that activation scales are calibrated on, and Q(W)'s gap measured on",
    )
    qat_calibration_batch: Count = Field(16, description="calibration texts in one forward pass")
    qat_calibration_max_tokens: Count = Field(
        1024, description="longest calibration text, in tokens; longer ones are an error"
    )
    completions_logged: Count = Field(8, description="completions a logged step puts into the table of samples")

    @field_validator("rewards")
    @classmethod
    def _once(cls, rewards: tuple[str, ...]) -> tuple[str, ...]:
        return _each_once(rewards, "reward")

    @field_validator("reward_weights")
    @classmethod
    def _some(cls, weights: tuple[float, ...]) -> tuple[float, ...]:
        if weights and not any(weights):
            raise ValueError("must hold a number other than 0: no completion would earn more than another")
        return weights

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


class Rollout(Section):
    """Who draws the completions that GRPO learns from, and how far that engine may be from the model that is trained."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="what samples; vllm needs a GPU and runs the step in projects/vllm"
    )
    mode: Literal["colocate", "server"] = Field(
        "colocate", description="vLLM in the training process, or a server on other GPUs"
    )
    quantization: Literal["none", "fp8"] = Field(
        "none", description="how vLLM stores its weights; quantized anew from bf16 at every step"
    )
    kv_cache: Literal["auto", "fp8"] = Field(
        "auto", description="how vLLM stores keys and values; auto: as it computes, in bf16"
    )
    gpu_memory_utilization: float = Field(
        0.3, gt=0, lt=1, description="share of the GPU's memory for a colocated engine, weights and KV cache"
    )
    max_model_tokens: Count | None = Field(
        None, description="longest prompt and completion together; default: the checkpoint's"
    )
    sleep: Literal["auto", "on", "off"] = Field(
        "auto", description="give a colocated engine's memory back while training; auto: where memory asks for it"
    )
    server: str = Field("http://127.0.0.1:8000", description="address of the server, in mode server")
    server_timeout_s: float = Field(240.0, gt=0, description="longest wait for the server")
    server_group_port: int = Field(51216, ge=1, le=65535, description="port over which weights reach the server")
    is_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        "token_truncate",
        description="what corrects for the gap between engine and trainer; none neither corrects nor measures it",
    )
    is_correction_max: float = Field(
        2.0, gt=0, description="weight at which a token or completion is truncated or masked"
    )
    max_engine_kl: float = Field(0.01, gt=0, description="warn above this KL of engine to trainer, k3, nats a token")
    min_effective_sample_size: Fraction = Field(
        0.9, description="warn below this effective sample size, a share of the tokens"
    )


class Watch(Section):
    """What training warns of, and stops for if told to."""

    stop: tuple[Literal["entropy", "signal", "kl", "truncation", "probe", "rollout"], ...] = Field(
        (), description="watchers that end training early, the weights so far kept; none named: all only warn"
    )
    window: Count = Field(5, description="optimizer steps in a row that a watcher looks at")
    min_entropy_share: Fraction = Field(0.1, description="entropy: least share of the first window's nats a token")
    max_reference_kl: float = Field(
        0.5, gt=0, description="kl: most nats a token from the reference; needs train.beta above 0"
    )
    max_truncation: Fraction = Field(
        0.5, description="truncation: largest share of completions cut at train.max_completion_tokens"
    )
    probe_every: int = Field(
        0, ge=0, description="probe: optimizer steps between two looks at held-out accuracy; 0: none"
    )
    probe_n: int = Field(
        128,
        ge=2,
        le=100_000,
        description="probe: questions of the training split that are neither prompts nor held out",
    )

    @field_validator("stop")
    @classmethod
    def _once(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        return _none_twice(stop, "watcher")


class Merge(Section):
    """Folding an adapter into its base."""

    max_logit_diff: float = Field(0.25, gt=0, description="largest logit difference allowed, merged against adapter-on")
    into: Literal["auto", "full", "int8", "nf4"] = Field(
        "auto",
        description="the original weights, or what int8 or nf4 unpack to; auto: what the adapter was trained over",
    )


class Quantize(Section):
    """How weights are stored in few bits."""

    schemes: tuple[Literal[known.QUANTIZED_SCHEMES], ...] = Field(
        (known.NF4, known.AWQ), description="schemes of the study, comma-separated"
    )
    group_size: Literal[32, 64, 128] = Field(
        128, description="input channels that share one scale, of awq, awq-ct, gptq, w8a16; other formats fix theirs"
    )
    bits: Literal[4, 8] = Field(
        4, description="bits of a weight under awq-ct and gptq; other schemes' names say theirs"
    )
    symmetric: bool | None = Field(
        None,
        description="no zero points, under awq-ct, gptq, w8a16; default: false under awq-ct, true under the others",
    )
    calibration: str = Field(
        "task",
        min_length=1,
        description="texts that awq, awq-ct, gptq, nvfp4 look at: task, rollouts (the policy's own answers), or a .jsonl file",
    )
    calibration_samples: int = Field(
        128, ge=1, le=100_000, description="calibration texts, chat-rendered, end token included"
    )
    calibration_max_tokens: Count = Field(
        512, description="longest calibration text, in tokens; longer ones are an error"
    )
    calibration_seed: int | None = Field(None, ge=0, lt=2**31, description="seed of calibration; default: seed")

    @field_validator("schemes")
    @classmethod
    def _once(cls, schemes: tuple[str, ...]) -> tuple[str, ...]:
        return _each_once(schemes, "scheme")


class Evaluate(Section):
    """Held-out questions, and when an accuracy counts."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="what answers: transformers here, or vLLM in its own environment; cells of both are never compared",
    )
    deterministic: bool = Field(
        False,
        description="vLLM: batch-invariant kernels on a GPU, for the same answers whatever is asked beside them (of w8a8 one or two of 1,000 may still turn)",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, lt=1, description="vLLM: share of the GPU's memory for all engines at once, weights and KV cache"
    )
    n: int = Field(
        2000,
        ge=2,
        le=1_000_000,
        description="held-out questions, at most, the same for every cell; all, where there are fewer",
    )
    samples: int = Field(1, ge=1, le=1000, description="answers to each question; 1 is greedy, more are sampled")
    temperature: float = Field(1.0, gt=0, description="sampling temperature, where samples is above 1")
    batch_size: Count = Field(256, description="prompts decoded together")
    max_new_tokens: Count = Field(128, description="longest answer, in tokens")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="compute dtype; auto: bf16 on a GPU, fp32 on a CPU"
    )
    min_eos_rate: Fraction = Field(0.95, description="least share of answers that end with the end token")
    max_truncation_rate: Fraction = Field(0.05, description="largest share of answers cut at max_new_tokens")
    min_parse_rate: Fraction = Field(0.90, description="least share of answers in the asked format")
    max_prompt_leak_rate: Fraction = Field(
        0.01, description="largest share of answers that repeat chat markers or the question"
    )
    max_grader_fault_rate: Fraction = Field(
        0.01, description="largest share of answers that the grader had no time or memory for"
    )
    samples_logged: Count = Field(20, description="completions shown as a table in each cell's run")


class Diagnose(Section):
    """What is measured of the weights."""

    bits: int = Field(4, ge=2, le=8, description="bits of the round-to-nearest proxy")
    group_size: Count = Field(128, description="input channels per scale of the proxy")
    outlier_multiplier: float = Field(6.0, gt=1, description="an outlier is larger than this times the median |w|")
    embeddings: bool = Field(False, description="measure embedding tables too")
    effective_rank: bool = Field(
        True, description="measure the effective rank of every update: the slowest measure of large models"
    )
    behaviour: int = Field(
        0,
        ge=0,
        le=10_000,
        description="held-out texts to compare next-token distributions on, quantized against full precision; 0: none",
    )


class Compare(Section):
    """What counts as surviving."""

    margin: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="loss of gain that still counts as survival; default: half the gain, at least 0.02",
    )


class Promote(Section):
    """What the gates ask for."""

    min_gain: float = Field(
        0.0, ge=-1, lt=1, description="grpo: the paired gain's lower 95 % bound must lie above this"
    )
    max_loss: float = Field(
        0.05, gt=0, le=1, description="awq: the lower 95 % bound of awq − full precision must lie above minus this"
    )


class Benchmark(Section):
    """How speed and memory are measured."""

    batches: tuple[Count, ...] = Field(
        (1, 16, 32, 64), description="prompts answered at once, comma-separated; against a server: clients"
    )
    requests: Count = Field(
        32, description="prompts of one model in one mode and round, at least; whole batches of them"
    )
    rounds: int = Field(
        5, ge=2, description="times that every model is asked in every mode, in turn; intervals are over rounds"
    )
    new_tokens: Count = Field(64, description="length of an answer, in tokens; the longest one where length is natural")
    length: Literal["fixed", "natural"] = Field(
        "fixed", description="fixed: every answer has new_tokens; natural: end tokens end it"
    )

    @field_validator("batches")
    @classmethod
    def _once(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        if not batches or len(set(batches)) < len(batches):
            raise ValueError("must name at least one batch, and each once")
        return batches
