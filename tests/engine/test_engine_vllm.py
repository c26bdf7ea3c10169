"""vLLM as the engine of evaluation. The core environment lacks vLLM: real answers come from projects/vllm_cpu.

QRL_VLLM_PYTHON=…/bin/python pytest tests/engine/test_engine_vllm.py    # uses an existing environment
"""

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import qrl
from qrl import checkpoint, names, quantize, recipe, tiny
from qrl.engine import hf, vllm, vllm_support
from qrl.errors import BadInput, QrlError
from qrl.evaluate import cells
from qrl.quantize import settings as choices
from qrl.recipe import Evaluate, Quantize, Recipe
from qrl.study import build
from qrl.tasks import load
from qrl.tracking import keys

ROOT = Path(qrl.__file__).parents[1]
ASK = {"max_new_tokens": 128, "batch_size": 32}
N = 96
PROGRAM = """
import json, multiprocessing, sys
from pathlib import Path
from qrl.evaluate import cells
from qrl.recipe import Evaluate, Recipe
from qrl.tasks import load

def answer(out, path, given):
    questions = load("arithmetic", "heldout", given.pop("n"), 0)
    settings = Recipe(task="arithmetic", prompt="answer-line", evaluate=Evaluate(engine="vllm", **given))
    asked = cells.answer_questions(cells.Cell("base", "full", path), questions, settings, "cpu")
    asked.frame.to_parquet(out / "rows.parquet")
    (out / "receipt.json").write_text(json.dumps(asked.receipt))

if __name__ == "__main__":
    words = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    if sys.argv[4] == "lane":
        lane = multiprocessing.get_context("fork").Process(target=answer, args=words)
        lane.start()
        lane.join()
        sys.exit(lane.exitcode)
    answer(*words)
"""


def asked(engine: str) -> Recipe:
    return Recipe(task="arithmetic", prompt="answer-line", evaluate=Evaluate(engine=engine, dtype="fp32", **ASK))


def test_a_missing_vllm_is_an_error_with_advice():
    with pytest.raises(BadInput, match=r"vLLM.*evaluate\.engine=transformers"):
        cells.answer_questions(
            cells.Cell("base", "full", tiny.PATH), load("arithmetic", "heldout", 2, 0), asked("vllm"), "cpu"
        )


@pytest.mark.parametrize(
    ("kernel", "invariant"),
    [
        ("CompressedTensorsW8A8Fp8/CutlassFP8ScaledMMLinearKernel", True),
        ("CompressedTensorsWNA16/MacheteLinearKernel", True),
        ("CompressedTensorsW8A8Int8/CutlassInt8ScaledMMLinearKernel", False),
    ],
)
def test_a_receipt_calls_kernels_batch_invariant_as_measured(kernel, invariant):
    """Kernels of an H200 that gave the same answers, or not, with 32 and 256 sequences (results/schemes.md)."""
    assert vllm.batch_invariant({"UnquantizedEmbeddingMethod": 1, kernel: 16, "FlashAttentionImpl": 4}) is invariant


@pytest.mark.parametrize(
    ("step", "choice", "folder"),
    [
        ("evaluate", "vllm", "vllm_cpu"),
        ("evaluate", "transformers", None),
        ("quantize", "awq", "awq"),
        ("quantize", "gptq", None),
    ],
)
def test_a_step_runs_where_its_engine_or_scheme_is(step, choice, folder, monkeypatch):
    monkeypatch.delenv(build.PLACE, raising=False)
    environment = build.environment_for(step, choice, "cpu")
    assert environment == (ROOT / "projects" / folder if folder else None)
    if folder:
        assert f"  {step}:" in (environment / "MLproject").read_text()
        monkeypatch.setenv(build.PLACE, folder)
        assert build.environment_for(step, choice, "cpu") is None


def test_the_engines_share_of_memory_is_not_part_of_a_cells_key():
    def key(**evaluate) -> str:
        settings = recipe.load("tiny", {f"evaluate.{name}": value for name, value in evaluate.items()})
        return keys.cell(settings, "base", "full", "digest", "cuda")

    assert key(gpu_memory_utilization="0.2") == key() != key(deterministic="true")


