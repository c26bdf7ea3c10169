"""The vLLM engine: prompts, completions and finish reasons as in `hf`, computed by vLLM's own kernels.

Evaluation compares checkpoints question by question, so an answer must not depend on chance. Every run therefore fixes
the number of sequences and the seed, and caches no prefix; on a GPU, a deterministic run also uses batch-invariant
kernels. Three things are read back from the engine rather than assumed, and `receipt`
reports them: which kernels it chose, in which dtype it computes, and whether it departs from the checkpoint's format.

The life of an engine: `__init__` checks the folder, starts vLLM's worker and inspects it; `generate` and
`log_likelihoods` answer; `reload` replaces the weights, where it can, for another checkpoint of the same network;
`close` stops the worker.

This file and `vllm_support` contain what differs between vLLM's versions. They were written for 0.31.0 and also run on
0.25.1; rollouts (`train/rollout`), the server (`serve/engines.py`) and `vllm bench serve` use what both have.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import checkpoint, process
from qrl.engine import hf, pretrained
from qrl.engine.hf import Completion
from qrl.engine.vllm_support import (
    batch_invariant,
    cache_options,
    check_runs,
    describe_departure,
    emulation_options,
    memory_options,
)
from qrl.errors import BadInput, QrlError
from qrl.formats import kind

if TYPE_CHECKING:
    from vllm import RequestOutput

NAME = "vllm"
_DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process that has used torch on a GPU cannot fork
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # sends our own `_inspect` to vLLM's worker, and nothing from outside
}
# A batch is padded to the next size that has a graph. vLLM captures graphs of three times as many sizes, which takes
# longer than small models take to answer.
_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_CPU_SHARE = 0.1  # of the machine's memory that must be free; the default is 92 %


class Vllm(AbstractContextManager):
    """A checkpoint in vLLM; use it in a `with` block, which stops its worker."""

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
        cache_gib: float | None = None,
        timed: bool = False,
        kv_fp8: bool = False,
        gpus: int = 1,
        compiled: bool = True,
        in_process: bool = False,
    ) -> None:
        """Load a checkpoint in place.

        Args:
            path: a folder that `checkpoint.check` accepts.
            device: "cpu" or "cuda".
            dtype: "auto" (the checkpoint's own), "fp32", "bf16" or "fp16".
            max_tokens: prompt and answer together, in tokens, at most.
            sequences: answers generated concurrently, at most.
            deterministic: use batch-invariant kernels where the device has them.
            memory: share of the GPU's memory that the engine may use.
            cache_gib: as for `shares`.
            timed: keep the times of each request, at a small cost per step.
            kv_fp8: keep the key-value cache in FP8, under the checkpoint's scales, or 1 where it has none.
            gpus: that divide the weights of each layer.
            compiled: let torch.compile fuse the layers on a GPU; else CUDA graphs alone, for a sooner first start.
            in_process: run the engine in this process, which must do nothing else, instead of starting one for it.

        Raises:
            BadInput: vLLM is not installed here, or has no kernel for the checkpoint's scheme.
            QrlError: vLLM cannot load the checkpoint; the sentence quotes its error.
        """
        on_gpu = device == "cuda"
        os.environ.update(_ENVIRONMENT)
        if not on_gpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # in GiB; the default is half of the memory
        os.environ["VLLM_BATCH_INVARIANT"] = "1" if deterministic and on_gpu else "0"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process and gpus == 1 else "1"
        try:
            import vllm
        except ImportError as error:
            raise BadInput(
                f"vLLM cannot be imported here ({error}): run {process.environment_command('evaluate')}, which builds "
                "an environment with it, or use evaluate.engine=transformers."
            ) from None
        checkpoint.check(path)
        pretrained.check_fit(path, for_transformers=False)
        check_runs(path, device, deterministic, dtype)

        self.name = f"{NAME} {vllm.__version__}"
        self._sampling = vllm.SamplingParams
        memory_settings = memory_options(memory, cache_gib) if on_gpu else {"gpu_memory_utilization": _CPU_SHARE}
        compile_options = graphs_alone(sequences) if on_gpu and not compiled else {}
        try:
            with process.deaf_children(), process.swallowing(), without_bars():
                self._llm = vllm.LLM(
                    model=str(path.resolve()),
                    dtype=_DTYPES[dtype],
                    max_model_len=max_tokens,
                    max_num_seqs=sequences,
                    tensor_parallel_size=gpus,
                    enforce_eager=not on_gpu,
                    enable_prefix_caching=False,
                    disable_log_stats=not timed,
                    generation_config="vllm",  # a checkpoint's own sampling settings would change every accuracy
                    seed=seed,
                    trust_remote_code=False,
                    worker_extension_cls="qrl.engine.vllm_worker.Extension",
                    **memory_settings,
                    **compile_options,
                    **cache_options(path, kv_fp8=kv_fp8),
                    **emulation_options(path, device),
                )
        except Exception as error:  # whatever the worker raised
            if on_gpu and cache_gib is None:
                _check_memory(memory, error)
            reason = " ".join(str(error).split())[:400]
            raise QrlError(f"vLLM cannot load {path} ({reason}): choose another engine or scheme.") from error

        workers = self._llm.apply_model(_inspect)
        weights_bytes = sum(worker["weights_bytes"] for worker in workers)
        self.kernels: dict[str, int] = workers[0]["kernels"]  # name → layers that use it
        self.weights_bytes: int | None = weights_bytes if on_gpu else None  # a CPU's kernels hide them
        self.dtype = str(self._llm.model_config.dtype).removeprefix("torch.")  # of activations
        self.invariant = deterministic and on_gpu and batch_invariant(self.kernels)
        self._sequences = sequences
        self._kv_fp8 = kv_fp8
        self._has_kv_scales = kind.has_kv_scales(checkpoint.config(path).get("quantization_config"))
        self._on_gpu = on_gpu
        self._gpus = gpus
        self._compiled = compiled or not on_gpu
        self._read_settings(path)

    def _read_settings(self, path: Path) -> None:
        """Read what differs between two checkpoints of one network: tokenizer, end tokens, and the format."""
        self.tokens = hf.tokenizer(path)
        self._ends = set(hf.end_tokens(None, path, self.tokens))
        self._network = network(path)
        self._departure = describe_departure(path, self.kernels)

    def reload(self, path: Path) -> bool:
        """Replace the weights by those of another checkpoint, which takes a second where a start takes a minute.

        Args:
            path: a folder that `checkpoint.check` accepts.

        Returns:
            Whether it was done: not if more than the weights differs, if vLLM cannot do it, or on a CPU, where kernels
            keep a packed copy of the old weights. Close the engine then.
        """
        checkpoint.check(path)
        pretrained.check_fit(path, for_transformers=False)
        if not self._on_gpu or self._network is None or network(path) != self._network:
            return False
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path.resolve())})
        except Exception:  # whatever the worker raised: a new engine will say what is wrong
            return False
        self._read_settings(path)
        return True

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def receipt(self) -> dict[str, Any]:
        """Return what ran: engine, dtype, kernels and settings."""
        receipt: dict[str, Any] = {
            "engine": self.name,
            "dtype": self.dtype,
            "kernels": self.kernels,
            "batch_invariant": self.invariant,
            "max_num_seqs": self._sequences,
            "prefix_caching": False,
        }
        # Only where they differ from the usual: receipts of earlier runs have none of these keys.
        if self._kv_fp8:
            receipt["kv_cache_dtype"] = "fp8"
            if self._has_kv_scales:
                receipt["kv_cache_scales"] = "calibrated"
        if self._gpus > 1:
            receipt["tensor_parallel"] = self._gpus
        if not self._compiled:
            receipt["compiled"] = False
        if self._departure:
            receipt["simulated"] = self._departure
        return receipt

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        progress: Callable[[int], object] = lambda n: None,
    ) -> list[Completion]:
        """Return completions of N token-id prompts, in the given order; arguments as for `hf.generate`.

        Each prompt's seed follows from `seed` and its position. `progress` is called once, with N.
        """
        outputs = self.ask(prompts, new_tokens=max_new_tokens, fixed=False, temperature=temperature, seed=seed)
        special = set(self.tokens.all_special_ids)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        completions = [hf.completion(self.tokens, ids, self._ends, special) for ids in answers]
        progress(len(completions))
        return completions

    def log_likelihoods(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the mean log-likelihood per token of N texts, each after its prompt, as `hf.log_likelihoods` does."""
        # vLLM scores the tokens of a prompt: the text becomes its end, and one token is generated in vain.
        prompts_with_text = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        outputs = self.ask(prompts_with_text, new_tokens=1, fixed=True, prompt_logprobs=0)
        means = []
        for output, text in zip(outputs, texts, strict=True):
            positions = (output.prompt_logprobs or [])[-len(text) :]
            logprobs = [position[token].logprob for position, token in zip(positions, text, strict=True)]
            means.append(sum(logprobs) / len(text))
        return means

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        fixed: bool,
        temperature: float = 0.0,
        seed: int = 0,
        **sampled: object,
    ) -> list[RequestOutput]:
        """Return vLLM's own outputs, with the times of each.

        Args:
            new_tokens: longest answer; the length of every answer if `fixed`.
            fixed: end tokens do not end an answer.
            prompts, temperature, seed: as for `generate`.
            sampled: further parameters of vLLM's `SamplingParams`.

        Raises:
            QrlError: the worker died; the sentence names its kernels.
        """
        options = {
            "max_tokens": new_tokens,
            "stop_token_ids": None if fixed else sorted(self._ends),
            "ignore_eos": fixed,
            "detokenize": False,
            **sampled,
        }
        if temperature:
            # Each prompt has a seed of its own, so that its answer does not depend on the others in its batch.
            seeds = [hash((seed, index)) % 2**63 for index in range(len(prompts))]
            sampling = [self._sampling(temperature=temperature, seed=prompt_seed, **options) for prompt_seed in seeds]
        else:
            sampling = self._sampling(temperature=0.0, **options)
        try:
            return self._llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False)
        except Exception as error:  # a kernel that this machine lacks kills the worker at its first product
            reason = " ".join(str(error).split())[:200]
            raise QrlError(
                f"{self.name} died while answering ({reason}); its log above says why. Its kernels here are "
                f"{', '.join(self.kernels)}: a scheme without a kernel for this machine needs another machine, or "
                "evaluate.engine=transformers."
            ) from error


