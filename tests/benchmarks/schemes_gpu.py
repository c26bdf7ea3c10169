"""Every scheme at a real model's shape, stored by `quantize` and run by vLLM on one GPU.

    python tests/benchmarks/schemes_gpu.py run 1.5b gptq fp8 --evaluation 1319 --receipts full,gptq --out FOLDER
    python tests/benchmarks/schemes_gpu.py print FOLDER                  # tables of all earlier results in FOLDER

run stores each scheme in a process of its own and loads each model in another, all at the same time, bf16 included.
Then the models take turns (`benchmark.run`), so that ratios to bf16 are paired. Results are written after every round.

--patience: schemes that are not stored within this time are left out.
--storing: number of schemes stored at the same time, for machines with little memory.
--spare-disk: delete a model's weights from the disk once it is loaded.
--evaluation: compare evaluation's engine with a bare `LLM.generate`, alternating, over that many prompts.
--receipts: deterministic and default runs of these schemes, repeated, in reverse, one by one, 8 at once.

Weights are random (seeded) under the built-in model's tokenizer: times are those of the real model, answers and errors
are not. `--llmc` and `--awq` name folders to import llm-compressor and AutoAWQ from, if they are installed apart from
vLLM.
"""

import argparse
import fcntl
import importlib
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SHAPES = {
    "1.5b": dict(zip(_KEYS, ("qwen2", 1536, 8960, 28, 12, 2, 151936, True), strict=True)),
    "8b": dict(zip(_KEYS, ("qwen3", 4096, 12288, 36, 32, 8, 151936, False), strict=True)) | {"head_dim": 128},
    "micro": dict(zip(_KEYS, ("qwen2", 256, 512, 2, 4, 2, 1024, True), strict=True)),
}
CALIBRATION = 16  # texts
PROMPT_TOKENS = 120
RECEIPT_PROMPTS, ALONE = 256, 16  # prompts of a receipt, and how many of them run one by one
LONGEST_S = 400  # to wait for one answer of an engine


def source(args: argparse.Namespace) -> Path:
    """Return a folder with random bf16 weights, made in a process of its own, so that GPU memory is freed."""
    subprocess.run(
        [sys.executable, __file__, "source", args.shape, "--weights", str(args.weights), "--out", str(args.out)],
        check=True,
    )
    return args.weights / f"{args.shape}-full"


