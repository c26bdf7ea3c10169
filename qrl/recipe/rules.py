"""Settings of a recipe that do not go together, and why: the one table of them.

A rule is data. It `applies` to some recipes, it `needs` something of them, and it says `because` of what. `check` looks
at all rules at once, so that a user corrects a recipe in one go. `markdown` prints the same rules as the table of a
README.

Only the recipe counts here. What depends on the machine, the model or the data is checked by the trainer
(`qrl.train.machine`, `qrl.train.trainers`). What one field alone may hold is checked by its type, as the recipe is
read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from qrl import names
from qrl.errors import BadInput, Objections
from qrl.recipe import layers
from qrl.recipe.sections import Quantize, Recipe
from qrl.recipe.training import REDISTRIBUTED, Rollout, Train, Watch, redistributed

DEFAULTS = Recipe()
CODE_FORMATS = ("int4", "nvfp4-a16", "fp8")  # of `train.qat`, for which vLLM has a kernel that we send codes to
SLOT_RANK_LIMIT = 512  # of vLLM's LoRA slots


@dataclass(frozen=True)
class Condition:
    """Something that holds for a recipe or does not."""

    text: str  # as a table shows it: `train.method = full`
    holds: Callable[[Recipe], bool]

    def __and__(self, other: "Condition") -> "Condition":
        return Condition(f"{self.text}, {other.text}", lambda recipe: self.holds(recipe) and other.holds(recipe))


@dataclass(frozen=True)
class Rule:
    """What a setting needs of the others."""

    name: str  # `BadInput.rule`, which tests and programs match
    field: str  # the setting that is wrong or has no effect: `BadInput.field`
    applies: Condition
    needs: Condition
    because: str
    message: str | Callable[[Recipe], str]  # the user's sentence; {train.qat} stands for the value of that field
    warns: bool = False  # the setting only has no effect: the recipe runs all the same

    def is_broken(self, recipe: Recipe) -> bool:
        """Return whether the rule applies to a recipe that lacks what it needs."""
        return self.applies.holds(recipe) and not self.needs.holds(recipe)

    def sentence(self, recipe: Recipe) -> str:
        """Return what the user is told of a recipe that breaks the rule."""
        if callable(self.message):
            return self.message(recipe)
        return self.message.format(**dict(recipe))


def value(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key, such as `train.qat`."""
    return attrgetter(key)(recipe)


def equals(key: str, *allowed: object) -> Condition:
    """Return the condition that a setting has one of some values."""
    text = f"`{key} = {' or '.join(map(str, allowed))}`"
    return Condition(text, lambda recipe: value(recipe, key) in allowed)


def differs(key: str, refused: object) -> Condition:
    """Return the condition that a setting has another value."""
    return Condition(f"`{key}` other than `{refused}`", lambda recipe: value(recipe, key) != refused)


def changed(key: str) -> Condition:
    """Return the condition that a setting does not have its default."""
    return Condition(f"`{key}`", lambda recipe: value(recipe, key) != value(DEFAULTS, key))


def unchanged(key: str) -> Condition:
    """Return the condition that a setting has its default."""
    return Condition(f"no `{key}`", lambda recipe: value(recipe, key) == value(DEFAULTS, key))


ALWAYS = Condition("", lambda recipe: True)
FULL = equals("train.method", "full")
ADAPTER = equals("train.method", "lora", "qlora")
SFT = equals("train.algorithm", "sft")
RAFT = equals("train.algorithm", "raft")
DISTILLS = Condition("`train.teacher`", lambda recipe: bool(recipe.train.teacher))
GRPO = Condition("GRPO", lambda recipe: not recipe.train.teacher and recipe.train.algorithm == "grpo")
REWARDED = Condition("GRPO or raft", lambda recipe: GRPO.holds(recipe) or RAFT.holds(recipe))
VERL = equals("train.trainer", "verl")
BY_VLLM = equals("rollout.engine", "vllm")
SERVED = equals("rollout.mode", "server")
CORRECTED = Condition(
    "`rollout.is_correction` other than `none`", lambda recipe: recipe.rollout.is_correction != "none"
)


# ---- train: batches, rewards, adapters ----


def _weights_sentence(recipe: Recipe) -> str:
    weights, rewards = recipe.train.reward_weights, recipe.train.rewards
    return (
        f"train.reward_weights has {len(weights)} numbers for {len(rewards)} rewards ({', '.join(rewards)}): give one "
        "per reward, or none."
    )


_NO_ADAPTER = "leave it out, or set train.method = lora or qlora"

