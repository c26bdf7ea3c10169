"""Names that users and other tools rely on: variants, schemes, stages, metrics, tags, artifacts."""

import difflib
import re
from collections.abc import Iterable

# Variants: which training made the weights.
BASE = "base"
GRPO = "grpo"
SFT = "sft"  # supervised fine-tuning for as many steps: a control
RAFT = "raft"  # fine-tuning on the policy's own right completions: a control between SFT and GRPO
QAT_PREFIX = "qat-"  # GRPO with linears that compute in a format: qat-int4
QAD_PREFIX = "qad-"  # on-policy distillation into such linears
DISTILLED = "distilled"  # a distilled arm's control: the teacher's model after the same steps without quantization

# Schemes: how the weights are stored. Tables show `full` with the dtype it was computed in: `full (bf16)`.
FULL = "full"
_OLD_SCHEMES = {"fp16": FULL}  # in older stores and files
NF4 = "nf4"
INT8 = "int8"
AWQ = "awq"
AWQ_CT = "awq-ct"
GPTQ = "gptq"
GPTQ_INT3 = "gptq-int3"  # schemes of their own, so that one study can have several widths
GPTQ_INT2 = "gptq-int2"
FP8 = "fp8"
FP8_BLOCK = "fp8-block"
FP8_STATIC = "fp8-static"  # as fp8, with one calibrated scale for all activations of a linear
NVFP4A16 = "nvfp4a16"
NVFP4 = "nvfp4"
W8A16 = "w8a16"
W8A8 = "w8a8"
W8A8_STATIC = "w8a8-static"  # likewise
MXFP4A16 = "mxfp4a16"
MXFP8 = "mxfp8"
W4AFP8 = "w4afp8"
AUTOROUND = "autoround"
SPINQUANT = "spinquant"
BITSANDBYTES = (NF4, INT8)
COMPRESSED = (  # by llm-compressor
    *(AWQ_CT, GPTQ, FP8, NVFP4A16, NVFP4, W8A16, W8A8, MXFP4A16, GPTQ_INT3, GPTQ_INT2),
    *(MXFP8, FP8_BLOCK, W4AFP8, AUTOROUND, SPINQUANT, FP8_STATIC, W8A8_STATIC),
)
ROUNDED_PREFIX = "rtn-"  # round-to-nearest without a search, in a format of train.qat
FORMATS = (  # of train.qat
    *("int8", "int8-attention", "int4", "nvfp4-a16", "nvfp4-a4", "fp8", "mxfp4", "int3", "int2"),
    *("fp8-static", "int8-a8-static"),
)
CALIBRATED_FORMATS = ("nvfp4-a4", "fp8-static", "int8-a8-static")  # that scale activations by calibrated numbers
GROUPED_FORMATS = ("int4", "int3", "int2")  # formats in which the recipe chooses how many inputs share a scale
ROUNDED = tuple(f"{ROUNDED_PREFIX}{name}" for name in (*FORMATS, "file"))
RTN_FILE = ROUNDED[-1]  # in the format of a file, quantize.format
QUANTIZED_SCHEMES = (*BITSANDBYTES, AWQ, *COMPRESSED, *ROUNDED)
SCHEMES = (FULL, *QUANTIZED_SCHEMES)
_BY_BITS = {"4": (GPTQ, AWQ, NF4), "8": (INT8, FP8, W8A8), "3": (GPTQ_INT3,), "2": (GPTQ_INT2,)}  # the usual ones
_BY_NUMBERS = {"fp4": (NVFP4A16, NVFP4, MXFP4A16), "w4a4": (NVFP4,), "w8a8": (W8A8, FP8), "fp8": (FP8,), "e4m3": (FP8,)}
STORED_AS = {  # scheme → quant_method in config.json
    FULL: None,
    **dict.fromkeys(BITSANDBYTES, "bitsandbytes"),
    AWQ: "awq",
    **dict.fromkeys((*COMPRESSED, *ROUNDED), "compressed-tensors"),
}
KV_FP8 = "+kv-fp8"  # after a scheme: its checkpoint, run by vLLM with key-value cache in FP8

FORMAT_FILE = r"(^|/)[\w.+-]+\.yaml$"  # a path whose name can be part of a variant: qat-NAME

# Stages of a recipe that declares none, each with the cell that may hold it. A stage is an alias in the registry.
STAGE_CELL = {"base": f"{BASE}:{FULL}", "grpo": f"{GRPO}:{FULL}", "awq": f"{GRPO}:{AWQ}"}
STAGES = tuple(STAGE_CELL)

