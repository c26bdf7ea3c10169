"""One registered version: what it says of itself, and whether it may be served.

A version says by itself what it is: tags name its variant, scheme, digest, accuracy, stderr and n, and `qrl.gate.<stage>`
the decision that let it in, for the weights with that digest. It may be served where a gate let it in and its files are
still those that were judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qrl import checkpoint, names
from qrl.errors import GateRefused, QrlError


@dataclass(frozen=True)
class Version:
    """One registered version, and the stage by which it was asked for (None: by number)."""

    name: str
    version: int
    digest: str
    variant: str
    scheme: str
    stage: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def uri(self) -> str:
        """The address that MLflow loads."""
        return f"models:/{self.name}/{self.version}"

    def gate(self, stage: str) -> dict[str, Any] | None:
        """The recorded decision on this version for a stage, or None where there was none."""
        text = self.tags.get(names.gate_tag(stage))
        return json.loads(text) if text else None

    def __str__(self) -> str:
        return f"{self.name} version {self.version} ({names.cell_name(self.variant, self.scheme)}, digest {self.digest[:12]})"


def folder(version: Version) -> Path:
    """The version's checkpoint folder, in place where the store is local.

    Raises:
        QrlError: its files are gone.
    """
    import mlflow

    try:
        found = Path(mlflow.artifacts.download_artifacts(version.uri)) / "model"
    except (mlflow.MlflowException, OSError) as error:
        raise QrlError(
            f"The files of {version} cannot be read ({str(error).splitlines()[0]}): run the study again."
        ) from None
    if not (found / "config.json").is_file():
        raise QrlError(f"The files of {version} are gone from {found}: run the study again.")
    return found


def verify(version: Version) -> Path:
    """The version's checkpoint folder, after its gate and its digest were found to hold; raises as `admit` and `whole` do."""
    path = admit(version)
    whole(version, path)
    return path


def admit(version: Version) -> Path:
    """The version's checkpoint folder, after its gate was found to hold; its weights are not read.

    Raises:
        GateRefused: no gate let it in, or the gate judged other weights.
        QrlError: the files are gone.
    """
    stages = [version.stage] if version.stage else names.STAGES
    gates = {stage: gate for stage in stages if (gate := version.gate(stage))}
    promoted = [gate for gate in gates.values() if gate.get("verdict") == "promoted"]
    if not promoted:
        stage, gate = next(iter(gates.items()), (stages[0], None))  # the one that judged it, if one did
        why = f" ({gate.get('why', 'it was refused').rstrip('.')})" if gate else ""
        raise GateRefused(
            f"No gate let {version} in{why}: `python -m qrl promote --stage {stage} --cell RUN` decides on it."
        )
    if not any(gate.get("digest") == version.digest for gate in promoted):
        raise GateRefused(
            f"The gate of {version} judged other weights, digest {str(promoted[0].get('digest'))[:12]}: promote it again."
        )
    return folder(version)


def whole(version: Version, path: Path) -> None:
    """Reads every file of a version.

    Args:
        version: whose digest they must have.
        path: its folder, from `admit`.

    Raises:
        QrlError: the files are no longer those that were evaluated.
    """
    found = checkpoint.digest(path)
    if found != version.digest:
        raise QrlError(
            f"The files of {version} have changed, their digest is {found[:12]} now: run the study again, which makes a new version of what was damaged."
        )
