"""How many vLLM engines share a GPU."""

import json
import shutil

import pytest

from qrl import tiny
from qrl.evaluate import engines
from qrl.recipe import Evaluate

pytestmark = pytest.mark.unit

GIB = 2**30
CELLS = [tiny.PATH] * 6
PLENTY = {"free_bytes": 140 * GIB, "host_bytes": 128 * GIB}


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(engines.os, "sched_getaffinity", lambda pid: set(range(16)))


def test_a_small_models_cells_have_an_engine_each():
    assert engines.together(CELLS, Evaluate(), 200, **PLENTY).count == 6
    assert engines.together(CELLS[:1], Evaluate(), 200, **PLENTY) is None


@pytest.mark.parametrize(
    ("memory", "count"),
    [
        ({"free_bytes": 24 * GIB}, 5),  # 0.9 of it, at 4 GiB and a little each
        ({"free_bytes": 8 * GIB}, None),
        ({"host_bytes": 14 * GIB}, 3),
        ({"host_bytes": 7 * GIB}, None),
    ],
)
def test_memory_limits_them(memory, count):
    planned = engines.together(CELLS, Evaluate(), 200, **PLENTY | memory)
    assert (planned.count if planned else None) == count


def test_so_do_cores(monkeypatch):
    monkeypatch.setattr(engines.os, "sched_getaffinity", lambda pid: {0, 1})
    assert engines.together(CELLS, Evaluate(), 200, **PLENTY).count == 2


def test_the_cache_holds_every_answer_at_its_longest(tmp_path):
    config = json.loads((tiny.PATH / "config.json").read_text())
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 64  # a token's, in heads of 64
    planned = engines.together(CELLS, Evaluate(batch_size=64), 1000, **PLENTY)
    assert planned.cache_gib == 64 * 1024 * 2 * values / GIB  # 1,000 tokens in blocks of 16, and a block more
    fixed = engines.together(CELLS, Evaluate(batch_size=64, kv_cache_gib=3), 1000, **PLENTY)
    assert fixed.cache_gib == 3

    shutil.copytree(tiny.PATH, tmp_path / "unknown")
    (tmp_path / "unknown" / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    assert engines.together([tmp_path / "unknown"] * 2, Evaluate(), 200, **PLENTY) is None


def test_engines_compile_only_where_the_tokens_to_come_pay_for_it():
    assert not Evaluate(n=2000, max_new_tokens=128).compiles
    assert Evaluate(n=2000, max_new_tokens=128, samples=20).compiles
    assert Evaluate(compile=True).compiles and not Evaluate(n=10**6, compile=False).compiles
