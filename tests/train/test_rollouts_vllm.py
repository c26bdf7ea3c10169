"""Rollouts of a real vLLM have the trained model's log-probabilities: ten syncs, every format.

QRL_VLLM_PYTHON=…/bin/python pytest -m slow tests/train/test_rollouts_vllm.py  # uses an existing environment
"""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import save_file
from torch.distributed.elastic.utils.distributed import get_free_port

import qrl
from qrl import names, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train
from qrl.tasks import prompt
from qrl.train import loop, policy
from qrl.train.rollout import engine_gap, server, sync

SYNCS, PROMPTS, TOKENS = 10, 24, 24
UPDATE = {"qlora": 0.01, "full": 0.05}  # an adapter's weights move by this, a model's own by this share of their spread
# What an engine on a CPU needs before it starts.
ON_CPU = """
import functools, json, sys
from pathlib import Path
import torch, vllm
from vllm.model_executor.layers import utils
vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)  # compiling takes longer than the test
def keep_weight(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear
utils.dispatch_cpu_unquantized_gemm = keep_weight  # a CPU with AVX512 packs weights and drops them; a GPU does not
"""
ENGINE = (
    ON_CPU
    + """\
from safetensors.torch import load_file
from qrl.recipe import Rollout
from qrl.train.rollout import vllm_engine
if __name__ == "__main__":
    base, folder = sys.argv[1], Path(sys.argv[2])
    prompts = json.loads((folder / "prompts.json").read_text())
    settings = Rollout(engine="vllm", gpu_memory_utilization=0.05, max_model_tokens=256)
    more = json.loads(sys.argv[5])
    size = {"sequences": len(prompts), "rank": 0, "world": 1}
    engine = vllm_engine.create(base, settings, sleeps=False, raw_logprobs=bool(more), **size)
    for number in range(int(sys.argv[3])):
        vllm_engine.load(engine, iter(load_file(folder / f"{number}.safetensors").items()), reloads=False)
        sampled = vllm_engine.generate(engine, prompts, temperature=1.0, max_tokens=int(sys.argv[4]), more=more)
        (folder / f"{number}.json").write_text(json.dumps(sampled))
    drawn = []
    for extra in (more, more | {"logprobs": None}):
        with vllm_engine.seeded(7):
            drawn.append(vllm_engine.generate(engine, prompts, temperature=1.0, max_tokens=8, more=extra))
    assert drawn[0][0] == drawn[1][0] and not any(drawn[1][1]), "other completions without log-probabilities"
"""
)


def logps(model, prompts: list[list[int]], completions: list[list[int]]) -> list[torch.Tensor]:
    """Return the log-probabilities of each completion's tokens under a model."""
    scores = []
    with torch.no_grad():
        for ids_before, drawn in zip(prompts, completions, strict=True):
            ids = torch.tensor([ids_before + drawn])
            all_of = model(input_ids=ids).logits[0, len(ids_before) - 1 : -1].float().log_softmax(-1)
            scores.append(all_of.gather(-1, ids[0, len(ids_before) :, None])[:, 0])
    return scores


def gap(own: list[torch.Tensor], engine: list[list[float]]) -> engine_gap.Gap:
    trainer = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
    theirs = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in engine], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in engine], batch_first=True)
    return engine_gap.measure(trainer, theirs, mask)


