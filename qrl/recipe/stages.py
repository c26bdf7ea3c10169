"""Stages of a study: the cells that become versions, and what the gate of each asks."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import field_validator, model_validator

from qrl import names
from qrl.recipe.base import Section, option

_NAME = re.compile(r"(?!v\d+$)[a-z][a-z0-9-]*(?<!-previous)")  # MLflow reserves `v3` and `latest`
_RESERVED = ("latest", "none", "staging", "production", "archived")
_CELL = re.compile(r"[^\s:,;=]+:[^\s:,;=]+")


class Stage(Section):
    """A stage, typed as `STAGE=VARIANT:SCHEME`, with further fields after semicolons: `int4=grpo:gptq;max_loss=0.1`."""

    stage: str = option(..., "name, an alias in the registry")
    cell: str = option(..., "the cell that may hold it, VARIANT:SCHEME")
    made_from: str | None = option(None, "earlier stage that its weights come from; default: the one before")
    gain_over: str | None = option(None, "earlier stage to beat by min_gain; default: the first, for full precision")
    loss_to: str | None = option(None, "earlier stage to lose less than max_loss to; default: made_from, if quantized")
    min_gain: float | None = option(None, "default: promote.min_gain", ge=-1, lt=1)
    max_loss: float | None = option(None, "default: promote.max_loss", gt=0, le=1)
    min_gain_kept: float | None = option(None, "default: promote.min_gain_kept, if trained and quantized", gt=0, le=1)
    mlflow: Literal["None", "Staging", "Production"] | None = option(
        None, "MLflow's stage; default: Production for the last, Staging for the one before it, None for the others"
    )

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.partition("=") for part in value.split(";")]
        if not all(key and equals and text for key, equals, text in parts):
            raise ValueError("must be STAGE=VARIANT:SCHEME, with further fields as in ;made_from=base;max_loss=0.1")
        (stage, _, cell), *further = parts
        return {"stage": stage, "cell": cell} | {key: text for key, _, text in further}

    @field_validator("stage")
    @classmethod
    def _is_name(cls, stage: str) -> str:
        if not _NAME.fullmatch(stage) or stage in _RESERVED:
            raise ValueError(
                "must begin with a lower-case letter, hold only those, digits and -, and not be a version number or a "
                "name that MLflow or a rollback uses"
            )
        return stage

    @field_validator("cell")
    @classmethod
    def _is_cell(cls, cell: str) -> str:
        if not _CELL.fullmatch(cell):
            raise ValueError("must be a variant and a scheme, such as qat-int4:rtn-int4")
        return cell

    @property
    def scheme(self) -> str:
        """How its weights are stored."""
        return self.cell.partition(":")[2]

    @property
    def can_keep_a_gain(self) -> bool:
        """Whether it holds a trained model that is quantized, so that a share of the gain is kept."""
        return self.scheme != names.FULL and self.cell.partition(":")[0] != names.BASE

    def __str__(self) -> str:
        further = self.model_dump(exclude_none=True, exclude={"stage", "cell"}).items()
        return ";".join([f"{self.stage}={self.cell}", *(f"{key}={value}" for key, value in further)])


def completed(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return stages with what their places say: what each was made from, is compared with, and mirrors in MLflow.

    Raises:
        ValueError: a name or a cell is repeated, the first stage is not the base in full precision, or a stage names
            one that is not before it.
    """
    base_cell = f"{names.BASE}:{names.FULL}"
    if stages and (stages[0].cell != base_cell or stages[0].made_from):
        raise ValueError(f"must begin with a stage of the base model itself, such as base={base_cell}")
    complete: list[Stage] = []
    for index, stage in enumerate(stages):
        earlier_names = [earlier.stage for earlier in complete]
        if stage.stage in earlier_names or stage.cell in [earlier.cell for earlier in complete]:
            raise ValueError(f"must name each stage and each cell once, but {stage.stage}={stage.cell} repeats one")
        for reference in (stage.made_from, stage.gain_over, stage.loss_to):
            if reference and reference not in earlier_names:
                raise ValueError(f"must name earlier stages, but {stage.stage} names {reference}")
        if stage.min_gain_kept is not None and not stage.can_keep_a_gain:
            raise ValueError(
                f"must set min_gain_kept at trained models that are quantized alone, but {stage.stage} is {stage.cell}"
            )
        defaults = _defaults(stage, earlier_names)
        defaults["mlflow"] = stage.mlflow or _mlflow_stage(index, len(stages))
        complete.append(stage.model_copy(update=defaults))
    return tuple(complete)


def _defaults(stage: Stage, earlier_names: list[str]) -> dict[str, str]:
    """Return what a stage was made from, and which one it must beat, or lose little to, by the stages before it."""
    if not earlier_names:
        return {}
    made_from = stage.made_from or earlier_names[-1]
    defaults = {"made_from": made_from}
    if stage.gain_over or stage.loss_to:
        return defaults
    if stage.scheme == names.FULL:
        defaults["gain_over"] = earlier_names[0]
    else:
        defaults["loss_to"] = made_from
    return defaults


def _mlflow_stage(index: int, count: int) -> str:
    """Return MLflow's stage of the stage at an index: the last is in production, the one before it in staging."""
    if index == 0:
        return "None"
    return {count - 1: "Production", count - 2: "Staging"}.get(index, "None")


DEFAULT = completed(tuple(Stage(stage=stage, cell=cell) for stage, cell in names.STAGE_CELL.items()))
