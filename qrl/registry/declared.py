"""Which stages a registered model has, and which of them MLflow's own stages show: what its tags say.

`qrl.stages` lists the stages that recipes declared, `qrl.mirror.<MLflow's stage>` names the one that is shown there. A
model of a former store has no such tags, and the stages base, grpo and awq.
"""

from collections.abc import Iterable
from contextlib import suppress

from mlflow import MlflowClient, MlflowException
from mlflow.entities.model_registry import RegisteredModel

from qrl import names
from qrl.errors import BadInput
from qrl.recipe.stages import DEFAULT, Stage
from qrl.tracking import store

USUAL = {stage.stage: stage for stage in DEFAULT}  # of every model, as soon as one is promoted
MIRRORED = ("Staging", "Production")


def known(name: str) -> dict[str, Stage]:
    """Return the stages of a registered model by name: those that were declared for it, or else base, grpo and awq."""
    return listed(model_of(name)) or dict(USUAL)


def check_declared(name: str, stages: Iterable[Stage]) -> None:
    """Raise BadInput if a stage of a recipe is a stage of this model already, but of another cell."""
    there = listed(model_of(name, make=True))
    for stage in stages:
        if (other := there.get(stage.stage)) and other.cell != stage.cell:
            taken = f"Stage {stage.stage} of '{name}' is the cell {other.cell}, but this recipe declares {stage.cell}"
            raise BadInput(f"{taken}: give the stage another name in promote.stages, or set registered_name.")


def declare(name: str, stage: Stage) -> None:
    """Write down which cell holds a stage, and that it is the one that its MLflow stage shows."""
    model = model_of(name)
    there = listed(model)
    if there != (now := there | {stage.stage: stage}) or (model and names.TAG_STAGES not in model.tags):
        MlflowClient().set_registered_model_tag(name, names.TAG_STAGES, ",".join(map(str, now.values())))
    if stage.mlflow in MIRRORED and mirrors(model)[stage.mlflow] != stage.stage:
        MlflowClient().set_registered_model_tag(name, names.TAG_MIRROR + stage.mlflow, stage.stage)


def model_of(name: str, *, make: bool = False) -> RegisteredModel | None:
    """Return a registered model as MLflow has it, with its tags and aliases; None if there is none of this name.

    With `make`, a model that a server denies is made if it can be: a server that gives no right by default denies what
    does not exist, too, and only whoever makes a model has rights on it.
    """
    try:
        return MlflowClient().get_registered_model(name)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        denied = store.sentence(error)
        if make and denied:
            with suppress(MlflowException):
                return MlflowClient().create_registered_model(name)
        raise denied or error from None


def listed(model: RegisteredModel | None) -> dict[str, Stage]:
    """Return the stages that a model's tag lists, and the usual ones that it has had without a tag."""
    if model is None:
        return {}
    texts = [text for text in model.tags.get(names.TAG_STAGES, "").split(",") if text]
    had = {stage: usual for stage, usual in USUAL.items() if stage in model.aliases}
    return had | {stage.stage: stage for stage in map(Stage.model_validate, texts)}


def mirrors(model: RegisteredModel | None) -> dict[str, str]:
    """Return MLflow's stage → the stage of ours that it shows."""
    usual = {stage.mlflow: stage.stage for stage in DEFAULT}
    tags = model.tags if model else {}
    return {mirrored: tags.get(names.TAG_MIRROR + mirrored, usual[mirrored]) for mirrored in MIRRORED}
