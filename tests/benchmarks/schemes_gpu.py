"""Every scheme at a real model's shape, stored by `quantize` and run by vLLM on one GPU.

    python tests/benchmarks/schemes_gpu.py speed 1.5b gptq awq-ct --out FOLDER       # stores them, then measures them beside bf16
    python tests/benchmarks/schemes_gpu.py evaluation 1.5b --out FOLDER              # our engine against a bare LLM.generate
    python tests/benchmarks/schemes_gpu.py receipt 1.5b fp16 gptq --out FOLDER       # is a deterministic run repeated to the letter
    python tests/benchmarks/schemes_gpu.py http 1.5b --out FOLDER                    # a server under `vllm bench serve`
    python tests/benchmarks/schemes_gpu.py print FOLDER                              # the tables, from what those wrote

Weights are random (seeded), under the built-in model's tokenizer: their time is the real model's, their answers and errors are
not. Every scheme is stored in a process of its own; `--llmc` and `--awq` name folders to import llm-compressor and AutoAWQ from,
where they lie apart from vLLM. All models of one call are loaded side by side and take turns, so ratios to bf16 are paired.
"""

import argparse
import fcntl
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

SHAPES = {
    "1.5b": dict(model_type="qwen2", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "8b": dict(model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False),
    "micro": dict(model_type="qwen2", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024, tie_word_embeddings=True),
}  # fmt: skip
CALIBRATION, PROBE = 32, 8  # texts
PROMPT_TOKENS = 120
MEMORY = 0.85  # of the GPU, for all engines of a call


def source(args: argparse.Namespace) -> Path:
    """A folder with random bf16 weights of a shape, made by a process of its own, which gives the GPU's memory back."""
    subprocess.run([sys.executable, __file__, "source", args.shape, "--weights", str(args.weights), "--out", str(args.out)], check=True)
    return args.weights / f"{args.shape}-fp16"


def make_source(shape: str, weights: Path) -> Path:
    """The folder; made once, whoever else wants it waits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from qrl import checkpoint, tiny

    folder = weights / f"{shape}-fp16"
    with _alone(folder):
        if folder.is_dir():
            return folder
        own = json.loads((tiny.PATH / "config.json").read_text())
        config = AutoConfig.for_model(max_position_embeddings=32768, eos_token_id=own["eos_token_id"], pad_token_id=own["pad_token_id"], **SHAPES[shape])  # fmt: skip
        torch.manual_seed(0)
        with torch.device(_device()):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        partial = folder.with_suffix(".partial")
        model.save_pretrained(partial)
        for name in (*checkpoint.TOKENIZER_FILES, "generation_config.json"):
            if (tiny.PATH / name).is_file():
                shutil.copy(tiny.PATH / name, partial / name)
        partial.rename(folder)
    return folder


def make(shape: str, scheme: str, weights: Path) -> dict:
    """Stores one scheme through `quantize.run`; in an environment that has its library."""
    from qrl import process, quantize, tasks
    from qrl.quantize import settings, staging
    from qrl.recipe import Quantize
    from qrl.tasks import prompt

    process.settle()
    process.hush_transformers()
    folder = weights / f"{shape}-{scheme}"
    with _alone(folder):
        if (folder / "made.json").is_file():
            return json.loads((folder / "made.json").read_text())
        shutil.rmtree(folder, ignore_errors=True)
        origin = weights / f"{shape}-fp16"
        tokens = staging.tokenizer(origin)
        texts = [prompt.training_text(tokens, question, "answer-line") for question in tasks.load("arithmetic", "train", CALIBRATION, 0)]
        chosen = settings.of(scheme, Quantize(calibration_samples=CALIBRATION), 0)
        made = quantize.run(scheme, origin, folder, settings=chosen, calibration=texts, probe=texts[:PROBE], device=_device())
        record = {
            "scheme": scheme, "bytes": made.bytes, "bits_per_weight": made.bits_per_weight, "seconds": made.seconds,
            "calibration_digest": made.calibration_digest, "layer_errors": made.layer_errors, "settings": asdict(made.settings),
        }  # fmt: skip
        (folder / "made.json").write_text(json.dumps(record))
    return record


def make_all(args: argparse.Namespace) -> dict[str, dict]:
    """Every scheme in a process of its own, all at once; what failed says why."""
    apart = {"awq": args.awq}
    running = {}
    for scheme in args.schemes:
        if scheme == "fp16":
            continue
        extra = apart.get(scheme, None if scheme in ("nf4", "int8") else args.llmc)
        path = os.pathsep.join(filter(None, [extra, os.environ.get("PYTHONPATH")]))
        words = [sys.executable, __file__, "make", args.shape, scheme, "--weights", str(args.weights), "--out", str(args.out)]
        log = (args.out / f"make-{args.shape}-{scheme}.log").open("wb")
        running[scheme] = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=subprocess.STDOUT)
    found = {}
    for scheme, each in running.items():
        code = each.wait()
        said = (args.out / f"make-{args.shape}-{scheme}.log").read_text(errors="replace")
        made = args.weights / f"{args.shape}-{scheme}" / "made.json"
        found[scheme] = json.loads(made.read_text()) if code == 0 and made.is_file() else {"error": said[-1500:]}
        print(f"{scheme}: {'stored' if code == 0 else 'NOT STORED'} {said[-300:] if code else ''}", flush=True)
    return found


def speed(args: argparse.Namespace) -> None:
    """bf16 and the schemes side by side: rows of `benchmark.run`, kernels, records."""
    source(args)
    made = make_all(args)
    from qrl import benchmark
    from qrl.benchmark import local
    from qrl.recipe import Benchmark

    stored = ["fp16", *(scheme for scheme, record in made.items() if "error" not in record)]
    settings = Benchmark(batches=args.batches, requests=args.requests, rounds=args.rounds, new_tokens=args.new_tokens)
    sizes = {"max_tokens": PROMPT_TOKENS + args.new_tokens, "sequences": max(args.batches), "memory": MEMORY / len(stored)}
    prompts = _prompts(args.shape, max(args.batches))
    opened, facts, failed = {}, {}, {}
    for scheme in stored:
        subject = benchmark.Subject("base", scheme, args.weights / f"{args.shape}-{scheme}")
        began = time.perf_counter()
        try:
            engine = local.Vllm(subject.path, _device(), "auto", **sizes)
            engine.ask(prompts[:2], new_tokens=2, fixed=True)
        except Exception as error:
            failed[scheme] = f"{error} {traceback.format_exc()[-1500:]}"
            print(f"{scheme}: NOT RUN: {error}", flush=True)
            continue
        opened[subject] = engine
        facts[scheme] = {"load_s": time.perf_counter() - began, "weights_bytes": engine.weights_bytes} | engine._loaded.receipt()
        print(f"{scheme}: loaded in {facts[scheme]['load_s']:.1f} s, {facts[scheme]['kernels']}", flush=True)
    frame = benchmark.run(list(opened), [prompts] * len(opened), opened.__getitem__, settings)
    name = f"speed-{args.shape}-{'-'.join(args.schemes)}"
    frame.to_parquet(args.out / f"{name}.parquet")
    _write(args, name, {"made": made, "facts": facts, "failed": failed, "settings": settings.model_dump(mode="json")})
    from qrl.benchmark import summary

    print(summary.markdown(summary.lines(frame), ""), flush=True)


def evaluation(args: argparse.Namespace) -> None:
    """Tokens a second of evaluation's engine and of a bare `LLM.generate`, in alternating rounds over the same prompts.

    The bare engine gets the same settings, prefixes uncached too (its second round would be answered from the first's), and
    writes its own text; ours is asked as evaluation asks it.
    """
    origin = source(args)
    import vllm

    from qrl import tasks
    from qrl.engine import hf
    from qrl.engine import vllm as engine

    prompts = _prompts(args.shape, args.questions)
    longest = PROMPT_TOKENS + args.new_tokens
    share = {} if _device() == "cpu" else {"gpu_memory_utilization": MEMORY / 2}
    ours = engine.Vllm(origin, _device(), "auto", max_tokens=longest, sequences=256, deterministic=False, seed=0, memory=MEMORY / 2)
    bare = vllm.LLM(model=str(origin), max_model_len=longest, max_num_seqs=256, enable_prefix_caching=False, enforce_eager=_device() == "cpu", seed=0, **share)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=args.new_tokens)

    def of_ours() -> tuple[float, int]:
        began = time.perf_counter()
        written = ours.generate(prompts, max_new_tokens=args.new_tokens)
        return time.perf_counter() - began, sum(each.n_tokens for each in written)

    def of_bare() -> tuple[float, int]:
        began = time.perf_counter()
        written = bare.generate(given, sampling, use_tqdm=False)
        return time.perf_counter() - began, sum(len(each.outputs[0].token_ids) for each in written)

    for warm in (of_ours, of_bare):
        warm()
    rounds = []
    for number in range(args.rounds):
        timed = {}
        for which in (("ours", "bare"), ("bare", "ours"))[number % 2]:
            seconds, tokens = of_ours() if which == "ours" else of_bare()
            timed[which] = {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}
        rounds.append(timed)
        print({key: round(value["tokens_per_s"]) for key, value in timed.items()}, flush=True)
    texts = [each.text for each in ours.generate(prompts, max_new_tokens=args.new_tokens)]
    began = time.perf_counter()
    tasks.grade_many("arithmetic", texts, ["1"] * len(texts))
    graded = time.perf_counter() - began
    began = time.perf_counter()
    tokens = hf.tokenizer(origin)
    decoded = [tokens.decode([1] * args.new_tokens) for _ in range(200)]
    _write(args, f"evaluation-{args.shape}", {
        "rounds": rounds, "questions": args.questions, "new_tokens": args.new_tokens, "grading_s": graded,
        "decode_us": (time.perf_counter() - began) / len(decoded) * 1e6, "facts": ours.receipt(),
    })  # fmt: skip


def receipt(args: argparse.Namespace) -> None:
    """The same prompts in other batches and in another engine: how many answers differ, deterministic and not."""
    source(args)
    made = make_all(args)
    from qrl.engine import vllm as engine

    prompts = _prompts(args.shape, args.questions)
    for scheme in args.schemes:
        if "error" in made.get(scheme, {}):
            continue
        for deterministic in (True, False):
            with _told(args, scheme, deterministic):
                _write(args, f"receipt-{args.shape}-{scheme}-{'invariant' if deterministic else 'default'}", _repeated(engine, args, scheme, deterministic, prompts))


def show(folder: Path) -> None:
    """The tables of everything that the other cases wrote anywhere below a folder."""
    import pandas as pd

    from qrl.benchmark import summary

    speeds = sorted(folder.rglob("speed-*.json"), key=lambda file: (json.loads(file.read_text())["case"].split("-")[1], file.stat().st_mtime))
    by_shape: dict[str, list] = {}
    for file in speeds:
        found = json.loads(file.read_text())
        by_shape.setdefault(found["case"].split("-")[1], []).append((found, summary.lines(pd.read_parquet(file.with_suffix(".parquet")))))
    for shape, calls in by_shape.items():
        _show_speed(shape, calls)
    for file in sorted(folder.rglob("evaluation-*.json")):
        found = json.loads(file.read_text())
        own, bare = ([each[which]["tokens_per_s"] for each in found["rounds"]] for which in ("ours", "bare"))
        ratio = summary.over_rounds([a / b for a, b in zip(own, bare, strict=True)])
        text = " against ".join(f"{each.estimate:,.0f} [{each.low:,.0f}, {each.high:,.0f}]" for each in map(summary.over_rounds, (own, bare)))
        print(f"\n{found['case']}, {found['machine']}, vllm {found['versions']['vllm']}: {text} tokens/s, ratio {ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], {len(own)} rounds of {found['questions']} × {found['new_tokens']}; grading {found['grading_s']:.2f} s, decoding one {found['decode_us']:.0f} µs")
    print("\n| case | kernels | tokens/s | differ from the first run: again | in reverse | one by one | 8 at once |\n|---|---|---:|---:|---:|---:|---:|")
    for file in sorted(folder.rglob("receipt-*.json")):
        found = json.loads(file.read_text())
        if "error" in found:
            print(f"| {file.stem} | {found['error'][:200]} | | | | | |")
            continue
        counts = [f"{found['differ'][how]} of {found['asked'][how]}" for how in ("again", "in reverse", "one by one", "8 at once")]
        print(f"| {file.stem.removeprefix('receipt-')} | {', '.join(found['receipt']['kernels'])} | {found['tokens_per_s']:,.0f} | {' | '.join(counts)} |")
    for file in sorted(folder.rglob("http-*.json")):
        found = json.loads(file.read_text())
        print(f"\n{found['case']}, {found['machine']}, vllm {found['versions']['vllm']}, prompts of {found['prompt_tokens']:.0f} tokens")
        for clients in sorted({row["clients"] for row in found["rows"]}):
            rows = [row for row in found["rows"] if row["clients"] == clients]
            values = {key: summary.over_rounds([row[key] for row in rows]) for key in ("output_throughput", "p50_e2el_ms", "p95_e2el_ms", "p50_ttft_ms")}
            print(f"{clients} clients: " + ", ".join(f"{key} {each.estimate:,.1f} [{each.low:,.1f}, {each.high:,.1f}]" for key, each in values.items()))


def _show_speed(shape: str, calls: list) -> None:
    """Two tables of a shape: throughput, with ratios to the bf16 of the same call, and latency and memory."""
    batches = sorted({line.batch for _, lines in calls for line in lines})
    first = calls[0][0]
    print(f"\n## {shape}, {first['machine']}, {first['versions']}, {first['settings']}\n")
    print(f"| scheme | kernel | bits a weight | {' | '.join(f'tokens/s at {batch}' for batch in batches)} |\n|---|---|---:|{'---|' * len(batches)}")
    rows, seen = [], set()
    for found, lines in calls:
        for scheme in dict.fromkeys(line.scheme for line in lines):
            if scheme not in seen:
                rows.append((scheme, found, {line.batch: line for line in lines if line.scheme == scheme}))
            seen.add(scheme)
        for scheme, why in found["failed"].items():
            print(f"| {scheme} | not run: {why[:300]} | |")
        for scheme, record in found["made"].items():
            if "error" in record:
                print(f"| {scheme} | not stored: {record['error'][-300:]} | |")
    for scheme, found, own in rows:
        kernels = ", ".join(name for name in found["facts"][scheme]["kernels"] if "Embedding" not in name and "FlashAttention" not in name)
        bits = found["made"].get(scheme, {}).get("bits_per_weight", 16)
        cells = [f"{line.tokens_per_s.estimate:,.0f}" + (f", × {line.relative.estimate:.2f} [{line.relative.low:.2f}, {line.relative.high:.2f}]" if line.relative else "") for line in (own[batch] for batch in batches)]
        print(f"| {scheme} | {kernels} | {bits:.2f} | {' | '.join(cells)} |")
    few = [batch for batch in (1, 64, 256) if batch in batches]
    print(f"\n| scheme | on disk, MB | in memory, MB | cache at {batches[-1]}, MB | {' | '.join(f'p50 / p95 / first token at {batch}, ms' for batch in few)} | stored in, s | loaded in, s |\n|---|---:|---:|---:|{'---:|' * (len(few) + 2)}")
    for scheme, found, own in rows:
        line = own[batches[-1]]
        times = [" / ".join(f"{1000 * each.estimate:,.1f}" for each in (own[batch].latency_p50_s, own[batch].latency_p95_s, own[batch].first_token_s)) for batch in few]
        made = found["made"].get(scheme, {}).get("seconds")
        print(f"| {scheme} | {line.stored_bytes / 1e6:,.0f} | {line.weights_bytes / 1e6 if line.weights_bytes else float('nan'):,.0f} | {line.cache_bytes / 1e6:,.0f} | {' | '.join(times)} | {f'{made:.0f}' if made else ''} | {found['facts'][scheme]['load_s']:.0f} |")
    bases = [[line.tokens_per_s.estimate for line in lines if line.scheme == "fp16"] for _, lines in calls]
    print("\nbf16 of every call: " + "; ".join(", ".join(f"{value:,.0f}" for value in each) for each in bases))


def _repeated(engine, args: argparse.Namespace, scheme: str, deterministic: bool, prompts: list) -> dict:
    from qrl.evaluate import cells

    path = args.weights / f"{args.shape}-{scheme}"
    found = {}

    def ask(loaded, given: list) -> list:
        return loaded.generate(given, max_new_tokens=args.new_tokens)

    for sequences in (256, 8):
        with engine.Vllm(path, _device(), "auto", max_tokens=PROMPT_TOKENS + args.new_tokens, sequences=sequences, deterministic=deterministic, seed=0, memory=MEMORY) as loaded:
            began = time.perf_counter()
            found[f"{sequences} at once"] = ask(loaded, prompts)
            seconds = time.perf_counter() - began
            said = loaded.receipt()
            if sequences == 256:
                found["again"] = ask(loaded, prompts)
                found["in reverse"] = ask(loaded, prompts[::-1])[::-1]
                some = prompts[:16]
                found["one by one"] = [ask(loaded, [each])[0] for each in some]
                speed = sum(each.n_tokens for each in found["256 at once"]) / seconds
        gc.collect()
    reference = found["256 at once"]
    differ = {how: sum(a.raw != b.raw for a, b in zip(reference, written, strict=False)) for how, written in found.items()}
    asked = {how: len(written) for how, written in found.items()}
    result = {"scheme": scheme, "deterministic": deterministic, "differ": differ, "asked": asked, "tokens_per_s": speed, "receipt": said, "completions": {how: cells._digest(written) for how, written in found.items() if len(written) == len(reference)}}  # fmt: skip
    print(json.dumps({key: result[key] for key in ("scheme", "deterministic", "differ", "tokens_per_s")}), flush=True)
    return result


def http(args: argparse.Namespace) -> None:
    """A server of the shape on loopback, under `vllm bench serve`."""
    origin = source(args)
    import urllib.request

    from qrl import tasks
    from qrl.benchmark import http as load
    from qrl.engine import hf
    from qrl.recipe import Benchmark
    from qrl.serve import engines
    from qrl.tasks import prompt

    tokens = hf.tokenizer(origin)
    texts = [tokens.decode(prompt.render(tokens, each.question, "answer-line")) for each in tasks.load("arithmetic", "heldout", 64, 0)]
    with tempfile.TemporaryDirectory() as scratch:
        start = engines.prepare(engines.VLLM, origin, "shape@1", "127.0.0.1", args.port, _device(), "auto", Path(scratch))
        log = (args.out / "http-server.log").open("wb")
        server = subprocess.Popen(start.command, cwd=start.folder, env=os.environ | start.environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{args.port}"
            for _ in range(300):
                with suppress(OSError), urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=2):
                    break
                if server.poll() is not None:
                    raise SystemExit(f"the server ended with {server.returncode}")
                time.sleep(1)
            settings = Benchmark(batches=args.batches, requests=args.requests, rounds=args.rounds, new_tokens=args.new_tokens)
            found = load.run(url, "shape@1", texts, origin, settings)
        finally:
            server.terminate()
            server.wait(60)
    keep = ("clients", "round", "completed", "output_throughput", "p50_e2el_ms", "p95_e2el_ms", "p50_ttft_ms", "p95_ttft_ms", "p50_tpot_ms")
    _write(args, f"http-{args.shape}", {"rows": [{key: row.get(key) for key in keep} for row in found], "prompt_tokens": sum(len(tokens(text)["input_ids"]) for text in texts) / len(texts)})


@contextmanager
def _told(args: argparse.Namespace, scheme: str, deterministic: bool):
    try:
        yield
    except Exception as error:
        print(f"{scheme}, deterministic={deterministic}: NOT RUN: {error}", flush=True)
        _write(args, f"receipt-{args.shape}-{scheme}-{'invariant' if deterministic else 'default'}-failed", {"error": f"{error} {traceback.format_exc()[-2000:]}"})


@contextmanager
def _alone(folder: Path):
    """One process at a time makes a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as held:
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
    (args.out / f"{name}.json").write_text(json.dumps({"case": name, "machine": machine, "versions": versions} | found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("speed", "evaluation", "receipt", "http", "source", "make", "print"))
    parser.add_argument("shape")
    parser.add_argument("schemes", nargs="*")
    parser.add_argument("--out", type=Path, default=Path.cwd())
    parser.add_argument("--weights", type=Path, default=Path(tempfile.gettempdir()) / "qrl-shapes")
    parser.add_argument("--llmc")
    parser.add_argument("--awq")
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=(1, 16, 32, 64, 256))
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--questions", type=int, default=1319)
    parser.add_argument("--port", type=int, default=8017)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.case == "print":
        show(Path(args.shape))
    elif args.case == "source":
        make_source(args.shape, args.weights)
    elif args.case == "make":
        print(json.dumps(make(args.shape, args.schemes[0], args.weights)))
    else:
        {"speed": speed, "evaluation": evaluation, "receipt": receipt, "http": http}[args.case](args)


if __name__ == "__main__":
    main()
