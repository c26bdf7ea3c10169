"""The recipe's sections on training: the policy, its rollouts, what is watched, and merging an adapter.

A field is a command-line option, MLflow's `-P` key and a logged parameter under `section.field`. Its description is the
option's help.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, field_validator, model_validator

from qrl import names as known
from qrl.recipe import layers
from qrl.recipe.base import Count, Fraction, NoKey, NotInKey, Section, Selection, once, one_of, option

REWARDS = ("correct", "format", "flexible", "leak", "soft_overlong")
REWARDS_OF_RIGHT = {"correct": 1.0, "format": 1.0, "flexible": 1.0}  # the others are 0 or less for every answer
_LOGGED = ("std", "step", "prompt", "completion", "advantage")  # by training, beside rewards
# An adapter learns best at about ten times the rate of all weights.
# Source: Schulman et al., LoRA Without Regret (2025), thinkingmachines.ai/blog/lora.
ADAPTER_RATE_FACTOR = 10
PACKED = ("int8", "nf4")  # ways to store a base as bitsandbytes codes
_UNLESS_VLLM = NotInKey("engine", "transformers")  # settings of an engine that does not run
_UNLESS_STOPPING = NotInKey("stop", ())  # a watcher that only warns trains the same weights
_Value = TypeVar("_Value")
_OfVllm = Annotated[_Value, _UNLESS_VLLM]
_OfStop = Annotated[_Value, _UNLESS_STOPPING]


def _different_names(rewards: tuple[str, ...]) -> tuple[str, ...]:
    for name in rewards:
        if ":" in name and reward_name(name) in _LOGGED:
            raise ValueError(f"has {name}, but training logs something else by that name: rename the function")
    if len(set(map(reward_name, rewards))) < len(rewards):
        raise ValueError("must name functions with different names: a reward is logged by its function's name")
    return rewards


def _address(address: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]\S*", address):
        raise ValueError("must be an address such as http://127.0.0.1:8000")
    return address


_Address = Annotated[str, AfterValidator(_address)]


def reward_name(reward: str) -> str:
    """Return the name by which a reward is logged: of FILE.py:FUNCTION the function's."""
    return reward.rpartition(":")[2]


def rate_of_other_method(rate: float, *, is_adapter: bool) -> float:
    """Return the learning rate of an adapter from that of all weights, or that of all weights from an adapter's."""
    converted = rate * ADAPTER_RATE_FACTOR if is_adapter else rate / ADAPTER_RATE_FACTOR
    return float(f"{converted:.6g}")  # 1e-05, not 9.999999999999999e-06


def _format(name: str) -> str:
    if name not in ("none", *known.FORMATS) and not re.search(known.FORMAT_FILE, name):
        own = "FILE.yaml with a name of letters, digits and . _ + -"
        raise ValueError(f"must be none, {', '.join(known.FORMATS)}, or {own}")
    return name


REDISTRIBUTED = ("top_p", "top_k", "min_p", "repetition_penalty")  # ways to sample that change more than temperature


