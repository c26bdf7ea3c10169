"""The `mlflow run` that started this process: which project, from which folder, and how to type the like again.

MLflow works in a project's own folder if the project is one on this machine. Any other project, such as
`https://…/qrl.git`, it clones into a temporary folder that no later run will see.
"""

import os
import shlex
import subprocess
import tempfile
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

# Options that a later command needs too, in the order in which they are printed, and by what names MLflow takes them.
_REPEATED = {
    "env_manager": ("--env-manager",),
    "experiment_name": ("--experiment-name",),
    "experiment_id": ("--experiment-id",),
}
_VERSION = "version"
# All others that have a value, which would else be taken for the project.
_OTHERS = (
    ("--entry-point", "-e"),
    ("--param-list", "-P"),
    ("--docker-args", "-A"),
    ("--backend", "-b"),
    ("--backend-config", "-c"),
    ("--storage-dir",),
    ("--run-id",),
    ("--run-name",),
)


@dataclass(frozen=True)
class MlflowRun:
    """A command `mlflow run PROJECT …`.

    Attributes:
        program: what comes before `run`, such as `mlflow` or `uvx --from mlflow==3.17.2 mlflow`.
        project: as typed: a folder, or an address that MLflow fetches.
        folder: in which it was typed.
        options: name as Python spells it → value, of those that a later command needs too.
    """

    program: str
    project: str
    folder: Path
    options: dict[str, str]

    @property
    def is_fetched(self) -> bool:
        """Whether MLflow fetched the project into a temporary folder; by MLflow's own rule."""
        address = self.project.strip("'\"").partition("#")[0]  # after #: a folder within the project
        if address.endswith(".zip"):
            return True
        if address.startswith("file://"):
            parts = urllib.parse.urlparse(address)
            address = parts.netloc + parts.path
        return not (self.folder / address).resolve().exists()

    def pattern(self, checkout: Path) -> str:
        """Return the command for other steps, with `{}` for the step; `checkout` is where a local project is."""
        if self.is_fetched:
            project = shlex.quote(self.project)
        elif self.folder == checkout:
            project = "."
        else:
            project = shlex.quote(str(checkout))
        words = [self.program, "run", project]
        if _VERSION in self.options:
            words += ["-v", shlex.quote(self.options[_VERSION])]
        before_step = " ".join(words).replace("{", "{{").replace("}", "}}")

        words = []
        for name, (typed, *_) in _REPEATED.items():
            if name in self.options:
                words += [typed, shlex.quote(self.options[name])]
        after_step = "".join(f" {word}" for word in words).replace("{", "{{").replace("}", "}}")
        return f"{before_step} -e {{}}{after_step}"


def read(words: Sequence[str], words_above: Sequence[str], folder: str) -> MlflowRun | None:
    """Return the `mlflow run` that a process is; None if it is another command.

    Args:
        words: the process's command line.
        words_above: that of the process which started it.
        folder: the process's working folder.
    """
    names = [Path(word).name for word in words]
    if "mlflow" not in names or "run" not in words[names.index("mlflow") :]:
        return None
    start = names.index("mlflow")
    end = words.index("run", start)

    program = "mlflow"
    if start > 0 and words[start - 1] == "-m":
        program = f"{shlex.quote(words[0])} -m mlflow"
    program = " ".join([program, *map(shlex.quote, words[start + 1 : end])])  # options of `mlflow` itself
    if list(words_above[1:3]) == ["tool", "uvx"] and "run" in words_above:  # as which uv starts itself
        program = shlex.join(["uvx", *words_above[3 : words_above.index("run")]])

    params = _parsed(words[end + 1 :])
    if not params.get("project"):
        return None
    options = {name: params[name] for name in (_VERSION, *_REPEATED) if params.get(name)}
    return MlflowRun(program, params["project"], Path(folder), options)


def of_clone(checkout: Path, folder: str) -> MlflowRun | None:
    """Return the `mlflow run` for a checkout that `mlflow.projects.run` cloned, called from Python; None for any other.

    Args:
        checkout: the folder of the project's files. MLflow clones into the temporary folder.
        folder: the working folder of the process which called.
    """
    is_temporary = checkout.resolve().parent == Path(tempfile.gettempdir()).resolve()
    if not is_temporary or not (checkout / ".git").is_dir():
        return None
    asked = ["git", "-C", str(checkout), "config", "--get", "remote.origin.url"]
    try:
        address = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a clone of somebody else's, without the address
        return None
    experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
    return MlflowRun("mlflow", address, Path(folder), {"experiment_id": experiment} if experiment else {})


def _parsed(words: Sequence[str]) -> dict[str, str]:
    """Return the project and the options of `mlflow run` that have a value, read as click reads them for MLflow."""
    params: list[click.Parameter] = [click.Argument(["project"]), click.Option(["--version", "-v"])]
    params += [click.Option([*typed, name]) for name, typed in _REPEATED.items()]
    params += [click.Option(list(typed), multiple=True) for typed in _OTHERS]
    command = click.Command("run", params=params)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return command.make_context("run", list(words), resilient_parsing=True, **settings).params