TRAINING = (
    Rule(
        name="weights-match-rewards",
        field="train.reward_weights",
        applies=Condition("`train.reward_weights`", lambda recipe: bool(recipe.train.reward_weights)),
        needs=Condition(
            "a number for each of `train.rewards`",
            lambda recipe: len(recipe.train.reward_weights) == len(recipe.train.rewards),
        ),
        because="each reward is multiplied by its weight",
        message=_weights_sentence,
    ),
    Rule(
        name="saves-between-batches",
        field="train.save_every",
        applies=ALWAYS,
        needs=Condition(
            "`train.save_every` a multiple of `train.num_iterations`",
            lambda recipe: recipe.train.save_every % recipe.train.num_iterations == 0,
        ),
        because="training cannot resume within a batch of completions",
        message="train.save_every = {train.save_every} is no multiple of train.num_iterations = "
        "{train.num_iterations}, but training cannot resume within a batch of completions: choose a multiple.",
    ),
    Rule(
        name="overlong-tokens-need-their-reward",
        field="train.soft_overlong_tokens",
        applies=changed("train.soft_overlong_tokens"),
        needs=Condition("`soft_overlong` in `train.rewards`", lambda recipe: "soft_overlong" in recipe.train.rewards),
        because="no other reward reads it",
        message="train.soft_overlong_tokens = {train.soft_overlong_tokens} has no effect without that reward: add "
        "soft_overlong to train.rewards, or leave it out.",
    ),
    Rule(
        name="overlong-tokens-are-of-a-completion",
        field="train.soft_overlong_tokens",
        applies=changed("train.soft_overlong_tokens"),
        needs=Condition(
            "at most `train.max_completion_tokens`",
            lambda recipe: (recipe.train.soft_overlong_tokens or 0) <= recipe.train.max_completion_tokens,
        ),
        because="they are the last tokens of a completion",
        message="train.soft_overlong_tokens = {train.soft_overlong_tokens} exceeds train.max_completion_tokens = "
        "{train.max_completion_tokens}: lower it.",
    ),
    *(
        Rule(
            name=f"{key}-needs-an-adapter",
            field=f"train.{key}",
            applies=Condition(f"`train.{key}`", lambda recipe, key=key: bool(getattr(recipe.train, key))),
            needs=ADAPTER,
            because="it is a setting of the adapter",
            message=f"train.{key} is set, but train.method = full trains all weights, no adapter: {_NO_ADAPTER}.",
        )
        for key in ("lora_rank", "lora_alpha", "lora_targets")
    ),
    Rule(
        name="full-training-is-in-fp32",
        field="train.base_storage",
        applies=FULL,
        needs=Condition("`train.base_storage = auto or fp32`", lambda recipe: recipe.train.storage == "fp32"),
        because="small updates vanish in fewer bits",
        message="train.base_storage = {train.storage} stores the base in too few bits to train its own weights: "
        f"{_NO_ADAPTER}.",
    ),
    Rule(
        name="bf16-storage-computes-in-bf16",
        field="train.dtype",
        applies=ADAPTER & equals("train.base_storage", "bf16"),
        needs=Condition("`train.dtype = auto or bf16`", lambda recipe: recipe.train.compute != "fp32"),
        because="weights are multiplied in the dtype that they are stored in",
        message="train.base_storage = {train.storage} computes in bf16, but train.dtype is fp32: leave one of the two "
        "out.",
    ),
    Rule(
        name="merge-stores-an-adapter",
        field="train.store_dtype",
        applies=changed("train.store_dtype"),
        needs=FULL,
        because="merging stores the weights: `merge.store_dtype`",
        message="train.store_dtype = {train.store_dtype} does not apply to an adapter: leave it out, and set "
        "merge.store_dtype, since merging stores the weights.",
    ),
    Rule(
        name="processes-need-parallel",
        field="train.processes",
        applies=changed("train.processes"),
        needs=differs("train.parallel", "none"),
        because="one process trains",
        message="train.processes = {train.processes} has no effect without train.parallel: set it to ddp or fsdp2.",
    ),
    Rule(
        name="qat-trains-all-weights",
        field="train.qat",
        applies=changed("train.qat"),
        needs=FULL,
        because="the weights that are rounded are those that are trained",
        message="train.qat = {train.qat} trains all weights, but train.method = {train.method} trains an adapter: set "
        "train.method = full, or train.qat = none.",
    ),
    Rule(
        name="qat-layers-need-qat",
        field="train.qat_layers",
        applies=changed("train.qat_layers"),
        needs=changed("train.qat"),
        because="training rounds no linear otherwise",
        message=lambda recipe: (
            f"train.qat_layers = {layers.text_of(recipe.train.qat_layers)} has no effect without train.qat: set it "
            "to a format, or leave the layers out."
        ),
    ),
    Rule(
        name="qat-layers-are-stored-as-trained",
        field="quantize.layers",
        applies=changed("train.qat"),
        needs=Condition(
            "`quantize.layers` equal to `train.qat_layers`",
            lambda recipe: recipe.quantize.layers == recipe.train.qat_layers,
        ),
        because="other linears than those trained in few bits would be stored in them",
        message=lambda recipe: (
            f"train.qat_layers = {layers.text_of(recipe.train.qat_layers) or 'all'} and quantize.layers = "
            f"{layers.text_of(recipe.quantize.layers) or 'all'} differ, so other linears would be stored in few bits "
            "than were trained in them: set both alike."
        ),
    ),
    Rule(
        name="attention-has-layers-of-its-own",
        field="train.qat_layers",
        applies=changed("train.qat_layers"),
        needs=differs("train.qat", "int8-attention"),
        because="that format is `int8` with `attention`",
        message="train.qat = int8-attention covers the linears of attention already: set train.qat = int8, and "
        "attention in train.qat_layers.",
    ),
    Rule(
        name="calibration-needs-qat",
        field="train.qat_calibration",
        applies=changed("train.qat_calibration"),
        needs=changed("train.qat"),
        because="nothing else is calibrated in training",
        message="train.qat_calibration calibrates train.qat, which is none: set one or omit the other.",
    ),
)


# ---- what each trainer reads ----