@pytest.fixture(scope="module")
def answered(tmp_path_factory, python_of):
    """Return a function that gives vLLM's answers, from its own Python.

    Unless `lane` is false, it answers in a lane, as cells that are evaluated side by side: the engine starts sooner.
    """

    def ask(path: Path = tiny.PATH, *, lane: bool = True, **given) -> tuple[pd.DataFrame, dict]:
        out = tmp_path_factory.mktemp("vllm")
        settings = json.dumps(ASK | {"n": N, "dtype": "fp32"} | given)
        place = "lane" if lane else "by itself"
        words = [python_of("vllm_cpu"), "-c", PROGRAM, str(out), str(path), settings, place]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return pd.read_parquet(out / "rows.parquet"), json.loads((out / "receipt.json").read_text())

    return ask


@pytest.mark.slow
def test_answers_are_those_of_transformers_on_nearly_all_questions(answered):
    rows, receipt = answered(lane=False)
    ours = cells.answer_questions(
        cells.Cell("base", "full", tiny.PATH), load("arithmetic", "heldout", N, 0), asked("transformers"), "cpu"
    )
    assert list(rows.columns) == list(ours.frame.columns)
    same = (
        (rows["completion"] == ours.frame["completion"])
        & (rows["finish_reason"] == ours.frame["finish_reason"])
        & (rows["n_tokens"] == ours.frame["n_tokens"])
    )
    assert same.mean() >= 0.95  # float32 sums in another order may break ties differently
    assert receipt["engine"].startswith("vllm ") and receipt["kernels"] and receipt["dtype"] == "float32"
    again, repeated = answered(deterministic=True)
    assert repeated["completions"] == receipt["completions"] and again["completion"].equals(rows["completion"])
    assert names.RECEIPT == "receipt.json"


@pytest.mark.slow
def test_three_bits_are_answered_unpacked_as_transformers_answers_them(answered, tmp_path):
    path = quantize.run("rtn-int3", tiny.PATH, tmp_path / "int3").path
    rows, receipt = answered(path, unpacked=True)
    ours = cells.answer_questions(
        cells.Cell("base", "rtn-int3", path), load("arithmetic", "heldout", N, 0), asked("transformers"), "cpu"
    )
    assert (rows["completion"] == ours.frame["completion"]).mean() >= 0.95
    assert receipt["unpacked"] is True


INNER = ("-first:1", "-last:1")
LAYERED = {  # scheme, layers, unpacked: a CPU has no kernel for four-bit floats
    "codes beside full precision": ("rtn-int4", ("mlp", *INNER), False),
    "two formats": ("rtn-int4", ("attention=fp8", *INNER), False),
    "four-bit floats": ("rtn-nvfp4-a16", ("mlp", *INNER), True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * ("floats" not in name)) for name in LAYERED]
)
def test_linears_in_few_bits_beside_others_are_answered_as_transformers_answers_them(name, answered, tmp_path):
    scheme, terms, unpacked = LAYERED[name]
    settings = choices.settings_of(scheme, Quantize(layers=terms), 0)
    path = quantize.run(scheme, tiny.PATH, tmp_path / "stored", settings=settings).path
    rows, receipt = answered(path, unpacked=unpacked, dtype="bf16")  # its CPU kernels for codes die in float32
    ours = cells.answer_questions(
        cells.Cell("base", scheme, path), load("arithmetic", "heldout", N, 0), asked("transformers"), "cpu"
    )
    assert (rows["completion"] == ours.frame["completion"]).mean() >= 0.9
    methods = [kernel.partition("/")[0] for kernel in receipt["kernels"]]
    of_codes = [method for method in methods if method.startswith("CompressedTensors")]
    assert len(of_codes) == {"codes beside full precision": 1, "two formats": 2, "four-bit floats": 0}[name]
    assert "UnquantizedLinearMethod" in methods


@pytest.mark.process
def test_a_fused_linear_that_is_stored_in_two_ways_is_refused_before_vllm_starts(tiny_checkpoint, tmp_path):
    for scheme, terms in (("rtn-int4", ("q_proj",)), ("rtn-int4", ("up_proj=int8",)), ("nf4", ("-k_proj",))):
        settings = choices.settings_of(scheme, Quantize(layers=terms), 0)
        path = quantize.run(scheme, tiny_checkpoint, tmp_path / "-".join((scheme, *terms)), settings=settings).path
        with pytest.raises(BadInput, match=r"vLLM fuses them .*unpacked=true") as refused:
            vllm_support.check_runs(path, "cpu")
        assert "model.layers.0." in str(refused.value)