# Tags
TAG_STEP = "qrl.step"
TAG_VARIANT = "qrl.variant"
TAG_SCHEME = "qrl.scheme"
TAG_TASK = "qrl.task"
TAG_DIGEST = "qrl.digest"
TAG_CACHE_KEY = "qrl.cache_key"
TAG_PARENT_DIGEST = "qrl.parent_digest"
TAG_ACTIVATION_SCALES = "qrl.activation_scales"  # of a version: how it scales the activations that it rounds
TAG_KV_SCALES = "qrl.kv_scales"  # of a version: which scales of keys and values it stores
TAG_CHAT = "qrl.chat_template_kwargs"  # of a version, as JSON: how its evaluation rendered chats; absent for none
TAG_PARENT_VERSION = "qrl.parent_version"
TAG_MODEL_VERSION = "qrl.model_version"  # of a run whose recipe's model is a version: models:/NAME/3, as resolved
TAG_HISTORY = "qrl.history"  # of a registered model: the run that holds the record of its decisions
TAG_APPLIED = "qrl.history.applied"  # the number of the last decision that its pointers show
TAG_REASON = "qrl.reason"
TAG_VERDICT = "qrl.verdict"  # of a run that a gate refused: `refused`; qrl.reason says why
TAG_EXIT_CODE = "qrl.exit_code"
TAG_PID = "qrl.pid"  # host:pid:start of the run's process, to recognize a run whose process is dead
TAG_SERVING = "qrl.serving"  # the version that a following server serves now, `qrl-tiny@3`
TAG_REFUSED = "qrl.follow.refused"  # why a following server did not switch to a version
TAG_ANSWERS_KEY = "qrl.answers_key"  # what a cell's answers depend on: its cache key without the limits of health
TAG_UNHEALTHY = "qrl.unhealthy"  # which limits quantization made a cell break: it counts, and no gate lets it pass
TAG_WATCH = "qrl.watch."  # and a watcher's name: its warning in a training run
TAG_STOPPED = "qrl.stopped"  # the watcher that ended a training early, and the step


def similar_schemes(word: str) -> tuple[str, ...]:
    """Return the schemes that somebody may mean by a word that names none, the likeliest first: `int4`, `bnb-8bit`.

    They are the one that is spelled much alike, with the same digits, or else the usual ones with as many bits.
    """
    typed = word.lower()
    digits = re.findall(r"\d+", typed)
    same_digits = [scheme for scheme in QUANTIZED_SCHEMES if re.findall(r"\d+", scheme) == digits]
    misspelled = difflib.get_close_matches(typed, same_digits, n=1, cutoff=0.8)
    if misspelled:
        return tuple(misspelled)
    for part, schemes in _BY_NUMBERS.items():
        if part in typed:
            return schemes
    for number in digits:
        if number in _BY_BITS:
            return _BY_BITS[number]
    return tuple(difflib.get_close_matches(typed, QUANTIZED_SCHEMES, n=1))


def scheme_hint(word: str) -> str:
    """Return a clause that names the schemes that a word may mean; empty if there is none."""
    schemes = [f"'{scheme}'" for scheme in similar_schemes(word)]
    if not schemes:
        return ""
    *others, last = schemes
    listed = f"{', '.join(others)} or {last}" if others else last
    return f" (did you mean {listed}?)"


def in_metric(*labels: str) -> str:
    """Return labels as the name of a metric holds them: MLflow refuses `+` there."""
    return "_".join(labels).replace("+", "_")


def gate_tag(stage: str) -> str:
    """Return the tag of a version that holds the verdict of a stage's gate: `passed` or `refused`."""
    return f"qrl.gate.{stage}"


def judged_stage(tag: str) -> str | None:
    """Return the stage whose verdict a tag of a version holds, or None if it is another tag."""
    stage = tag.removeprefix(gate_tag(""))
    return None if stage == tag or "." in stage else stage


def gate_record_tag(stage: str) -> str:
    """Return the tag of a version that holds the reasons for that verdict, as JSON."""
    return f"{gate_tag(stage)}.record"


# Metrics
ACCURACY = "eval/accuracy"
ACCURACY_STDERR = "eval/accuracy_stderr"
ACCURACY_FLEXIBLE = "eval/accuracy_flexible"
N = "eval/n"  # questions
PARSE_RATE = "eval/parse_rate"
EOS_RATE = "eval/eos_rate"
TRUNCATION_RATE = "eval/truncation_rate"
PROMPT_LEAK_RATE = "eval/prompt_leak_rate"
GRADER_TIMEOUTS = "eval/grader_timeouts"  # answers on which the grader ran out of time
GRADER_ERRORS = "eval/grader_errors"
GRADER_FAULT_RATE = "eval/grader_fault_rate"  # both, over n
TOKENS_PER_S = "eval/tokens_per_s"
TOKENS_PER_ANSWER = "eval/tokens_per_answer"
REACHED_RATE = "eval/reached_rate"  # reached the right value, then went on to a wrong answer or none
REFERENCE_PERPLEXITY = "eval/reference_perplexity"  # exp(−eval/reference_logprob)
REFERENCE_LIKELIHOOD = "eval/reference_logprob"  # mean over questions
SERVE_READY = "serve/ready_s"  # from the command's start to the first answer; serve/load_s, verify_s, added_s are parts
SERVE_VERSION = "serve/version"  # of a server that follows a stage, by switch
SERVE_REFUSED = "serve/refused_version"
SECONDS = "step/seconds"  # logged only by a step that succeeds

