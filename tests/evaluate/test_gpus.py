"""Weights divided over GPUs by vLLM: what is refused, and what the engine and the server are told."""

import pytest

from qrl import evaluate, recipe, tiny
from qrl.errors import BadInput
from qrl.serve import engines


@pytest.mark.parametrize(
    ("engine", "device", "gpus", "words"),
    [
        ("transformers", "cuda", 8, "the engine is transformers"),
        ("vllm", "cuda", 1, "needs 2 GPUs, but this machine has 1 for device cuda"),
        ("vllm", "cpu", 0, "needs 2 GPUs, but this machine has 0 for device cpu"),
    ],
)
def test_too_few_gpus_or_another_engine_is_a_sentence(engine, device, gpus, words, monkeypatch):
    monkeypatch.setattr(evaluate.devices, "gpus", lambda _device: gpus)
    with pytest.raises(BadInput, match=words):
        evaluate.check_gpus(2, engine, device)
    evaluate.check_gpus(1, engine, device)


def test_one_gpu_is_in_no_key_and_two_are():
    two = recipe.load(overrides={"evaluate.tensor_parallel": "2"})
    assert "evaluate.tensor_parallel" not in recipe.load().key_settings("evaluate")
    assert two.key_settings("evaluate")["evaluate.tensor_parallel"] == "2"


def test_a_server_is_told_how_many(tmp_path):
    model = engines.ServedModel("qrl-tiny", 1, tiny.PATH, device="cuda", gpus=2)
    options = engines.arguments(engines.VLLM, model, ("127.0.0.1", 8000), tmp_path)
    assert options[options.index("--tensor-parallel-size") + 1] == "2"


def test_a_server_is_told_the_size_of_its_cache(tmp_path):
    model = engines.ServedModel("qrl-tiny", 1, tiny.PATH, device="cuda", memory=0.5, cache_gib=2)
    options = engines.arguments(engines.VLLM, model, ("127.0.0.1", 8000), tmp_path)
    assert options[options.index("--kv-cache-memory-bytes") + 1] == str(2 * 2**30)
    assert float(options[options.index("--gpu-memory-utilization") + 1]) < 0.05