def _stops_beside_probe(recipe: Recipe) -> list[str]:
    return sorted(set(recipe.watch.stop) - {"probe"})


# Settings of rewards and rollouts are read by neither. A recipe with `train.algorithm = sft` is the control of the same
# recipe with GRPO, so it may keep them; a distillation is a study of its own, where they would mislead.
SUPERVISED = (
    Rule(
        name="sft-has-no-teacher",
        field="train.algorithm",
        applies=SFT,
        needs=unchanged("train.teacher"),
        because="it trains on worked solutions",
        message="train.algorithm = sft trains on worked solutions, but train.teacher distils: leave one out.",
    ),
    Rule(
        name="sft-has-no-qat",
        field="train.qat",
        applies=SFT,
        needs=unchanged("train.qat"),
        because="the control trains all weights in full precision",
        message="train.algorithm = sft trains all weights in full precision, but train.qat = {train.qat}: set it to "
        "none.",
    ),
    Rule(
        name="sft-trains-all-weights",
        field="train.method",
        applies=SFT,
        needs=FULL,
        because="the control trains all weights in full precision",
        message="train.algorithm = sft trains all weights in full precision, but train.method = {train.method}: set "
        "it to full.",
    ),
    Rule(
        name="sft-stops-by-the-probe",
        field="watch.stop",
        applies=SFT,
        needs=Condition("`watch.stop = probe`, or none", lambda recipe: not _stops_beside_probe(recipe)),
        because="the other watchers read rewards and completions",
        message=lambda recipe: (
            "train.algorithm = sft has no rewards, which watch.stop = "
            f"{', '.join(_stops_beside_probe(recipe))} reads: leave it out, or stop by the probe."
        ),
    ),
)

_SAMPLED = "it trains on completions that the policy samples"
_NO_RATIOS = "it has no ratios of probabilities and no advantages"
_RAFT_LACKS = {  # our key → why any value but the default is refused
    "train.teacher": _SAMPLED,
    "train.qat": "the control trains in full precision",
    "train.beta": "its loss has no KL term",
    "train.max_resamples": "a group of right completions has a gradient",
    "train.loss": "its loss is the mean over all kept tokens",
    "train.importance_sampling_level": _NO_RATIOS,
    "train.epsilon": _NO_RATIOS,
    "train.epsilon_high": _NO_RATIOS,
    "train.scale_rewards": _NO_RATIOS,
    "rollout.is_correction_max": _NO_RATIOS,
}
_OWN_REWARDS = Condition(
    "`FILE.py:NAME` in `train.rewards`", lambda recipe: any(":" in name for name in recipe.train.rewards)
)


def _raft_lacks(key: str, because: str) -> Rule:
    default = value(DEFAULTS, key)
    remedy = "leave it out" if default is None else f"set it to {default}"
    message = f"{key} = {{{key}}} does not go with train.algorithm = raft, since {because}: {remedy}."
    return Rule(f"raft-has-no-{key}", key, RAFT, unchanged(key), because, message)


REJECTION_SAMPLING = (
    *(_raft_lacks(key, because) for key, because in _RAFT_LACKS.items()),
    Rule(
        name="raft-corrects-no-engine",
        field="rollout.is_correction",
        applies=RAFT,
        needs=equals("rollout.is_correction", "token_truncate", "none"),
        because="the gap to an engine is measured, but weighs no completion",
        message="rollout.is_correction = {rollout.is_correction} has no effect with train.algorithm = raft, which "
        "weighs no completion: leave it out to have the gap measured, or set none.",
    ),
    Rule(
        name="raft-measures-the-gap-at-temperature-1",
        field="train.temperature",
        applies=RAFT & BY_VLLM & CORRECTED,
        needs=equals("train.temperature", 1.0),
        because="its log-probabilities are of temperature 1, the engine's of the sampling",
        message="train.temperature = {train.temperature} changes the engine's log-probabilities, but those of "
        "train.algorithm = raft are of temperature 1, so the gap between them would be wrong: set "
        "rollout.is_correction = none, or train.temperature = 1.",
    ),
    Rule(
        name="raft-stops-by-what-it-measures",
        field="watch.stop",
        applies=RAFT,
        needs=Condition(
            "`watch.stop` without `kl`, `resample`", lambda recipe: not {"kl", "resample"} & set(recipe.watch.stop)
        ),
        because="it has no reference policy and resamples no group",
        message="train.algorithm = raft has no reference policy and resamples no group, which watch.stop = kl and "
        "resample read: leave them out.",
    ),
    Rule(
        name="raft-knows-no-right-answer-of-own-rewards",
        field="train.min_kept_reward",
        applies=RAFT & _OWN_REWARDS,
        needs=changed("train.min_kept_reward"),
        because="what a right answer earns is not known",
        message="train.algorithm = raft keeps completions that earn what a right answer earns, which is not known of "
        "functions of your own in train.rewards: set train.min_kept_reward to the smallest summed reward to keep.",
    ),
    Rule(
        name="min-kept-reward-needs-raft",
        field="train.min_kept_reward",
        applies=changed("train.min_kept_reward"),
        needs=RAFT,
        because="nothing else keeps some completions and drops others",
        message="train.min_kept_reward = {train.min_kept_reward} has no effect with train.algorithm = "
        "{train.algorithm}: leave it out, or set train.algorithm = raft.",
    ),
)

