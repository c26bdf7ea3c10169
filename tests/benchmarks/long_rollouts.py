"""Measure the gap of vLLM's rollouts along completions of thousands of tokens, and what its correction would do there.

    python tests/benchmarks/long_rollouts.py OUT --model MODEL   # one GPU: 64 completions of 8,192 tokens
    python tests/benchmarks/long_rollouts.py OUT --check         # the built-in model, few tokens, CPU, no fp8
    python tests/benchmarks/long_rollouts.py OUT --print         # the table again, from OUT

A format is a process with an engine of its own: `bf16`; `fp8`, vLLM's FP8 kernels beside a trainer in bf16
(rollout.quantization=fp8); `nvfp4-a4`, for training with train.qat=nvfp4-a4. It writes OUT/FORMAT.json, FORMAT.npz with
every log-probability, and FORMAT.log; a second call does what is left. A completion does not end at the end token. No
min_tokens: it would take the end token from the engine's distribution and so add to the gap. Past its answers a model
continues as it can, so `surprise` is printed too: the gap of text that repeats itself is small.

In a quarter of the tokens: k3, KL(engine || trainer) in nats per token, with the standard error over completions; mean
|log ratio|; surprise, mean -log p of the trainer; token ESS; share of tokens above rollout.is_correction_max. For
completions that end with the quarter: sequence ESS, the share above the cap, and for each rollout.is_correction the
mean weight (1 without bias) and the ESS of the corrected weights. `watcher` holds what it says after five such steps.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import rollout_fakequant as short  # noqa: E402
import rollouts  # noqa: E402

FORMATS = ("bf16", "fp8", "nvfp4-a4")
BATCH = ("input_ids", "attention_mask")


def measure(name: str, given: argparse.Namespace) -> dict:
    """Return the quarters of a format, the watcher's sentences and the seconds; write the log-probabilities."""
    import numpy
    import torch

    from qrl import tasks
    from qrl.engine import hf
    from qrl.recipe import Rollout
    from qrl.tasks import prompt
    from qrl.train.qat import prepare

    tokens, questions = hf.tokenizer(given.model), tasks.load("arithmetic", "train", given.completions, 0)
    prompts = [prompt.render(tokens, question.question, given.prompt) for question in questions]
    longest = max(map(len, prompts)) + given.tokens
    quantization, qat = ("fp8", "none") if name == "fp8" else ("none", "none" if name == "bf16" else name)
    settings = Rollout(engine="vllm", quantization=quantization, max_model_tokens=longest, compile=False)
    model = short.policy(given.model, "bf16" if qat == "none" else qat)
    if qat != "none":  # as training calibrates: on worked solutions
        rows = [
            tokens(prompt.training_text(tokens, each, given.prompt), add_special_tokens=False) for each in questions
        ]
        batches = [{key: torch.tensor([row[key]], device=model.device) for key in BATCH} for row in rows]
        prepare.calibrate(model, batches)
    if longest > (positions := model.config.max_position_embeddings):
        raise SystemExit(
            f"Prompt and completion have {longest} tokens, but the model {positions} positions: lower --tokens."
        )
    if importlib.util.find_spec("vllm"):
        drawn, engine, found = by_vllm(model, qat, settings, prompts, given)
    else:
        drawn, engine, found = by_transformers(
            short.narrow(model, given.model, "bf16" if qat == "none" else qat), prompts, given.tokens
        )
    if {len(row) for row in drawn} != {given.tokens}:
        raise SystemExit("A completion ended early: its quarters are no quarters of the others.")
    began = short.finished()
    trainer = torch.stack(short.score(model, prompts, drawn, given.micro_batch))
    found["score_s"] = short.finished() - began
    arrays = {"trainer": trainer.numpy(), "engine": engine.numpy(), "tokens": numpy.array(drawn, dtype=numpy.int32)}
    numpy.savez_compressed(given.out / f"{name}.npz", **arrays)
    if torch.cuda.is_available():
        found["trainer_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return (
        found
        | {"quarters": quarters(trainer, engine, settings.is_correction_max)}
        | judged(trainer, engine, settings, qat)
    )


