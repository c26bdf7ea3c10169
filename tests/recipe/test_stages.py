"""Stages of a recipe: what is typed, what their places say, what is refused, and what a study promotes by them."""

from types import SimpleNamespace

import pytest
import yaml

from qrl import names, recipe, registry
from qrl.errors import BadInput
from qrl.recipe.stages import DEFAULT
from qrl.registry import pointers
from qrl.study.pipeline import StudySteps

OWN = "base=base:full,qat=qat-int4:full,int4=qat-int4:rtn-int4;max_loss=0.1;mlflow=None"
DISTILLED = [name for name in recipe.names() if name.startswith(("qat-", "qad-"))]


def test_without_a_word_there_are_base_grpo_and_awq():
    declared = recipe.load("tiny").promote.declared
    assert declared == DEFAULT and {stage.stage: stage.cell for stage in declared} == names.STAGE_CELL
    asked = [(stage.made_from, stage.gain_over, stage.loss_to, stage.mlflow) for stage in declared]
    assert asked == [
        (None, None, None, "None"),
        ("base", "base", None, "Staging"),
        ("grpo", None, "grpo", "Production"),
    ]


def test_stages_are_typed_written_and_logged_alike(tmp_path):
    typed = recipe.load("tiny", {"promote.stages": OWN})
    assert typed.flat()["promote.stages"] == OWN and recipe.load("tiny", typed.flat()) == typed
    (tmp_path / "typed.yaml").write_text(f"extends: tiny\npromote: {{stages: '{OWN}'}}\n")
    fields = [stage.model_dump(exclude_none=True) for stage in typed.promote.stages]
    (tmp_path / "fields.yaml").write_text(yaml.safe_dump({"extends": "tiny", "promote": {"stages": fields}}))
    (tmp_path / "whole.yaml").write_text(typed.dump())
    for file in ("typed", "fields", "whole"):
        assert recipe.load(str(tmp_path / f"{file}.yaml")) == typed
    last = typed.promote.declared[-1]
    assert (last.made_from, last.loss_to, last.max_loss, last.mlflow) == ("qat", "qat", 0.1, "None")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("base", "must be STAGE=VARIANT:SCHEME"),
        ("grpo=grpo:full", "must begin with a stage of the base model itself, such as base=base:full"),
        ("base=base:full,v3=grpo:full", "lower-case letter"),
        ("base=base:full,latest=grpo:full", "lower-case letter"),
        ("base=base:full,grpo-previous=grpo:full", "lower-case letter"),
        ("base=base:full,Production=grpo:full", "lower-case letter"),
        ("base=base:full,a=grpo", "a variant and a scheme"),
        ("base=base:full,a=grpo:full;made_from=b", "earlier stages, but a names b"),
        ("base=base:full,a=grpo:full,b=grpo:full", "b=grpo:full repeats one"),
        ("base=base:full,a=grpo:full;max_loss=x", "max_loss' is 'x'"),
        ("base=base:full,a=grpo:full;colour=red", "not a key"),
        ("base=base:full,a=grpo:nf4;min_gain_kept=0", "min_gain_kept' is '0', but must be greater than 0"),
        ("base=base:full,a=grpo:nf4;min_gain_kept=1.1", "min_gain_kept' is '1.1', but must be less than or equal to 1"),
        ("base=base:full,a=grpo:full;min_gain_kept=0.8", "quantized alone, but a is grpo:full"),
        ("base=base:full,a=base:nf4;min_gain_kept=0.8", "quantized alone, but a is base:nf4"),
    ],
)
def test_what_cannot_be_a_stage_is_refused_in_a_sentence(text, says):
    with pytest.raises(BadInput, match=says) as error:
        recipe.load("tiny", {"promote.stages": text})
    assert "\n" not in str(error.value)