@pytest.mark.process
@pytest.mark.parametrize(
    ("unpacked", "scheme", "loaded"),
    [(True, "rtn-int4", "plain"), (False, "rtn-int4", "stored"), (True, "rtn-fp8", "stored"), (True, "full", "stored")],
)
def test_weights_alone_are_unpacked_for_the_engine_of_full_precision(
    unpacked, scheme, loaded, tiny_checkpoint, tmp_path
):
    path = tmp_path / "stored"
    if scheme == "full":
        shutil.copytree(tiny_checkpoint, path)
    else:
        quantize.run(scheme, tiny_checkpoint, path)
    settings = Recipe(evaluate=Evaluate(engine="vllm", dtype="bf16", unpacked=unpacked))
    own = loaded == "stored" and scheme != "full"
    assert cells.engine_sort_key(path, scheme, settings) == (False, own), "cells that share an engine follow each other"
    assert cells.engine_sort_key(path, f"{scheme}+kv-fp8", settings) == (True, own)
    with cells._loadable(path, settings, "cpu") as folder:
        assert folder.name == loaded
        if loaded == "plain":
            assert vllm.network(folder) == vllm.network(tiny_checkpoint), "it needs an engine of its own"
            assert checkpoint.check(folder).dtype == "bfloat16"
    assert folder.exists() is (loaded == "stored")


RELOADED = """
import sys
from pathlib import Path
from qrl.engine import vllm
if __name__ == "__main__":
    first, second = map(Path, sys.argv[1:])
    settings = {"max_tokens": 64, "sequences": 4, "deterministic": True, "seed": 0, "memory": 0.1}
    prompts = [[5, 6, 7], [8, 9]]

    def written(engine):
        return [completion.raw for completion in engine.generate(prompts, max_new_tokens=24)]

    with vllm.Vllm(first, "cuda", "bf16", **settings) as engine:
        before = written(engine)
        assert engine.reload(second), "not reloaded"
        after = written(engine)
        assert engine.reload(first) and written(engine) == before, "the first weights are not back"
    with vllm.Vllm(second, "cuda", "bf16", **settings) as engine:
        new = written(engine)
        assert new == after, f"other answers than a new engine's: {after}, {new}"
        assert new != before, "the test cannot tell the two models apart"
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[Path]:
    """Return the built-in model and one with other weights."""
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(tiny.PATH, tmp_path_factory.mktemp("pair") / "other")
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: value if value.ndim < 2 else value + value.float().std() * torch.randn(value.shape, generator=noise) / 4
        for name, value in load_file(other / "model.safetensors").items()
    }
    save_file(
        {name: value.bfloat16() for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"}
    )
    return [tiny.PATH, other]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU a new engine is started for every cell")
def test_an_engine_with_replaced_weights_answers_as_a_new_one(pair, python_of):
    words = [python_of("vllm"), "-c", RELOADED, *map(str, pair)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


class Kept:
    """An engine that notes what is asked of it, in place of vLLM's."""

    made: ClassVar[list[str]] = []

    def __init__(self, path: Path, *_arguments: object, **_settings: object) -> None:
        self.made.append(f"start {path.name}")

    def reload(self, path: Path) -> bool:
        self.made.append(f"reload {path.name}")
        return path.name != "other-network"

    def close(self) -> None:
        self.made.append("close")


def test_an_engine_is_kept_for_cells_that_differ_in_weights_alone(monkeypatch):
    monkeypatch.setattr(vllm, "Vllm", Kept)
    Kept.made.clear()
    with cells.Engines() as engines:
        for name, settings in [("base", {}), ("grpo", {}), ("other-network", {}), ("base", {"kv_fp8": True})]:
            with engines.open(Path(name), "cuda", "bf16", **settings):
                pass
        with pytest.raises(KeyboardInterrupt), engines.open(Path("grpo"), "cuda", "bf16", kv_fp8=True):
            raise KeyboardInterrupt
    assert Kept.made == [
        *("start base", "reload grpo", "reload other-network", "close", "start other-network"),
        *("close", "start base", "reload grpo", "close"),
    ]


