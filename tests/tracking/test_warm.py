"""A command that a warm process runs is, from outside, as one that runs by itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from qrl.tracking import warm
from qrl.tracking.keys import ROOT

pytestmark = pytest.mark.process

# A command as `qrl/__main__.py` is one: it prints what it sees, and does what its first word says.
PROGRAM = """
import json, os, signal, sys, time
from qrl.tracking import warm

if sys.argv[1] == warm.COMMAND:
    warm.serve(lambda: None)
else:
    warm.hand_over(dict(os.environ))
facts = {"pid": os.getpid(), "words": sys.argv[1:], "folder": os.getcwd(), "group": os.getpgrp()}
facts |= {"variable": os.environ.get("QRL_CALLER"), "imported": "colorsys" in sys.modules}
facts |= {"further": "wave" in sys.modules}
print(json.dumps(facts), flush=True)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "ends":
    sys.exit(int(sys.argv[2]))
if sys.argv[1] == "dies":
    os.kill(os.getpid(), int(sys.argv[2]))

def stop(signum, frame):
    os.write(1, f"stopped by {signum}\\n".encode())
    os._exit(128 + signum)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(600)
"""
VARIABLES = {"MLFLOW_RUN_ID": "0", "QRL_CALLER": "typed {}"}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def server(program, tmp_path) -> Iterator[subprocess.Popen]:
    """Return a warm process, which has imported a module that nothing else does."""
    address = warm.socket_of(tmp_path, "")
    words = [sys.executable, program, warm.COMMAND, address, str(os.getpid()), "colorsys", "no_such_module"]
    with subprocess.Popen(words, env=environment()) as process:
        until(address.exists)
        yield process
        process.kill()


def environment(**more: str) -> dict[str, str]:
    root = str(Path(warm.__file__).parents[2])
    ours = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # differs by phase
    return ours | {"PYTHONPATH": root} | more


def command(program: Path, folder: Path, *words: str, **more: str) -> subprocess.Popen:
    variables = environment(**VARIABLES, **{warm.FOLDER: str(folder)}, **more)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, program, *words], env=variables, text=True, cwd=folder, **pipes)


def facts(process: subprocess.Popen) -> dict:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("code", [0, 3])
def test_a_fork_has_the_commands_words_streams_folder_variables_and_exit_code(program, server, tmp_path, code):
    process = command(program, tmp_path, "ends", str(code))
    output, errors = process.communicate(timeout=60)
    seen = json.loads(output)
    assert seen["words"] == ["ends", str(code)] and seen["folder"] == str(tmp_path)
    assert seen["imported"] and seen["variable"] == VARIABLES["QRL_CALLER"] and errors == "to stderr\n"
    assert seen["pid"] != process.pid and psutil.pid_exists(server.pid) and process.returncode == code


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_command_dies_of_the_signal_that_its_fork_died_of(program, server, tmp_path, signum):
    process = command(program, tmp_path, "dies", str(int(signum)))
    process.communicate(timeout=60)
    assert process.returncode == -signum


def test_a_stop_signal_is_passed_on(program, server, tmp_path):
    process = command(program, tmp_path, "waits")
    seen = facts(process)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == (f"stopped by {int(signal.SIGTERM)}\n", 128 + signal.SIGTERM), _
    assert is_gone(seen["pid"]) and seen["group"] == os.getpgid(server.pid)


def test_a_fork_ends_with_a_command_that_was_killed(program, server, tmp_path):
    process = command(program, tmp_path, "waits")
    seen = facts(process)
    process.kill()
    process.communicate(timeout=60)
    until(lambda: is_gone(seen["pid"]))
    assert server.poll() is None  # and serves the next
    following = command(program, tmp_path, "ends", "0")
    assert json.loads(following.communicate(timeout=60)[0])["pid"] != following.pid


def test_a_command_ends_if_the_warm_process_is_killed(program, server, tmp_path):
    process = command(program, tmp_path, "waits")
    seen = facts(process)
    psutil.Process(seen["pid"]).kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    process = command(program, tmp_path, "waits")
    fork = facts(process)["pid"]
    server.kill()
    assert process.wait(timeout=60) == 128 + signal.SIGKILL
    psutil.Process(fork).kill()  # `signals.guard` would have asked the kernel to


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "HF_HOME"])
def test_a_command_with_other_variables_runs_by_itself(program, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    address = warm.socket_of(tmp_path, "")
    words = [sys.executable, program, warm.COMMAND, address, str(os.getpid())]
    with subprocess.Popen(words, env=environment()) as process:
        until(address.exists)
        for value, is_own in (("1", False), ("2", True)):
            run = command(program, tmp_path, "ends", "0", **{variable: value})
            output, _ = run.communicate(timeout=60)
            assert (json.loads(output)["pid"] == run.pid) is is_own
        process.kill()


def test_a_command_whose_sources_were_edited_runs_by_itself(program, tmp_path):
    package = tmp_path / "edited" / "qrl"
    shutil.copytree(Path(warm.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    address = warm.socket_of(tmp_path, "")
    variables = environment(PYTHONPATH=str(package.parent))
    words = [sys.executable, program, warm.COMMAND, address, str(os.getpid())]
    with subprocess.Popen(words, env=variables) as process:
        until(address.exists)
        for is_own in (False, True):
            run = command(program, tmp_path, "ends", "0", PYTHONPATH=str(package.parent))
            output, _ = run.communicate(timeout=60)
            assert (json.loads(output)["pid"] == run.pid) is is_own
            with (package / "steps" / "compare.py").open("a") as source:
                source.write("# another line\n")
        process.kill()


def test_a_study_can_be_told_to_start_none(program, tmp_path, monkeypatch):
    from qrl.study.warming import WarmProcesses

    monkeypatch.setenv(warm.FOLDER, warm.OFF)
    warm.hand_over(dict(os.environ))  # as each command begins
    with WarmProcesses() as warm_processes:
        warm_processes.begin()
        warm_processes.add("cpu", [ROOT], "local")
        assert not any(warm.COMMAND in child.cmdline() for child in psutil.Process().children())
    assert os.environ[warm.FOLDER] == warm.OFF


def test_a_study_ends_its_warm_processes(monkeypatch):
    from qrl.study.warming import WarmProcesses

    monkeypatch.delenv(warm.FOLDER, raising=False)
    with WarmProcesses() as warm_processes:
        warm_processes.begin()
        folder = Path(os.environ[warm.FOLDER])
        children = [child for child in psutil.Process().children() if warm.COMMAND in child.cmdline()]
        assert len(children) == 1
        until(lambda: list(folder.glob("*.sock")))
    assert is_gone(children[0].pid) and not folder.exists() and warm.FOLDER not in os.environ


def test_a_command_whose_input_is_closed_runs_by_itself(program, server, tmp_path):
    variables = environment(**VARIABLES, **{warm.FOLDER: str(tmp_path)})
    words = ["bash", "-c", 'exec "$@" <&-', "bash", sys.executable, program, "ends", "0"]
    done = subprocess.run(words, env=variables, text=True, capture_output=True, check=True, timeout=60)
    assert not json.loads(done.stdout)["imported"] and server.poll() is None


def test_without_a_warm_process_a_command_runs_by_itself(program, tmp_path):
    run = command(program, tmp_path, "ends", "3")
    output, _ = run.communicate(timeout=60)
    assert json.loads(output)["pid"] == run.pid and run.returncode == 3


def test_a_warm_process_ends_with_its_owner_but_after_its_commands(program, tmp_path):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as owner:
        address = warm.socket_of(tmp_path, "")
        words = [sys.executable, program, warm.COMMAND, address, str(owner.pid)]
        with subprocess.Popen(words, env=environment()) as process:
            until(address.exists)
            running = command(program, tmp_path, "waits")
            facts(running)
            assert running.stdout.readline() == "ready\n"
            owner.kill()
            time.sleep(0.5)
            assert process.poll() is None
            running.terminate()
            running.communicate(timeout=60)
            assert process.wait(timeout=60) == 0 and running.returncode == 128 + signal.SIGTERM
    assert not address.exists()


def test_further_modules_are_imported_before_the_next_command(program, server, tmp_path):
    for number, imported in enumerate((False, True)):
        process = command(program, tmp_path, "ends", str(number))
        seen = json.loads(process.communicate(timeout=60)[0])
        assert seen["pid"] != process.pid and seen["further"] is imported
        warm.import_more(warm.socket_of(tmp_path, ""), ["no_such_module", "wave"])
    assert server.poll() is None