def test_a_least_share_of_the_gain_is_asked_of_stages_that_can_keep_one():
    assert recipe.load("tiny").promote.min_gain_kept is None
    text = "base=base:full,int4=grpo:gptq;min_gain_kept=0.9"
    typed = recipe.load("tiny", {"promote.min_gain_kept": "0.8", "promote.stages": text})
    assert typed.flat()["promote.stages"] == text and typed.promote.declared[-1].min_gain_kept == 0.9
    asked = [stage.can_keep_a_gain for stage in recipe.load("tiny", {"promote.min_gain_kept": "0.8"}).promote.declared]
    assert asked == [False, False, True]
    for share in ("0", "1.5"):
        with pytest.raises(BadInput, match=r"promote.min_gain_kept' is '.*', but must be (greater|less) than"):
            recipe.load("tiny", {"promote.min_gain_kept": share})
    without = {"promote.min_gain_kept": "0.8", "promote.stages": "base=base:full,grpo=grpo:full"}
    with pytest.raises(BadInput, match=r"promote.stages' is .* must hold a trained model that is quantized"):
        recipe.load("tiny", without)


def test_no_cache_key_depends_on_stages():
    assert "promote.stages" not in recipe.load("tiny").key_settings("train", "quantize", "evaluate", "compare")


@pytest.mark.parametrize("name", DISTILLED)
def test_recipes_with_quantized_training_declare_the_stages_of_their_cells(name):
    settings = recipe.load(name)
    made = {f"{names.BASE}:{names.FULL}", f"{settings.train.variant}:{names.FULL}"}
    made |= {f"{settings.train.variant}:{scheme}" for scheme in settings.quantize.schemes}
    assert {stage.cell for stage in settings.promote.declared} == made


def test_stages_of_all_shipped_recipes_fit_one_registered_model():
    cells: dict[str, str] = {}
    for name in recipe.names():
        for stage in recipe.load(name).promote.declared:
            assert cells.setdefault(stage.stage, stage.cell) == stage.cell, name


def test_a_study_promotes_its_own_stages_and_leaves_those_without_a_cell():
    launched = []
    launcher = SimpleNamespace(promote=lambda *words: launched.append(words))
    settings = recipe.load("qat-int4")
    cells = {stage.cell: SimpleNamespace(run_id=stage.stage * 2) for stage in settings.promote.declared}
    steps = StudySteps(settings, launcher, "cpu")
    assert steps.promote(cells) == "int4"
    title, options = launched[0]
    assert title == "base → qat-int4 → int4"
    assert options["cell"] == "basebase,qat-int4qat-int4,int4int4"
    del cells["qat-int4:rtn-int4"]
    assert steps.promote(cells) == "qat-int4"
    assert launched[1][0].endswith("; int4 is unchanged: no cell qat-int4:rtn-int4")


@pytest.mark.parametrize("name", [name for name in DISTILLED if name.startswith("qad-")])
def test_distilled_weights_need_not_beat_the_base_that_is_their_teacher(name):
    first, *others = recipe.load(name).promote.declared
    assert [(stage.made_from, stage.loss_to, stage.gain_over) for stage in others] == [
        ("base", "base", None),
        (others[0].stage, "base", None),
    ]
    assert first.stage == "base"


def test_a_stage_keeps_its_cell(store):
    import mlflow

    mlflow.MlflowClient().create_registered_model("qrl-tiny")
    declared = "int4=grpo:gptq;max_loss=0.1"
    decision = {"action": "promote", "stage": "int4", "version": 1, "declared": declared}
    pointers.append("qrl-tiny", lambda _history: decision)
    assert registry.stages_of("qrl-tiny")["int4"].max_loss == 0.1
    with pytest.raises(BadInput, match="'qrl-tiny' is the cell grpo:gptq, but this recipe declares qat-int4:rtn-int4"):
        registry.check_stages("qrl-tiny", recipe.load("qat-int4").promote.declared)
    registry.check_stages("other", recipe.load("qat-int4").promote.declared)