def test_a_cache_of_fixed_size_leaves_the_share_of_memory_out():
    assert vllm_support.memory_options(0.5, None) == {"gpu_memory_utilization": 0.5}
    fixed = vllm_support.memory_options(0.5, 1)
    assert fixed["kv_cache_memory_bytes"] == 2**30 and fixed["gpu_memory_utilization"] < 0.05
    with_it = recipe.load("tiny", {"evaluate.kv_cache_gib": "4"})
    key = [keys.cell(settings, "base", "full", "digest", "cuda") for settings in (with_it, recipe.load("tiny"))]
    assert key[0] == key[1], "the size of a cache changes no answer"
    uncompiled = recipe.load("tiny", {"evaluate.engine": "vllm", "evaluate.compile": "false"})
    compiled = recipe.load("tiny", {"evaluate.engine": "vllm"})
    key = [keys.cell(settings, "base", "full", "digest", "cuda") for settings in (uncompiled, compiled)]
    assert key[0] != key[1], "other kernels can give other answers"


class Capability:
    def __init__(self, number: int) -> None:
        self.number = number

    def to_int(self) -> int:
        return self.number


@pytest.mark.process
@pytest.mark.parametrize(
    ("scheme", "capability", "options"),
    [
        ("nvfp4", 90, {"linear_backend": "emulation"}),
        ("nvfp4", 100, {}),
        ("nvfp4a16", 90, {}),
        ("fp8", 90, {}),
        ("full", 90, {}),
    ],
)
def test_activations_of_four_bits_are_rounded_in_software_where_a_gpu_cannot_multiply_them(
    scheme, capability, options, tiny_checkpoint, tmp_path, monkeypatch
):
    path = tiny_checkpoint
    if scheme != "full":
        texts = ["Tom has 3 apples and buys 4 more. How many does he have?"]
        path = quantize.run(scheme, tiny_checkpoint, tmp_path / scheme, calibration=texts).path
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(get_device_capability=lambda: Capability(capability))
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert vllm_support.emulation_options(path, "cuda") == options
    assert vllm_support.emulation_options(path, "cpu") == {}
    said = vllm_support.describe_departure(
        path, {"CompressedTensorsW4A4Fp4/MarlinNvFp4LinearKernel": 16, "FlashAttentionImpl": 4}
    )
    assert said.startswith("activations not rounded to") is (scheme in ("nvfp4", "fp8"))
    assert ("float4" in said) is (scheme == "nvfp4")
    assert ("in software" in vllm_support.describe_departure(path, ["EmulationNvFp4LinearKernel"])) is (
        scheme in ("nvfp4", "fp8")
    )
    assert vllm_support.describe_departure(path, ["CutlassNvFp4LinearKernel"]) == ""


EMULATED = """
import sys
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation
held = load_file(sys.argv[1])
weights = held["weight_packed"], held["weight_scale"], 1 / held["weight_global_scale"]  # as vLLM holds them
save_file({
    **{key: emulation.ref_nvfp4_quant_dequant(held[key], held["input_global_scale"], 16) for key in ("fp32", "bf16")},
    "weight": emulation.dequantize_to_dtype(*weights, torch.bfloat16, 16, swizzle=False),
}, sys.argv[2])
"""


@pytest.mark.slow
def test_vllms_emulation_of_nvfp4_rounds_and_unpacks_as_transformers_does(python_of, tmp_path, monkeypatch):
    """Its reference on a CPU; GPUs run kernels of their own. Weights are unpacked to bf16, whatever the model's dtype.

    Inputs are the same bit for bit in fp32. In bf16, where transformers divides a group's largest by six, few differ.
    """
    texts = ["Tom has 3 apples and buys 4 more. How many does he have?"]
    path = quantize.run("nvfp4", tiny.PATH, tmp_path / "nvfp4", calibration=texts).path
    name, multiply, given, seen = "model.layers.1.mlp.down_proj", torch.nn.functional.linear, {}, {}
    for key, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        linear = hf.load(path, "cpu", dtype)[0].get_submodule(name)
        given[key] = torch.randn(64, linear.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)

        def note(inputs, weight, bias=None, key=key):
            seen.update({key: inputs, "weight": weight.detach()})
            return multiply(inputs, weight, bias)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", note)
            linear(given[key])
    stored = {key.removeprefix(f"{name}."): value for key, value in load_file(path / "model.safetensors").items()}
    kept = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    save_file(given | {key: stored[key] for key in kept}, tmp_path / "layer.safetensors")
    words = [python_of("vllm_cpu"), "-c", EMULATED, tmp_path / "layer.safetensors", tmp_path / "vllm.safetensors"]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    theirs = load_file(tmp_path / "vllm.safetensors")
    assert not seen["fp32"].equal(given["fp32"]) and theirs["fp32"].equal(seen["fp32"])
    assert (theirs["bf16"] != seen["bf16"]).float().mean() < 0.03  # 0.006; 0.017 with the scales of 64 texts
    assert theirs["weight"].equal(seen["weight"])