def by_vllm(model, qat: str, settings, prompts: list[list[int]], given: argparse.Namespace):
    """Return completions, the engine's log-probabilities (B, T) and the seconds, with the trainer's weights sent."""
    import torch

    from qrl.train.rollout import sync, vllm_engine

    if torch.cuda.is_available():
        config = model.config
        channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = 4 * config.num_hidden_layers * config.num_key_value_heads * channels  # bytes a token, in bf16
        gib = len(prompts) * (settings.max_model_tokens + 32) * cache * 1.05 / 2**30
        settings = settings.model_copy(update={"kv_cache_gib": gib})
    else:
        short._prepare_cpu()
        settings = settings.model_copy(update={"gpu_memory_utilization": 0.05, "compile": True})
    began = short.finished()
    engine = vllm_engine.create(
        str(given.model), settings, sequences=len(prompts), sleeps=False, rank=0, world=1, qat=qat
    )
    found = {"kv_cache_gib": settings.kv_cache_gib, "start_s": short.finished() - began}
    short.say(f"the engine started in {found['start_s']:.0f} s")
    sent = iter([*sync.named_scales(model), *sync.named_weights(model, torch.bfloat16)])
    vllm_engine.load(engine, sent, reloads=settings.quantization != "none")
    began = short.finished()
    with vllm_engine.seeded(0):
        options = {"temperature": 1.0, "max_tokens": given.tokens, "more": {"ignore_eos": True}}
        drawn, logprobs = vllm_engine.generate(engine, prompts, **options)
    found |= {"sample_s": short.finished() - began, "used_gib": short._used_gib()}
    short.say(f"sampled in {found['sample_s']:.0f} s")
    return drawn, torch.tensor([[float("nan") if x is None else x for x in row] for row in logprobs]), found


def by_transformers(model, prompts: list[list[int]], count: int):
    """Return the same of a model wholly in bf16, which stands in for an engine where vLLM is missing."""
    import torch

    torch.manual_seed(0)
    drawn, logprobs = [], []
    for ids in prompts:
        given, cache, row, scores = torch.tensor([ids], device=model.device), None, [], []
        for _ in range(count):
            with torch.no_grad():
                answer = model(input_ids=given, past_key_values=cache, use_cache=True)
            cache, logits = answer.past_key_values, answer.logits[0, -1].float().log_softmax(-1)
            given = torch.multinomial(logits.exp(), 1)[None]
            row.append(int(given))
            scores.append(float(logits[row[-1]]))
        drawn.append(row)
        logprobs.append(scores)
    return drawn, torch.tensor(logprobs), {}


def quarters(trainer, engine, cap: float) -> list[dict]:
    """Return what the docstring of this file lists, from log-probabilities (B, T) and the correction's cap."""
    import torch

    from qrl.train.rollout import engine_gap

    count, every = trainer.shape[1], []
    logs = torch.nan_to_num(trainer.double() - engine.double())  # as TRL: a token without one has the weight 1
    for number in range(4):
        start, end = number * count // 4, (number + 1) * count // 4
        part, whole = logs[:, start:end], logs[:, :end].sum(1)
        k3 = (part.exp() - 1 - part).mean(1)
        ones = torch.ones_like(part)
        row = {"tokens": [start, end], "k3": float(k3.mean()), "k3_se": float(k3.std() / len(k3) ** 0.5)}
        row |= {"abs_log_ratio": float(part.abs().mean()), "surprise": -float(trainer[:, start:end].mean())}
        row["token_ess"] = engine_gap.measure(trainer[:, start:end], engine[:, start:end], ones).token_ess
        row["tokens_above_cap"] = float((part.exp() > cap).double().mean())
        row["sequence_ess"] = engine_gap.effective_share(whole)
        row["sequences_above_cap"] = float((whole.exp() > cap).double().mean())
        for level, weights in (("token", logs[:, :end].flatten().exp()), ("sequence", whole.exp())):
            kept = {"truncate": weights.clamp(max=cap), "mask": weights.masked_fill(weights > cap, 0)}
            for kind, left in kept.items():
                ess = float(left.sum() ** 2 / (len(left) * left.square().sum()).clamp(min=1e-300))
                row[f"{level}_{kind}"] = {"mean_weight": float(left.mean()), "ess": ess}
        every.append(row)
    return every