def make_source(shape: str, weights: Path) -> Path:
    """Make the folder once; other processes that need it wait."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from qrl import checkpoint, tiny

    folder = weights / f"{shape}-full"
    with _alone(folder):
        if folder.is_dir():
            return folder
        own = json.loads((tiny.PATH / "config.json").read_text())
        special = {key: own[key] for key in ("eos_token_id", "pad_token_id")}
        config = AutoConfig.for_model(max_position_embeddings=32768, **special, **SHAPES[shape])
        torch.manual_seed(0)
        with torch.device(_device()):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        partial = folder.with_name(f"{folder.name}.partial")
        model.save_pretrained(partial)
        for name in (*checkpoint.TOKENIZER_FILES, "generation_config.json"):
            if (tiny.PATH / name).is_file():
                shutil.copy(tiny.PATH / name, partial / name)
        partial.rename(folder)
    return folder


def make(shape: str, scheme: str, weights: Path, probe: bool) -> dict:
    """Store one scheme through `quantize.run`, in an environment with its library."""
    from qrl import process, quantize, tasks
    from qrl.engine import hf
    from qrl.quantize import settings
    from qrl.recipe import Quantize
    from qrl.tasks import prompt

    process.prepare_process()
    process.hush_transformers()
    folder = weights / f"{shape}-{scheme}"
    with _alone(folder):
        if (folder / "made.json").is_file():
            return json.loads((folder / "made.json").read_text())
        shutil.rmtree(folder, ignore_errors=True)
        origin = weights / f"{shape}-full"
        tokens = hf.plain_tokenizer(origin)
        texts = [
            prompt.training_text(tokens, question, "answer-line")
            for question in tasks.load("arithmetic", "train", CALIBRATION, 0)
        ]
        chosen = settings.settings_of(scheme, Quantize(calibration_samples=CALIBRATION), 0)
        made = quantize.run(
            scheme, origin, folder, settings=chosen, calibration=texts, probe=texts if probe else (), device=_device()
        )
        kept = ("scheme", "bytes", "bits_per_weight", "seconds", "calibration_digest", "layer_errors")
        record = {key: getattr(made, key) for key in kept} | {"settings": asdict(made.settings)}
        (folder / "made.json").write_text(json.dumps(record))
    return record


class Remote:
    """An engine in a process of its own: several load at once, each with its own vLLM settings."""

    def __init__(self, kind: str, path: Path, sizes: dict) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_engine, args=(theirs, kind, path, sizes))
        self._process.start()
        self.facts = self._answer()
        self.name, self.weights_bytes = self.facts["name"], self.facts["weights_bytes"]

    def ask(self, prompts: list, *, new_tokens: int, fixed: bool):
        return self("ask", prompts, new_tokens=new_tokens, fixed=fixed)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(20)
        self._process.kill()

    def __call__(self, name: str, *given, **named):
        self._pipe.send((name, given, named))
        return self._answer()

    def _answer(self):
        if not self._pipe.poll(LONGEST_S):
            self._process.kill()
            raise RuntimeError(f"no answer in {LONGEST_S} s")
        found = self._pipe.recv()
        if isinstance(found, str):
            raise RuntimeError(found)
        return found


def _engine(pipe, kind: str, path: Path, sizes: dict) -> None:
    """Run the process of a `Remote`: load `ours` or a bare LLM, then execute the calls that it receives."""
    engine = None
    try:
        began = time.perf_counter()
        engine = {"ours": _Ours, "bare": _Bare}[kind](path, sizes)
        pipe.send(engine.facts | {"load_s": time.perf_counter() - began})
        while call := pipe.recv():
            name, given, named = call
            pipe.send(getattr(engine, name)(*given, **named))
    except Exception as error:
        pipe.send(f"{error} {traceback.format_exc()[-1500:]}")
    finally:
        if engine:
            engine.close()


class _Ours:
    """The engine of benchmark and evaluation."""

    def __init__(self, path: Path, sizes: dict) -> None:
        from qrl.benchmark import local

        if sizes.pop("evaluates", False):  # a benchmark also keeps each request's times
            from qrl.engine import vllm

            self._loaded, self._local = vllm.Vllm(path, _device(), "auto", seed=0, **sizes), None
        else:
            self._local = local.Vllm(path, _device(), "auto", **sizes)
            self._loaded = self._local._loaded
        self.facts = {
            "name": self._loaded.name,
            "weights_bytes": self._loaded.weights_bytes,
            "receipt": self._loaded.receipt(),
        }
        self._loaded.generate([[5] * 8] * 2, max_new_tokens=2)  # a missing kernel fails here

    def ask(self, prompts: list, **how):
        return self._local.ask(prompts, **how)

    def generate(self, prompts: list, new_tokens: int) -> dict:
        """Generate as evaluation does; return seconds, tokens and texts."""
        began = time.perf_counter()
        written = self._loaded.generate(prompts, max_new_tokens=new_tokens)
        return {
            "seconds": time.perf_counter() - began,
            "tokens": sum(each.n_tokens for each in written),
            "texts": [each.raw for each in written],
        }

    def close(self) -> None:
        self._loaded.close()

    def one_by_one(self, prompts: list, new_tokens: int) -> dict:
        return {"texts": [self._loaded.generate([each], max_new_tokens=new_tokens)[0].raw for each in prompts]}


class _Bare:
    """vLLM's own `LLM.generate` with the same settings; a prefix cache would answer round two from round one."""

    def __init__(self, path: Path, sizes: dict) -> None:
        import vllm

        share = (
            {"gpu_memory_utilization": 0.1}
            if _device() == "cpu"
            else {"gpu_memory_utilization": sizes["memory"], "kv_cache_memory_bytes": int(sizes["cache_gib"] * 2**30)}
        )
        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=str(path),
            max_model_len=sizes["max_tokens"],
            max_num_seqs=sizes["sequences"],
            enable_prefix_caching=False,
            enforce_eager=_device() == "cpu",
            seed=0,
            **share,
        )
        self.facts = {"name": f"vllm {vllm.__version__}", "weights_bytes": None}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts: list, new_tokens: int) -> dict:
        began = time.perf_counter()
        sampling = self._sampling(temperature=0.0, max_tokens=new_tokens)
        written = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - began,
            "tokens": sum(len(each.outputs[0].token_ids) for each in written),
        }