DISTILLATION = (
    *(
        Rule(
            name=f"distillation-has-no-{key}",
            field=f"train.{key}",
            applies=DISTILLS,
            needs=unchanged(f"train.{key}"),
            because="a distillation has no rewards",
            message=f"train.{key} has no effect where train.teacher distils, without rewards: leave it out.",
        )
        for key in ("mask_truncated", "max_resamples")
    ),
    Rule(
        name="distillation-has-no-watchers",
        field="watch.stop",
        applies=DISTILLS,
        needs=unchanged("watch.stop") & unchanged("watch.probe_every"),
        because="watchers read GRPO's rewards",
        message="train.teacher trains without watchers, which read GRPO's rewards: leave watch.stop out, and "
        "watch.probe_every at 0.",
    ),
    Rule(
        name="distillation-trains-all-weights",
        field="train.method",
        applies=DISTILLS,
        needs=FULL,
        because="the student's own weights learn",
        message="train.teacher distils into all weights, but train.method = {train.method} trains an adapter: set "
        "train.method = full.",
    ),
    Rule(
        name="placement-needs-a-teacher",
        field="train.teacher_placement",
        applies=changed("train.teacher_placement"),
        needs=DISTILLS,
        because="there is nothing to place",
        message="train.teacher_placement = {train.teacher_placement} has no effect without train.teacher: leave it "
        "out, or name a teacher.",
    ),
    Rule(
        name="teacher-server-needs-its-placement",
        field="train.teacher_server",
        applies=changed("train.teacher_server"),
        needs=equals("train.teacher_placement", "server"),
        because="no server is asked otherwise",
        message="train.teacher_server = {train.teacher_server} has no effect: set train.teacher_placement = server, "
        "or leave it out.",
    ),
)

_GAP_IS_MEASURED = BY_VLLM & CORRECTED
_MEASURES = {  # watcher → what makes training measure what it reads, and how to get that
    "kl": (Condition("`train.beta` above 0", lambda recipe: recipe.train.beta > 0), "set train.beta above 0"),
    "probe": (
        Condition("`watch.probe_every` above 0", lambda recipe: recipe.watch.probe_every > 0),
        "set watch.probe_every to a number of steps",
    ),
    "resample": (
        Condition("`train.max_resamples` above 0", lambda recipe: recipe.train.max_resamples > 0),
        "set train.max_resamples above 0",
    ),
    "rollout": (_GAP_IS_MEASURED, "set rollout.engine = vllm and rollout.is_correction to anything but none"),
}


def _stops_for(watcher: str) -> Condition:
    stops = Condition(f"`watch.stop = {watcher}`", lambda recipe: watcher in recipe.watch.stop)
    # Other trainings have rules of their own on `watch.stop`; raft refuses what `kl` and `resample` would need.
    watched = {"kl": GRPO, "resample": GRPO}.get(watcher, REWARDED)
    return Condition(stops.text, lambda recipe: watched.holds(recipe) and stops.holds(recipe))


WATCHERS = tuple(
    Rule(
        name=f"stop-{watcher}-needs-its-measure",
        field="watch.stop",
        applies=_stops_for(watcher),
        needs=is_measured,
        because="training does not measure it otherwise",
        message=f"watch.stop = {watcher} needs a measure that training lacks: {remedy}, or leave it out.",
    )
    for watcher, (is_measured, remedy) in _MEASURES.items()
)


# ---- rollout: who samples ----

OF_SERVER = ("server", "server_timeout_s", "server_group_port")  # settings of mode server
OF_COLOCATED = ("gpu_memory_utilization", "kv_cache_gib", "compile", "max_model_tokens", "sleep")
OF_CORRECTION = (
    *("is_correction_max", "max_engine_kl", "min_effective_sample_size", "max_gap_growth", "min_sequence_ess"),
)


@dataclass(frozen=True)
class Ignored:
    """Settings that a choice ignores."""

    choice: str  # field of `rollout`
    chosen: str  # the value that ignores them
    fields: Sequence[str]
    remedy: str  # the choice that does not


IGNORED = (
    Ignored(
        "engine", "transformers", [name for name in Rollout.model_fields if name != "engine"], "rollout.engine = vllm"
    ),
    Ignored("mode", "colocate", OF_SERVER, "rollout.mode = server"),
    Ignored("mode", "server", OF_COLOCATED, "rollout.mode = colocate, or start the server with it"),
    Ignored(
        "is_correction", "none", OF_CORRECTION, "rollout.is_correction to a correction, which also measures the gap"
    ),
)


def _heeded(ignored: Ignored, name: str) -> Rule:
    """Return the rule that a setting of rollouts is left alone where a choice ignores it."""
    key = f"rollout.{name}"
    applies = changed(key)
    if ignored.choice != "engine":  # else the engine ignores it already, and is told once
        applies = Condition(applies.text, lambda recipe: BY_VLLM.holds(recipe) and changed(key).holds(recipe))
    return Rule(
        name=f"{name}-is-ignored-by-{ignored.choice}-{ignored.chosen}",
        field=key,
        applies=applies,
        needs=differs(f"rollout.{ignored.choice}", ignored.chosen),
        because="it has no effect otherwise",
        message=f"{key} = {{{key}}} has no effect where rollout.{ignored.choice} = {ignored.chosen}: set "
        f"{ignored.remedy}, or leave it out.",
    )