class Train(Section):
    """GRPO, rejection sampling, distillation or supervised fine-tuning: how the policy is trained."""

    steps: int = option(20, "optimizer steps", ge=1, le=1_000_000)
    prompts_per_step: Count = option(64, "distinct questions in one optimizer step")
    generations: int = option(8, "completions sampled per question: the size of GRPO's group", ge=2, le=4096)
    micro_batch: Count = option(512, "completions in one forward and backward pass")
    questions: int = option(4096, "training questions to draw prompts from, at most", ge=1, le=1_000_000)
    max_ngram_share: Fraction | None = option(
        None, "largest share of held-out questions with 13 words in a row from a training question; default: by task"
    )
    learning_rate: float = option(
        3e-5, "peak learning rate of AdamW; an adapter's is ten times that of all weights unless it is set", gt=0, le=1
    )
    warmup_steps: int = option(0, "optimizer steps of linear warm-up", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "learning-rate schedule after warm-up")
    temperature: float = option(1.0, "sampling temperature of rollouts", gt=0)
    max_completion_tokens: Count = option(80, "longest sampled completion, in tokens")
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = option("dr_grpo", "how the token losses are averaged")
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token", "which ratio is clipped: of each token (GRPO) or of the whole answer (GSPO)"
    )
    num_iterations: Count = option(1, "optimizer steps on each batch of completions; clipping has an effect above 1")
    epsilon: float = option(0.2, "ratios are clipped to 1 − epsilon … 1 + epsilon_high", gt=0, lt=1)
    epsilon_high: float | None = option(None, "upper clip range; default: epsilon", gt=0)
    scale_rewards: Literal["none", "group", "batch"] = option("none", "whose standard deviation divides the rewards")
    rewards: Annotated[
        tuple[Annotated[str, one_of(REWARDS, "FILE.py:FUNCTION")], ...],
        once("reward", at_least_one=True),
        AfterValidator(_different_names),
    ] = option(("correct",), f"{', '.join(REWARDS)} (train/README.md) or FILE.py:FUNCTION, comma-separated; summed")
    reward_weights: tuple[float, ...] = option((), "one weight per reward, in order; default: all 1")
    beta: float = option(0.0, "weight of the KL term to the reference policy; 0 keeps no reference", ge=0)
    method: Literal["full", "lora", "qlora"] = option(
        "full", "train all weights, or a low-rank adapter that `merge` folds in; qlora: over a base in nf4"
    )
    base_storage: Literal["auto", "fp32", "bf16", "int8", "nf4"] = option(
        "auto", "how the base is stored in memory; auto: fp32 for full, train.dtype for lora, nf4 for qlora"
    )
    lora_rank: Count | None = option(None, "rank of the adapter; default: 16")
    lora_alpha: Count | None = option(None, "scale of the adapter, divided by its rank; default: twice the rank")
    lora_targets: Annotated[tuple[str, ...], once("linear")] = option(
        (), "linears that get an adapter, e.g. q_proj,k_proj; default: all but the output head"
    )
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", "dtype of both passes; auto: bf16 over a base in bf16, int8 or nf4, else fp32; master weights are fp32"
    )
    store_dtype: Annotated[Literal["auto", "fp32"], NotInKey("store_dtype", "auto")] = option(
        "auto", "dtype of the trained weights on the disk; auto: the base's, or fp32 with train.qat"
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    save_every: Count = option(10, "optimizer steps between checkpoints to resume from")
    qat: Annotated[str, AfterValidator(_format)] = option(
        "none",
        "quantization-aware training in a format that linears compute in; its codes become a checkpoint too: none, "
        "int8, int8-attention, int4, int3, int2, nvfp4-a16, nvfp4-a4, fp8, fp8-static, int8-a8-static, mxfp4, or a "
        "compressed-tensors scheme as FILE.yaml",
    )
    qat_layers: Annotated[layers.Layers, NotInKey("qat_layers", ())] = option(
        (), "linears that train.qat covers, spelled as quantize.layers, which must be the same; default: all"
    )
    # Its digest is an input of the key: an address may come to hold another model.
    teacher: NoKey[str | None] = option(
        None, "distil on-policy from this model instead of GRPO: the student samples, the teacher scores"
    )
    # How the teacher's scores come about may change their last bits. No key covers the default: earlier results stay.
    teacher_placement: Annotated[Literal["process", "sharded", "server"], NotInKey("teacher_placement", "process")] = (
        option("process", "the teacher is whole in each process, sharded over the GPUs of all, or behind a server")
    )
    teacher_server: NoKey[_Address] = option(
        "http://127.0.0.1:8001", "address of vLLM's server, with train.teacher_placement=server"
    )
    distill_top_k: Count = option(64, "distillation: number of the teacher's top tokens to compare, re-normalized")
    distill_reverse: Fraction = option(0.5, "distillation: weight of reverse KL; 0: forward only, 1: reverse only")
    qat_calibration_samples: int = option(
        128, "training texts for activation scales and for the error of quantized weights", ge=1, le=100_000
    )
    qat_calibration_batch: Count = option(16, "calibration texts in one forward pass")
    qat_calibration_max_tokens: Count = option(1024, "longest calibration text, in tokens; a longer one is an error")
    completions_logged: Count = option(8, "completions that each logged step adds to the table of samples")
    selection: Selection = option(
        "random", "training questions to take: random (drawn by the seed) or first (the first rows of the file)"
    )
    # No key covers these while they have their defaults, so that a new field with its default is no other setting. The
    # code of this file is part of a training's key all the same: a change here trains again (`tracking/sources.py`).
    top_p: Annotated[float, NotInKey("top_p", 1.0)] = option(
        1.0, "rollouts: sample from the likeliest tokens that together have this probability", gt=0, le=1
    )
    top_k: Annotated[int, NotInKey("top_k", 0)] = option(
        0, "rollouts: sample from this many of the likeliest tokens; 0: from all", ge=0, lt=2**31
    )
    min_p: Annotated[Fraction, NotInKey("min_p", 0.0)] = option(
        0.0, "rollouts: leave out tokens with less than this share of the likeliest one's probability"
    )
    repetition_penalty: Annotated[float, NotInKey("repetition_penalty", 1.0)] = option(
        1.0, "rollouts: tokens that are in the prompt or the answer already become less likely above 1", gt=0
    )
    mask_truncated: Annotated[bool, NotInKey("mask_truncated", False)] = option(
        False, "leave completions that were cut at train.max_completion_tokens out of the loss"
    )
    soft_overlong_tokens: Annotated[Count | None, NotInKey("soft_overlong_tokens", None)] = option(
        None, "soft_overlong: last tokens of max_completion_tokens in which it falls from 0 to -1; default: a fifth"
    )
    max_resamples: Annotated[int, NotInKey("max_resamples", 0)] = option(
        0, "rounds in which groups with equal rewards are replaced by new questions, at most; 0: none", ge=0, le=1000
    )
    algorithm: Annotated[Literal["grpo", "sft", "raft"], NotInKey("algorithm", "grpo")] = option(
        "grpo",
        "sft: supervised fine-tuning on the worked solutions of the questions that GRPO would draw; raft: on the "
        "policy's own right completions (rejection sampling); both are controls",
    )
    min_kept_reward: Annotated[float | None, NotInKey("min_kept_reward", None)] = option(
        None, "raft: smallest summed reward of a completion that is trained on; default: what a right answer earns"
    )
    keep_checkpoints: NoKey[Count] = option(2, "checkpoints to resume from that stay on the disk; the oldest go first")
    # Its content's digest is an input of the key.
    qat_calibration: NoKey[str] = option(
        "task", "texts for activation scales and for the error of quantized weights: task, or a .jsonl file with `text`"
    )

    parallel: Annotated[Literal["none", "ddp", "fsdp2"], NotInKey("parallel", "none")] = option(
        "none", "processes that train as one, a GPU each: ddp (copies) or fsdp2 (parts, on GPUs alone)"
    )
    # The number that trains is an input of the key.
    processes: NoKey[Count | None] = option(None, "how many with train.parallel; default: all GPUs of this machine")
    trainer: Annotated[Literal["trl", "verl"], NotInKey("trainer", "trl")] = option(
        "trl", "what trains: trl, or verl (GRPO alone, with rollout.engine=vllm; several GPUs: train.parallel=fsdp2)"
    )

    @model_validator(mode="before")
    @classmethod
    def _adapter_has_its_rate(cls, values: Any) -> Any:
        is_adapter = isinstance(values, dict) and values.get("method", "full") != "full"
        if is_adapter and "learning_rate" not in values:
            default = cls.model_fields["learning_rate"].default
            return values | {"learning_rate": rate_of_other_method(default, is_adapter=True)}
        return values

    @field_validator("reward_weights")
    @classmethod
    def _not_all_zero(cls, weights: tuple[float, ...]) -> tuple[float, ...]:
        if weights and not any(weights):
            raise ValueError("must hold a number other than 0: no completion would earn more than another")
        return weights

    @property
    def adapter(self) -> bool:
        """Whether a low-rank adapter is trained over a frozen base."""
        return self.method != "full"

    @property
    def storage(self) -> str:
        """How the base is stored in memory: `base_storage`, with `auto` resolved."""
        if self.base_storage != "auto":
            return self.base_storage
        return {"full": "fp32", "lora": "bf16" if self.dtype == "bf16" else "fp32", "qlora": "nf4"}[self.method]

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapter: `lora_rank`, or its default."""
        return self.lora_rank or 16

    @property
    def adapter_alpha(self) -> int:
        """Scale of the adapter, divided by its rank: `lora_alpha`, or its default."""
        return self.lora_alpha or 2 * self.adapter_rank

    @property
    def weights_of_rewards(self) -> tuple[float, ...]:
        """One weight per reward: `reward_weights`, or 1 each."""
        return self.reward_weights or (1.0,) * len(self.rewards)

    @property
    def least_kept_reward(self) -> float:
        """The reward at which raft keeps a completion: `min_kept_reward`, or the weighted sum for a right answer."""
        if self.min_kept_reward is not None:
            return self.min_kept_reward
        weighted = zip(self.rewards, self.weights_of_rewards, strict=True)
        return sum(weight * REWARDS_OF_RIGHT.get(name, 0.0) for name, weight in weighted)

    @property
    def variant(self) -> str:
        """The variant of the trained weights: the algorithm, `qat-int4`, `distilled`, or `qad-int4` with both."""
        trained_in = Path(self.qat).stem
        if self.qat_layers:
            trained_in = f"{trained_in}+{layers.slug(self.qat_layers)}"
        if self.teacher:
            return known.DISTILLED if self.qat == "none" else f"{known.QAD_PREFIX}{trained_in}"
        if self.algorithm != "grpo":
            return {"sft": known.SFT, "raft": known.RAFT}[self.algorithm]
        return known.GRPO if self.qat == "none" else f"{known.QAT_PREFIX}{trained_in}"

    @property
    def has_groups(self) -> bool:
        """Whether it trains in a format in which the recipe chooses how many inputs share a scale."""
        return self.qat in known.GROUPED_FORMATS or layers.has_groups(self.qat_layers)

    @property
    def title(self) -> str:
        """What trains, as people read it."""
        return "distillation" if self.teacher else self.algorithm.upper()

    @property
    def batch(self) -> str:
        """What one optimizer step trains on, as people read it."""
        if self.algorithm == "sft":
            return f"{self.prompts_per_step} worked solutions"
        completions = f"{self.prompts_per_step} × {self.generations} completions"
        return f"the right ones of {completions}" if self.algorithm == "raft" else completions

    @property
    def most_tokens(self) -> int:
        """How many tokens its rollouts have at most."""
        completions = self.steps * self.prompts_per_step * self.generations // self.num_iterations
        return completions * self.max_completion_tokens

    @property
    def packed(self) -> bool:
        """Whether the base is stored in memory as bitsandbytes codes."""
        return self.storage in PACKED

    @property
    def compute(self) -> str:
        """Dtype of forward and backward passes: `dtype`, with `auto` resolved."""
        return self.dtype if self.dtype != "auto" else "fp32" if self.storage == "fp32" else "bf16"


def redistributed(sampling: object) -> list[str]:
    """Return which settings of sampling, a `Train`'s or TRL's, change the distribution beside its temperature."""
    return [key for key in REDISTRIBUTED if (getattr(sampling, key) or 0) != Train.model_fields[key].default]


class Rollout(Section):
    """The engine that samples completions, and how far it may differ from the model that is trained."""

    engine: Literal["transformers", "vllm"] = option("transformers", "what samples; vllm needs a GPU and projects/vllm")
    mode: _OfVllm[Literal["colocate", "server"]] = option("colocate", "vLLM within training, or a server on other GPUs")
    quantization: _OfVllm[Literal["none", "fp8", "real"]] = option(
        "none", "vLLM's weights: bf16; fp8, quantized from bf16 at every step; real, the codes of train.qat"
    )
    kv_cache: _OfVllm[Literal["auto", "fp8"]] = option("auto", "how vLLM stores keys and values; auto: bf16")
    gpu_memory_utilization: _OfVllm[float] = option(
        0.3, "share of GPU memory for a colocated engine, weights and KV cache", gt=0, lt=1
    )
    kv_cache_gib: _OfVllm[float | None] = option(
        None, "fixed size of a colocated engine's KV cache: several trainings can then share a GPU", gt=0
    )
    compile: _OfVllm[bool | None] = option(
        None,
        "torch.compile in a colocated engine; false: CUDA graphs alone, so that it starts sooner; default: true for "
        "trainings of up to 5 million completion tokens or more",
    )
    max_model_tokens: _OfVllm[Count | None] = option(
        None, "longest prompt plus completion, in tokens; default: the checkpoint's limit"
    )
    sleep: _OfVllm[Literal["auto", "on", "off"]] = option(
        "auto", "release a colocated engine's memory while training; auto: if memory is short"
    )
    server: NoKey[_Address] = option("http://127.0.0.1:8000", "server's address, with rollout.mode=server")
    server_timeout_s: NoKey[float] = option(240.0, "longest wait for the server, in seconds", gt=0)
    server_group_port: NoKey[int] = option(51216, "port for sending it weights", ge=1, le=65535)
    is_correction: Annotated[
        Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"], _UNLESS_VLLM
    ] = option(
        "token_truncate", "importance-sampling correction of engine to trainer; none neither corrects nor measures"
    )
    is_correction_max: _OfVllm[float] = option(2.0, "weight above which a token or answer is truncated or masked", gt=0)
    max_engine_kl: _OfVllm[float] = option(0.01, "warn above this engine-to-trainer KL, nats per token", gt=0)
    min_effective_sample_size: _OfVllm[Fraction] = option(0.9, "warn below this effective sample size (token share)")
    # No key covers these while they have their defaults, so that a new field with its default is no other setting. The
    # code of this file is part of a training's key all the same: a change here trains again (`tracking/sources.py`).
    max_gap_growth: Annotated[float, _UNLESS_VLLM, NotInKey("max_gap_growth", 5.0)] = option(
        5.0, "warn where the engine's gap grows to this multiple, along completions or over steps", gt=1
    )
    min_sequence_ess: Annotated[Fraction, _UNLESS_VLLM, NotInKey("min_sequence_ess", 0.2)] = option(
        0.2, "warn below this effective sample size of whole completions, as a share"
    )
    adapter: Annotated[Literal["merged", "slot"], _UNLESS_VLLM, NotInKey("adapter", "merged")] = option(
        "merged", "how a colocated engine gets an adapter: merged into the base, or in a LoRA slot beside it"
    )


class Watch(Section):
    """What training warns about, and which warnings end it."""

    stop: Annotated[
        tuple[Literal["entropy", "signal", "kl", "truncation", "probe", "rollout", "resample"], ...],
        once("watcher"),
        _UNLESS_STOPPING,
    ] = option((), "watchers that end training early and keep the weights; default: all only warn")
    window: _OfStop[Count] = option(5, "consecutive optimizer steps that a watcher looks at")
    min_entropy_share: _OfStop[Fraction] = option(0.1, "entropy: smallest share of the first window's entropy")
    max_reference_kl: _OfStop[float] = option(
        0.5, "kl: largest KL to the reference, nats per token; needs train.beta above 0", gt=0
    )
    max_truncation: _OfStop[Fraction] = option(0.5, "truncation: largest share cut at train.max_completion_tokens")
    probe_every: int = option(0, "probe: optimizer steps between checks of held-out accuracy; 0: none", ge=0)
    probe_n: int = option(128, "probe: training questions that are neither prompts nor held out", ge=2, le=100_000)


class Merge(Section):
    """Folding an adapter into its base."""

    max_kl: float = option(0.01, "largest KL from the adapter-on model to the merged one, nats per token", gt=0)
    into: Literal["auto", "full", "int8", "nf4"] = option(
        "auto", "the original weights, or the dequantized int8 or nf4 base; auto: what the adapter was trained over"
    )
    store_dtype: Annotated[Literal["auto", "fp32"], NotInKey("store_dtype", "auto")] = option(
        "auto", "dtype of the merged weights on the disk; auto: the base's"
    )