def test_too_little_free_memory_is_said_in_gigabytes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (69 << 30, 140 << 30))
    vllm._check_memory(0.4, RuntimeError("another reason"))
    with pytest.raises(QrlError, match=r"50%.*70 GiB.*69 of 140 GiB.*gpu_memory_utilization"):
        vllm._check_memory(0.5, RuntimeError("Engine core initialization failed."))


def test_weights_are_replaced_only_in_the_same_network(tmp_path):
    def folder(name: str, **config) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"model_type": "qwen2", "num_hidden_layers": 4} | config)
        )
        return tmp_path / name

    base = folder("base", _name_or_path="a", transformers_version="5")
    assert vllm.network(base) == vllm.network(folder("grpo", _name_or_path="b"))
    assert vllm.network(base) != vllm.network(folder("deeper", num_hidden_layers=8))
    assert vllm.network(folder("int4", quantization_config={"quant_method": "awq"})) is None


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static"])
@pytest.mark.parametrize("has_amx", [True, False])
def test_int8_on_a_cpu_with_amx_is_scaled_by_token_and_in_16_bits(scheme, has_amx, tmp_path, monkeypatch):
    activations = {"type": "int", "num_bits": 8, "dynamic": scheme == "w8a8", "strategy": "token"}
    group = {"weights": {"type": "int", "num_bits": 8}, "input_activations": activations}
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"all": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    monkeypatch.setattr(vllm_support, "_has_amx", lambda: has_amx)
    kernels = {"CompressedTensorsW8A8Int8/CPUInt8ScaledMMLinearKernel": 16, "CPUAttentionBackendImpl": 4}
    said = vllm_support.describe_departure(tmp_path, kernels)
    assert ("each token's own scale" in said) is (has_amx and scheme == "w8a8-static")
    if has_amx:
        with pytest.raises(BadInput, match=r"with AMX, takes 16 bits alone: set evaluate\.dtype=bf16"):
            vllm_support.check_runs(tmp_path, "cpu", dtype="fp32")


FITS = """
import sys
from pathlib import Path
from qrl.engine import vllm
from qrl.errors import BadInput, QrlError
for folder in map(Path, sys.argv[1:]):
    for how in (("cpu",), ("cuda", True)):
        try:
            vllm.check_runs(folder, *how)
            print(folder.name, how[0], "runs", sep="\t")
        except BadInput as error:
            print(folder.name, how[0], error, sep="\t")
"""


@pytest.mark.slow
def test_a_scheme_without_a_kernel_is_refused_before_a_weight_is_read(python_of, tiny_checkpoint, tmp_path):
    texts = ["Tom has 3 apples and buys 4 more. How many does he have?"]
    schemes = ("nf4", "fp8", "w8a8", "w8a16", "nvfp4a16", "mxfp4a16", "nvfp4", "mxfp8", "fp8-block", "w4afp8")
    folders = [quantize.run(scheme, tiny_checkpoint, tmp_path / scheme, calibration=texts).path for scheme in schemes]
    for folder in folders:
        for weights in folder.glob("*.safetensors"):
            weights.write_bytes(b"not to be read")
    words = [python_of("vllm_cpu"), "-c", FITS, *map(str, (tiny.PATH, *folders))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 2]
    on_cpu = {name: words for name, device, words in lines if device == "cpu"}
    with_amx = {"fp8-block"} if torch.cpu._is_amx_tile_supported() else set()
    assert {name for name, words in on_cpu.items() if words == "runs"} == {tiny.PATH.name, "fp8", "w8a8", *with_amx}
    assert "bitsandbytes without vllm-bnb-plugin" in on_cpu["nf4"] and "8-bit weights" in on_cpu["w8a16"]
    for scheme in ("nvfp4a16", "mxfp4a16", "nvfp4"):
        assert "4-bit floats" in on_cpu[scheme] and "evaluate.engine=transformers" in on_cpu[scheme]
    assert "MXFP8" in on_cpu["mxfp8"] and "FP8" in on_cpu["w4afp8"]
    assert with_amx or "AMX" in on_cpu["fp8-block"]
    on_gpu = {name: words for name, device, words in lines if device == "cuda"}  # on a GPU of any kind
    assert {name for name, words in on_gpu.items() if words != "runs"} == {"nf4", "nvfp4a16"}
    assert "batch-invariant" in on_gpu["nvfp4a16"]
