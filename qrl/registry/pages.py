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
        former = MlflowClient().get_registered_model(name).description or ""
    except MlflowException:
        return
    if former and not former.startswith(_HEAD):
        return
    meanings = _stages(stages)
    table = table.replace("\n## ", "\n#### ").removeprefix("## ").strip() or former.partition(_TABLE)[2].strip()
    MlflowClient().update_registered_model(name, _cut(f"{meanings}\n{_TABLE}\n\n{table}" if table else meanings))


def _stages(stages: Iterable[Stage]) -> str:
    """Return what a model's stages mean: the cell of each, and what its gate asks."""
    lines = [_HEAD, ""]
    for stage in stages:
        mirrored = "" if stage.mlflow == "None" else f" (MLflow stage {stage.mlflow})"
        asks = "Its evaluation must be healthy, and of the very weights that are served."
        if stage.made_from:
            parts = [f"be made from `{stage.made_from}`"]
            if stage.gain_over:
                limit = "`promote.min_gain`" if stage.min_gain is None else f"{stage.min_gain:g}"
                parts.append(f"have a lower 95 % bound of its gain over `{stage.gain_over}` above {limit}")
            if stage.loss_to:
                limit = "`promote.max_loss`" if stage.max_loss is None else f"{stage.max_loss:g}"
                parts.append(f"have a lower 95 % bound of its difference to `{stage.loss_to}` above minus {limit}")
            asks = f"It must also {', and '.join(parts)}."
        lines.append(f"- **`{stage.stage}`**{mirrored}: the cell `{stage.cell}`. {asks}")
    return "\n".join([*lines, "", "`promote --stage STAGE --rollback` returns a stage to the version before.", ""])


def refresh(past: History, number: int) -> None:
    """Write the descriptions of a version and of its parent, which lists it."""
    parent = _describe(past, number)
    if parent not in (0, number):
        _describe(past, parent)


def _describe(past: History, number: int) -> int:
    """Write a version's description; return the number of its parent, 0 if it has none, or is not there."""
    entry = version_of(past.name, number)
    if entry is None:
        return 0
    version = Version.of(entry, past)
    made_from_it = f" and tags.`{names.TAG_PARENT_VERSION}` = '{number}'"
    children = [int(child.version) for child in versions_of(past.name, made_from_it, _CHILDREN)]
    MlflowClient().update_model_version(past.name, str(number), _cut(_certificate(version, sorted(children))))
    return _parent(version)


def _certificate(version: Version, children: list[int]) -> str:
    """Return a version's description; `children` are the numbers of the versions that were made from it."""
    records, parent = version.gates(), _parent(version)
    verdicts = [f"{'passed' if record.passed else 'refused by'} gate `{record.stage}`" for record in records]
    cell = names.cell_name(version.variant, version.scheme)
    accuracy, stderr = (_number(version.tags.get(key, "")) for key in ("accuracy", "stderr"))
    lineage = [f"Made from {_link(version.name, parent)}."] if parent else []
    lineage += [f"Parent of {', '.join(_link(version.name, child) for child in children)}."] if children else []
    use = _USE if any(record.passed for record in records) else _NO_USE
    lines = [
        f"{cell}: {', '.join(verdicts) or 'not judged by a gate'}.",  # plain: a list of versions shows it unrendered
        "",
        # Not a table: the UI draws the columns of narrow ones without space between them.
        f"- accuracy **{accuracy:.3f} ± {stderr:.3f}** (± one standard error), n = {version.tags.get('n')} questions",
        *([f"- chats rendered with `{version.tags[names.TAG_CHAT]}`"] if version.chat else []),
        *(f"- difference **{delta}** (95 % interval)" for delta in _deltas(records)),
        "",
        *(line for record in records for line in _gate(record)),
        " ".join([f"**Weights**: digest `{version.digest}`.", *lineage]),
        "",
        *(line.format(name=version.name, number=version.version) for line in use),
    ]
    return "\n".join(lines)


def _parent(version: Version) -> int:
    number = version.tags.get(names.TAG_PARENT_VERSION, "")
    return int(number) if number.isdecimal() else 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # edited by hand
        return math.nan


def _link(name: str, number: int) -> str:
    return f"[version {number}](#/models/{quote(name, safe='')}/versions/{number})"


def _deltas(records: list[Record]) -> Iterator[str]:
    for record in records:
        for key, usual in (("gain", "base"), ("difference", "grpo")):  # what stores did not name before
            other = record.bounds.get(f"{key}_to", usual)
            if {"n", key, f"{key}_low", f"{key}_high"} <= record.bounds.keys():
                estimate, low, high = (float(record.bounds[name]) for name in (key, f"{key}_low", f"{key}_high"))
                yield f"{interval(Estimate(estimate, 0.0, low, high, int(record.bounds['n'])))} to `{other}`"


def _gate(record: Record) -> list[str]:
    head = f"**Gate `{record.stage}`: {'passed' if record.passed else 'refused'}**, {record.time}"
    made_by = f", by study `{record.study}`" if record.study else ""
    return [f"{head}, on evaluation run `{record.run}`{made_by}", "", *(f"- {text}" for text in record.reasons), ""]


def _cut(text: str) -> str:
    """Return a text that every registry accepts, cut at a line's end."""
    return text if len(text) <= _MAX else text[:_MAX].rpartition("\n")[0] + "\n"
