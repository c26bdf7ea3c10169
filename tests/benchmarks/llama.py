"""Make a small Llama that answers, and take the Llama recipes through whole studies on it.

    python tests/benchmarks/llama.py OUT               # on a CPU, five minutes
    python tests/benchmarks/llama.py OUT --device cuda # as the recipes say: fsdp2 on all GPUs, rollouts by vLLM
    python tests/benchmarks/llama.py OUT --device cuda --step train # their trainings alone

The model has the built-in one's weights, of a Qwen2, under a Llama's names: `attention_bias`, with output biases of 0.
OUT/model holds it, OUT/FORMAT.yaml the recipe that a study ran, which extends the shipped one by this task and its
sizes. Both studies share the store OUT/store.db, so the second one reuses the base's cells. Prints their seconds.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qrl import tiny

FORMATS = ("nvfp4-a4", "nvfp4-a16")
OF_TASK = {"task": "arithmetic", "prompt": "plain", "machine": "any"}
TRAIN = {"steps": 6, "prompts_per_step": 12, "questions": 1000, "learning_rate": 4e-5, "max_completion_tokens": 80}
TRAIN |= {"max_ngram_share": 1.0, "micro_batch": 24, "qat_calibration_max_tokens": 256}
ANSWERS = {"evaluate": {"n": 500, "batch_size": 128, "max_new_tokens": 96}}
PLACES = {
    "cpu": {
        "train": {"parallel": "none"},
        "rollout": {"engine": "transformers", "kv_cache_gib": None, "compile": True},
    },
    "cuda": {"train": {}, "rollout": {"kv_cache_gib": 2}},
}


def make(folder: Path) -> None:
    """Write the built-in model as a Llama."""
    source = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    same += ("eos_token_id", "pad_token_id", "bos_token_id")
    config = LlamaConfig(**{name: getattr(source.config, name) for name in same}, attention_bias=True)
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected and all(name.endswith("o_proj.bias") for name in missing), (missing, unexpected)
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
        ids = torch.arange(3, 40)[None]
        assert torch.equal(model(ids).logits, source(ids).logits), "the Llama does not answer as the built-in model"
    model.generation_config = source.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny.PATH / file).exists():
            shutil.copyfile(tiny.PATH / file, folder / file)


def recipe(out: Path, name: str, device: str) -> Path:
    """Write the recipe of one format, and return its path."""
    place = PLACES[device]
    fields = OF_TASK | {"extends": f"llama-8b-qat-{name}", "model": str(out / "model"), "device": device, **ANSWERS}
    fields |= {"train": TRAIN | place["train"], "rollout": place["rollout"]}
    file = out / f"{name}.yaml"
    file.write_text(yaml.safe_dump(fields, sort_keys=False))
    return file


def main() -> int:
    """Make what is missing, run both studies, and return the exit code: 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=PLACES, default="cpu")
    parser.add_argument("--step", choices=("study", "train"), default="study")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        make(out / "model")
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    own = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{out}/store.db", "PYTHONPATH": path}
    failed = 0
    for name in FORMATS:
        words = [sys.executable, "-m", "qrl", given.step, "--recipe", str(recipe(out, name, given.device))]
        words += ["--yes"] if given.step == "study" else []
        began = time.monotonic()
        with (out / f"{name}.log").open("w") as log:
            code = subprocess.run(words, cwd=out, env=own, stdout=log, stderr=log, check=False).returncode
        print(f"{name}: exit code {code} after {time.monotonic() - began:.0f} s, see {out / name}.log", flush=True)
        failed |= code not in (0, 3)  # 3: a gate refused a stage
    return failed


if __name__ == "__main__":
    sys.exit(main())
