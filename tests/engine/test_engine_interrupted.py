"""A signal while vLLM starts an engine ends `evaluate` and every process of it.

QRL_VLLM_PYTHON=…/bin/python pytest -m slow tests/engine/test_engine_interrupted.py  # uses an existing environment
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import psutil
import pytest

import qrl
from qrl import names
from qrl.study import build

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's processes")]

ROOT = Path(qrl.__file__).parents[1]
WORDS = ("evaluate", "--recipe", "tiny", "--device", "cpu", "--evaluate.engine", "vllm", "--evaluate.n", "8")
MOMENTS = {  # how a process is titled that vLLM has just started
    "an engine's process begins": "spawn_main",
    "the engine has imported vLLM": "VLLM::EngineCore",
    "its worker loads the model": "VLLM::Worker",
}
LAST = [*MOMENTS][-1]
GONE_S = 10  # within which every process must have ended, on a machine with nothing else to do
BEGUN_S = 300  # at most, until an engine starts


def of_session(leader: int) -> list[psutil.Process]:
    """Return the processes of a session, zombies aside; vLLM overwrites what they were started with, but not this."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def titles(leader: int) -> list[str]:
    told = []
    for process in of_session(leader):
        with contextlib.suppress(psutil.Error):
            told.append(" ".join(process.cmdline()))
    return told


def runnable() -> int:
    """Return how many threads of this machine run or wait for a core just now."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        *(pytest.param(moment, signal.SIGTERM, marks=[pytest.mark.long] * (moment != LAST)) for moment in MOMENTS),
        *(pytest.param(moment, signal.SIGINT, marks=pytest.mark.long) for moment in MOMENTS),
    ],
)
def test_a_signal_while_an_engine_starts_leaves_no_process(moment, signum, store, tmp_path, python_of):
    told = tmp_path / "terminal.txt"
    own = os.environ | {build.PLACE: "vllm_cpu", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with told.open("w") as terminal:
        words = [python_of("vllm_cpu"), "-m", "qrl", *WORDS]
        how = {"stdout": terminal, "stderr": subprocess.STDOUT, "start_new_session": True}
        started = subprocess.Popen(words, env=own, **how)
    try:
        until = time.monotonic() + BEGUN_S
        while not any(MOMENTS[moment] in title for title in titles(started.pid)):
            assert started.poll() is None and time.monotonic() < until, told.read_text()[-3000:]
            time.sleep(0.1)
        if signum == signal.SIGINT:
            os.killpg(started.pid, signum)  # as a terminal sends Ctrl-C
        else:
            started.send_signal(signum)
        sent, within, waiting = time.monotonic(), float(GONE_S), []
        while ((left := of_session(started.pid)) or started.poll() is None) and time.monotonic() - sent < within:
            time.sleep(0.1)
            waiting.append(runnable())
            busy = max(statistics.mean(waiting), os.getloadavg()[0]) / (os.cpu_count() or 1)
            within = GONE_S * max(1.0, busy)
        assert not left and started.poll() is not None, f"after {within:.0f} s: {titles(started.pid)}"
    finally:
        for process in of_session(started.pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        started.wait(60)
    said = told.read_text()
    assert started.returncode == 128 + signum, said[-3000:]
    assert said.count(f"Stopped by {signum.name}.") == 1 and "Traceback" not in said, said[-3000:]
    ended = [(run.info.status, run.data.tags.get(names.TAG_REASON)) for run in mlflow.search_runs(output_format="list")]
    assert set(ended) == {("KILLED", f"Stopped by {signum.name}.")}, ended