def without_bars() -> AbstractContextManager[object]:
    """Return a context in which vLLM shows no bars of its own: they would break those of the command."""
    return contextlib.redirect_stderr(io.StringIO())


def graphs_alone(sequences: int) -> dict[str, Any]:
    """Return vLLM's options for CUDA graphs without torch.compile, for batches of up to `sequences`."""
    largest = next((size for size in _GRAPH_SIZES if size >= sequences), _GRAPH_SIZES[-1])
    sizes = [size for size in _GRAPH_SIZES if size <= largest]
    compilation = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {"optimization_level": 0, "compilation_config": compilation}


def _check_memory(share: float, error: Exception) -> None:
    """Raise QrlError if an engine could not start because less of the GPU's memory is free than it should take."""
    import torch

    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    if free < share * total:
        raise QrlError(
            f"vLLM should take {share:.0%} of the GPU's memory, {share * total:.0f} GiB, but only {free:.0f} of "
            f"{total:.0f} GiB are free: end what else runs on this GPU, which `nvidia-smi` lists, or lower "
            "gpu_memory_utilization."
        ) from error


def network(path: Path) -> dict | None:
    """Return the settings of config.json that an engine is built for; None if its weights cannot be replaced."""
    from transformers import AutoConfig

    if checkpoint.config(path).get("quantization_config"):
        return None  # kernels keep codes in an order of their own; only full precision was seen to be replaced rightly
    config = AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()  # alike, whatever version wrote it
    unused = ("_name_or_path", "transformers_version", "use_cache")
    return {key: value for key, value in config.items() if key not in unused}


def _inspect(model) -> dict[str, Any]:
    """In vLLM's worker: count the layers of each kernel, and the bytes of their weights."""
    kernels: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
        if method is not None and hasattr(module, "weight_loader"):
            parts = [type(value).__name__ for value in vars(method).values()]
            kernel_names = [name for name in parts if "Kernel" in name]
            kernels["/".join([type(method).__name__, *kernel_names])] += 1
        attention = getattr(module, "impl", None)
        if attention is not None:
            kernels[type(attention).__name__] += 1

    # Tied weights share a storage, which counts once.
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return {"kernels": dict(kernels), "weights_bytes": sum(sizes.values())}