_REAL = BY_VLLM & equals("rollout.quantization", "real")
_SLOT = BY_VLLM & equals("rollout.adapter", "slot")


_INPUTS_ALONE = tuple(name for name in names.FORMATS if name not in ("nvfp4-a4", "fp8"))


def _formats_of(train: Train) -> set[str]:
    """Return the formats that linears train in: the own one, and those of `train.qat_layers`."""
    return {train.qat, *(term.format for term in layers.parse_all(train.qat_layers) if term.format)}


def _of_layers(train: Train) -> str:
    """Return a clause on the formats that `train.qat_layers` adds; empty if there are none."""
    added = sorted(_formats_of(train) - {train.qat})
    return f", with {', '.join(added)} in train.qat_layers" if added else ""


_ROUNDS_INPUTS = Condition(
    "a format that rounds inputs", lambda recipe: not _formats_of(recipe.train) <= {"none", *_INPUTS_ALONE}
)


_TRUNCATES = Condition(
    f"`train.{'`, `'.join(REDISTRIBUTED)}`",
    lambda recipe: bool(redistributed(recipe.train)) and not recipe.train.teacher,
)


def _biased(recipe: Recipe, reason: str) -> str:
    key = redistributed(recipe.train)[0]
    return (
        f"train.{key} = {getattr(recipe.train, key)} samples from another distribution than the policy's, and "
        f"{reason}, so the importance weights of rollout.is_correction = {recipe.rollout.is_correction} would be "
        f"biased: set rollout.is_correction = none, or leave train.{key} out."
    )


# The trainer's log-probabilities are of the whole policy. Those of the distribution that vLLM samples from, once that
# is penalized, truncated and normalized again, would add the kept probability mass to the gap, and scale each token's
# loss by it (huggingface/trl issue 6789). A colocated engine is therefore asked for those before that, which ignore
# the temperature, too. A server's are fixed when it starts.
_WHOLE_POLICY = "importance weights compare with the whole policy"

SAMPLING = (
    *(_heeded(ignored, name) for ignored in IGNORED for name in ignored.fields),
    Rule(
        name="real-codes-need-their-format",
        field="rollout.quantization",
        applies=_REAL,
        needs=Condition(
            equals("train.qat", *CODE_FORMATS).text, lambda recipe: _formats_of(recipe.train) <= set(CODE_FORMATS)
        ),
        because="vLLM's kernels are sent the codes of these formats",
        message=lambda recipe: (
            f"rollout.quantization = real sends vLLM's kernels the codes of train.qat = {', '.join(CODE_FORMATS)}, "
            f"but train.qat = {recipe.train.qat}{_of_layers(recipe.train)}: set one of these, or "
            "rollout.quantization = none."
        ),
    ),
    Rule(
        name="a-server-rounds-inputs-of-all-linears",
        field="train.qat_layers",
        applies=BY_VLLM & SERVED & changed("train.qat_layers") & _ROUNDS_INPUTS,
        needs=equals("rollout.mode", "colocate"),
        because="a server is started with one format for all linears",
        message="train.qat_layers names linears, but a server is started with one rounding of inputs for all: set "
        "rollout.mode = colocate, or train in a format that leaves inputs alone (int8, int4, nvfp4-a16, mxfp4).",
    ),
    Rule(
        name="real-codes-need-an-engine-within-training",
        field="rollout.quantization",
        applies=_REAL,
        needs=equals("rollout.mode", "colocate"),
        because="a server is sent full precision",
        message="rollout.quantization = real needs an engine in the training process, since a server is sent full "
        "precision: set rollout.mode = colocate, or rollout.quantization = none.",
    ),
    Rule(
        name="codes-are-rounded-once",
        field="rollout.quantization",
        applies=BY_VLLM & changed("train.qat"),
        needs=equals("rollout.quantization", "none", "real"),
        because="the engine is sent weights that the format has rounded",
        message="rollout.quantization = {rollout.quantization} would round again the weights that train.qat = "
        "{train.qat} has rounded: set it to none.",
    ),
    Rule(
        name="a-slot-holds-an-adapter",
        field="rollout.adapter",
        applies=_SLOT,
        needs=ADAPTER,
        because="it holds nothing else",
        message="rollout.adapter = slot sends an adapter, but train.method = full trains all weights: set "
        "train.method = lora or qlora, or rollout.adapter = merged.",
    ),
    Rule(
        name="a-slot-needs-an-engine-within-training",
        field="rollout.adapter",
        applies=_SLOT,
        needs=equals("rollout.mode", "colocate"),
        because="a server is sent merged weights",
        message="rollout.adapter = slot needs an engine in the training process, since a server is sent merged "
        "weights: set rollout.mode = colocate, or rollout.adapter = merged.",
    ),
    Rule(
        name="a-slot-needs-an-unquantized-engine",
        field="rollout.adapter",
        applies=_SLOT,
        needs=equals("rollout.quantization", "none"),
        because="the engine keeps the base that it was sent once",
        message="rollout.adapter = slot keeps the engine's base in full precision, but rollout.quantization = "
        "{rollout.quantization} requantizes merged weights at every sync: set rollout.quantization = none, or "
        "rollout.adapter = merged.",
    ),
    Rule(
        name="a-slot-holds-ranks-up-to-its-limit",
        field="train.lora_rank",
        applies=_SLOT,
        needs=Condition(
            f"`train.lora_rank` up to {SLOT_RANK_LIMIT}", lambda recipe: recipe.train.adapter_rank <= SLOT_RANK_LIMIT
        ),
        because="vLLM has no larger slot",
        message=f"rollout.adapter = slot holds ranks up to {SLOT_RANK_LIMIT}, but train.lora_rank = "
        "{train.adapter_rank}: lower it, or rollout.adapter = merged.",
    ),
    Rule(
        name="a-server-reports-the-truncated-distribution",
        field="rollout.is_correction",
        applies=BY_VLLM & SERVED & _TRUNCATES,
        needs=equals("rollout.is_correction", "none"),
        because=_WHOLE_POLICY,
        message=lambda recipe: _biased(recipe, "a server reports the probabilities of that one"),
    ),
    Rule(
        name="an-engine-reports-temperature-1",
        field="rollout.is_correction",
        applies=BY_VLLM
        & equals("rollout.mode", "colocate")
        & _TRUNCATES
        & Condition("`train.temperature` other than 1", lambda recipe: recipe.train.temperature != 1),
        needs=equals("rollout.is_correction", "none"),
        because=_WHOLE_POLICY,
        message=lambda recipe: _biased(
            recipe, f"vLLM reports the policy's at temperature 1, not at train.temperature = {recipe.train.temperature}"
        ),
    ),
)


