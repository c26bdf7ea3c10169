"""What MLflow's UI shows of a registered model and its versions: descriptions in Markdown."""

from __future__ import annotations

from urllib.parse import quote

from qrl import names
from qrl.registry.client import as_version, client, versions_of
from qrl.registry.versions import Record, Version
from qrl.stats import Estimate
from qrl.stats import text as markdown

_MAX = 5000  # characters that every registry accepts
_MODEL = "Versions of one base model, each with the evaluation and the gate that let it in."
_TABLE = "### Newest table of cells"
_STAGES = {  # stage → cell, gate
    "base": ("base, full precision", "healthy evaluation, of these very weights"),
    "grpo": ("trained, full precision", "also made from `base`; lower 95 % bound of its gain above `promote.min_gain`"),
    "awq": ("trained, AWQ", "also made from `grpo`; its loss surely smaller than `promote.max_loss`"),
}


_USE = (
    *("**Load**", "", "```python", "import qrl", 'model, tokenizer = qrl.load("{name}", {number})', "```", ""),
    *("**Serve**", "", "```sh"),
    *('mlflow run . -e serve -P registered_name="{name}" -P stage={number} --env-manager uv', "```"),
)
_NO_USE = ("`qrl` neither loads nor serves it: no gate let it in.",)


def publish(name: str, table: str = "") -> None:
    """Write a registered model's description: what its stages mean, and the newest table of cells.

    A description that somebody else wrote stays as it is, and a model that does not exist is left out.

    Args:
        name: the registered model.
        table: a study's table.md; empty keeps the table that is there.
    """
    from mlflow import MlflowException

    try:
        former = client().get_registered_model(name).description or ""
    except MlflowException:
        return
    if former and not former.startswith(_MODEL):
        return
    rows = [(f"`{stage}`", *_STAGES[stage], names.MLFLOW_STAGE[stage]) for stage in names.STAGES]
    lines = [
        *(_MODEL, "A stage is an alias: a version gets it by passing its gate, and keeps it until another one does."),
        f"`promote --stage STAGE --rollback` returns it to `STAGE{'-previous'}`.\n",
        *markdown.table(["stage", "cell", "gate", "MLflow stage"], rows),
    ]
    table = table.replace("\n## ", "\n#### ").removeprefix("## ").strip() or former.partition(_TABLE)[2].strip()
    client().update_registered_model(name, _cut("\n".join([*lines, *(["", _TABLE, "", table] if table else [])])))


def refresh(name: str, number: int) -> None:
    """Write the descriptions of a version and of its parent, which lists it."""
    versions = {int(entry.version): as_version(entry) for entry in versions_of(name)}
    for version in (versions[number], versions.get(_parent(versions[number]))):
        if version:
            children = [other.version for other in versions.values() if _parent(other) == version.version]
            page = _cut(certificate(version, sorted(children)))
            client().update_model_version(name, str(version.version), page)


def certificate(version: Version, children: list[int]) -> str:
    """Return a version's description: verdict and reasons, table row, weights and lineage, how to load and serve it.

    Args:
        version: with its tags.
        children: numbers of the versions that were made from it.
    """
    records, parent = version.gates(), _parent(version)
    verdicts = [f"{'passed' if record.passed else 'refused by'} gate `{record.stage}`" for record in records]
    cell = names.cell_name(version.variant, version.scheme)
    accuracy, stderr = (float(version.tags.get(key, "nan")) for key in ("accuracy", "stderr"))
    row = (cell, f"{accuracy:.3f} ± {stderr:.3f}", version.tags.get("n", "unknown"), _delta(records))
    lineage = [f"Made from {_link(version.name, parent)}."] if parent else []
    lineage += [f"Parent of {', '.join(_link(version.name, child) for child in children)}."] if children else []
    use = _USE if any(record.passed for record in records) else _NO_USE
    lines = [
        f"## {cell}: {', '.join(verdicts) or 'not judged by a gate'}",
        "",
        *markdown.table(["cell", "accuracy ± stderr", "n", "delta [95 % interval]"], [row]),
        "",
        *(line for record in records for line in _gate(record)),
        " ".join([f"**Weights**: digest `{version.digest}`.", *lineage]),
        "",
        *(line.format(name=version.name, number=version.version) for line in use),
    ]
    return "\n".join(lines)


def _parent(version: Version) -> int:
    return int(version.tags.get(names.TAG_PARENT_VERSION, 0))


def _link(name: str, number: int) -> str:
    return f"[version {number}](#/models/{quote(name, safe='')}/versions/{number})"


def _delta(records: list[Record]) -> str:
    for record in records:
        for key, other in (("gain", "base"), ("difference", "grpo")):
            if {"n", key, f"{key}_low", f"{key}_high"} <= record.bounds.keys():
                estimate, low, high = (float(record.bounds[name]) for name in (key, f"{key}_low", f"{key}_high"))
                return f"{markdown.interval(Estimate(estimate, 0.0, low, high, int(record.bounds['n'])))} to `{other}`"
    return "compared with none"


def _gate(record: Record) -> list[str]:
    head = f"**Gate `{record.stage}`: {'passed' if record.passed else 'refused'}**"
    return [
        f"{head}, {record.time}, on evaluation run `{record.run}`",
        "",
        *(f"- {text}" for text in record.reasons),
        "",
    ]


def _cut(text: str) -> str:
    """Return a text that every registry accepts, cut at a line's end."""
    return text if len(text) <= _MAX else text[:_MAX].rpartition("\n")[0] + "\n"
