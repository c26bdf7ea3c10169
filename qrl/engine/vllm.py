"""The vLLM engine: the same prompts, answers and finish reasons as transformers', from vLLM's own kernels.

What differs between vLLM's versions is in this file; written for 0.31.0, and run on 0.25.1, too. Rollouts (`train/vllm_engine.py`),
the server (`serve/engines.py`) and `vllm bench serve` use what both have. A deterministic run is asked for by a fixed
number of sequences, a seed, no cache of prefixes, and, on a GPU, batch-invariant kernels; `receipt` says what ran.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import checkpoint
from qrl.engine import hf
from qrl.engine.hf import Completion
from qrl.errors import BadInput, QrlError

if TYPE_CHECKING:
    from vllm import RequestOutput

NAME = "vllm"
_DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # whoever asked torch for a GPU before cannot be forked
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # our own `_inspect` goes to vLLM's worker, nothing from outside
}
_CPU_CACHE_GIB = "1"  # the default takes half of the memory
_BATCH_VARIANT = "Int8ScaledMM"  # of a model on it answers turn with the batch all the same, one or two of 1,000: measured, qrl/benchmark/SCHEMES.md
_CPU_SHARE = 0.1  # of the machine's memory that must be free; the default wants 92 %


class Vllm:
    """A checkpoint in vLLM, to be used in a `with` block, which stops its worker."""

    def __init__(
        self,
        path: Path,
        device: str,
        dtype: str,
        *,
        max_tokens: int,
        sequences: int,
        deterministic: bool,
        seed: int,
        memory: float = 0.9,
        cache_bytes: int | None = None,
        timed: bool = False,
    ) -> None:
        """Loads a checkpoint in place.

        Args:
            path: a folder that `checkpoint.check` accepts.
            device: "cpu" or "cuda".
            dtype: "auto" (the checkpoint's own), "fp32", "bf16" or "fp16".
            max_tokens: longest prompt and answer together, in tokens.
            sequences: answers written at once, at most.
            deterministic: batch-invariant kernels, where the device has them.
            seed: of the engine.
            memory: share of the GPU's memory that the engine may take.
            timed: keep the times of each request, which costs a little at every step.
            cache_bytes: of keys and values, instead of what that share leaves; several engines can then load at once.

        Raises:
            BadInput: vLLM is not installed here, or has no kernel for the checkpoint's scheme.
            QrlError: it cannot load the checkpoint; with its own words.
        """
        os.environ.update(_SETTINGS)
        if device == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
        os.environ["VLLM_BATCH_INVARIANT"] = "1" if deterministic and device == "cuda" else "0"
        try:
            import vllm
        except ImportError as error:
            raise BadInput(
                f"vLLM cannot be imported here ({error}): run under `mlflow run . -e evaluate … --env-manager uv`, which builds an "
                "environment that has it, or use evaluate.engine=transformers."
            ) from None
        checkpoint.check(path)
        check_runs(path, device, deterministic)
        self.name = f"{NAME} {vllm.__version__}"
        self.tokens = hf.tokenizer(path)
        self._sampling = vllm.SamplingParams
        try:
            self._llm = vllm.LLM(
                model=str(path.resolve()),
                dtype=_DTYPES[dtype],
                max_model_len=max_tokens,
                max_num_seqs=sequences,
                enforce_eager=device == "cpu",
                enable_prefix_caching=False,
                disable_log_stats=not timed,
                generation_config="vllm",  # a checkpoint's own sampling would colour every accuracy
                seed=seed,
                trust_remote_code=False,
                **(
                    {"gpu_memory_utilization": _CPU_SHARE}
                    if device == "cpu"
                    else {"gpu_memory_utilization": memory, "kv_cache_memory_bytes": cache_bytes}
                ),
            )
        except Exception as error:  # whatever its worker met, told by its own sentence
            raise QrlError(
                f"vLLM cannot load {path} ({' '.join(str(error).split())[:400]}): choose another engine or scheme."
            ) from error
        self._ends = _end_ids(path)
        self._found = self._llm.apply_model(_inspect)[0]
        self._sequences, self._device = sequences, device
        self.invariant = deterministic and device == "cuda" and batch_invariant(self._found["kernels"])

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the worker."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    @property
    def dtype(self) -> str:
        """Of activations, "bfloat16" say."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of weights that the worker holds, the cache of keys and values apart; None on a CPU, where kernels hide them."""
        return None if self._device == "cpu" else self._found["weights_bytes"]

    def receipt(self) -> dict[str, Any]:
        """What ran: engine, kernels by the number of layers that they serve, and what was asked for to be deterministic."""
        return {
            "engine": self.name,
            "dtype": self.dtype,
            "kernels": self._found["kernels"],
            "batch_invariant": self.invariant,
            "max_num_seqs": self._sequences,
            "prefix_caching": False,
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        progress: Callable[[int], object] = lambda n: None,
    ) -> list[Completion]:
        """Completions of token-id prompts, in the order given; as `hf.generate`.

        Args:
            prompts: N lists of token ids, generation prompt included.
            max_new_tokens: longest completion, in tokens.
            temperature: 0 is greedy; above, tokens are drawn from the whole distribution at this temperature.
            seed: of the draws; every prompt's own follows from it and its place.
            progress: called with N at the end: vLLM forms its batches itself.
        """
        answers = self.ask(prompts, new_tokens=max_new_tokens, fixed=False, temperature=temperature, seed=seed)
        special = set(self.tokens.all_special_ids)
        done = [
            hf.completion(self.tokens, list(answer.outputs[0].token_ids), self._ends, special) for answer in answers
        ]
        progress(len(done))
        return done

    def ask(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, fixed: bool, temperature: float = 0.0, seed: int = 0
    ) -> list[RequestOutput]:
        """vLLM's own answers, with the times of each.

        Args:
            prompts: N lists of token ids.
            new_tokens: longest answer; of every answer, if fixed.
            fixed: end tokens do not end an answer.
            temperature, seed: as `generate` takes them.

        Raises:
            QrlError: its worker died; with the kernels that it had chosen.
        """
        ends = None if fixed else sorted(self._ends)
        options = {"max_tokens": new_tokens, "stop_token_ids": ends, "ignore_eos": fixed, "detokenize": False}
        if temperature:
            seeds = [hash((seed, place)) % 2**63 for place in range(len(prompts))]
            asked = [self._sampling(temperature=temperature, seed=own, **options) for own in seeds]
        else:
            asked = self._sampling(temperature=0.0, **options)
        try:
            return self._llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], asked, use_tqdm=False)
        except Exception as error:  # a kernel that this machine lacks ends the worker at the first product
            kernels = ", ".join(self._found["kernels"])
            raise QrlError(
                f"{self.name} died while answering ({' '.join(str(error).split())[:200]}); its log above says why. Its kernels here "
                f"are {kernels}: a scheme whose kernel this machine lacks needs another machine, or evaluate.engine=transformers."
            ) from error