# ---- verl, the other trainer of GRPO ----

_WATCHED = "its watcher reads metrics that verl does not log, or averages in another way"
_NO_FORMAT = "verl trains in no format of qrl's"
_GRPO_ALONE = "verl runs GRPO alone here"
_NO_SERVER = "the engine runs on verl's own GPU"
_TEXT_ONLY = "verl gives a reward the text of a completion, not its tokens"

VERL_REFUSES: Mapping[str, str] = {  # our key → why any value but the default is refused
    "train.num_iterations": "verl counts batches as steps, so schedule and checkpoints would differ",
    "train.min_p": "verl's rollouts have no such setting",
    "train.repetition_penalty": "verl's rollouts set it to 1",
    "train.mask_truncated": "verl has no such mask",
    "train.soft_overlong_tokens": _TEXT_ONLY,
    "train.max_resamples": "verl's filter of groups samples without this bound",
    "train.algorithm": _GRPO_ALONE,
    "train.min_kept_reward": _GRPO_ALONE,
    "train.teacher": _GRPO_ALONE,
    "train.teacher_placement": _GRPO_ALONE,
    "train.teacher_server": _GRPO_ALONE,
    "train.distill_top_k": _GRPO_ALONE,
    "train.distill_reverse": _GRPO_ALONE,
    "train.store_dtype": "verl's merger writes bfloat16",
    "train.qat": _NO_FORMAT,
    "train.qat_layers": _NO_FORMAT,
    "train.qat_calibration": _NO_FORMAT,
    "train.qat_calibration_samples": _NO_FORMAT,
    "train.qat_calibration_batch": _NO_FORMAT,
    "train.qat_calibration_max_tokens": _NO_FORMAT,
    "rollout.mode": _NO_SERVER,
    "rollout.server": _NO_SERVER,
    "rollout.server_timeout_s": _NO_SERVER,
    "rollout.server_group_port": _NO_SERVER,
    "rollout.quantization": "verl sends vLLM weights in bf16",
    "rollout.kv_cache": "verl sets no dtype of keys and values",
    "rollout.adapter": "verl sends an adapter in its own way",
    "rollout.min_effective_sample_size": "verl measures it after truncation",
    "rollout.min_sequence_ess": "verl measures it after truncation",
    "watch.stop": "verl cannot be ended at a step with its weights",
    **{f"watch.{name}": _WATCHED for name in Watch.model_fields if name != "stop"},
}
VERL_REFUSES_VALUES: Mapping[tuple[str, str], str] = {  # our key and value → why
    ("train.parallel", "ddp"): "verl divides the weights over the GPUs, and keeps no whole copies: fsdp2 does so too",
    ("train.schedule", "linear"): "verl has constant and cosine",
    ("train.loss", "bnpo"): "verl averages over all tokens of a step, not of a micro-batch: dapo does so too",
    ("train.scale_rewards", "batch"): "verl divides by a group's standard deviation, or by none",
    ("train.method", "qlora"): "verl would train its adapter in bf16 over a packed base",
    ("train.rewards", "leak"): _TEXT_ONLY,
    ("train.rewards", "soft_overlong"): _TEXT_ONLY,
    ("rollout.engine", "transformers"): "verl samples with vLLM alone",
}


def _verl_rule(name: str, key: str, needs: Condition, because: str) -> Rule:
    def message(recipe: Recipe) -> str:
        chosen = value(recipe, key)
        shown = ",".join(map(str, chosen)) if isinstance(chosen, tuple) else chosen
        return (
            f"{key} = {shown} does not go with train.trainer = verl, since {because}: choose another value, or set "
            "train.trainer = trl."
        )

    return Rule(name, key, VERL, needs, because, message)


def _lacks(key: str, refused: str) -> Condition:
    """Return the condition that a setting is not, or does not list, a value."""

    def holds(recipe: Recipe) -> bool:
        chosen = value(recipe, key)
        return refused not in chosen if isinstance(chosen, tuple) else refused != chosen

    return Condition(f"no `{key} = {refused}`", holds)