def run(args: argparse.Namespace) -> None:
    """Store, load, then run the chosen measurements; results are written as soon as they exist."""
    source(args)
    deadline, storing = time.monotonic() + args.patience, threading.BoundedSemaphore(args.storing)
    sizes = _sizes(args)
    evaluates = sizes | {"evaluates": True, "deterministic": False}
    wanted = (
        {("speed", scheme): ("ours", scheme, sizes) for scheme in dict.fromkeys(("full", *args.schemes))}
        if args.schemes
        else {}
    )
    if args.evaluation:
        wanted |= {("default", "full"): ("ours", "full", evaluates), ("bare", "full"): ("bare", "full", sizes)}
    for scheme in args.receipts:
        for how, deterministic in (("default", False), ("invariant", True)):
            wanted[how, scheme] = ("ours", scheme, evaluates | {"deterministic": deterministic})
            wanted[f"{how}, 8", scheme] = ("ours", scheme, evaluates | {"deterministic": deterministic, "sequences": 8})
    made, engines, failed = {}, {}, {}

    def prepare(role: tuple[str, str]) -> None:
        kind, scheme, sizes = wanted[role]
        try:
            if scheme != "full":
                with storing:
                    made[scheme] = _made(args, scheme, deadline)
            folder = args.weights / f"{args.shape}-{scheme}"
            engines[role] = Remote(kind, folder, sizes)
            if args.spare_disk and scheme != "full":
                _hollow(folder)
            print(f"{role}: loaded in {engines[role].facts['load_s']:.1f} s", flush=True)
        except Exception as error:
            failed[", ".join(role)] = str(error)[-2000:]
            print(f"{role}: NOT RUN: {str(error)[-600:]}", flush=True)

    began = time.perf_counter()
    with ThreadPoolExecutor(len(wanted)) as pool:
        waiting = [pool.submit(prepare, role) for role in wanted]
        importlib.import_module("vllm")  # for its version, while the others load
        for each in waiting:
            each.result()
    print(f"all loaded after {time.perf_counter() - began:.0f} s", flush=True)
    name = f"{args.shape}-{'-'.join(args.schemes)}"[:120]
    if args.schemes:
        _speed(
            args,
            name,
            {role[1]: engines[role] for role in wanted if role[0] == "speed" and role in engines},
            made,
            failed,
        )
    if ("bare", "full") in engines and ("default", "full") in engines:
        _evaluation(args, name, engines["default", "full"], engines["bare", "full"])
    for scheme in args.receipts:
        for how in ("invariant", "default"):
            if (how, scheme) in engines and (f"{how}, 8", scheme) in engines:
                _receipt(args, scheme, how == "invariant", engines[how, scheme], engines[f"{how}, 8", scheme])
    for engine in engines.values():
        engine.close()


def _hollow(folder: Path) -> None:
    """Empty a loaded checkpoint's weight files but keep their sizes, for the table; no other call reuses it."""
    (folder / "made.json").unlink()
    for file in folder.glob("*.safetensors"):
        size = file.stat().st_size
        os.truncate(file, 0)
        os.truncate(file, size)