def judged(trainer, engine, settings, qat: str) -> dict:
    """Return the whole gap, and what the watcher `rollout` says of five steps with this gap."""
    import torch

    from qrl.recipe import Watch
    from qrl.train.monitor.watchers import Watchers
    from qrl.train.rollout import engine_gap

    gap = vars(engine_gap.measure(trainer, engine, torch.ones_like(trainer)))
    watching = Watchers(Watch(), settings, qat)
    row = {"reward": 0.0} | {f"{engine_gap.PREFIX}{key}": value for key, value in gap.items()}
    alarms = [alarm for step in range(1, 6) for alarm in watching.see(row | {"step": step})]
    return {
        "gap": gap,
        "watcher": [alarm.sentence for alarm in alarms if alarm.watcher == "rollout"],
        "drift": list(watching._drift()),
    }


def one(name: str, given: argparse.Namespace) -> int:
    """Measure a format in this process, and write its row; return 1 if it failed."""
    versions = rollouts.versions()
    if importlib.util.find_spec("vllm"):
        versions = short.versions()
    row = {
        "format": name,
        "model": given.model.name,
        "completions": given.completions,
        "length": given.tokens,
        **versions,
    }
    try:
        row |= measure(name, given)
    except Exception:
        row["error"] = traceback.format_exc()[-3000:]
    (given.out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
    return int("error" in row)


def run_apart(name: str, given: argparse.Namespace) -> int:
    """Measure a format in a process of its own, and end it after its time; return its exit code."""
    words = [sys.executable, __file__, *sys.argv[1:], "--part", name]
    short.say(f"{name}: at most {given.seconds} s")
    with open(given.out / f"{name}.log", "w") as log:
        variables = os.environ | {"TQDM_DISABLE": "1"}
        try:
            code = subprocess.run(
                words, check=False, stdout=log, stderr=log, env=variables, timeout=given.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = 1
            short.say(f"{name}: out of time")
    if code:
        print((given.out / f"{name}.log").read_text(errors="replace")[-1500:], flush=True)
    return code


def show(out: Path) -> None:
    """Print a line per format and quarter."""
    for name in FORMATS:
        row = (
            json.loads((out / f"{name}.json").read_text()) if (out / f"{name}.json").is_file() else {"error": "not run"}
        )
        if "error" in row:
            print(f"{name}: {row['error'].strip().splitlines()[-1]}")
            continue
        seconds = ", ".join(f"{key} {row[key]:.1f}" for key in ("start_s", "sample_s", "score_s") if key in row)
        print(f"{name}: {row['completions']} x {row['length']} tokens, {row['gpu']}, vLLM {row['vllm']}; {seconds}")
        for part in row["quarters"]:
            print(
                f"  {part['tokens']}: k3 {part['k3']:.2e} ± {part['k3_se']:.0e}, "
                f"|log ratio| {part['abs_log_ratio']:.4f}, surprise {part['surprise']:.2f}, "
                f"token ESS {part['token_ess']:.4f}, tokens above the cap {part['tokens_above_cap']:.1e}; "
                f"up to here: sequence ESS {part['sequence_ess']:.3f}, "
                f"sequences above the cap {part['sequences_above_cap']:.2f}, mean weight "
                + ", ".join(
                    f"{mode} {part[mode]['mean_weight']:.3f} (ESS {part[mode]['ess']:.3f})"
                    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
                )
            )
        for sentence in dict.fromkeys(row["watcher"] + row["drift"]) or ["the watcher says nothing"]:
            print(f"  {sentence}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for results and logs")
    parser.add_argument("--model", type=Path, help="folder of the model; default: the built-in one")
    parser.add_argument("--prompt", default="plain", help="template of the questions; boxed for `--form math`")
    parser.add_argument("--completions", type=int)
    parser.add_argument("--tokens", type=int, help="of every completion")
    parser.add_argument("--micro-batch", type=int, default=4, help="completions that the trainer scores at once")
    parser.add_argument("--formats", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--seconds", type=int, default=420, help="most for a format")
    parser.add_argument("--check", action="store_true", help="16 completions of 128 tokens, unless given, and no fp8")
    parser.add_argument("--print", dest="show", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    from qrl import tiny

    given.model = given.model or tiny.PATH
    given.completions = given.completions or (16 if given.check else 64)
    given.tokens = given.tokens or (128 if given.check else 8192)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part:
        return one(given.part, given)
    failed, formats = 0, given.formats or ",".join(each for each in FORMATS if each != "fp8" or not given.check)
    for name in () if given.show else formats.split(","):
        done = given.out / f"{name}.json"
        if not done.is_file() or "error" in json.loads(done.read_text()):
            failed |= run_apart(name, given)
    show(given.out)
    return failed


if __name__ == "__main__":
    sys.exit(main())
