"""The names that others rely on, written once: variants, schemes, stages, metrics, tags, artifacts."""

from collections.abc import Iterable

# Variants: which training made the weights.
BASE, GRPO = "base", "grpo"
QAD_PREFIX = "qad-"  # distilled on-policy into such linears
QAT_PREFIX = "qat-"  # GRPO with linears that compute in a format: qat-int4

# Schemes: how the weights are stored. Tables show `full` with the dtype it was computed in: `full (bf16)`.
FULL, NF4, INT8, AWQ = "full", "nf4", "int8", "awq"
_FORMER = {"fp16": FULL}  # what older stores and files call it
AWQ_CT, GPTQ, FP8, NVFP4A16, NVFP4 = "awq-ct", "gptq", "fp8", "nvfp4a16", "nvfp4"
W8A16, W8A8, MXFP4A16 = "w8a16", "w8a8", "mxfp4a16"
BITSANDBYTES = (NF4, INT8)
COMPRESSED = (AWQ_CT, GPTQ, FP8, NVFP4A16, NVFP4, W8A16, W8A8, MXFP4A16)  # made by llm-compressor
ROUNDED_PREFIX = (
    "rtn-"  # rounded to nearest, nothing searched: the formats of train.qat, its own codes for its own masters
)
ROUNDED = tuple(
    f"{ROUNDED_PREFIX}{name}" for name in ("int8", "int8-attention", "int4", "nvfp4-a16", "nvfp4-a4", "fp8", "mxfp4")
)
QUANTIZED_SCHEMES = (*BITSANDBYTES, AWQ, *COMPRESSED, *ROUNDED)
SCHEMES = (FULL, *QUANTIZED_SCHEMES)
STORED_AS = {  # scheme → quant_method in config.json
    FULL: None,
    **dict.fromkeys(BITSANDBYTES, "bitsandbytes"),
    AWQ: "awq",
    **dict.fromkeys((*COMPRESSED, *ROUNDED), "compressed-tensors"),
}

# Stages: the user's names, each an alias; MLflow's own stages are mirrored from them.
STAGES = ("base", "grpo", "awq")
MLFLOW_STAGE = {"base": "None", "grpo": "Staging", "awq": "Production"}

# Tags
TAG_STEP = "qrl.step"
TAG_VARIANT = "qrl.variant"
TAG_SCHEME = "qrl.scheme"
TAG_TASK = "qrl.task"
TAG_DIGEST = "qrl.digest"
TAG_CACHE_KEY = "qrl.cache_key"
TAG_PARENT_DIGEST = "qrl.parent_digest"
TAG_PARENT_VERSION = "qrl.parent_version"
TAG_REASON = "qrl.reason"
TAG_EXIT_CODE = "qrl.exit_code"
TAG_PID = "qrl.pid"  # host:pid:start of the process that owns the run, so that a dead one can be told

TAG_SERVING = "qrl.serving"  # of a server that follows a stage: what it turned to last, `qrl-tiny@3`
TAG_REFUSED = "qrl.follow.refused"  # why a version that the stage moved to did not take over
TAG_STOPPED = "qrl.stopped"  # of a training that a watcher ended early: which one, at which step


def watch_tag(watcher: str) -> str:
    """The tag of a training run that keeps a watcher's warning."""
    return f"qrl.watch.{watcher}"


def gate_tag(stage: str) -> str:
    """The tag of a version that records its gate's decision for `stage`."""
    return f"qrl.gate.{stage}"


# Metrics
ACCURACY = "eval/accuracy"
ACCURACY_STDERR = "eval/accuracy_stderr"
ACCURACY_FLEXIBLE = "eval/accuracy_flexible"
N = "eval/n"  # questions
PARSE_RATE = "eval/parse_rate"
EOS_RATE = "eval/eos_rate"
TRUNCATION_RATE = "eval/truncation_rate"
PROMPT_LEAK_RATE = "eval/prompt_leak_rate"
GRADER_TIMEOUTS = "eval/grader_timeouts"  # answers of a cell that the grader gave up on
GRADER_ERRORS = "eval/grader_errors"
GRADER_FAULT_RATE = "eval/grader_fault_rate"  # both, over n
TOKENS_PER_S = "eval/tokens_per_s"
SERVE_TOKENS_PER_S = "serve/tokens_per_s"
SERVE_LATENCY_P50 = "serve/latency_p50_s"
SERVE_LATENCY_P95 = "serve/latency_p95_s"
SERVE_FIRST_TOKEN = "serve/first_token_s"
SERVE_READY = "serve/ready_s"  # from the command's start to a server that answers; beside it serve/load_s, verify_s, added_s of the engine
SERVE_VERSION, SERVE_REFUSED = "serve/version", "serve/refused_version"  # of a server that follows a stage, by move
SECONDS = "step/seconds"  # logged by a step that ends well, and by no other

# How a cell came to be, in its rows and its model's params: cells that differ in one of these are never subtracted.
ENGINE = "engine"  # what answered
SETTINGS = "settings_digest"  # sha256 over a scheme's settings, libraries and calibration questions
DTYPE = "dtype"  # of activations; tables show `full` with it
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def pass_at(k: int) -> str:
    """The metric of pass@k; MLflow's names have no `@`."""
    return f"eval/pass_at_{k}"


# Artifacts of a study's run
TABLE_MD, TABLE_JSON = "table.md", "table.json"
QUESTIONS = "questions.parquet"
GROUPS_MD = "groups.md"  # a cell's accuracy by subject and level
RECEIPT = "receipt.json"  # what answered a cell: engine, version, kernels, digests
RECIPE = "recipe.yaml"
REPORT = "report.html"  # all of it as one page
HISTORY = "history.parquet"  # a training's curves
WEIGHTS, STORED, BEHAVIOUR = "weights.parquet", "schemes.parquet", "behaviour.parquet"  # what diagnose found
FIGURES = "figures"


def scheme(label: str) -> str:
    """Return the present name of a scheme: stores and files of earlier versions say `fp16` for `full`."""
    return _FORMER.get(label, label)


def shown(scheme: str, dtypes: Iterable[object]) -> str:
    """Return a scheme as tables show it: `full (bf16)` if all its answers were computed in one dtype.

    Args:
        scheme: as cells are labelled.
        dtypes: of the answers, torch's names; anything but one name leaves the scheme as it is.
    """
    distinct = set(dtypes)
    dtype = distinct.pop() if len(distinct) == 1 else None
    return f"{scheme} ({_SHORT.get(dtype, dtype)})" if scheme == FULL and isinstance(dtype, str) and dtype else scheme


def cell_name(variant: str, scheme: str) -> str:
    """How the UI shows a cell: `grpo · awq`."""
    return f"{variant} · {scheme}"