IN_VERL = (
    *(_verl_rule(f"verl-has-no-{key}", key, unchanged(key), why) for key, why in VERL_REFUSES.items()),
    *(
        _verl_rule(f"verl-has-no-{key}-{refused}", key, _lacks(key, refused), why)
        for (key, refused), why in VERL_REFUSES_VALUES.items()
    ),
    Rule(
        name="verl-stores-the-base-in-fp32",
        field="train.base_storage",
        applies=VERL & equals("train.method", "full", "lora"),  # qlora is refused by itself
        needs=Condition("`train.base_storage = fp32`", lambda recipe: recipe.train.storage == "fp32"),
        because="verl would train the adapter in the same dtype and lose small updates",
        message="With train.trainer = verl the base is stored in fp32, but the recipe stores it in {train.storage}, "
        "where verl would train the adapter in the same dtype and lose small updates: set train.base_storage = fp32.",
    ),
)


# ---- quantize and evaluate ----


def _schemes_made(recipe: Recipe) -> tuple[str, ...]:
    return (names.FULL, *recipe.quantize.schemes)


def _schemes_not_made(recipe: Recipe) -> list[str]:
    return [scheme for scheme in recipe.evaluate.kv_fp8 if scheme not in _schemes_made(recipe)]


def needs_vllm(scheme: str, engine: str) -> str:
    """Return the sentence of a scheme with its key-value cache in FP8, which an engine does not have."""
    return (
        f"Scheme {scheme} needs vLLM, which can keep the key-value cache in FP8, but the engine is {engine}: choose "
        f"vllm (--evaluate.engine, or --engine of serve), or the scheme {names.stored(scheme)}."
    )


def _kv_sentence(recipe: Recipe) -> str:
    return needs_vllm(f"{recipe.evaluate.kv_fp8[0]}{names.KV_FP8}", recipe.evaluate.engine)


# Schemes that store all linears, and why.
OF_ALL_LAYERS: Mapping[str, str] = {
    names.AWQ: "AutoAWQ leaves out linears by their names within a block, and no single block: awq-ct can",
    names.AUTOROUND: "AutoRound rounds every linear of a block, also those that are stored in full: gptq does not",
    "rtn-int8-attention": "it stores the linears of attention: rtn-int8 with quantize.layers = attention is the same",
}
# Schemes whose search, rotation or library knows one format for all linears.
OF_ONE_FORMAT = (*names.BITSANDBYTES, names.AWQ_CT, names.SPINQUANT)
_LAYERS = changed("quantize.layers")
_FORMATS = Condition("`TERM=FORMAT` in `quantize.layers`", lambda recipe: layers.has_formats(recipe.quantize.layers))


def _first_of(recipe: Recipe, refused: Iterable[str]) -> str | None:
    """Return the first of a recipe's schemes that is one of some, or None."""
    return next((scheme for scheme in recipe.quantize.schemes if scheme in refused), None)


def _of_all_layers_sentence(recipe: Recipe) -> str:
    scheme = _first_of(recipe, OF_ALL_LAYERS) or ""
    return (
        f"quantize.layers = {layers.text_of(recipe.quantize.layers)} does not go with scheme {scheme}, since "
        f"{OF_ALL_LAYERS[scheme]}."
    )


LAYERING = (
    Rule(
        name="layers-need-a-scheme-that-can-leave-some-out",
        field="quantize.layers",
        applies=_LAYERS,
        needs=Condition(
            f"no {', '.join(OF_ALL_LAYERS)} in `quantize.schemes`",
            lambda recipe: _first_of(recipe, OF_ALL_LAYERS) is None,
        ),
        because="they store all linears that they know",
        message=_of_all_layers_sentence,
    ),
    Rule(
        name="mixed-formats-need-a-scheme-that-can-hold-them",
        field="quantize.layers",
        applies=_FORMATS,
        needs=Condition(
            f"no {', '.join(OF_ONE_FORMAT)} in `quantize.schemes`",
            lambda recipe: _first_of(recipe, OF_ONE_FORMAT) is None,
        ),
        because="their codes, search or rotation are of one format",
        message=lambda recipe: (
            f"quantize.layers = {layers.text_of(recipe.quantize.layers)} gives linears a format of their own, but "
            f"scheme {_first_of(recipe, OF_ONE_FORMAT)} has one for all: choose an rtn-* scheme, gptq or one of "
            "llm-compressor's presets such as fp8, or leave =FORMAT out."
        ),
    ),
)

QUANTIZING = (
    *LAYERING,
    Rule(
        name="rtn-file-needs-its-file",
        field="quantize.format",
        applies=Condition("`rtn-file` in `quantize.schemes`", lambda recipe: names.RTN_FILE in recipe.quantize.schemes),
        needs=changed("quantize.format"),
        because="the file is the format",
        message=f"Scheme {names.RTN_FILE} rounds in the format of a file: set quantize.format to FILE.yaml.",
    ),
    Rule(
        name="awq-has-no-rollouts",
        field="quantize.calibration",
        applies=Condition("`awq` in `quantize.schemes`", lambda recipe: names.AWQ in recipe.quantize.schemes),
        needs=differs("quantize.calibration", "rollouts"),
        because="AutoAWQ's environment cannot run the policy",
        message="Scheme awq runs in AutoAWQ's own environment, whose transformers cannot run the policy for its "
        "rollouts: use scheme awq-ct, or quantize.calibration=task.",
    ),
)