def _made(args: argparse.Namespace, scheme: str, deadline: float) -> dict:
    """Return the record of a scheme, stored in a process of its own, by this call or by another one."""
    if (record := args.weights / f"{args.shape}-{scheme}" / "made.json").is_file():
        return json.loads(record.read_text())
    extra = {"awq": args.awq, "nf4": None, "int8": None}.get(scheme, args.llmc)
    path = os.pathsep.join(filter(None, [extra, os.environ.get("PYTHONPATH")]))
    log = args.out / f"make-{args.shape}-{scheme}.log"
    words = [
        sys.executable,
        __file__,
        "make",
        args.shape,
        scheme,
        "--weights",
        str(args.weights),
        "--out",
        str(args.out),
        *(["--probe"] if args.probe else []),
    ]
    with log.open("wb") as file:
        done = subprocess.run(
            words,
            env=os.environ | {"PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=deadline - time.monotonic(),
        )
    if done.returncode:
        raise RuntimeError(f"not stored: {log.read_text(errors='replace')[-800:]}")
    return json.loads(record.read_text())


def _sizes(args: argparse.Namespace) -> dict:
    """Of an engine: room for every sequence, and no more, so that many lie side by side."""
    shape, longest = SHAPES[args.shape], PROMPT_TOKENS + args.new_tokens
    width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * width * 2
    sequences = max(args.batches)
    return {
        "max_tokens": longest,
        "sequences": sequences,
        "memory": 0.02,
        "cache_gib": 1.1 * token * (sequences + 1) * (longest + 16) / 2**30,
    }


def _speed(args: argparse.Namespace, name: str, engines: dict[str, Remote], made: dict, failed: dict) -> None:
    import pandas as pd

    from qrl import benchmark
    from qrl.benchmark import summary
    from qrl.recipe import Benchmark

    settings = Benchmark(batches=args.batches, requests=args.requests, rounds=args.rounds, new_tokens=args.new_tokens)
    opened = {
        benchmark.Subject("base", scheme, args.weights / f"{args.shape}-{scheme}"): engine
        for scheme, engine in engines.items()
    }
    subjects, prompts = list(opened), _prompts(args.shape, max(args.batches))
    facts = {scheme: engine.facts for scheme, engine in engines.items()}
    _write(
        args,
        f"speed-{name}",
        {"made": made, "facts": facts, "failed": failed, "settings": settings.model_dump(mode="json")},
    )
    frames = []
    for number in range(args.rounds):  # one at a time, so that a machine that is taken away leaves what was measured
        began, first = time.perf_counter(), number % len(subjects)
        turned = subjects[first:] + subjects[:first]
        once = benchmark.run(
            turned,
            [prompts] * len(turned),
            lambda subject: _Open(opened[subject]),
            settings.model_copy(update={"rounds": 1}),
        )
        frames.append(once.assign(round=number))
        frame = pd.concat(frames)
        frame.to_parquet(args.out / f"speed-{name}.parquet")
        print(f"round {number}: {time.perf_counter() - began:.1f} s", flush=True)
        speeds = (
            once.groupby(["scheme", "batch"])["new_tokens"].sum()
            / once.drop_duplicates(["scheme", "batch", "turn"]).groupby(["scheme", "batch"])["turn_s"].sum()
        )
        print(
            speeds.round().unstack().to_string() if number == 0 else summary.markdown(summary.lines(frame), ""),
            flush=True,
        )


class _Open:
    """A `Remote` that stays open after the benchmark."""

    def __init__(self, remote: Remote) -> None:
        self.name, self.weights_bytes, self.ask = remote.name, remote.weights_bytes, remote.ask

    def close(self) -> None:
        pass


def _evaluation(args: argparse.Namespace, name: str, ours: Remote, bare: Remote) -> None:
    """Measure tokens per second of both in alternating rounds, and the cost of rendering and grading."""
    from qrl import tasks
    from qrl.engine import hf
    from qrl.tasks import prompt

    questions = tasks.load("arithmetic", "heldout", args.evaluation, 0)
    tokens = hf.tokenizer(args.weights / f"{args.shape}-full")
    began = time.perf_counter()
    for each in questions:
        prompt.render(tokens, each.question, "answer-line")
    rendering_s = time.perf_counter() - began

    prompts = _prompts(args.shape, args.evaluation)
    sides = {"ours": ours, "bare": bare}
    for each in sides.values():
        each("generate", prompts[:256], args.new_tokens)
    rounds = []
    for number in range(args.evaluation_rounds):
        timed = {}
        for which in (("ours", "bare"), ("bare", "ours"))[number % 2]:
            timed[which] = sides[which]("generate", prompts, args.new_tokens)
            timed[which]["tokens_per_s"] = timed[which]["tokens"] / timed[which]["seconds"]
        texts = timed["ours"].pop("texts")
        began = time.perf_counter()
        tasks.grade_many("arithmetic", texts, [each.answer for each in questions])
        timed["beside_s"] = {"rendering": rendering_s, "grading": time.perf_counter() - began}
        rounds.append(timed)
        print({which: round(timed[which]["tokens_per_s"]) for which in sides}, timed["beside_s"], flush=True)
        _write(
            args, f"evaluation-{name}", {"rounds": rounds, "questions": args.evaluation, "new_tokens": args.new_tokens}
        )


def _receipt(args: argparse.Namespace, scheme: str, deterministic: bool, engine: Remote, eight: Remote) -> None:
    """Count the answers that differ from the first run's, in other batches and in another engine."""
    from hashlib import sha256

    prompts = _prompts(args.shape, RECEIPT_PROMPTS)
    first = engine("generate", prompts, args.new_tokens)
    found = {
        "again": engine("generate", prompts, args.new_tokens)["texts"],
        "in reverse": engine("generate", prompts[::-1], args.new_tokens)["texts"][::-1],
        "one by one": engine("one_by_one", prompts[:ALONE], args.new_tokens)["texts"],
        "8 at once": eight("generate", prompts, args.new_tokens)["texts"],
    }
    hashed = {how: texts for how, texts in found.items() if how != "one by one"} | {"first": first["texts"]}
    result = {
        "scheme": scheme,
        "deterministic": deterministic,
        "receipt": engine.facts["receipt"],
        "tokens_per_s": first["tokens"] / first["seconds"],
        "differ": {how: _differing(first["texts"], texts) for how, texts in found.items()},
        "asked": {how: len(texts) for how, texts in found.items()},
        "completions": {how: sha256("\0".join(texts).encode()).hexdigest() for how, texts in hashed.items()},
    }
    print(json.dumps({key: result[key] for key in ("scheme", "deterministic", "differ", "tokens_per_s")}), flush=True)
    _write(args, f"receipt-{args.shape}-{scheme}-{'invariant' if deterministic else 'default'}", result)


def _differing(texts: list[str], others: list[str]) -> int:
    return sum(text != other for text, other in zip(texts, others, strict=False))


def show(folder: Path) -> None:
    """Print tables of all results below a folder."""
    import pandas as pd

    from qrl.benchmark import summary

    speeds = sorted(
        folder.rglob("speed-*.json"),
        key=lambda file: (json.loads(file.read_text())["case"].split("-")[1], file.stat().st_mtime),
    )
    by_shape: dict[str, list] = {}
    for file in speeds:
        found, frame = json.loads(file.read_text()), pd.read_parquet(file.with_suffix(".parquet"))
        if frame["round"].nunique() < 2:
            print(f"{file}: one round, which supports no interval")
            continue
        by_shape.setdefault(found["case"].split("-")[1], []).append((found, summary.lines(frame)))
    for shape, calls in by_shape.items():
        _show_speed(shape, calls)
    for file in sorted(folder.rglob("evaluation-*.json")):
        found = json.loads(file.read_text())
        rounds = found["rounds"]
        own, bare = ([each[which]["tokens_per_s"] for each in rounds] for which in ("ours", "bare"))
        whole = [each["ours"]["tokens"] / (each["ours"]["seconds"] + sum(each["beside_s"].values())) for each in rounds]
        speeds = " against ".join(f"{_interval(summary.over_rounds(side), ',.0f')}" for side in (own, bare))
        size = f"{len(own)} rounds of {found['questions']} × {found['new_tokens']}"
        print(f"\n{found['case']}, {found['machine']}, vllm {found['versions']['vllm']}: {speeds} tokens/s, {size}")
        for what, side in (("ratio", own), ("with rendering and grading", whole)):
            ratios = [a / b for a, b in zip(side, bare, strict=True)]
            by_round = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"{what}: {_interval(summary.over_rounds(ratios), '.3f')}, rounds {by_round}")
    orders = ("again", "in reverse", "one by one", "8 at once")
    print(f"\n| case | kernels | tokens/s | differ from the first run: {' | '.join(orders)} |\n|---|---|{'---:|' * 5}")
    for file in sorted(folder.rglob("receipt-*.json")):
        found = json.loads(file.read_text())
        if "error" in found:
            print(f"| {file.stem} | {found['error'][:200]} | | | | | |")
            continue
        counts = [f"{found['differ'][how]} of {found['asked'][how]}" for how in orders]
        cells = (
            file.stem.removeprefix("receipt-"),
            ", ".join(found["receipt"]["kernels"]),
            f"{found['tokens_per_s']:,.0f}",
        )
        print(f"| {' | '.join((*cells, *counts))} |")