def batch_invariant(kernels: Iterable[str]) -> bool:
    """Whether answers of a model on these kernels were the same whatever was asked beside them, as far as was measured.

    Args:
        kernels: as a receipt names them.
    """
    return not any(_BATCH_VARIANT in kernel for kernel in kernels)


def check_runs(path: Path, device: str, deterministic: bool = False) -> None:
    """Refuses a scheme that vLLM has no kernel for here, before a weight is read or a worker started.

    Args:
        path: a checkpoint folder.
        device: "cpu" or "cuda".
        deterministic: by batch-invariant kernels, where the device has them.

    Raises:
        BadInput: what is missing.
    """
    quantization = checkpoint.config(path).get("quantization_config")
    missing = _missing(quantization, device, deterministic) if quantization else ""
    if missing:
        import vllm

        raise BadInput(
            f"{path} is stored as {quantization['quant_method']}, which vLLM {vllm.__version__} cannot run on this {'machine' if device == 'cpu' else 'GPU'}: "
            f"{missing}; choose another scheme or machine, or evaluate.engine=transformers."
        )


def _missing(quantization: dict, device: str, deterministic: bool) -> str:
    """What a scheme needs and vLLM lacks here, in words; empty where nothing is known to be."""
    from vllm.model_executor.layers import quantization as methods
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    method = quantization["quant_method"]
    if method not in methods.QUANTIZATION_METHODS:
        return f"it knows no {method}" + (" without vllm-bnb-plugin" if method == "bitsandbytes" else "")
    groups = [
        group | {"format": group.get("format") or quantization.get("format") or ""}
        for group in (quantization.get("config_groups") or {}).values()
    ]
    if device == "cpu":
        return _missing_on_cpu(method, groups)
    return _missing_on_gpu(methods.get_quantization_config(method).get_min_capability(), groups, deterministic)


def _missing_on_gpu(least: int, groups: list[dict], deterministic: bool) -> str:
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    if found and found.to_int() < least:
        return f"it needs compute capability {least / 10:.1f}, and this is {found.to_int() / 10:.1f}"
    if deterministic and any(
        group["format"].startswith("nvfp4") and not group.get("input_activations") for group in groups
    ):
        return "its batch-invariant kernels for NVFP4 round activations, which this scheme does not (without evaluate.deterministic it runs)"
    return ""


def _missing_on_cpu(method: str, groups: list[dict]) -> str:
    import torch

    importlib.import_module("vllm._custom_ops")  # loads the kernels of this CPU
    if any(group["format"].startswith(("nvfp4", "mxfp4")) for group in groups):
        return "it has no kernel for 4-bit floats on a CPU"
    integers = [
        group["weights"]["num_bits"]
        for group in groups
        if group["weights"]["type"] == "int" and not group.get("input_activations")
    ]
    if any(bits > 4 for bits in integers):
        return "it has no kernel for 8-bit weights with full-precision activations on a CPU"
    if (integers or method == "awq") and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return "its build has no kernel for 4-bit integers on this CPU (cpu_gemm_wna16)"
    return ""


def _inspect(model) -> dict[str, Any]:
    """In vLLM's worker: which kernels serve its layers, and how many bytes their weights take."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # INT8 warns at every matrix product: 112 lines a token
    kernels: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
        if method is not None and hasattr(module, "weight_loader"):
            chosen = [type(value).__name__ for value in vars(method).values() if "Kernel" in type(value).__name__]
            kernels["/".join([type(method).__name__, *chosen])] += 1
        attention = getattr(module, "impl", None)
        if attention is not None:
            kernels[type(attention).__name__] += 1
    tensors = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in (*model.parameters(), *model.buffers())
    }
    return {"kernels": dict(kernels), "weights_bytes": sum(tensors.values())}


def _end_ids(path: Path) -> set[int]:
    """The end tokens of generation_config.json.

    Raises:
        BadInput: there is none.
    """
    from transformers import GenerationConfig

    ends = GenerationConfig.from_pretrained(path).eos_token_id
    if ends is None:
        raise BadInput(f"{path} names no end token (eos_token_id) in generation_config.json: answers could never stop.")
    return set(ends) if isinstance(ends, list) else {ends}