# Provenance of a cell, in its rows and its model's params: `compare` rejects cells that differ in one of these.
ENGINE = "engine"  # that generated the answers
SETTINGS = "settings_digest"  # sha256 over a scheme's settings, libraries and calibration questions
PROMPT_HASH = "prompt_hash"  # of the wording and the variables that a question was rendered with
STORED_IN = "stored_in"  # dtype of trained or merged weights on the disk, a param of the step's run
DTYPE = "dtype"  # of activations; tables show `full` with it
GROUP_SIZE = "group_size"  # inputs that share a scale, of integer codes; tables show it where it is not the usual one
LAYERS = "layers"  # which linears are stored in few bits, as quantize.layers spells it; tables show it; absent: all
ACTIVATION_SCALES = "activation_scales"  # of a model that rounds activations: `static, per tensor`; a param of it
KV_SCALES = "kv_scales"  # of a model that stores scales of keys and values: `static, per layer`; a param of it
QUESTION_TEXT = "question_text"
ANSWER_START = "answer_start"  # characters of `completion` before its answer: what the model thought
UNHEALTHY = "unhealthy"  # the tag's text, in every row of such a cell
GRADED = "graded"  # there: the grader's own verdict, where `correct` counts an unfinished answer as wrong
REFERENCE_LOGPROB = "reference_logprob"  # of the worked solution, mean over its tokens, in nats
_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def pass_at(k: int) -> str:
    """Return the name of the metric pass@k; MLflow allows no `@` in it."""
    return f"eval/pass_at_{k}"


# Artifacts of a study's run
TABLE_MD = "table.md"
TABLE_JSON = "table.json"
QUESTIONS = "questions.parquet"
CHANGED_JSON = "changed_answers.json"  # a table of MLflow's: answers that quantization turned right or wrong
NOTES_JSON = "notes.json"  # of a comparison: sentences on what it rests on, its warnings first
GROUPS_MD = "groups.md"  # a cell's accuracy by subject and level
RECEIPT = "receipt.json"  # of a cell: engine, version, kernels, digests
RECIPE = "recipe.yaml"
FILES = "files"  # the user's own: a task, rewards
REPORT = "report.html"
HISTORY = "history.parquet"  # training curves
LIVE_METRICS = "metrics.jsonl"  # of a training, a line as each is measured
WEIGHTS = "weights.parquet"  # of diagnose
STORED = "schemes.parquet"
BEHAVIOUR = "behaviour.parquet"
FIGURES = "figures"


def rounded(qat: str) -> str:
    """Return the scheme that stores the codes of a format of train.qat, which may be a file."""
    return RTN_FILE if qat.endswith(".yaml") else f"{ROUNDED_PREFIX}{qat}"


def stored(scheme: str) -> str:
    """Return the scheme that a cell's weights are stored in: `awq` for `awq+kv-fp8`."""
    return scheme.removesuffix(KV_FP8)


def scheme(label: str, reference: str | None = None) -> str:
    """Return the present name of a scheme: older stores and files say `fp16` for `full`, a user's say `reference`."""
    return FULL if label == reference else _OLD_SCHEMES.get(label, label)


def shown(scheme: str, dtypes: Iterable[object]) -> str:
    """Return a scheme as tables show it: `full (bf16)` if all its answers were computed in one dtype.

    Args:
        scheme: as cells are labelled.
        dtypes: of the answers, torch's names; anything but one name leaves the scheme as it is.
    """
    distinct_dtypes = set(dtypes)
    if scheme != FULL or len(distinct_dtypes) != 1:
        return scheme
    (dtype,) = distinct_dtypes
    is_name = isinstance(dtype, str) and dtype != ""
    return f"{scheme} ({short(dtype)})" if is_name else scheme


def short(dtype: str) -> str:
    """Return a dtype as tables show it: `bf16` for torch's `bfloat16`."""
    return _SHORT_DTYPES.get(dtype, dtype)


def detailed(scheme: str, group_size: int | None, layers: str | None) -> str:
    """Return a scheme as tables show it: `awq (groups of 64)`, `gptq (layers mlp,-first:2)`.

    Args:
        scheme: as cells are labelled.
        group_size: inputs that share a scale, where that is unusual.
        layers: which linears are in few bits, where not all are.
    """
    details = []
    if group_size:
        details.append(f"groups of {group_size}")
    if layers:
        details.append(f"layers {layers}")
    return f"{scheme} ({'; '.join(details)})" if details else scheme


def cell_name(variant: str, scheme: str) -> str:
    """Return a cell's name in the UI: `grpo · awq`."""
    return f"{variant} · {scheme}"
