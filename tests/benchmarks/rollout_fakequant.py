"""Measure fake-quantized rollouts of vLLM: the gap to the trainer, the linears, and the speed, per format.

    python tests/benchmarks/rollout_fakequant.py OUT            # one GPU, about 12 minutes
    python tests/benchmarks/rollout_fakequant.py OUT --quick    # about 6 minutes: bf16 and nvfp4-a4 at 1.5 B's shape
    python tests/benchmarks/rollout_fakequant.py OUT --print    # the table again, from OUT

Each part is a process with an engine and a time bound; it writes OUT/SHAPE-FORMAT.json as soon as a format is measured,
and OUT/PART.log. The engine of `plain` is vLLM's own: it is sent the weights of bf16 and of each weight-only format in
turn. `again` measures bf16 a second time, for the spread. `real-FORMAT` sends the codes to vLLM's own kernels
(rollout.quantization=real), beside the simulated FORMAT. Shapes have random weights (their time is the real model's,
their log-probabilities are not); `tiny` is the built-in model, which is trained.

k3      KL(engine || trainer), nats per token, of sampled tokens; the trainer computes as the loss does, under autocast;
        bf16_kl_k3 is the same of a trainer wholly in bf16, whose residual stream is as narrow as the engine's
linears every linear of the first and last layer, on the same inputs: weights, rounded inputs and outputs, bit for bit;
        outputs against the product of the trainer's matrices, fused as the engine's are, and one by one
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

PLAIN = ("bf16", "int8", "int8-attention", "int4", "nvfp4-a16", "mxfp4", "int3", "int2")  # the engine rounds no inputs
STATIC = ("fp8-static", "int8-a8-static")  # the engine rounds inputs under calibrated scales
ROUNDED = ("nvfp4-a4", "fp8", *STATIC)
REAL = ("real-fp8", "real-int4", "real-nvfp4-a16")  # the engine multiplies by codes
PARTS = {  # name → formats, shape, seconds
    "plain": (PLAIN, "1.5b", 420),
    "nvfp4-a4": (ROUNDED[:1], "1.5b", 240),
    "fp8": (ROUNDED[1:2], "1.5b", 240),
    "again": (("bf16",), "1.5b", 180),
    "tiny-plain": (PLAIN, "tiny", 600),
    "tiny-nvfp4-a4": (ROUNDED[:1], "tiny", 300),
    "tiny-fp8": (ROUNDED[1:2], "tiny", 300),
    **{f"tiny-{name}": ((name,), "tiny", 300) for name in STATIC},
    **{name: ((name,), "1.5b", 240) for name in REAL},
    **{f"tiny-{name}": ((name,), "tiny", 240) for name in REAL},
}
QUICK = {"plain": (("bf16",), "1.5b", 300), "nvfp4-a4": (ROUNDED[:1], "1.5b", 300)}
SAMPLED = {"1.5b": (512, 256, 128), "quick": (256, 128, 64), "tiny": (256, 64, 256)}  # completions, tokens, scored
FUSED = {  # the engine's linear of a layer → the checkpoint's
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
BATCHES = (1, 37, 512)  # tokens


def measure(part: str, formats: tuple[str, ...], shape: str, out: Path, *, quick: bool, compiles: bool) -> None:
    """Measure formats with one engine in this process; one that fails is recorded, and the next goes on."""
    import torch

    from qrl import tiny
    from qrl.recipe import Rollout
    from qrl.train.rollout import vllm_engine

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        _prepare_cpu()
    count, tokens, scored = SAMPLED["quick" if quick and shape != "tiny" else shape]
    if shape == "tiny":
        base = tiny.PATH
    else:
        import rollouts

        base = rollouts.checkpoint_of(shape)
    say(f"{part}: the checkpoint is {base}")
    prompts = _prompts(base, shape, count)
    longest = max(map(len, prompts)) + tokens
    real = formats[0] in REAL
    settings = Rollout(
        engine="vllm",
        **({"kv_cache_gib": 6} if on_gpu else {"gpu_memory_utilization": 0.05}),  # other jobs may share the card
        compile=(compiles and shape != "tiny") or not on_gpu,  # it takes minutes
        max_model_tokens=longest,
        quantization="real" if real else "none",
    )
    qat = plain(formats[0]) if real or formats[0] in ROUNDED else "none"
    began = time.perf_counter()
    engine = vllm_engine.create(
        str(base), settings, sequences=count, sleeps=False, rank=0, world=1, **({"qat": qat} if qat != "none" else {})
    )
    started = time.perf_counter() - began
    say(f"{part}: the engine started in {started:.0f} s")
    for name in formats:
        row = {"part": part, "format": name, "shape": shape, "quick": quick, "compile": settings.compile}
        row |= {"start_s": started, **versions()}
        try:
            found = one(engine, base, name, prompts, tokens, scored, ignore_eos=shape != "tiny")
            say(f"{part}: {name} {json.dumps(found)}")
        except Exception:
            found = {"error": traceback.format_exc()[-2000:]}
            say(f"{part}: {name} failed\n{found['error']}")
        label = "again-" if part == "again" else ""
        (out / f"{label}{shape}-{name}.json").write_text(json.dumps(row | found, indent=1) + "\n")


def one(engine, base: Path, name: str, prompts, tokens: int, scored: int, *, ignore_eos: bool) -> dict:
    """Return the gap, the linears and the speed of one format."""
    import torch

    from qrl.train.rollout import codes, engine_gap, sync, vllm_engine

    real, name = name in REAL, plain(name)
    model, found = policy(base, name), {}
    for each in ("first_sync_s", "sync_s"):
        began = finished()
        if real:
            sent = codes.named_codes(model, torch.bfloat16)
        else:
            sent = iter([*sync.named_scales(model), *sync.named_weights(model, torch.bfloat16)])
        vllm_engine.load(engine, sent, reloads=real)
        found[each] = finished() - began
        del sent
        say(f"{name}: sent in {found[each]:.2f} s")
    own = vllm_engine.runner(engine).model
    found["weights_gib"] = sum(weight.numel() * weight.element_size() for weight in own.parameters()) / 2**30
    found["used_gib"] = _used_gib()
    found["linears"] = {} if real else linears(own, model)  # codes are in the kernel's own layout
    more, speeds = {"ignore_eos": ignore_eos}, []
    for number in range(4):
        with vllm_engine.seeded(number):
            began = finished()
            drawn, logprobs = vllm_engine.generate(engine, prompts, temperature=1.0, max_tokens=tokens, more=more)
            seconds = finished() - began
        speeds.append(sum(map(len, drawn)) / seconds)
        say(f"{name}: {speeds[-1]:.0f} tokens/s")
    found |= {"tokens_per_s": statistics.median(speeds[1:]), "tokens_per_s_of_each": speeds}  # the first one warms up
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    theirs = pad(
        [torch.tensor([float("nan") if value is None else value for value in row]) for row in logprobs[:scored]]
    )
    mask = pad([torch.ones(len(row)) for row in drawn[:scored]])
    for prefix, scoring in (("", model), ("bf16_", narrow(model, base, name))):
        own = pad(score(scoring, prompts[:scored], drawn[:scored]))
        found |= {f"{prefix}{key}": value for key, value in vars(engine_gap.measure(own, theirs, mask)).items()}
    return found | {"scored_tokens": int(mask.sum())}


def plain(name: str) -> str:
    """Return the format of training that a row measures."""
    return name.removeprefix("real-")


def _used_gib() -> float:
    """Return what everything on the GPU takes, the trained model too; NaN without one."""
    import torch

    if not torch.cuda.is_available():
        return float("nan")
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def narrow(model, base: Path, name: str):
    """Return the trainer's model wholly in bf16, as the engine computes: the residual stream and the norms too."""
    import torch
    from transformers import AutoModelForCausalLM

    from qrl.formats.fakequant import operation
    from qrl.train.rollout import sync

    config = operation.engine_config(name) if name in ROUNDED else None
    copy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device()).eval()
    copy.load_state_dict(dict(sync.named_weights(model, torch.bfloat16)), strict=False)
    scales = dict(sync.named_scales(model))
    for path, module in copy.named_modules() if config else ():
        if isinstance(module, torch.nn.Linear) and path != "lm_head":
            scale, spec = scales.get(f"{path}.{operation.SCALE}"), config["input_activations"]
            module.register_forward_pre_hook(
                lambda _, inputs, scale=scale, spec=spec: (operation.rounded(inputs[0], spec, scale),)
            )
    return copy


