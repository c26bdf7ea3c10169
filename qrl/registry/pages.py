"""What MLflow's UI shows of a registered model and its versions: descriptions in Markdown."""

import math
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from mlflow import MlflowException

from qrl import names
from qrl.recipe.stages import Stage
from qrl.registry.client import MlflowClient
from qrl.registry.history import History, Record
from qrl.registry.versions import Version, version_of, versions_of
from qrl.stats import Estimate
from qrl.stats.text import interval

_MAX = 5000  # characters that every registry accepts
_CHILDREN = 50  # versions made from one that its description lists, the newest; a base has hundreds
_HEAD = (
    "Versions of one base model. A stage is an alias: a version that passes the gate gets it, until another one does."
)
_TABLE = "### Newest table of cells"
_USE = (
    *("**Load**", "", "```python", "import qrl", 'model, tokenizer = qrl.load("{name}", {number})', "```", ""),
    *("**Serve**", "", "```sh"),
    *('mlflow run . -e serve -P registered_name="{name}" -P stage={number} --env-manager uv', "```"),
)
_NO_USE = ("`qrl` neither loads nor serves it: no gate let it in.",)


def publish(name: str, stages: Iterable[Stage], table: str = "") -> None:
    """Write a registered model's description: what its stages mean, and the newest table of cells.

    A description that somebody else wrote stays as it is, and a model that does not exist is left out.

    Args:
        name: the registered model.
        stages: that it has.
        table: a study's table.md; empty keeps the table that is there.
    """
    try:
        current = MlflowClient().get_registered_model(name).description or ""
    except MlflowException:
        return
    is_ours = not current or current.startswith(_HEAD)
    if not is_ours:
        return
    description = _describe_stages(stages)
    new_table = table.replace("\n## ", "\n#### ").removeprefix("## ").strip()
    shown_table = new_table or current.partition(_TABLE)[2].strip()
    if shown_table:
        description = f"{description}\n{_TABLE}\n\n{shown_table}"
    MlflowClient().update_registered_model(name, _cut(description))


def _describe_stages(stages: Iterable[Stage]) -> str:
    """Return what a model's stages mean: the cell of each, and what its gate requires."""
    lines = [_HEAD, ""]
    for stage in stages:
        mirrored = "" if stage.mlflow == "None" else f" (MLflow stage {stage.mlflow})"
        requirement = "Its evaluation must be healthy, and of the very weights that are served."
        if stage.made_from:
            requirement = f"It must also {', and '.join(_requirements(stage))}."
        lines.append(f"- **`{stage.stage}`**{mirrored}: the cell `{stage.cell}`. {requirement}")
    return "\n".join([*lines, "", "`promote --stage STAGE --rollback` returns a stage to the version before.", ""])


def _requirements(stage: Stage) -> list[str]:
    """Return what the gate of a stage that is made from another one requires of a version, as clauses."""
    clauses = [f"be made from `{stage.made_from}`"]
    if stage.gain_over:
        least = "`promote.min_gain`" if stage.min_gain is None else f"{stage.min_gain:g}"
        clauses.append(f"have a lower 95 % bound of its gain over `{stage.gain_over}` above {least}")
    if stage.loss_to:
        limit = "`promote.max_loss`" if stage.max_loss is None else f"{stage.max_loss:g}"
        clauses.append(f"have a lower 95 % bound of its difference to `{stage.loss_to}` above minus {limit}")
    return clauses


def refresh(history: History, number: int) -> None:
    """Write the descriptions of a version and of its parent, which lists it."""
    parent = _write_description(history, number)
    if parent not in (0, number):
        _write_description(history, parent)


def _write_description(history: History, number: int) -> int:
    """Write a version's description; return the number of its parent, 0 if it has none, or is not there."""
    entry = version_of(history.name, number)
    if entry is None:
        return 0
    version = Version.of(entry, history)
    is_child = f" and tags.`{names.TAG_PARENT_VERSION}` = '{number}'"
    children = [int(child.version) for child in versions_of(history.name, is_child, _CHILDREN)]
    MlflowClient().update_model_version(history.name, str(number), _cut(_certificate(version, sorted(children))))
    return _parent(version)


def _certificate(version: Version, children: list[int]) -> str:
    """Return a version's description; `children` are the numbers of the versions that were made from it."""
    decisions = version.gates()
    verdicts = [f"{'passed' if record.passed else 'refused by'} gate `{record.stage}`" for record in decisions]
    cell = names.cell_name(version.variant, version.scheme)
    accuracy = _number(version.tags.get("accuracy", ""))
    stderr = _number(version.tags.get("stderr", ""))
    lines = [
        f"{cell}: {', '.join(verdicts) or 'not judged by a gate'}.",  # plain: a list of versions shows it unrendered
        "",
        # Not a table: the UI draws the columns of narrow ones without space between them.
        f"- accuracy **{accuracy:.3f} ± {stderr:.3f}** (± one standard error), n = {version.tags.get('n')} questions",
    ]
    if version.chat:
        lines.append(f"- chats rendered with `{version.tags[names.TAG_CHAT]}`")
    lines += [f"- difference **{difference}** (95 % interval)" for difference in _differences(decisions)]
    lines.append("")
    for record in decisions:
        lines += _describe_gate(record)

    weights = [f"**Weights**: digest `{version.digest}`."]
    parent = _parent(version)
    if parent:
        weights.append(f"Made from {_link(version.name, parent)}.")
    if children:
        weights.append(f"Parent of {', '.join(_link(version.name, child) for child in children)}.")
    lines += [" ".join(weights), ""]

    use = _USE if any(record.passed for record in decisions) else _NO_USE
    lines += [line.format(name=version.name, number=version.version) for line in use]
    return "\n".join(lines)


def _parent(version: Version) -> int:
    """Return the number of the version that a version was made from; 0 if there is none."""
    number = version.tags.get(names.TAG_PARENT_VERSION, "")
    return int(number) if number.isdecimal() else 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # edited by hand
        return math.nan


def _link(name: str, number: int) -> str:
    return f"[version {number}](#/models/{quote(name, safe='')}/versions/{number})"


def _differences(decisions: list[Record]) -> Iterator[str]:
    """Yield the gains and losses that gates compared, with their intervals."""
    for record in decisions:
        bounds = record.bounds
        for key in ("gain", "difference"):
            if {"n", key, f"{key}_low", f"{key}_high", f"{key}_to"} <= bounds.keys():
                low = float(bounds[f"{key}_low"])
                high = float(bounds[f"{key}_high"])
                estimate = Estimate(float(bounds[key]), 0.0, low, high, int(bounds["n"]))
                yield f"{interval(estimate)} to `{bounds[f'{key}_to']}`"


def _describe_gate(record: Record) -> list[str]:
    head = f"**Gate `{record.stage}`: {'passed' if record.passed else 'refused'}**, {record.time}"
    made_by = f", by study `{record.study}`" if record.study else ""
    return [f"{head}, on evaluation run `{record.run}`{made_by}", "", *(f"- {text}" for text in record.reasons), ""]


def _cut(text: str) -> str:
    """Return a text that every registry accepts, cut at a line's end."""
    return text if len(text) <= _MAX else text[:_MAX].rpartition("\n")[0] + "\n"
