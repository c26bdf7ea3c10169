"""A signal ends a process with 130 or 143, one sentence and its run KILLED, whatever it was doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import psutil
import pytest

import qrl
from qrl import names
from qrl.process import is_gone
from qrl.tracking import projects, signals

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="Linux's processes")]

ROOT = Path(qrl.__file__).parents[1]
TRIPPED = """
import os, sys

class Trip:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signum)

module, signum = sys.argv[1], int(sys.argv[2])
sys.argv[1:3] = []
sys.meta_path.insert(0, Trip())
from qrl.__main__ import main
main()
"""
SWALLOWED = """
import subprocess, sys, time
from qrl.tracking import runs, signals, store
signals.guard(ends=True)
store.prepare()
with runs.step("train") as run:
    below = "setsid sleep 600 > /dev/null & echo $!; wait"  # in a session of its own
    child = subprocess.Popen(["sh", "-c", below], stdout=subprocess.PIPE, text=True)
    told = f"{run.info.run_id} {child.pid} {child.stdout.readline()}".strip()
    while True:
        try:
            print(told, flush=True)
            time.sleep(600)
        except KeyboardInterrupt:  # as code does that waits for an engine which has died
            print("swallowed", flush=True)
"""
STARTING = """
import time
from qrl import process
from qrl.tracking import runs, signals, store
signals.guard(ends=True)
store.prepare()
with runs.step("evaluate"), runs.child("base · full"), process.swallowing():
    while True:
        try:
            print("starting", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:  # as a poll of ZeroMQ does
            print("swallowed", flush=True)
"""

UNRAISABLE = """
import os, signal, time, weakref
from qrl.tracking import runs, signals, store
signals.guard(ends=True)
store.prepare()
with runs.step("train"):
    kept = {0}
    reference = weakref.ref(kept, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del kept
    time.sleep(600)
"""


def environment(store: str, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": store, "CUDA_VISIBLE_DEVICES": "", **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "signum"),
    [
        ("psutil", signal.SIGINT),  # before signals are heeded
        ("qrl.tracking", signal.SIGTERM),
        ("mlflow.entities", signal.SIGTERM),
        *(pytest.param(module, signal.SIGINT, marks=pytest.mark.long) for module in ("click", "pandas")),
        ("trl", signal.SIGTERM),
    ],
)
def test_a_signal_while_modules_are_imported_ends_in_a_sentence(module, signum, store):
    opened = mlflow.MlflowClient().create_run("0").info.run_id  # as `mlflow run` does
    words = [module, str(int(signum)), "train", "--train.steps", "1"]
    how = {"env": environment(store, MLFLOW_RUN_ID=opened), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", TRIPPED, *words], check=False, **how)
    run = mlflow.get_run(opened)
    assert done.returncode == 128 + signum, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count(f"Stopped by {signum.name}.") == 1, done.stderr
    assert run.info.status == "KILLED" and run.data.tags[names.TAG_REASON] == f"Stopped by {signum.name}."


@pytest.mark.slow
def test_a_signal_that_is_swallowed_ends_the_process_its_children_and_its_run(store):
    how = {"env": environment(store), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SWALLOWED], **how) as process:
        run_id, *below = process.stdout.readline().split()
        process.terminate()
        while process.stdout.readline() != "swallowed\n":
            assert process.poll() is None
        _, told = process.communicate(timeout=300)
    assert process.returncode == 143 and "Traceback" not in told, told
    run = mlflow.get_run(run_id)
    assert run.info.status == "KILLED" and run.data.tags[names.TAG_REASON] == "Stopped by SIGTERM."
    assert len(below) == 2 and not any(psutil.pid_exists(int(pid)) for pid in below)  # nor as zombies


def test_a_process_without_a_run_ends_at_once_and_asks_no_store(tmp_path):
    words = "import os; from qrl.tracking import runs, signals; signals.guard(caught=False, ends=True); "
    words += "os.kill(os.getpid(), 15)"
    how = {"env": environment(f"sqlite:///{tmp_path}/store.db"), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", words], check=False, **how)
    assert (done.returncode, done.stderr) == (143, "Stopped by SIGTERM. Run the same command again to resume.\n")
    assert not (tmp_path / "store.db").exists()


HANDED = """
import os, subprocess, sys
from qrl.tracking import signals
signals.guard(ends=True)
own = {"MLFLOW_RUN_ID": os.environ.pop("MLFLOW_RUN_ID")}
step = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | own, stdout=subprocess.PIPE)
step.stdout.readline()
signals.end_now(15)
"""


@pytest.mark.slow
def test_a_command_that_handed_its_run_over_ends_it_where_it_stands(store):
    opened = mlflow.MlflowClient().create_run("0").info.run_id  # as `mlflow run` does
    how = {"env": environment(store, MLFLOW_RUN_ID=opened), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", HANDED, STARTING], check=False, **how)
    assert done.returncode == 143, done.stderr
    assert {run.info.status for run in mlflow.search_runs(output_format="list")} == {"KILLED"}


@pytest.mark.slow
@pytest.mark.parametrize("both", [True, False], ids=["the launcher is stopped too", "only the step is"])
def test_a_launched_step_ends_where_it_stands_and_leaves_its_runs_to_its_launcher(both, store):
    opened = mlflow.MlflowClient().create_run("0").info.run_id  # as a study does
    own = environment(store, MLFLOW_RUN_ID=opened, **{signals.LAUNCHER: str(os.getpid())})
    how = {"env": own, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STARTING], **how) as process:
        assert process.stdout.readline() == "starting\n"
        process.terminate()
        printed, told = process.communicate(timeout=300)
    assert process.returncode == 143 and "swallowed" not in printed and "Traceback" not in told, (printed, told)
    left = {run.info.status for run in mlflow.search_runs(output_format="list")}
    assert left == {"RUNNING"}  # whoever imports MLflow anew to end them takes seconds
    if both:
        assert not projects.mark_stopped(opened, signals.Stopped(signal.SIGTERM))
    else:
        assert projects.failure(opened) == ("Stopped by SIGTERM.", 143)
    assert signals.take_note(opened) is None  # no note is left
    ended = [(run.info.status, run.data.tags[names.TAG_REASON]) for run in mlflow.search_runs(output_format="list")]
    assert ended == [("KILLED", "Stopped by SIGTERM.")] * 2


@pytest.mark.slow
def test_a_signal_in_code_that_cannot_raise_ends_in_a_sentence(store):
    how = {"env": environment(store), "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", UNRAISABLE], check=False, **how)
    told = "Stopped by SIGTERM. Run the same command again to resume."
    assert done.returncode == 143 and done.stderr.splitlines().count(told) == 1, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "KILLED" and run.data.tags[names.TAG_REASON] == "Stopped by SIGTERM."


@pytest.mark.slow
def test_a_step_does_not_outlive_a_launcher_that_died_before_it_began(store):
    gone = subprocess.Popen(["true"])
    gone.wait()
    opened = mlflow.MlflowClient().create_run("0").info.run_id
    own = environment(store, MLFLOW_RUN_ID=opened, **{signals.LAUNCHER: str(gone.pid)})
    done = subprocess.run([sys.executable, "-m", "qrl", "train"], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 143 and "Stopped by SIGTERM" in done.stderr, done.stderr
    assert mlflow.get_run(opened).info.status == "KILLED"


def test_a_signal_after_the_end_of_a_command_changes_nothing():
    program = "import os, time\nfrom qrl.tracking import signals\nsignals.guard(ends=True)\nclass Slow:\n"
    program += "    def __del__(self, write=os.write, sleep=time.sleep):\n        sleep(write(1, b'ends\\n') / 2)\n"
    program += "slow = Slow()\n"  # deleted while the interpreter is torn down
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ends\n"
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def test_ctrl_c_does_not_reach_what_is_spawned_to_be_deaf():
    """A process that is still importing would print hundreds of lines; the parent gets the signal too."""
    program = "import multiprocessing, signal, sys\nfrom qrl import process\n"
    program += (
        "with process.deaf_children():\n    deaf = multiprocessing.get_context('spawn').Process(target=sys.exit)\n"
    )
    program += "    deaf.start()\nstate = open(f'/proc/{deaf.pid}/status').read()\n"
    program += "blocked = int(state.split('SigBlk:')[1].split()[0], 16)\ndeaf.join()\n"
    program += (
        "print(blocked >> signal.SIGINT - 1 & 1, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split() == ["1", "False"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import", "death"])
def test_vllms_process_does_not_outlive_its_parent(first, tmp_path):
    late, soon = (0, 3) if first == "import" else (3, 0)
    engine = f"import time; time.sleep({late}); import qrl.engine.vllm_worker; time.sleep(600)"
    program = "import multiprocessing, os, time\n"
    program += f"child = multiprocessing.get_context('spawn').Process(target=exec, args=({engine!r},))\n"
    program += f"child.start()\nopen('pid', 'w').write(str(child.pid))\ntime.sleep({soon})\nos.kill(os.getpid(), 9)\n"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(""), check=False)
    child, until = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while not is_gone(child):
        assert time.monotonic() < until, "it outlives its parent"
        time.sleep(0.1)