def policy(base: Path, name: str):
    """Return the trainer's model: fp32 masters, with the format attached, computed in bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    from qrl.formats.fakequant import linears as covered
    from qrl.train.qat import linear, prepare

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device()).eval()
    if name != "bf16":
        linear.attach(model, name, torch.bfloat16)
        if covered.needs_calibration(name):
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(3, model.config.vocab_size, (8, 128), generator=generator).to(device())
            prepare.calibrate(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    return model


def linears(engine, model) -> dict:
    """Compare the linears of the first and last layer on the same inputs; return how many are equal in each respect."""
    import torch
    from torch.nn import functional

    from qrl.formats.fakequant import operation, rounding
    from qrl.train.qat.linear import QATLinear

    counts = dict.fromkeys(("products", "weights", "inputs", "outputs", "outputs_one_by_one"), 0)
    generator = torch.Generator().manual_seed(0)
    for place in (0, model.config.num_hidden_layers - 1):
        for name, members in FUSED.items():
            theirs = engine.model.layers[place].get_submodule(name)
            ours = [model.model.layers[place].get_submodule(member) for member in members]
            weight = torch.cat([m.effective_weight if isinstance(m, QATLinear) else m.weight for m in ours]).bfloat16()
            bias = torch.cat([m.bias for m in ours]).bfloat16() if ours[0].bias is not None else None
            for count in BATCHES:
                x = torch.randn(count, weight.shape[1], generator=generator)
                x[:, ::97] *= 20
                x = x.to(weight)
                with torch.no_grad():
                    answer = theirs(x)
                    answer = answer[0] if isinstance(answer, tuple) else answer
                    fold = getattr(ours[0], "fold", None)
                    args, rounded, same = fold and fold.scheme.input_activations, x, True
                    if args is not None:
                        rounded = rounding.activations(x, args, ours[0].input_global_scale)
                        scale = getattr(theirs, operation.SCALE, None)
                        of_engine = torch.ops.qrl.rounded(
                            x, theirs.quant_method.spec, None if scale is None else scale[:1]
                        )
                        same = torch.equal(of_engine, rounded)
                    each = [m(x) if isinstance(m, QATLinear) else _product(m, x) for m in ours]
                    counts["products"] += 1
                    counts["weights"] += torch.equal(theirs.weight, weight)
                    counts["inputs"] += same
                    counts["outputs"] += torch.equal(answer, functional.linear(rounded, weight, bias))
                    counts["outputs_one_by_one"] += torch.equal(answer, torch.cat(each, -1))
    return counts


def _product(linear, x):
    from torch.nn import functional

    return functional.linear(x, linear.weight.to(x), None if linear.bias is None else linear.bias.to(x))


def score(model, prompts: list[list[int]], completions: list[list[int]], batch: int = 8) -> list:
    """Return the log-probabilities of each completion's tokens as the loss computes them, on the CPU.

    Of a whole vocabulary, only 1,024 positions at once are widened to float32.
    """
    import torch

    scores = []
    autocast = torch.autocast(device(), torch.bfloat16, model.dtype == torch.float32, cache_enabled=False)
    with torch.no_grad(), autocast:
        for start in range(0, len(prompts), batch):
            rows = [
                torch.tensor(ids + drawn)
                for ids, drawn in zip(prompts[start : start + batch], completions[start : start + batch], strict=True)
            ]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device())
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True).to(ids)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for row, logit, before in zip(rows, logits, prompts[start : start + batch], strict=True):
                own, drawn = logit[len(before) - 1 : len(row) - 1].split(1024), row[len(before) :, None].to(ids)
                parts = zip(own, drawn.split(1024), strict=True)
                every = [part.float().log_softmax(-1).gather(-1, chosen)[:, 0] for part, chosen in parts]
                scores.append(torch.cat(every).cpu())
    return scores


def _prompts(base: Path, shape: str, count: int) -> list[list[int]]:
    from qrl import tasks
    from qrl.engine import hf
    from qrl.tasks import prompt

    tokens = hf.tokenizer(base)
    questions = tasks.load("arithmetic", "train", count, 0)
    return [prompt.render(tokens, question.question, "plain") for question in questions]


def _prepare_cpu() -> None:
    """Start engines without compiling, and keep weights that a CPU's kernels would pack and drop."""
    import torch
    import vllm
    from vllm.model_executor.layers import utils

    def keep_weight(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
    utils.dispatch_cpu_unquantized_gemm = keep_weight


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def finished() -> float:
    """Return the time once the GPU has done everything."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def versions() -> dict:
    import rollouts
    import vllm

    return rollouts.versions() | {"vllm": vllm.__version__}  # its CPU build has another package name


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def run_apart(part: str, formats: tuple[str, ...], shape: str, seconds: int, out: Path, flags: list[str]) -> None:
    """Run a part in its own process, and end it after its time."""
    words = [sys.executable, __file__, str(out), "--part", part, "--formats", ",".join(formats), "--shape", shape]
    words += flags
    began = time.perf_counter()
    say(f"{part}: at most {seconds} s")
    with open(out / f"{part}.log", "w") as log:
        serving = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"TQDM_DISABLE": "1"})
        try:
            code = serving.wait(seconds)
        except subprocess.TimeoutExpired:
            serving.kill()
            serving.wait()
            code = "out of time"
    say(f"{part}: {code} in {time.perf_counter() - began:.0f} s")
    if code != 0:
        print((out / f"{part}.log").read_text(errors="replace")[-1500:], flush=True)


def show(out: Path) -> None:
    """Print a line per format, with the ratios to bf16 of the same shape."""
    rows = {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    for name, row in rows.items():
        if "error" in row:
            print(f"{name}: failed: {row['error'].strip().splitlines()[-1]}")
            continue
        bf16 = rows.get(f"{row['shape']}-bf16", {})
        speed = row["tokens_per_s"] / bf16["tokens_per_s"] if "tokens_per_s" in bf16 else float("nan")
        gap = row["kl_k3"] / bf16["kl_k3"] if bf16.get("kl_k3") else float("nan")
        print(
            f"{name}: k3 {row['kl_k3']:.3g} ({gap:.2f} of bf16's; {row['bf16_kl_k3']:.3g} wholly in bf16), "
            f"token ESS {row['token_ess']:.4f}, "
            f"{row['tokens_per_s']:.0f} tokens/s ({speed:.2f} of bf16's), sync {row['sync_s']:.2f} s, "
            f"weights {row.get('weights_gib', float('nan')):.2f} GiB, "
            f"linears {row['linears']}, {row['gpu']}, vLLM {row['vllm']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for results and logs")
    parser.add_argument("--quick", action="store_true", help="bf16 and nvfp4-a4, fewer tokens")
    parser.add_argument("--without-compile", action="store_true", help="only CUDA graphs: an engine starts sooner")
    parser.add_argument("--only", help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--print", dest="show", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--formats", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part:
        how = {"quick": given.quick, "compiles": not given.without_compile}
        measure(given.part, tuple(given.formats.split(",")), given.shape, given.out, **how)
        return
    if not given.show:
        parts = QUICK if given.quick else PARTS
        flags = ["--quick"] * given.quick + ["--without-compile"] * given.without_compile
        for part in given.only.split(",") if given.only else parts:
            run_apart(part, *parts[part], given.out, flags)
    show(given.out)


if __name__ == "__main__":
    main()
