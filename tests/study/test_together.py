"""Studies at once: they share a store, and one waits for the step that another is making, then reuses it.

`QRL_TOGETHER=8` starts eight studies, of which two have the same seed; by default three.
"""

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

import qrl
from qrl import names
from qrl.study import launch
from qrl.tracking import claims
from tests.tracking import team

ROOT = Path(qrl.__file__).parents[1]
SMALL = {
    "train.method": "lora",
    "train.steps": "1",
    "train.prompts_per_step": "2",
    "train.questions": "8",
    "train.micro_batch": "16",
    "quantize.schemes": "nf4",
    "evaluate.n": "20",
    "promote.min_gain": "-1",
}


def test_work_is_claimed_by_one_and_another_waits(store):
    said, entered, order = [], threading.Event(), []

    def first() -> None:
        with claims.claimed(["b", "a"], lambda: None):
            entered.set()
            time.sleep(0.5)
            order.append("first")

    other = threading.Thread(target=first)
    other.start()
    entered.wait()
    with (
        claims.claimed(["a", "b", "c"], lambda: said.append("waits")),
        claims.claimed(["d"], lambda: said.append("no")),
    ):
        order.append("second")
    other.join()
    assert order == ["first", "second"] and said == ["waits"]
    assert not list(Path(store.removeprefix("sqlite:///")).parent.rglob("*.lock"))


def test_a_study_waits_for_a_step_of_another_and_reuses_it(store, monkeypatch, capsys):
    results, begun, launched = {}, threading.Event(), []

    def make(_launcher, _folder, step: str, parameters: dict[str, str]) -> None:
        launched.append(step)
        begun.set()
        time.sleep(0.5)
        results["k"] = SimpleNamespace(info=SimpleNamespace(run_id="a" * 32))

    monkeypatch.setattr(launch.reuse, "find", lambda _step, key: results.get(key))
    monkeypatch.setattr(launch.reuse, "changes", lambda *_: [])
    monkeypatch.setattr(launch.reuse, "outputs", lambda _run: launch.reuse.Outputs())
    monkeypatch.setattr(launch.Launcher, "_launch", make)
    step = launch.Step("train", "GRPO", {"train": "k"}, lambda _missing: {})
    first = threading.Thread(target=launch.Launcher({}, "", 1).obtain, args=(step,))
    first.start()
    begun.wait()
    found = launch.Launcher({}, "", 1).obtain(step)["train"]
    first.join()
    assert found.reused and launched == ["train"]
    told = capsys.readouterr().err
    assert "waiting for it" in told and "reused, as another study made it: train from run aaaaaaaa" in told


@pytest.fixture(params=["default store", pytest.param("server", marks=pytest.mark.long)])
def shared(request, tmp_path):
    """A folder, and the environment in which studies share a fresh store."""
    own = {key: text for key, text in os.environ.items() if not key.startswith("MLFLOW_")}
    own |= {"PYTHONPATH": str(ROOT), "QRL_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if request.param == "default store":
        yield tmp_path, own, f"sqlite:///{tmp_path}/mlflow.db"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    words = ["server", "--port", address.rpartition(":")[2], "--workers", "1"]  # of several, a busy machine kills some
    words += ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", f"{tmp_path}/server"]
    with (tmp_path / "server.log").open("w") as log:
        how = {"cwd": tmp_path, "env": own | team.SAFE, "stdout": log, "stderr": subprocess.STDOUT}
        server = subprocess.Popen([sys.executable, "-m", "mlflow", *words], **how)
    try:
        until = time.monotonic() + 300
        while not _answers(address):
            assert time.monotonic() < until, (tmp_path / "server.log").read_text()[-2000:]
            time.sleep(0.5)
        yield tmp_path, own | {"MLFLOW_TRACKING_URI": address}, address
    finally:
        server.terminate()
        server.wait(60)


def _answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
    except OSError:
        return False


@pytest.mark.slow
def test_studies_at_once_all_finish_and_two_with_one_seed_train_once(shared):
    """They train adapters, which are merged on their way through a study."""
    import mlflow

    folder, environment, address = shared
    count = int(os.environ.get("QRL_TOGETHER", "3"))
    seeds = [0, *range(count - 1)]  # two have seed 0
    words = [word for key, text in SMALL.items() for word in (f"--{key}", text)]
    studies = []
    for number, seed in enumerate(seeds):
        with (folder / f"{number}.txt").open("w") as told:
            command = [sys.executable, "-m", "qrl", "study", *words, "--seed", str(seed)]
            how = {"cwd": folder, "env": environment, "stdout": told, "stderr": subprocess.STDOUT}
            studies.append(subprocess.Popen(command, **how))
    codes = [study.wait() for study in studies]
    told = [(folder / f"{number}.txt").read_text() for number in range(count)]
    assert codes == [0] * count, "\n".join(text[-2000:] for text, code in zip(told, codes, strict=True) if code)
    twins = told[0] + told[1]
    assert "waiting for it" in twins and "reused, as another study made it: train" in twins
    client = mlflow.MlflowClient(address)
    runs = client.search_runs(["0"], max_results=5000)
    assert {run.info.status for run in runs} == {"FINISHED"}
    trained = [run.data.params["seed"] for run in runs if run.data.tags.get(names.TAG_STEP) == "train"]
    assert sorted(trained) == sorted({str(seed) for seed in seeds})
    assert len({re.search(r"nf4 \|.*", text)[0] for text in told[:2]}) == 1  # the twins' tables
    aliases = client.get_registered_model("qrl-tiny").aliases
    digests = {stage: client.get_model_version("qrl-tiny", number).tags for stage, number in aliases.items()}
    assert digests["base"][names.TAG_DIGEST] != digests["grpo"][names.TAG_DIGEST]

    steps = [run for run in runs if run.data.tags.get(names.TAG_STEP)]
    merges = [run for run in steps if run.data.tags[names.TAG_STEP] == "merge"]
    assert "merge" in told[0] and len(merges) == len(trained)
    for merge in merges:
        assert 0 <= merge.data.metrics["merge/kl"] <= 0.01
        assert 0 <= merge.data.metrics["merge/max_logit_diff"] <= 0.25
    quantized = [
        run.data.tags[names.TAG_PARENT_DIGEST]
        for run in steps
        if run.data.tags[names.TAG_STEP] == "quantize" and run.outputs.model_outputs
    ]
    assert digests["grpo"][names.TAG_DIGEST] in quantized  # the merged model, not the adapter