EVALUATING = (
    Rule(
        name="kv-scales-need-a-cell",
        field="quantize.kv_cache",
        applies=changed("quantize.kv_cache"),
        needs=changed("evaluate.kv_fp8"),
        because="no other cell reads the scales",
        message="quantize.kv_cache = {quantize.kv_cache} stores scales of keys and values, which only cells "
        f"SCHEME{names.KV_FP8} read: name schemes in evaluate.kv_fp8 to have such cells in this study.",
        warns=True,
    ),
    Rule(
        name="kv-fp8-of-a-scheme-that-is-made",
        field="evaluate.kv_fp8",
        applies=changed("evaluate.kv_fp8"),
        needs=Condition("schemes of `quantize.schemes`, or `full`", lambda recipe: not _schemes_not_made(recipe)),
        because="the cell answers from the same checkpoint",
        message=lambda recipe: (
            f"evaluate.kv_fp8 names {_schemes_not_made(recipe)[0]}, but the study makes "
            f"{', '.join(_schemes_made(recipe))}: name some of these."
        ),
    ),
    Rule(
        name="kv-fp8-needs-vllm",
        field="evaluate.kv_fp8",
        applies=changed("evaluate.kv_fp8"),
        needs=equals("evaluate.engine", "vllm"),
        because="transformers keeps no cache in FP8",
        message=_kv_sentence,
    ),
    Rule(
        name="temperature-needs-samples",
        field="evaluate.temperature",
        applies=changed("evaluate.temperature"),
        needs=Condition("`evaluate.samples` above 1", lambda recipe: recipe.evaluate.samples > 1),
        because="a single answer is greedy",
        message="evaluate.temperature = {evaluate.temperature:g} means nothing with evaluate.samples = 1: a single "
        "answer is greedy, only several are sampled.",
        warns=True,
    ),
    Rule(
        name="deterministic-needs-vllm",
        field="evaluate.deterministic",
        applies=changed("evaluate.deterministic"),
        needs=equals("evaluate.engine", "vllm"),
        because="it selects vLLM's kernels",
        message="evaluate.deterministic means nothing with evaluate.engine = {evaluate.engine}: it selects vLLM's "
        "kernels.",
        warns=True,
    ),
    Rule(
        name="unpacked-needs-vllm",
        field="evaluate.unpacked",
        applies=changed("evaluate.unpacked"),
        needs=equals("evaluate.engine", "vllm"),
        because="transformers always unpacks weights",
        message="evaluate.unpacked means nothing with evaluate.engine = {evaluate.engine}: it always unpacks weights.",
        warns=True,
    ),
)

RULES = (
    *TRAINING,
    *SUPERVISED,
    *REJECTION_SAMPLING,
    *DISTILLATION,
    *WATCHERS,
    *SAMPLING,
    *IN_VERL,
    *QUANTIZING,
    *EVALUATING,
)
OF_TRAINING = (
    *TRAINING,
    *SUPERVISED,
    *REJECTION_SAMPLING,
    *DISTILLATION,
    *WATCHERS,
    *SAMPLING,
    *IN_VERL,
)  # what a training reads


def check(recipe: Recipe, rules: Iterable[Rule] = RULES) -> None:
    """Raise BadInput with all that is wrong if settings of a recipe do not go together; nothing is loaded."""
    objections = Objections()
    for rule in rules:
        if not rule.warns and rule.is_broken(recipe):
            objections.add(BadInput(rule.sentence(recipe), field=rule.field, rule=rule.name))
    objections.insist()


def check_training(train: Train, rollout: Rollout = DEFAULTS.rollout, watch: Watch = DEFAULTS.watch) -> None:
    """Raise BadInput with all that is wrong if the sections that a training reads do not go together."""
    quantize = Quantize(layers=train.qat_layers)  # which is not looked at here
    check(Recipe(train=train, rollout=rollout, watch=watch, quantize=quantize), OF_TRAINING)


def warnings(recipe: Recipe, rules: Iterable[Rule] = RULES) -> list[str]:
    """Return a sentence for each setting that has no effect, where the recipe runs all the same."""
    return [rule.sentence(recipe) for rule in rules if rule.warns and rule.is_broken(recipe)]


@dataclass
class _Row:
    """A line of the table."""

    applies: list[str]
    needs: list[str]
    because: str


def markdown(rules: Iterable[Rule] = RULES) -> str:
    """Return rules as a table of Markdown: when they apply, what they need, and why.

    Settings with the same need and reason share a row, and so do the needs of one setting that have the same reason.
    """
    rows: list[_Row] = []
    for rule in rules:
        applies, needs = rule.applies.text or "always", rule.needs.text
        same = next((row for row in rows if (row.needs, row.because) == ([needs], rule.because)), None)
        if same is None:
            same = next((row for row in rows if (row.applies, row.because) == ([applies], rule.because)), None)
        if same is None:
            rows.append(_Row([applies], [needs], rule.because))
            continue
        if applies not in same.applies:
            same.applies.append(applies)
        if needs not in same.needs:
            same.needs.append(needs)
    lines = ["| with | needs | since |", "|---|---|---|"]
    lines += [f"| {'; '.join(row.applies)} | {'; '.join(row.needs)} | {row.because} |" for row in rows]
    return "\n".join(lines) + "\n"
