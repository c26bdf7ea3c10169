"""A command that a warm process runs is, from outside, as one that runs by itself."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from qrl.process import is_gone
from qrl.tracking import warm
from qrl.tracking.keys import ROOT
from tests.processes import children_with

pytestmark = pytest.mark.process

# A command as `qrl/__main__.py` is one: it prints what it sees, and does what its first word says.
PROGRAM = """
import json, os, signal, sys, time
from qrl.process import is_gone
from qrl.tracking import warm

if sys.argv[1] == warm.COMMAND:
    warm.serve(lambda: None)
else:
    warm.hand_over(dict(os.environ))
facts = {"pid": os.getpid(), "words": sys.argv[1:], "folder": os.getcwd(), "group": os.getpgrp()}
facts |= {"variable": os.environ.get("QRL_CALLER"), "imported": "colorsys" in sys.modules}
facts |= {"further": "wave" in sys.modules, "write_through": sys.stdout.write_through}
facts |= {"asked_driver": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")}
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
    with start(program, tmp_path, "colorsys", "no_such_module") as process:
        yield process


@contextmanager
def start(program: Path, folder: Path, *modules: str, owner: int = 0, **more: str) -> Iterator[subprocess.Popen]:
    """Yield a warm process in a folder; kill it at the end."""
    from qrl.study import warming

    address = warm.socket_of(folder, "")
    command = [sys.executable, program]
    with warming.start(command, address, modules, environment(**more), owner) as process:
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
    with start(program, tmp_path):
        for value, is_own in (("1", False), ("2", True)):
            run = command(program, tmp_path, "ends", "0", **{variable: value})
            output, _ = run.communicate(timeout=60)
            assert (json.loads(output)["pid"] == run.pid) is is_own


def test_a_command_whose_sources_were_edited_runs_by_itself(program, tmp_path):
    package = tmp_path / "edited" / "qrl"
    shutil.copytree(Path(warm.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    lock = package / ".#editor.py"  # a link to nothing
    lock.symlink_to("user@machine.1234")
    with start(program, tmp_path, PYTHONPATH=str(package.parent)):
        for is_own in (False, True):
            run = command(program, tmp_path, "ends", "0", PYTHONPATH=str(package.parent))
            output, _ = run.communicate(timeout=60)
            assert (json.loads(output)["pid"] == run.pid) is is_own
            with (package / "steps" / "compare.py").open("a") as source:
                source.write("# another line\n")


def test_a_study_can_be_told_to_start_none(program, tmp_path, monkeypatch):
    from qrl.study.warming import WarmProcesses

    monkeypatch.setenv(warm.FOLDER, warm.OFF)
    warm.hand_over(dict(os.environ))  # as each command begins
    with WarmProcesses() as warm_processes:
        warm_processes.begin()
        warm_processes.add("cpu", [ROOT], "local")
        assert not children_with(warm.COMMAND)
    assert os.environ[warm.FOLDER] == warm.OFF


def test_a_study_ends_its_warm_processes(monkeypatch):
    from qrl.study.warming import WarmProcesses

    monkeypatch.delenv(warm.FOLDER, raising=False)
    with WarmProcesses() as warm_processes:
        warm_processes.begin()
        folder = Path(os.environ[warm.FOLDER])
        children = children_with(warm.COMMAND)
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
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as owner,
        start(program, tmp_path, owner=owner.pid) as process,
    ):
        running = command(program, tmp_path, "waits")
        facts(running)
        assert running.stdout.readline() == "ready\n"
        owner.kill()
        time.sleep(0.5)
        assert process.poll() is None
        running.terminate()
        running.communicate(timeout=60)
        assert process.wait(timeout=60) == 0 and running.returncode == 128 + signal.SIGTERM
    assert not warm.socket_of(tmp_path, "").exists()


def test_further_modules_are_imported_before_the_next_command(program, server, tmp_path):
    for number, imported in enumerate((False, True)):
        process = command(program, tmp_path, "ends", str(number))
        seen = json.loads(process.communicate(timeout=60)[0])
        assert seen["pid"] != process.pid and seen["further"] is imported
        warm.import_more(warm.socket_of(tmp_path, ""), ["no_such_module", "wave"])
    assert server.poll() is None


def test_a_warm_process_whose_owner_has_ended_already_leaves_no_folder(program, tmp_path):
    folder = tmp_path / "sockets"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as owner:
        pass
    with start(program, folder, owner=owner.pid) as process:
        assert process.wait(timeout=60) == 0
    assert not folder.exists()


def test_a_command_that_comes_before_the_warm_process_is_ready_waits(program, tmp_path):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "slow.py").write_text("import time\ntime.sleep(2)\n")
    path = f"{environment()['PYTHONPATH']}:{modules}"
    with start(program, tmp_path, "slow", PYTHONPATH=path):
        warm.import_more(warm.socket_of(tmp_path, ""), ["wave"])
        run = command(program, tmp_path, "ends", "0", PYTHONPATH=path)
        seen = json.loads(run.communicate(timeout=60)[0])
        assert seen["pid"] != run.pid and seen["further"]


@pytest.mark.parametrize("is_asked", [True, False])
def test_torch_asks_no_cuda_while_it_is_imported_and_what_asks_it_ends_the_forks(program, tmp_path, is_asked):
    """Simulated: torch marks each fork of a process that has asked CUDA, and no fork can use a GPU after that."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "asks.py").write_text(
        "import os, sys, types\n"
        f"asked = {is_asked} or os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK') != '1'\n"
        "cuda = types.SimpleNamespace(_is_in_bad_fork=lambda: asked)\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)\n"
    )
    path = f"{environment()['PYTHONPATH']}:{modules}"
    with start(program, tmp_path, "asks", PYTHONPATH=path) as server:
        run = command(program, tmp_path, "ends", "0", PYTHONPATH=path)
        seen = json.loads(run.communicate(timeout=60)[0])
        assert (seen["pid"] == run.pid) is is_asked
        assert seen["asked_driver"] is None and server.poll() is None


@pytest.mark.slow
def test_what_a_study_imports_for_a_gpu_asks_the_drivers_library_alone(tmp_path):
    """And torchao alone asks, to which no GPU is visible: it would ask the first one that it sees for more."""
    program = tmp_path / "program.py"
    program.write_text("""
import os, sys, torch
from qrl.study import warming
from qrl.process import is_gone
from qrl.tracking import warm

asked = []

def is_available():
    asked.append((os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), os.environ.get("CUDA_VISIBLE_DEVICES")))
    return False