def _interval(value, digits: str) -> str:
    return f"{value.estimate:{digits}} [{value.low:{digits}}, {value.high:{digits}}]"


def _show_speed(shape: str, calls: list) -> None:
    """Print two tables of a shape: throughput, with ratios to bf16 in the same call; latency and memory."""
    batches = sorted({line.batch for _, lines in calls for line in lines})
    calls = [call for call in calls if {line.batch for line in call[1]} == set(batches)]  # complete runs only
    first = calls[0][0]
    print(f"\n## {shape}, {first['machine']}, {first['versions']}, {first['settings']}\n")
    speeds = " | ".join(f"tokens/s at {batch}" for batch in batches)
    print(f"| scheme | kernel | bits a weight | {speeds} |\n|---|---|---:|{'---|' * len(batches)}")
    rows, seen = [], set()
    for found, lines in calls:
        for scheme in dict.fromkeys(line.scheme for line in lines):
            if scheme not in seen:
                rows.append((scheme, found, {line.batch: line for line in lines if line.scheme == scheme}))
            seen.add(scheme)
        for scheme, why in found["failed"].items():
            print(f"| {scheme} | not run: {' '.join(why.split())[:300]} | |")
    for scheme, found, own in rows:
        kernels = ", ".join(
            name
            for name in found["facts"][scheme]["receipt"]["kernels"]
            if "Embedding" not in name and "FlashAttention" not in name
        )
        bits = found["made"].get(scheme, {}).get("bits_per_weight", 16)
        cells = [
            f"{line.tokens_per_s.estimate:,.0f}"
            + (
                f", × {line.relative.estimate:.2f} [{line.relative.low:.2f}, {line.relative.high:.2f}]"
                if line.relative
                else ""
            )
            for line in (own[batch] for batch in batches)
        ]
        print(f"| {scheme} | {kernels} | {bits:.2f} | {' | '.join(cells)} |")
    few = [batch for batch in (1, 64, 256) if batch in batches]
    latencies = [f"p50 / p95 / first token at {batch}, ms" for batch in few]
    head = ("on disk, MB", "in memory, MB", f"cache at {batches[-1]}, MB", *latencies, "stored in, s", "loaded in, s")
    print(f"\n| scheme | {' | '.join(head)} |\n|---|{'---:|' * len(head)}")
    for scheme, found, own in rows:
        line = own[batches[-1]]
        times = [
            " / ".join(
                f"{1000 * each.estimate:,.1f}"
                for each in (own[batch].latency_p50_s, own[batch].latency_p95_s, own[batch].first_token_s)
            )
            for batch in few
        ]
        stored_s = found["made"].get(scheme, {}).get("seconds")
        in_memory = line.weights_bytes / 1e6 if line.weights_bytes else float("nan")
        sizes = [f"{size:,.0f}" for size in (line.stored_bytes / 1e6, in_memory, line.cache_bytes / 1e6)]
        seconds = [f"{stored_s:.0f}" if stored_s else "", f"{found['facts'][scheme]['load_s']:.0f}"]
        print(f"| {' | '.join((scheme, *sizes, *times, *seconds))} |")
    bases = [[line.tokens_per_s.estimate for line in lines if line.scheme == "full"] for _, lines in calls]
    print("\nbf16 of every call: " + "; ".join(", ".join(f"{value:,.0f}" for value in each) for each in bases))


