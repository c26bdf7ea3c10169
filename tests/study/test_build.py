"""Environments of other projects: built beside a study, awaited, and refused with the last lines of their log."""

import contextlib
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from qrl import recipe
from qrl.errors import QrlError
from qrl.study import build, environments
from qrl.tracking import projects

pytestmark = pytest.mark.process


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a project whose environment holds one wheel, without an index."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ENV_ROOT", str(tmp_path / "environments"))
    folder = tmp_path / "projects" / "awq"
    folder.mkdir(parents=True)
    wheel = tmp_path / "awq-1.0-py3-none-any.whl"
    lines = f"name: one\ndependencies:\n  - python=3.{sys.version_info[1]}\n  - pip:\n      - {wheel}\n"
    (folder / "conda.yaml").write_text(lines)
    return folder, wheel


def write(wheel, source: str = "print('imported')\n") -> None:
    info = "awq-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("awq/__init__.py", source)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: awq\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_an_environment_is_built_where_mlflow_looks_for_it_and_only_once(project, monkeypatch, capsys):
    folder, wheel = project
    write(wheel)
    place = projects.environment(folder)
    place.mkdir(parents=True)  # of a build that was killed
    build.begin(folder, "uv")
    build.wait(folder, "uv")
    assert "projects/awq is being built" in capsys.readouterr().err
    assert projects.is_built(folder, "awq") and (place / "bin" / "activate").is_file()
    assert "imported" in build.log(folder).read_text()  # which compiles it
    build.log(folder).unlink()
    build.wait(folder, "uv")
    assert not build.log(folder).exists() and not capsys.readouterr().err

    monkeypatch.setattr(projects.mlflow, "get_run", None)  # MLflow itself finds it, and builds nothing
    from mlflow.utils import virtualenv

    monkeypatch.setattr(virtualenv, "_exec_cmd", None)
    found = virtualenv._create_virtualenv(folder, projects._python(folder), place, env_manager="uv")
    assert found == f"source {place}/bin/activate"


def test_a_failed_build_ends_with_the_path_of_its_log_and_the_installers_words(project):
    folder, wheel = project  # which does not exist
    with pytest.raises(QrlError, match="could not be built") as failed:
        build.wait(folder, "uv")
    *_, first, last = str(failed.value).splitlines()
    assert str(build.log(folder).resolve()) in str(failed.value) and wheel.name in first + last
    assert not projects.environment(folder).exists()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_build_that_was_killed_is_not_taken_for_an_environment(project, signum, tmp_path):
    folder, wheel = project
    once = f"open({str(tmp_path / 'began')!r}, 'x'); import time; time.sleep(600)"
    write(wheel, f"import os\nif not os.path.exists({str(tmp_path / 'began')!r}):\n    {once}\n")
    build.begin(folder, "uv")
    builder = build._running.pop(folder)
    until = time.monotonic() + 120
    while not (tmp_path / "began").exists() and time.monotonic() < until:
        time.sleep(0.1)
    started = psutil.Process(builder.pid).children(recursive=True)
    builder.send_signal(signum)
    builder.wait(60)
    assert started and not projects.is_built(folder, "awq")
    for left in started:
        assert signum == signal.SIGKILL or not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
        with contextlib.suppress(psutil.Error):
            left.kill()
    build.wait(folder, "uv")
    assert projects.is_built(folder, "awq")


@pytest.mark.parametrize("manager", ["local", "conda"])
def test_other_managers_are_left_alone(project, manager):
    folder, _ = project
    build.begin(folder, manager)
    build.wait(folder, manager)
    assert not build.log(folder).exists()


@pytest.mark.parametrize(("schemes", "named"), [("nf4,awq", True), ("nf4", False)])
def test_a_study_says_first_what_it_does_and_what_it_builds(monkeypatch, capsys, schemes, named):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0")
    monkeypatch.setattr(build.metadata, "version", lambda _: "2.13.0+cpu")
    build.announce(recipe.load("tiny", {"quantize.schemes": schemes}))
    said = capsys.readouterr().err
    assert "train" in said and schemes.replace(",", ", ") in said and "promote" in said
    assert ("environment-awq.log" in said) is named and ("GB" in said) is named
    monkeypatch.delenv("MLFLOW_RUN_ID")
    build.announce(recipe.load("tiny"), "tiny")
    said = capsys.readouterr().err
    assert "environment" not in said and "on arithmetic by recipe tiny, about 4 minutes" in said


@pytest.mark.parametrize(("version", "is_told"), [("2.13.0", True), ("2.13.0+cpu", False)])
def test_a_machine_without_a_gpu_is_told_of_torchs_cpu_build(monkeypatch, capsys, version, is_told):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("MLFLOW_RUN_ID", "0")
    monkeypatch.setattr(build.metadata, "version", lambda _: version)
    build.announce(recipe.load("tiny"))
    assert (f"UV_FIND_LINKS={build.CPU_WHEELS}" in capsys.readouterr().err) is is_told


def test_an_environment_of_mlflow_s_imports_the_checkout_from_any_folder(tmp_path, monkeypatch):
    def prepared(name: str) -> Path:
        packages = tmp_path / name / "lib" / "site-packages"
        packages.mkdir(parents=True)
        monkeypatch.setattr(environments.sys, "prefix", str(tmp_path / name))
        monkeypatch.setattr(environments.sysconfig, "get_path", lambda _: str(packages))
        environments.put_on_path()
        return packages / environments.PATH_FILE

    path_file = prepared("mlflow-0123")
    assert path_file.read_text() == f"{environments.ROOT}\n"
    program = f"import site; site.addsitedir({str(path_file.parent)!r}); import qrl; print(qrl.__file__)"
    command = [sys.executable, "-S", "-I", "-c", program]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(printed.strip()).parents[1] == environments.ROOT
    assert not prepared("venv-of-the-user-s").exists()