torch.cuda.is_available = is_available
torch.cuda._lazy_init = lambda: asked.append("CUDA")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
server = warm._Server.__new__(warm._Server)
server._can_fork = True
server._import([*warming._LIGHT, *warming._heavy("cuda", "")])
assert "torchao.prototype.mx_formats.kernels" in sys.modules and "transformers.modeling_utils" in sys.modules
assert asked and set(asked) == {("1", "")}, asked
""")
    variables = environment()
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    subprocess.run([sys.executable, program], check=True, env=variables, timeout=300)


@pytest.mark.parametrize("visible", [None, "1,2"])
def test_gpus_are_hidden_only_from_what_would_use_them(monkeypatch, visible):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with warm._gpus_hidden_from("torchao.prototype"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    with warm._gpus_hidden_from("transformers"):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize("value", ["", "1"])
def test_output_is_buffered_as_the_command_was_told(program, tmp_path, value):
    with start(program, tmp_path, PYTHONUNBUFFERED=value):
        run = command(program, tmp_path, "ends", "0", PYTHONUNBUFFERED=value)
        seen = json.loads(run.communicate(timeout=60)[0])
        assert seen["pid"] != run.pid and seen["write_through"] is bool(value)


@pytest.mark.parametrize("has_terminal", [True, False])
def test_bars_move_at_a_terminal_as_without_a_warm_process(program, tmp_path, has_terminal):
    """The process reads how often a bar moves from a variable, once, and sets that where it writes to a file."""
    from qrl.study import warming

    bars = "import sys, tqdm; print(tqdm.tqdm([], file=sys.stderr).mininterval)"
    source = tmp_path / "bars.py"
    source.write_text(f"""
import sys
from qrl import process
from qrl.process import is_gone
from qrl.tracking import warm
if sys.argv[1] == warm.COMMAND:
    warm.serve(process.prepare_imports)
warm.hand_over(dict(__import__("os").environ))
{bars}
""")
    terminal, other_end = os.openpty()
    error_stream = {"stderr": other_end} if has_terminal else {"stderr": subprocess.PIPE}
    variables = environment(**VARIABLES, **{warm.FOLDER: str(tmp_path)})
    variables.pop("TQDM_MININTERVAL", None)
    kept_stderr = os.dup(2)
    try:
        if has_terminal:
            os.dup2(other_end, 2)  # of the study, which starts the process
        own = {name: value for name, value in variables.items() if name != warm.FOLDER}
        server = warming.start([sys.executable, source], warm.socket_of(tmp_path, ""), ["tqdm"], own)
    finally:
        os.dup2(kept_stderr, 2)
        os.close(kept_stderr)
    with server:
        done = subprocess.run(
            [sys.executable, source, "bars"],
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            check=True,
            **error_stream,
        )
        assert float(done.stdout) == (0.1 if has_terminal else 30)
        server.kill()
    os.close(terminal)
    os.close(other_end)


def test_a_long_folder_for_temporary_files_leaves_room_for_a_socket(tmp_path, monkeypatch):
    from qrl.study import warming

    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = warming._make_folder()
    try:
        warm.listen(warm.socket_of(folder, "vllm_cpu")).close()
    finally:
        shutil.rmtree(folder)


def test_a_message_that_is_none_ends_no_warm_process(program, server, tmp_path):
    for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{]"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(warm.socket_of(tmp_path, "")))
            connection.sendall(text)
    following = command(program, tmp_path, "ends", "0")
    assert json.loads(following.communicate(timeout=60)[0])["pid"] != following.pid and server.poll() is None