@contextmanager
def _alone(folder: Path):
    """Let one process at a time make a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as held:  # a suffix of its own: "1.5b-gptq" has a dot
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _prompts(shape: str, n: int) -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(0).integers(10, SHAPES[shape]["vocab_size"], (n, PROMPT_TOKENS)).tolist()


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _write(args: argparse.Namespace, name: str, found: dict) -> None:
    import torch
    import vllm

    machine = torch.cuda.get_device_name() if _device() == "cuda" else platform.machine()
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    (args.out / f"{name}.json").write_text(
        json.dumps({"case": name, "machine": machine, "versions": versions} | found, indent=1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("run", "source", "make", "print"))
    parser.add_argument("shape")
    parser.add_argument("schemes", nargs="*")
    parser.add_argument("--out", type=Path, default=Path.cwd())
    parser.add_argument("--weights", type=Path, default=Path(tempfile.gettempdir()) / "qrl-shapes")
    parser.add_argument("--llmc")
    parser.add_argument("--awq")
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=(1, 16, 32, 64, 256))
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--probe", action="store_true", help="also measure every layer's error")
    parser.add_argument("--evaluation", type=int, default=0, metavar="N")
    parser.add_argument("--evaluation-rounds", type=int, default=6)
    parser.add_argument("--receipts", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--patience", type=float, default=3600, help="seconds in which a scheme must be stored")
    parser.add_argument("--storing", type=int, default=99)
    parser.add_argument("--spare-disk", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.case == "print":
        show(Path(args.shape))
    elif args.case == "source":
        make_source(args.shape, args.weights)
    elif args.case == "make":
        print(json.dumps(make(args.shape, args.schemes[0], args.weights, args.probe)))
    else:
        run(args)


if __name__ == "__main__":
    main()
