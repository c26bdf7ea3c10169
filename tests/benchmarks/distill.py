"""Measure distillation on one GPU: the student samples with vLLM, beside sampling with transformers.

    python tests/benchmarks/distill.py --out FOLDER [--shape 1.5b] [--steps 3]
    python tests/benchmarks/distill.py --out FOLDER --shape micro   # a small model, to check that it runs

The arms train the same shape with the same batch, a process each, one after the other; `vllm-64` and `vllm-kept` have
a larger micro-batch, and the latter no checkpointing; `vllm-compiled` is that with a compiled engine, `vllm-liger` that
with Liger's fused norms, rotations and MLPs in student and teacher (`pip install liger-kernel`). A step samples 64 × 8
completions of 256 tokens, scores them with a teacher of the same shape, and updates; with vLLM the weights are sent to
the engine first. Weights are random, so completions have the largest length. Goal: a step at least four times
as fast with vLLM. FOLDER/distill.json holds the arms and the ratios of the first two; each arm's output is in
FOLDER/ARM.log.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import rollouts

GOAL = 4.0
VLLM = {"engine": "vllm", "kv_cache_gib": 6, "compile": False, "max_model_tokens": 1024, "sleep": "off"}
KEPT = {"micro_batch": 32, "gradient_checkpointing": False}  # activations are kept: 87 GiB, the engine's 9 included
ARMS: dict[str, tuple[dict, dict]] = {  # settings of rollouts and, where they differ, of training
    "transformers": ({}, {}),
    "vllm": (VLLM, {}),
    "vllm-64": (VLLM, {"micro_batch": 64}),
    "vllm-kept": (VLLM, KEPT),
    "vllm-compiled": (VLLM | {"compile": True}, KEPT),  # by torch.compile, in the engine alone
    "vllm-liger": (VLLM, KEPT),
    "vllm-liger-64": (VLLM, KEPT | {"micro_batch": 64}),
}
COMPARED = ("transformers", "vllm")  # the same batch
LARGE = {"prompts_per_step": 64, "generations": 8, "micro_batch": 16, "max_completion_tokens": 256, "questions": 256}
SMALL = {"prompts_per_step": 8, "generations": 2, "micro_batch": 8, "max_completion_tokens": 64, "questions": 32}


def measure(arm: str, shape: str, steps: int, profile: Path | None = None) -> dict:
    """Distil for some steps in this process; return each step's seconds, sampling's apart, and what was sampled.

    `profile` names a file for torch's table of the second step.
    """
    import torch
    from transformers import TrainerCallback

    from qrl import tasks
    from qrl.recipe import Rollout, Train
    from qrl.train import Job, distill

    if "liger" in arm:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2(cross_entropy=False, fused_linear_cross_entropy=False)  # the loss reads logits
    sampling, changed = ARMS[arm]
    size = SMALL if shape == "micro" else LARGE | {"dtype": "bf16", "gradient_checkpointing": True} | changed
    base, taken, sampled = rollouts.checkpoint_of(shape), [], []
    train = Train(teacher=str(base), steps=steps, learning_rate=1e-6, **size)

    class Clock(TrainerCallback):
        def on_step_begin(self, _args, state, *_, **__):
            self.began = rollouts.finished()
            if profile and state.global_step == 1:
                self.profiler = torch.profiler.profile()
                self.profiler.start()

        def on_step_end(self, _args, state, *_, **__):
            taken.append(rollouts.finished() - self.began)
            if profile and state.global_step == 2:
                self.profiler.stop()
                order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
                profile.write_text(self.profiler.key_averages().table(sort_by=order, row_limit=45))

    with tempfile.TemporaryDirectory() as work:
        data = {"questions": tasks.load("arithmetic", "train", train.questions, 0), "task": "arithmetic"}
        where = {"device": rollouts.device(), "work": Path(work), "out": Path(work) / "model"}
        job = Job(base=base, settings=train, rollout=Rollout(**sampling), template="plain", seed=0, **data, **where)
        trainer = distill.make_trainer(job, base)
        trainer.args.save_strategy = "no"
        trainer.add_callback(Clock())
        sample = trainer._generate_single_turn

        def timed(prompt_ids, *rest, **named):
            began = rollouts.finished()
            completions = sample(prompt_ids, *rest, **named)
            sampled.append((rollouts.finished() - began, len(completions), sum(map(len, completions))))
            return completions

        trainer._generate_single_turn = timed
        trainer.train()
    seconds, counts, tokens = zip(*sampled, strict=True)
    return {
        "step_s": statistics.median(taken[1:]),
        "sample_s": statistics.median(seconds[1:]),
        "steps_s": taken,
        "samples_s": seconds,
        "completions": counts[-1],
        "tokens": tokens[-1],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    } | rollouts.versions()


def main() -> int:
    """Measure the arms, write FOLDER/distill.json, and return the exit code: 1 where an arm failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=rollouts.SHAPES, default="1.5b")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps; the first one warms up, so at least 2")
    parser.add_argument("--arms", default=",".join(COMPARED), help=f"of {', '.join(ARMS)}")
    parser.add_argument(
        "--profile", action="store_true", help="torch's profile of the second step: OUT/ARM.profile.txt"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.one:
        profile = given.out / f"{given.one}.profile.txt" if given.profile else None
        found = measure(given.one, given.shape, max(given.steps, 2), profile)
        (given.out / f"{given.one}.json").write_text(json.dumps(found))
        return 0
    arms, failed = {}, []
    for arm in given.arms.split(","):
        words = [sys.executable, __file__, "--out", given.out, "--shape", given.shape, "--steps", given.steps]
        words += ["--profile"] if given.profile else []
        with open(given.out / f"{arm}.log", "w") as log:
            own = os.environ | {"TQDM_DISABLE": "1"}
            done = subprocess.run([*map(str, words), "--one", arm], stdout=log, stderr=log, env=own, check=False)
        if done.returncode:
            failed.append(arm)
            print(f"{arm}: exit code {done.returncode}, see {log.name}")
            continue
        arms[arm] = json.loads((given.out / f"{arm}.json").read_text())
        print(f"{arm}: a step {arms[arm]['step_s']:.2f} s, of which sampling {arms[arm]['sample_s']:.2f} s", flush=True)
    result = {"shape": given.shape, "goal": GOAL, "arms": arms}
    if arms.keys() >= set(COMPARED):
        for name in ("step_s", "sample_s"):
            result[f"{name.removesuffix('_s')}_ratio"] = arms["transformers"][name] / arms["vllm"][name]
        print("with vLLM: step {step_ratio:.2f} times as fast, sampling {sample_ratio:.2f} times".format(**result))
    (given.out / "distill.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
