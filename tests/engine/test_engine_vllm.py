"""vLLM as the engine of evaluation. The core environment lacks vLLM: real answers come from projects/vllm_cpu.

QRL_VLLM_PYTHON=…/bin/python pytest tests/engine/test_engine_vllm.py    # uses an existing environment
"""

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest

import qrl
from qrl import names, quantize, recipe, tiny
from qrl.engine import vllm
from qrl.errors import BadInput
from qrl.evaluate import cells
from qrl.recipe import Evaluate, Recipe
from qrl.study import build
from qrl.tasks import load
from qrl.tracking import keys

ROOT = Path(qrl.__file__).parents[1]
ASK = {"max_new_tokens": 128, "batch_size": 32}
N = 96
PROGRAM = """
import json, sys
from pathlib import Path
from qrl.evaluate import cells
from qrl.recipe import Evaluate, Recipe
from qrl.tasks import load
if __name__ == "__main__":
    out, path, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    questions = load("arithmetic", "heldout", given.pop("n"), 0)
    settings = Recipe(task="arithmetic", prompt="answer-line", evaluate=Evaluate(engine="vllm", **given))
    asked = cells.ask(cells.Cell("base", "full", path), questions, settings, "cpu")
    asked.frame.to_parquet(out / "rows.parquet")
    (out / "receipt.json").write_text(json.dumps(asked.receipt))
"""


def asked(engine: str) -> Recipe:
    return Recipe(task="arithmetic", prompt="answer-line", evaluate=Evaluate(engine=engine, dtype="fp32", **ASK))


def test_a_missing_vllm_is_an_error_with_advice():
    with pytest.raises(BadInput, match=r"vLLM.*evaluate\.engine=transformers"):
        cells.ask(cells.Cell("base", "full", tiny.PATH), load("arithmetic", "heldout", 2, 0), asked("vllm"), "cpu")


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
    """Return a function that gives vLLM's answers, from its own Python."""

    def ask(**given) -> tuple[pd.DataFrame, dict]:
        out = tmp_path_factory.mktemp("vllm")
        settings = json.dumps(ASK | {"n": N, "dtype": "fp32"} | given)
        words = [python_of("vllm_cpu"), "-c", PROGRAM, str(out), str(tiny.PATH), settings]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return pd.read_parquet(out / "rows.parquet"), json.loads((out / "receipt.json").read_text())

    return ask


@pytest.mark.slow
def test_answers_are_those_of_transformers_on_nearly_all_questions(answered):
    rows, receipt = answered()
    ours = cells.ask(
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


FITS = """
import sys
from pathlib import Path
from qrl.engine import vllm
from qrl.errors import BadInput
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
    schemes = ("nf4", "fp8", "w8a8", "w8a16", "nvfp4a16", "mxfp4a16", "nvfp4")
    folders = [quantize.run(scheme, tiny_checkpoint, tmp_path / scheme, calibration=texts).path for scheme in schemes]
    for folder in folders:
        for weights in folder.glob("*.safetensors"):
            weights.write_bytes(b"not to be read")
    words = [python_of("vllm_cpu"), "-c", FITS, *map(str, (tiny.PATH, *folders))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 2]
    on_cpu = {name: words for name, device, words in lines if device == "cpu"}
    assert {name for name, words in on_cpu.items() if words == "runs"} == {tiny.PATH.name, "fp8", "w8a8"}
    assert "bitsandbytes without vllm-bnb-plugin" in on_cpu["nf4"] and "8-bit weights" in on_cpu["w8a16"]
    for scheme in ("nvfp4a16", "mxfp4a16", "nvfp4"):
        assert "4-bit floats" in on_cpu[scheme] and "evaluate.engine=transformers" in on_cpu[scheme]
    on_gpu = {name: words for name, device, words in lines if device == "cuda"}  # on a GPU of any kind
    assert {name for name, words in on_gpu.items() if words != "runs"} == {"nf4", "nvfp4a16"}
    assert "batch-invariant" in on_gpu["nvfp4a16"]
