"""A finished step is found again, never done twice.

Its key is the sha256 of its name, the recipe section it reads, its inputs' digests, the device class, its environment file
and the sources that could change its result. Not the commit: a change of README must not retrain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import names
from qrl.errors import QrlError
from qrl.tracking import models

if TYPE_CHECKING:
    from mlflow.entities import Run

_PACKAGE = Path(__file__).parents[1]
_OUTPUTS = "outputs.json"

# What each step runs: its command and room, and what every room builds on (design: the layers above it). A test follows the
# imports of these files and asks that none leads out of the list, but to what keeps and finds results.
_ROOMS = {
    "train": ("steps/train.py", "train", "tiny/__init__.py", "tiny/corpus.py"),
    "merge": ("steps/train.py", "train", "tiny/__init__.py", "tiny/corpus.py"),
    "quantize": ("steps/quantize.py", "quantize"),
    "evaluate": ("steps/evaluate.py", "evaluate"),
    "diagnose": ("steps/diagnose.py", "diagnose"),
    "compare": ("steps/compare.py", "compare", "evaluate/__init__.py", "evaluate/groups.py"),
}
_ABOVE = ("names.py", "stats", "recipe", "tasks", "checkpoint.py", "formats", "engine", "figures", "steps/inputs.py")


@dataclass(frozen=True)
class Outputs:
    """What a step left for later ones: models by label, artifacts by path in its run, plain values by name."""

    models: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def sources_of(step: str) -> list[Path]:
    """Every source file that could change the step's result."""
    files: list[Path] = []
    for name in (*_ABOVE, *_ROOMS[step]):
        path = _PACKAGE / name
        files += [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sorted(file for file in files if "__pycache__" not in file.parts)


def key(
    step: str,
    *,
    section: Mapping[str, Any],
    inputs: Mapping[str, str],
    device: str,
    environment: Path,
    sources: list[Path] | None = None,
) -> str:
    """The name under which a step's result is found again.

    Args:
        step: its name.
        section: the recipe's values that it reads.
        inputs: name → digest of what goes in.
        device: `cpu` or `cuda`.
        environment: its conda.yaml.
        sources: default: `sources_of(step)`.

    Returns:
        64 hexadecimal digits.
    """
    files = sources_of(step) if sources is None else sources
    document = {
        "step": step,
        "section": dict(section),
        "inputs": dict(inputs),
        "device": device,
        "environment": _sha256(environment),
        "sources": sorted((_name(file), _sha256(file)) for file in files),
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def find(step: str, key: str) -> Run | None:
    """The newest finished run with this key in the active experiment whose outputs all still exist, or None."""
    import mlflow

    wanted = f"attributes.status = 'FINISHED' and tags.`{names.TAG_CACHE_KEY}` = '{key}' and tags.`{names.TAG_STEP}` = '{step}'"
    runs = mlflow.search_runs(filter_string=wanted, order_by=["attributes.start_time DESC"], output_format="list")
    return next((run for run in runs if _is_whole(run)), None)


def record_outputs(
    *,
    models: Mapping[str, str] | None = None,
    artifacts: list[str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Outputs:
    """Keep what later steps need in the active run, with every file's size, and an artifact's digest; call it last in the step.

    Args:
        models: label → "models:/m-…".
        artifacts: paths in the active run, files or folders.
        values: whatever JSON holds.
    """
    import mlflow

    run = mlflow.active_run()
    found = Outputs(dict(models or {}), list(artifacts or []), dict(values or {}))
    sizes = {place: _sizes(_address(run, place)) for place in (*found.models.values(), *found.artifacts)}
    digests = {place: _digests(_address(run, place)) for place in found.artifacts}
    mlflow.log_dict({**vars(found), "sizes": sizes, "digests": digests}, _OUTPUTS)
    return found


def outputs(run: Run) -> Outputs:
    """What `record_outputs` kept in a run."""
    document = _document(run)
    return Outputs(document["models"], document["artifacts"], document["values"])


def check_artifact(run_id: str, place: str) -> None:
    """Refuses an artifact that is not what its step recorded; one that no step recorded is taken as it is.

    Raises:
        QrlError: its bytes have changed since.
    """
    import mlflow

    run = mlflow.get_run(run_id)
    try:
        recorded = _document(run).get("digests", {})
    except (mlflow.MlflowException, OSError, ValueError):
        return
    if place in recorded and recorded[place] != _digests(_address(run, place)):
        raise QrlError(
            f"{place} of run {run_id} is not what was logged: its bytes have changed since. Run its step again; what is damaged is not reused."
        )


def _is_whole(run: Run) -> bool:
    """Whether every recorded file is there with its size, and weights and artifacts with their digests."""
    import mlflow

    try:
        document = _document(run)
        recorded = document["sizes"]
        client = mlflow.MlflowClient()
        ready = all(
            str(client.get_logged_model(place.removeprefix("models:/")).status) == "READY"
            for place in recorded
            if place.startswith("models:/")
        )
        sound = all(sizes and _sizes(_address(run, place)) == sizes for place, sizes in recorded.items())
        sound = sound and all(
            _digests(_address(run, place)) == found for place, found in document.get("digests", {}).items()
        )
        digest = document["values"].get("digest")
        return ready and sound and all(models.holds(uri, digest) for uri in document["models"].values())
    except (mlflow.MlflowException, OSError, ValueError, KeyError):
        return False  # whatever cannot be read cannot be reused


def _document(run: Run) -> dict:
    import mlflow

    return json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{_OUTPUTS}"))


def _address(run: Run, place: str) -> str:
    return place if place.startswith("models:/") else f"{run.info.artifact_uri}/{place}"


def _sizes(address: str) -> dict[str, int]:
    """Path below the address → bytes, for every file; MLflow's own note of a download, which comes and goes, left out."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    parent, _, name = address.rpartition("/")
    if not address.startswith("models:/"):
        siblings = {Path(info.path).name: info for info in get_artifact_repository(parent).list_artifacts()}
        if name in siblings and not siblings[name].is_dir:
            return {name: siblings[name].file_size}
    repository = get_artifact_repository(address)
    sizes, folders = {}, [None]
    while folders:
        for info in repository.list_artifacts(folders.pop()):
            if info.is_dir:
                folders.append(info.path)
            elif info.path != "registered_model_meta":
                sizes[info.path] = info.file_size
    return sizes


def _digests(address: str) -> dict[str, str]:
    """Path below the address → sha256, for every file of a local artifact; none where the store is on another machine."""
    place = models.local(address)
    if place is None:
        return {}
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    return {file.relative_to(place.parent).as_posix(): _sha256(file) for file in files}


def _name(file: Path) -> str:
    return file.relative_to(_PACKAGE).as_posix() if file.is_relative_to(_PACKAGE) else file.name


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