def sample(python: str, folder: Path, syncs: int, **more) -> None:
    """Let an engine sample after each sync; its answers go beside the weights that it is sent."""
    words = [python, "-c", ENGINE, str(tiny.PATH), str(folder), str(syncs), str(TOKENS), json.dumps(more)]
    done = subprocess.run(
        words,
        cwd=Path(qrl.__file__).parents[1],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_an_engine_that_truncates_reports_the_whole_distributions_log_probabilities(tmp_path, python_of):
    model = policy.load(tiny.PATH, Train(dtype="fp32"), "cpu").eval()
    model.model.norm.weight.data *= 0.3  # less sure of each token
    tokens, questions = hf.tokenizer(tiny.PATH), tasks.load("arithmetic", "train", PROMPTS, 0)
    prompts = [prompt.render(tokens, question.question, "plain") for question in questions]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    sent = {name: weight.clone() for name, weight in sync.named_weights(model, torch.bfloat16)}
    save_file(sent, tmp_path / "0.safetensors")
    sample(python_of("vllm_cpu"), tmp_path, 1, top_k=1, repetition_penalty=1.05)
    drawn, logprobs = json.loads((tmp_path / "0.json").read_text())
    policy.compute_in_fp32(model)
    own = logps(model, prompts, drawn)
    assert gap(own, logprobs).kl_k3 < 1e-3
    assert gap(own, [[0.0] * len(row) for row in logprobs]).kl_k3 > 0.01  # of the only token that is kept


@pytest.mark.slow
@pytest.mark.parametrize("method", ["qlora", pytest.param("full", marks=pytest.mark.long)])
def test_after_each_of_ten_syncs_the_engine_says_what_the_trainer_says_and_the_base_stands(method, tmp_path, python_of):
    torch.manual_seed(0)
    settings = Train(method=method, dtype="fp32" if method == "full" else "bf16")
    model = policy.load(tiny.PATH, settings, "cpu")
    model = get_peft_model(model, policy.adapter(settings)) if settings.adapter else model
    policy.widen(model)
    tokens = hf.tokenizer(tiny.PATH)
    prompts = [
        prompt.render(tokens, question.question, "plain") for question in tasks.load("arithmetic", "train", PROMPTS, 0)
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    before, states, chance = loop.frozen_digest(model), [], torch.Generator().manual_seed(0)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for number in range(SYNCS):  # an update, of a size that is seen in what is sampled, and a sync
        for weight in trained.values():
            weight.data += (
                UPDATE[method]
                * (1 if settings.adapter else weight.std(correction=0))
                * torch.randn(weight.shape, generator=chance)
            )
        states.append({name: weight.detach().clone() for name, weight in trained.items()})
        save_file(
            {name: weight.clone() for name, weight in sync.named_weights(model, torch.bfloat16)},
            tmp_path / f"{number}.safetensors",
        )
    assert loop.frozen_digest(model) == before

    sample(python_of("vllm_cpu"), tmp_path, SYNCS)
    model.eval()
    policy.compute_in_fp32(model)  # the values that are trained, without bf16's rounding between layers
    gaps, samples = [], [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(SYNCS)]
    for state, (drawn, logprobs) in zip(states, samples, strict=True):
        for name, weight in state.items():
            trained[name].data.copy_(weight)
        gaps.append(gap(logps(model, prompts, drawn), logprobs))
    widest = max(item.kl_k3 for item in gaps)
    assert widest < 1e-3 and min(item.token_ess for item in gaps) > 0.99, gaps
    assert (
        gap(logps(model, prompts, samples[0][0]), samples[0][1]).kl_k3 > 100 * widest
    )  # had the engine kept its first weights


SERVER_SYNC = """
import math, os
from types import SimpleNamespace
import torch
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.model_loader.reload import layerwise
from qrl.engine.vllm_fakequant import FakeQuant
from qrl.formats.fakequant import operation
def load(name, tensor, part):
    parameter = dict(model.named_parameters())[name]
    parameter.weight_loader(parameter, tensor, part)
def sync(scales):  # as vLLM's server receives weights: onto new tensors, which are copied to where graphs read
    sent = {part: torch.randn(rows, 64) for part, rows in zip("qkv", (64, 32, 32))}
    layerwise.initialize_layerwise_reload(model)
    for part, scale in zip("qkv", scales):
        load("qkv.input_global_scale", torch.tensor([scale], dtype=torch.float32), part)
    for part, weight in sent.items():
        load("qkv.weight", weight, part)
    layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
    return torch.cat(list(sent.values()))
torch.set_default_dtype(torch.bfloat16)
with set_current_vllm_config(VllmConfig()), torch.no_grad():
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    initialize_model_parallel(1)
    config = operation.engine_config("nvfp4-a4")
    model = torch.nn.Module()
    model.qkv = QKVParallelLinear(64, 16, 4, 2, bias=False, quant_config=FakeQuant.from_config(config), prefix="qkv")
    layerwise.record_metadata_for_reloading(model)
    model.qkv.quant_method.process_weights_after_loading(model.qkv)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for number in (3.0, 4.5):
        weight = sync([number] * 3)
        assert model.qkv.weight.equal(weight) and model.qkv.input_global_scale.tolist() == [number] * 3
        assert places == [parameter.data_ptr() for parameter in model.parameters()]
    for bad in ({"version": "0"}, [3.0, math.nan, 3.0]):
        try:
            FakeQuant.from_config(config | bad) if isinstance(bad, dict) else sync(bad)
        except ValueError as error:
            print(error)
"""


@pytest.mark.slow
def test_a_servers_sync_keeps_its_tensors_in_place_and_refuses_scales_that_are_no_numbers(python_of):
    words, root = [python_of("vllm_cpu"), "-c", SERVER_SYNC], Path(qrl.__file__).parents[1]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "but the training with 0: run both from the same version of qrl." in done.stdout
    assert "qkv got the activation scales 3, nan, 3, but needs one positive number: calibrate again." in done.stdout


@pytest.mark.slow
def test_a_rollout_server_rounds_as_training_does_takes_weights_and_says_so(python_of, tmp_path, monkeypatch):
    """Its processes import the plugin from a checkout, and its own report passes the checks before a training."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of training
    root, port = Path(qrl.__file__).parents[1], get_free_port()
    words = [python_of("vllm_cpu"), "-m", "qrl.engine.rollout_server", "fp8", "--model", str(tiny.PATH)]
    words += ["--port", str(port), "--enforce-eager", "--max-model-len", "64"]
    own = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "0"}
    served = Rollout(engine="vllm", mode="server", server=f"http://127.0.0.1:{port}")
    with (tmp_path / "server.log").open("w") as log:
        running = subprocess.Popen(words, cwd=tmp_path, env=own, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 300
        while not _answers(f"{served.server}/health"):
            assert running.poll() is None and time.monotonic() < until, (tmp_path / "server.log").read_text()[-3000:]
            time.sleep(1)
        server.check(served, Train(qat="fp8", temperature=0.7))
        assert server.longest(served) == 64
        for qat in ("none", "nvfp4-a4"):
            with pytest.raises(BadInput, match=rf"rounds activations as train\.qat = {qat} does not"):
                server.check(served, Train(qat=qat))
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        running.wait(60)


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
        return True
    return False


UNROUNDED = (
    ON_CPU
    + """\
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from qrl.engine import vllm_fakequant
from qrl.errors import QrlError
from qrl.recipe import Rollout
from qrl.train.rollout import vllm_engine
if __name__ == "__main__":
    split = vllm_fakequant.Rounded(vllm_fakequant.operation.engine_config("fp8")["input_activations"])
    try:
        split.create_weights(torch.nn.Module(), 32, [64], 64, 64, torch.bfloat16)
    except ValueError as error:
        print(error)
    plain = lambda self, layer, prefix: UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
    vllm_fakequant.FakeQuant.get_quant_method = plain  # as of an architecture whose layers are no linears of vLLM's
    settings = Rollout(engine="vllm", gpu_memory_utilization=0.05, max_model_tokens=256)
    try:
        vllm_engine.create(sys.argv[1], settings, sleeps=False, sequences=4, rank=0, world=1, qat="nvfp4-a4")
    except QrlError as error:
        print(error)
"""
)


@pytest.mark.slow
def test_an_engine_that_does_not_round_or_would_round_parts_of_rows_is_refused(python_of):
    words, root = [python_of("vllm_cpu"), "-c", UNROUNDED, str(tiny.PATH)], Path(qrl.__file__).parents[1]
    limits = {"env": os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}, "timeout": 600}
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False, **limits)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Scales per token need whole rows of inputs: start the engine without tensor parallelism." in done.stdout
    assert "The rollout engine does not round activations as train.qat = nvfp4-a4 does: set rollout" in done.stdout


# Of the benchmark, an engine each: that of all formats that round no activations, and of the others one by one.
PARTS, FURTHER = ("tiny-plain", "tiny-nvfp4-a4"), ("tiny-fp8", "tiny-fp8-static", "tiny-int8-a8-static")
# Rounding activations turns a difference in the last bit into one of a whole step, so these formats are further away.
AMPLIFIED = {"nvfp4-a4": 5e-3, "fp8": 1e-3, "fp8-static": 1e-3, "int8-a8-static": 1e-3}
AMPLIFIED |= {"int3": 2e-4, "int2": 1e-3}  # so does a model that few bits have broken: 3e-5 and 2e-4 in one sample
NOISE = 1e-5  # bf16's own k3 was 2e-6 and 6e-6 in two samples of this size


@pytest.mark.slow
@pytest.mark.parametrize("parts", [PARTS, pytest.param(PARTS + FURTHER, marks=pytest.mark.long)])
def test_engines_of_all_formats_compute_the_trainers_linears_bit_for_bit_and_stay_near_it(parts, tmp_path, python_of):
    """The linears of the first and last layer are fed the same inputs; what is sampled is scored by both."""
    script = Path(__file__).parents[1] / "benchmarks" / "rollout_fakequant.py"
    subprocess.run(
        [python_of("vllm_cpu"), str(script), str(tmp_path), "--only", ",".join(parts)],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        check=True,
        timeout=1300,
    )
    left_out = {part.removeprefix("tiny-") for part in (*PARTS, *FURTHER) if part not in parts}
    formats = [name for name in ("bf16", *names.FORMATS) if name not in left_out]
    rows = {name: json.loads((tmp_path / f"tiny-{name}.json").read_text()) for name in formats}
    for name, row in rows.items():
        assert "error" not in row, f"{name}: {row.get('error')}"
        assert len(set(row["linears"].values())) == 1, f"{name}: {row['linears']}"
        limit = AMPLIFIED.get(name, max(2 * rows["bf16"]["kl_k3"], NOISE))
        assert row["kl_k3"] < limit, f"{name}: {row['kl_k3']}, unquantized {rows['bf16']['kl_k3']}"
