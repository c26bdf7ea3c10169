"""The registry, with the real MLflow on a store in a temporary folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlflow
import pandas as pd
import pytest

import qrl
from qrl import checkpoint, names, recipe, registry
from qrl.engine import hf
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.registry import versions
from qrl.steps import promote as promoting
from qrl.steps import serve as serving
from qrl.tracking import cells, contents, models, runs
from tests.registry.made import NAME, log_rows

ROOT = Path(qrl.__file__).parents[1]
WHY = {"run": "r", "reasons": ["it was better."], "bounds": {"gain": 0.1}}


def pointers() -> dict[str, str]:
    return {alias: str(number) for alias, number in mlflow.MlflowClient().get_registered_model(NAME).aliases.items()}


def mlflow_stages() -> dict[int, str]:
    return {int(mv.version): mv.current_stage for mv in mlflow.MlflowClient().search_model_versions(f"name = '{NAME}'")}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qrl-tiny", "qrl-tiny"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "qrl-qwen2.5-1.5b-instruct"),
        ("./runs/My Model (1)/", "qrl-my-model-1"),
    ],
)
def test_names_say_the_base_model(model, name):
    assert registry.registered_name(recipe.load(overrides={"model": model})) == name


def test_a_name_of_ones_own_is_taken_or_refused():
    assert registry.registered_name(recipe.load(overrides={"registered_name": "mine"})) == "mine"
    assert registry.registered_name(recipe.load(overrides={"registered_name": "Ваша модель 2.5"})) == "Ваша модель 2.5"
    for wrong in ("a/b", "a:b", " ", "..", "your's"):
        with pytest.raises(BadInput, match="registered_name"):
            registry.registered_name(recipe.load(overrides={"registered_name": wrong}))


def test_looking_where_no_store_is_makes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(BadInput, match=r"no store at .*MLFLOW_TRACKING_URI"):
        qrl.resolve("qrl-tiny", "awq")
    assert list(tmp_path.iterdir()) == []


def test_a_digest_is_registered_once(version):
    first, again, other = version(weights="a"), version(weights="a"), version(weights="b")
    assert (first.version, again.version, other.version) == (1, 1, 2)
    in_fp8 = version(scheme="full+kv-fp8", weights="a")  # the same weights, another cell
    assert (in_fp8.version, registry.resolve(NAME, 1).scheme) == (3, "full")
    resolved = registry.resolve(NAME, 1)
    assert resolved == first and resolved.tags["accuracy"] == "0.6000" and resolved.tags["n"] == "2000"
    entry = mlflow.MlflowClient().get_model_version(NAME, "1")
    assert "**0.600 ± 0.010**" in entry.description and "n = 2000" in entry.description
    assert entry.run_id and entry.source.startswith("models:/m-")


@pytest.mark.parametrize("stage", ["nope", "None", "Archived", "v3", "latest", "0", "-1", "", "base-previous-previous"])
def test_an_unknown_stage_is_refused_with_the_allowed_ones(version, stage):
    version()
    with pytest.raises(BadInput, match="base, grpo, awq, Staging, Production"):
        registry.resolve(NAME, stage)


@pytest.mark.parametrize("stage", ["base", "Production", "9", "grpo-previous"])
def test_a_stage_without_a_version_says_so(version, stage):
    version()
    with pytest.raises(BadInput, match=r"has no version|no other version"):
        registry.resolve(NAME, stage)


def test_stages_are_aliases_and_mlflow_mirrors_them(version):
    for number, stage in enumerate(names.STAGES, start=1):
        assert version(stage).version == number
        assert registry.promote(NAME, stage, number, record=WHY).version == number
    assert pointers() == {"base": "1", "grpo": "2", "awq": "3"}
    assert mlflow_stages() == {1: "None", 2: "Staging", 3: "Production"}
    asked = {
        stage: registry.resolve(NAME, stage).version
        for stage in ("base", "grpo", "awq", "Staging", "Production", "2", 3)
    }
    assert asked == {"base": 1, "grpo": 2, "awq": 3, "Staging": 2, "Production": 3, "2": 2, 3: 3}
    version = registry.resolve(NAME, "grpo")
    assert version.tags["qrl.gate.grpo"] == "passed"
    record = json.loads(version.tags["qrl.gate.grpo.record"])
    assert record.pop("time") and "@" in record.pop("by")
    assert record == {**WHY, "digest": version.digest, "number": 2}
    gate = version.gate("grpo")
    assert gate.passed and (gate.run, gate.reasons, gate.bounds) == ("r", ("it was better.",), {"gain": 0.1})


def test_promotion_remembers_what_was_and_rollback_returns_to_it(version):
    version(), version()
    with pytest.raises(BadInput, match="nothing to roll back to"):
        registry.rollback(NAME, "awq")
    for number in (1, 2, 2):  # the second time, nothing moves
        registry.promote(NAME, "awq", number, record=WHY)
        assert pointers().get("awq-previous") == (None if number == 1 else "1")
    assert mlflow_stages() == {1: "Archived", 2: "Production"}
    assert registry.rollback(NAME, "awq").version == 1
    assert pointers() == {"awq": "1", "awq-previous": "2"} and mlflow_stages() == {1: "Production", 2: "Archived"}
    assert registry.resolve(NAME, "awq-previous").version == 2


def test_a_refusal_moves_nothing_and_says_why(version):
    version(), version()
    registry.promote(NAME, "grpo", 1, record=WHY)
    for number in (1, 2):
        registry.refuse(NAME, "grpo", number, record={"reasons": ["the gain is not above 0"]})
    assert pointers() == {"grpo": "1"} and mlflow_stages() == {1: "Staging", 2: "None"}
    assert registry.resolve(NAME, "grpo").gate("grpo").passed
    other = registry.resolve(NAME, 2)
    assert other.tags["qrl.gate.grpo"] == "refused" and not other.gate("grpo").passed
    assert other.gate("grpo").reasons == ("the gain is not above 0",)
    assert "not above 0" in json.loads(registry.resolve(NAME, 1).tags["qrl.gate.grpo.refused"])["reasons"][0]


def test_a_decision_about_a_stage_that_moved_meanwhile_moves_nothing(version):
    version(), version()
    registry.promote(NAME, "base", 1, record=WHY, expected={"base": None})
    with pytest.raises(QrlError, match=r"base of .* moved to version 1"):
        registry.promote(NAME, "base", 2, record=WHY, expected={"base": None})
    with pytest.raises(QrlError, match=r"base of .* moved to version 1"):  # the version that grpo was compared with
        registry.promote(NAME, "grpo", 2, record=WHY, expected={"grpo": None, "base": 2})
    assert registry.promote(NAME, "base", 2, record=WHY, expected={"base": 1}).version == 2


@pytest.mark.parametrize(("stage", "number"), [("Staging", 1), ("None", 1), ("base", 7)])
def test_promotion_of_what_is_not_there_is_refused(version, stage, number):
    version()
    with pytest.raises(BadInput):
        registry.promote(NAME, stage, number, record=WHY)
    assert pointers() == {}


def test_what_is_served_is_what_was_measured(store, tiny_checkpoint):
    digest = checkpoint.digest(tiny_checkpoint)
    with runs.step("evaluate"):
        uri, stored = models.log_checkpoint(
            tiny_checkpoint, name="base", digest=digest, variant="base", scheme="full", task="arithmetic", move=False
        )
    numbers = {"accuracy": 0.6, "stderr": 0.01, "n": 2000}
    made = registry.register(NAME, uri, digest=digest, variant="base", scheme="full", **numbers)
    with pytest.raises(GateRefused, match="No gate let"):
        versions.verify(made)
    registry.refuse(NAME, "grpo", 1, record={"reasons": ["it was unhealthy."]})
    with pytest.raises(
        GateRefused, match=r"\(it was unhealthy\): `python -m qrl promote --stage grpo --cell RUN` decides"
    ):
        versions.verify(registry.resolve(NAME, 1))
    served = registry.promote(NAME, "base", 1, record=WHY)
    assert versions.verify(served) == versions.verify(registry.resolve(NAME, 1)) == stored
    mlflow.MlflowClient().set_model_version_tag(NAME, "1", names.TAG_DIGEST, "other")
    with pytest.raises(GateRefused, match="other weights"):
        versions.verify(registry.resolve(NAME, "base"))
    mlflow.MlflowClient().set_model_version_tag(NAME, "1", names.TAG_DIGEST, digest)
    (stored / checkpoint.TEMPLATES).mkdir()
    (stored / checkpoint.TEMPLATES / "default.jinja").write_text("another prompt")
    with pytest.raises(QrlError, match="have changed"):
        versions.verify(served)
    shutil.rmtree(stored / checkpoint.TEMPLATES)
    (stored / "more.safetensors").write_bytes((stored / "model.safetensors").read_bytes())
    with pytest.raises(BadInput, match="not part of the model"):
        versions.verify(served)
    (stored / "more.safetensors").unlink()
    for unsafe in ("modeling.py", "pytorch_model.bin"):
        (stored / unsafe).touch()
        with pytest.raises(BadInput, match=f"{unsafe} .* could run code"):
            versions.verify(served)
        (stored / unsafe).unlink()
    (stored / "generation_config.json").write_text("{}")
    with pytest.raises(QrlError, match="have changed"):
        versions.verify(served)
    (stored / "config.json").unlink()
    with pytest.raises(QrlError, match="holds no checkpoint"):
        versions.verify(served)
    assert registry.register(NAME, uri, digest=digest, variant="base", scheme="full", **numbers).version == 2


def promote_base(run_id: str, **typed: str) -> None:
    typed = {"registered_name": NAME, **typed}
    promoting.promote(recipe.load(overrides=typed), ["base"], [run_id], typed)


def test_a_gate_looks_at_the_files_and_not_at_their_tag(store, tiny_checkpoint, tmp_path):
    digest = checkpoint.digest(tiny_checkpoint)
    tags = {names.TAG_DIGEST: digest, names.TAG_VARIANT: "base", names.TAG_SCHEME: "full"}
    with runs.step("evaluate", tags=tags) as run:
        uri, stored = models.log_checkpoint(
            tiny_checkpoint, name="base", digest=digest, variant="base", scheme="full", task="arithmetic", move=False
        )
        contents.log_scores({names.ACCURACY: 0.6, names.ACCURACY_STDERR: 0.01, names.N: 2000}, model_uri=uri)
        log_rows(tmp_path, "base", "full", digest=digest)
    promote_base(run.info.run_id)
    assert pointers() == {"base": "1"}
    (stored / "generation_config.json").write_text('{"temperature": 0.5}')
    with pytest.raises(GateRefused, match="are not the version's"):
        promote_base(run.info.run_id)
    assert pointers() == {"base": "1"} and list(mlflow_stages()) == [1]
    with runs.step("evaluate", tags=tags) as again:
        uri, _ = models.log_checkpoint(
            tiny_checkpoint, name="base", digest=digest, variant="base", scheme="full", task="arithmetic", move=False
        )
        contents.log_scores({names.ACCURACY: 0.6, names.ACCURACY_STDERR: 0.01, names.N: 2000}, model_uri=uri)
        log_rows(tmp_path, "base", "full", digest=digest)
    promote_base(again.info.run_id)
    assert pointers() == {"base": "2", "base-previous": "1"}  # whole weights displace damaged ones


def test_an_evaluation_in_the_trash_earns_no_stage(evaluated):
    run_id, _ = evaluated("base:full")
    mlflow.delete_run(run_id)
    with pytest.raises(BadInput, match=f"deleted: restore it .* {run_id}"):
        promote_base(run_id)
    mlflow.MlflowClient().restore_run(run_id)
    promote_base(run_id)
    assert pointers() == {"base": "1"}


def newest() -> mlflow.entities.Run:
    return mlflow.search_runs(output_format="list", order_by=["attributes.start_time DESC"])[0]


def test_a_cell_knows_its_model_its_task_and_its_seed(evaluated, tmp_path):
    own, other = evaluated("base:full", seed="3"), evaluated("base:full", changed="second-model", seed="3")
    promoting.promote(recipe.load(), ["base"], [own[0]])
    assert registry.resolve("qrl-my-llama", "base").digest == own[1]
    params = newest().data.params
    assert (params["model"], params["seed"], params["registered"]) == (str(tmp_path / "my-llama"), "3", "qrl-my-llama")
    promote_base(own[0], model=str(tmp_path / "my-llama"), seed="3", registered_name="mine")
    assert registry.resolve("mine", "base").digest == own[1]
    for typed in ({"model": "qrl-tiny"}, {"task": "gsm8k"}, {"seed": "0"}, {"data": str(tmp_path)}):
        (tmp_path / "test.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n' * 20)
        with pytest.raises(BadInput, match=rf"--{next(iter(typed))} .* contradicts run {own[0]}"):
            promote_base(own[0], **typed)
    with pytest.raises(BadInput, match="several models, qrl-my-llama and qrl-second-model"):
        promoting.promote(recipe.load(), ["base", "grpo"], [own[0], other[0]])
    assert [model.name for model in mlflow.search_registered_models()] == ["mine", "qrl-my-llama"]


@pytest.mark.slow
def test_a_version_renders_chats_as_it_was_evaluated(evaluated, monkeypatch):
    monkeypatch.setattr(hf, "load", lambda path, *how: (None, hf.tokenizer(path)))
    off, name = '{"enable_thinking": false}', "qrl-my-llama"
    unlike = evaluated("base:full", **{"chat.template_kwargs": off})
    with pytest.raises(BadInput, match=f"rendered chats with chat.template_kwargs {off}, but .* stored .* with {{}}"):
        promoting.promote(recipe.load(), ["base"], [unlike[0]])
    assert not mlflow.search_registered_models()
    for chat, number in ((off, 1), ("{}", 2), (off, 1)):  # the same weights, rendered otherwise, are another version
        asked = evaluated("base:full", chat="" if chat == "{}" else chat, **{"chat.template_kwargs": chat})
        promoting.promote(recipe.load(), ["base"], [asked[0]])
        version = registry.resolve(name, "base")
        assert (version.version, json.dumps(version.chat), version.digest) == (number, chat, asked[1])
        described = mlflow.MlflowClient().get_model_version(name, str(number)).description
        assert ("chats rendered with `" in described) is (chat == off)
        settings = recipe.load(overrides={"registered_name": name, "device": "cpu"})
        _, served = serving.check_stage(settings, "base", host="127.0.0.1", port=0)
        assert served.chat == json.loads(chat)
        _, tokens = qrl.load(name, "base", device="cpu")
        assert tokens.chat_template.startswith("{% set enable_thinking = False +%}") is (chat == off)
    for tag, text in ((names.TAG_CHAT, "{}"), (names.TAG_SCHEME, f"full{names.KV_FP8}"), (names.TAG_CHAT, "[" * 5000)):
        before = mlflow.MlflowClient().get_model_version(name, "1").tags[tag]
        mlflow.MlflowClient().set_model_version_tag(name, "1", tag, text)  # its gate judged another rendering
        with pytest.raises(GateRefused, match="are not what its gate judged"):
            serving.check_stage(settings, "base", host="127.0.0.1", port=0)
        with pytest.raises(QrlError):
            _ = qrl.load(name, "base", device="cpu")
        mlflow.MlflowClient().set_model_version_tag(name, "1", tag, before)
    assert versions.verify(registry.resolve(name, "base"))


def test_a_cells_settings_are_the_resolved_ones_and_not_what_was_typed(evaluated, tmp_path, monkeypatch):
    (tmp_path / "own.yaml").write_text("user: 'Q: {question}'")
    opened = mlflow.MlflowClient().create_run("0").info.run_id
    mlflow.MlflowClient().log_param(opened, "prompt", "own.yaml")  # as `mlflow run -P prompt=own.yaml` does
    monkeypatch.setenv("MLFLOW_RUN_ID", opened)
    run_id, _ = evaluated("base:full", prompt=str(tmp_path / "own.yaml"))
    assert json.loads(cells.read(run_id).settings["prompt"]) == {"user": "Q: {question}"}
    promoting.promote(recipe.load(), ["base"], [run_id])
    with pytest.raises(BadInput, match="contradicts run"):
        promoting.promote(recipe.load(overrides={"prompt": "plain"}), ["base"], [run_id], {"prompt": "plain"})


@pytest.mark.slow
def test_a_trained_model_belongs_to_its_base_and_to_its_stage_alone(evaluated):
    base = evaluated("base:full")
    grpo = evaluated("grpo:full", parent=base[1], changed="a")
    nf4 = evaluated("grpo:nf4", parent=grpo[1], changed="b")
    awq = evaluated("grpo:awq", parent=grpo[1], changed="c")
    free = recipe.load(overrides={"promote.min_gain": "-0.9", "promote.max_loss": "1"})
    promoting.promote(free, ["base", "grpo"], [base[0], grpo[0]])
    for stage, wrong, wanted in (("awq", nf4, "grpo:awq"), ("grpo", awq, "grpo:full"), ("base", grpo, "base:full")):
        with pytest.raises(GateRefused, match=f"only {wanted} can hold the stage"):
            promoting.promote(free, [stage], [wrong[0]])
    relabelled = evaluated("base:full", parent=base[1], changed="a")
    with pytest.raises(GateRefused, match="not the base model itself"):
        promoting.promote(free, ["base"], [relabelled[0]])
    promoting.promote(free, ["awq"], [awq[0]])
    aliases = mlflow.MlflowClient().get_registered_model("qrl-my-llama").aliases
    assert aliases == {"base": 1, "grpo": 2, "awq": 4}


@pytest.mark.slow
def test_a_gate_asks_for_a_least_share_of_the_gain(evaluated):
    """Of a gain of 16 in 20 questions all is kept, which 20 questions show to be more than half and not 90 %."""
    base = evaluated("base:full", right=2)
    grpo = evaluated("grpo:full", parent=base[1], changed="a", right=17)
    awq = evaluated("grpo:awq", parent=grpo[1], changed="b", right=17)
    asked = recipe.load(overrides={"promote.max_loss": "1", "promote.min_gain_kept": "0.5"})
    promoting.promote(asked, ["base", "grpo"], [base[0], grpo[0]])
    with pytest.raises(GateRefused, match=r"At least 50 % of the gain must be kept, but .* evaluation of base:awq"):
        promoting.promote(asked, ["awq"], [awq[0]])
    assert "awq" not in pointers_of("qrl-my-llama")
    evaluated("base:awq", parent="another model's", changed="c", right=19)  # of another base: it does not count
    evaluated("base:awq", parent=base[1], changed="d", right=19, questions="of other questions")
    with pytest.raises(GateRefused, match="evaluation of base:awq"):
        promoting.promote(asked, ["awq"], [awq[0]])
    evaluated("base:awq", parent=base[1], changed="e", right=2, unhealthy="30 % unfinished")  # an outcome counts
    strict = recipe.load(overrides={"promote.max_loss": "1", "promote.min_gain_kept": "0.9"})
    with pytest.raises(GateRefused, match=r"It keeps 100 % \[\d+, \d+\] of the gain on n = 20 .* is below 90 %"):
        promoting.promote(strict, ["awq"], [awq[0]])
    promoting.promote(asked, ["awq"], [awq[0]])
    bounds = registry.resolve("qrl-my-llama", "awq").gate("awq").bounds
    assert bounds["gain_kept"] == 1 and 0.5 <= bounds["gain_kept_low"] < 0.9 and bounds["min_gain_kept"] == 0.5


def pointers_of(name: str) -> dict[str, str]:
    return mlflow.MlflowClient().get_registered_model(name).aliases


def test_the_growth_of_answers_is_paired_by_question_and_unknown_without_lengths(monkeypatch):
    lengths = [20 + i % 7 for i in range(60)]
    frame = pd.DataFrame({"question": [f"q{i:02}" for i in range(60)], "correct": [0, 1, 1] * 20, "n_tokens": lengths})
    longer = frame.assign(n_tokens=[length * 1.5 + i % 3 - 1 for i, length in enumerate(lengths)])
    rows = {"before": frame, "after": longer[::-1], "old": frame.drop(columns="n_tokens")}
    cell = cells.Evaluated("before", "grpo", "full", "", "", "", 0.6, 0.01, 4, ())
    monkeypatch.setattr(cells, "rows", lambda run_ids: rows[run_ids[0]])
    difference, growth = promoting._paired(replace(cell, run_id="after"), cell)
    assert difference.estimate == 0 and growth.estimate == pytest.approx(0.5) and 0.48 < growth.low < growth.high < 0.52
    assert promoting._paired(replace(cell, run_id="old"), cell)[1] is None


QAT = "base=base:full,qat=qat-int4:full,int4=qat-int4:rtn-int4"


@pytest.mark.slow
def test_a_studys_own_stages_are_promoted_resolved_listed_and_rolled_back(evaluated, version):
    base = evaluated("base:full")
    qat = evaluated("qat-int4:full", parent=base[1], changed="a")
    int4 = evaluated("qat-int4:rtn-int4", parent=qat[1], changed="b")
    grpo = evaluated("grpo:full", parent=base[1], changed="c")
    free = {"promote.min_gain": "-0.9", "promote.max_loss": "1"}
    own, name = recipe.load(overrides=free | {"promote.stages": QAT}), "qrl-my-llama"
    with pytest.raises(BadInput, match="no stage 'int4' to promote to: expected one of base, grpo, awq"):
        promoting.promote(recipe.load(), ["int4"], [int4[0]])
    promoting.promote(own, ["base", "qat", "int4"], [base[0], qat[0], int4[0]])
    at = {stage: registry.resolve(name, stage).digest for stage in ("base", "qat", "int4", "Staging", "Production")}
    assert at == dict(zip(at, (base[1], qat[1], int4[1], qat[1], int4[1]), strict=True))
    with pytest.raises(BadInput, match=r"no stage 'gold': expected one of base, qat, int4, Staging, .*int4-previous"):
        registry.resolve(name, "gold")
    with pytest.raises(BadInput, match=r"Stage grpo of .* has no version yet \(it has base, qat, int4;"):
        registry.resolve(name, "grpo")
    page = mlflow.MlflowClient().get_registered_model(name).description
    assert "**`int4`** (MLflow stage Production): the cell `qat-int4:rtn-int4`" in page and "`awq`" not in page
    assert "to `qat`" in mlflow.MlflowClient().get_model_version(name, "3").description
    promoting.promote(recipe.load(overrides=free), ["grpo"], [grpo[0]])  # the usual stages stay beside one's own
    assert registry.resolve(name, "Staging").digest == grpo[1] and registry.resolve(name, "int4").digest == int4[1]
    assert [each.stage for each in registry.resolve(name, 3).gates()] == ["int4"]
    again = evaluated("qat-int4:rtn-int4", parent=qat[1], changed="d")
    promoting.promote(recipe.load(overrides=free), ["int4"], [again[0]])  # without the recipe: the model knows it
    assert registry.resolve(name, "int4-previous").digest == int4[1] != registry.resolve(name, "int4").digest
    assert registry.rollback(name, "int4").digest == int4[1]
    other = recipe.load(overrides=free | {"promote.stages": "base=base:full,int4=grpo:full"})
    with pytest.raises(BadInput, match=r"int4 of .* is the cell qat-int4:rtn-int4, but this recipe declares grpo:full"):
        promoting.promote(other, ["int4"], [grpo[0]])


@pytest.mark.slow
def test_without_declared_stages_a_model_is_judged_by_its_own(evaluated):
    base = evaluated("base:full")
    grpo = evaluated("grpo:full", parent=base[1], changed="a")
    ct = evaluated("grpo:awq-ct", parent=grpo[1], changed="b")
    free = {"promote.min_gain": "-0.9", "promote.max_loss": "1"}
    own = recipe.load(overrides=free | {"promote.stages": "base=base:full,grpo=grpo:full,awq=grpo:awq-ct;max_loss=0.9"})
    promoting.promote(own, ["base", "grpo", "awq"], [base[0], grpo[0], ct[0]])
    plain = recipe.load(overrides=free)
    promoting.promote(plain, ["base", "awq"], [base[0], ct[0]])
    version = registry.resolve("qrl-my-llama", "awq")
    assert version.gate("awq").bounds["limit"] == 0.9


@pytest.mark.slow
def test_the_same_weights_with_another_cache_follow_their_own_stage(evaluated):
    base = evaluated("base:full")
    grpo = evaluated("grpo:full", parent=base[1], changed="a")
    cached = evaluated("grpo:full+kv-fp8", parent=base[1], changed="a")
    free = {"promote.min_gain": "-0.9", "promote.max_loss": "1"}
    stages = "base=base:full,grpo=grpo:full,kv=grpo:full+kv-fp8"
    own = recipe.load(overrides=free | {"promote.stages": stages})
    promoting.promote(own, ["base", "grpo", "kv"], [base[0], grpo[0], cached[0]])
    at = {stage: registry.resolve("qrl-my-llama", stage) for stage in ("grpo", "kv")}
    assert at["kv"].digest == at["grpo"].digest and at["kv"].version != at["grpo"].version


@pytest.mark.slow
def test_a_gate_of_ones_own_looks_at_cell_and_lineage_too(evaluated):
    base = evaluated("base:full")
    qat = evaluated("qat-int4:full", parent=base[1], changed="a")
    int4 = evaluated("qat-int4:rtn-int4", parent=qat[1], changed="b")
    stray = evaluated("qat-int4:rtn-int4", parent=base[1], changed="c")
    ptq = evaluated("grpo:rtn-int4", parent=qat[1], changed="d")
    free = {"promote.min_gain": "-0.9", "promote.max_loss": "1", "registered_name": NAME}
    own = recipe.load(overrides=free | {"promote.stages": QAT})
    promoting.promote(own, ["base", "qat"], [base[0], qat[0]])
    with pytest.raises(GateRefused, match="grpo:rtn-int4, but only qat-int4:rtn-int4"):
        promoting.promote(own, ["int4"], [ptq[0]])
    with pytest.raises(GateRefused, match="not from the version at stage qat"):
        promoting.promote(own, ["int4"], [stray[0]])
    skipping = recipe.load(overrides=free | {"promote.stages": "base=base:full,codes=qat-int4:rtn-int4"})
    promoting.promote(skipping, ["codes"], [int4[0]])  # the model between them is its own, in full precision
    with pytest.raises(GateRefused, match="not from the version at stage base"):
        promoting.promote(skipping, ["codes"], [evaluated("qat-int4:rtn-int4", parent=ptq[1], changed="e")[0]])


def test_the_base_as_a_candidate_for_grpo_is_refused_at_once_and_is_not_its_own_parent(evaluated):
    base = evaluated("base:full")
    own = recipe.load(overrides={"registered_name": NAME})
    promoting.promote(own, ["base"], [base[0]])
    with pytest.raises(GateRefused, match="base:full, but only grpo:full can hold the stage"):
        promoting.promote(own, ["grpo"], [base[0]])
    assert names.TAG_PARENT_VERSION not in registry.resolve(NAME, "base").tags


def test_a_gate_subtracts_no_answers_of_two_engines(store, tmp_path):
    def answered(variant: str, engine: str) -> cells.Evaluated:
        rows = pd.DataFrame({"question": ["a", "b", "c"], "correct": [0, 1, 1], names.ENGINE: engine}).assign(
            variant=variant, scheme="full"
        )
        rows.to_parquet(tmp_path / names.QUESTIONS)
        with runs.step("evaluate") as run:
            mlflow.log_artifact(str(tmp_path / names.QUESTIONS))
        return cells.Evaluated(run.info.run_id, variant, "full", "", "", "", 2 / 3, 0.3, 3, ())

    base = answered("base", "transformers")
    assert promoting._paired(answered("grpo", "transformers"), base)[0].estimate == 0
    with pytest.raises(BadInput, match="different engines"):
        promoting._paired(answered("grpo", "vllm"), base)


def test_a_stage_is_never_rolled_back_onto_damaged_weights(version):
    for variant in ("first", "second"):
        registry.promote(NAME, "grpo", version(variant).version, record=WHY)
    before = registry.resolve(NAME, "grpo-previous")
    (versions.folder(before) / checkpoint.WEIGHTS).write_text("rotten")
    with pytest.raises(QrlError, match="have changed"):
        registry.rollback(NAME, "grpo")
    assert pointers() == {"grpo": "2", "grpo-previous": "1"}


def judged(stage: str, number: int, verdict: str = "passed", **bounds: float) -> None:
    """Give version `number` the tags of a gate's decision, without a record that holds it."""
    client = mlflow.MlflowClient()
    digest = client.get_model_version(NAME, str(number)).tags[names.TAG_DIGEST]
    record = {"run": f"run-{stage}", "reasons": [f"Stage {stage} {verdict}."], "bounds": bounds}
    entry = json.dumps({**record, "digest": digest, "time": "2026-11-01T00:00:00+00:00"})
    client.set_model_version_tag(NAME, str(number), names.gate_record_tag(stage), entry)
    client.set_model_version_tag(NAME, str(number), names.gate_tag(stage), verdict)


def test_versions_without_a_record_are_served_rolled_back_and_promoted(version, capsys):
    client = mlflow.MlflowClient()
    for _ in range(4):
        version("grpo")
    for number, alias in ((1, "grpo-previous"), (2, "grpo"), (3, "awq"), (3, "champion")):
        client.set_registered_model_alias(NAME, alias, str(number))
    judged("grpo", 1), judged("grpo", 2, gain=0.2, gain_low=0.1, gain_high=0.3, n=2000.0), judged("awq", 1, "refused")
    former = registry.resolve(NAME, "grpo")
    assert "had no record of decisions" in capsys.readouterr().err
    assert former.version == 2 and versions.verify(former)
    gate = former.gate("grpo")
    assert gate.passed and (gate.run, gate.reasons) == ("run-grpo", ("Stage grpo passed.",))
    assert pointers() == {"grpo": "2", "grpo-previous": "1", "champion": "3"}  # no gate had let 3 into awq
    assert not registry.resolve(NAME, 1).gate("awq").passed
    assert registry.rollback(NAME, "grpo").version == 1 and registry.rollback(NAME, "grpo").version == 2
    registry.refuse(NAME, "grpo", 2, record={"reasons": ["it gained nothing."]})
    assert registry.resolve(NAME, "grpo").gate("grpo") == gate  # a refusal beside a former promotion
    registry.promote(NAME, "grpo", 2, record=WHY)
    assert registry.resolve(NAME, 2).tags["qrl.gate.grpo"] == "passed"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("qrl.gate.grpo", "{not json"),
        ("qrl.gate.grpo.record", "{not json"),
        ("qrl.gate.grpo.record", "[1, 2]"),
        ("qrl.gate.grpo.record", "[" * 5000),
        ("qrl.gate.grpo.record", '{"bounds": 3}'),
    ],
)
def test_a_malformed_tag_of_a_model_without_a_record_is_a_sentence(version, tag, text):
    version()
    client = mlflow.MlflowClient()
    client.set_model_version_tag(NAME, "1", "qrl.gate.grpo", "passed")
    client.set_model_version_tag(NAME, "1", tag, text)
    with pytest.raises(BadInput, match=f"tag {tag} of .* cannot be read"):
        registry.resolve(NAME, 1)


def test_a_versions_page_is_a_certificate(version):
    client = mlflow.MlflowClient()
    base = version("base")
    assert "not judged" in client.get_model_version(NAME, "1").description
    bounds = {"gain": 0.2, "gain_low": 0.1, "gain_high": 0.3, "gain_to": "base", "n": 2000.0}
    reasons = ("The evaluation was healthy.", "The gain over base is +0.200.")
    registry.promote(NAME, "base", base.version, record=WHY)
    child = version("grpo", parent=1)
    registry.promote(
        NAME, "grpo", child.version, record={"run": "r2", "reasons": reasons, "bounds": bounds, "study": "s1"}
    )
    page = client.get_model_version(NAME, "2").description
    assert page.startswith("grpo · full: passed gate `grpo`.")
    assert "0.600 ± 0.010" in page and "n = 2000" in page and "+0.200 [+0.100, +0.300] to `base`" in page
    assert all(f"\n- {reason}" in page for reason in reasons) and "`r2`, by study `s1`" in page
    assert child.digest in page and "Made from [version 1](#/models/qrl-tiny/versions/1)" in page
    assert f'qrl.load("{NAME}", 2)' in page and "-e serve" in page and "-P stage=2" in page
    assert "Parent of [version 2](#/models/qrl-tiny/versions/2)." in client.get_model_version(NAME, "1").description
    registry.refuse(NAME, "awq", 2, record={"reasons": ["It was made from {1234}."]})
    page = client.get_model_version(NAME, "2").description
    assert "passed gate `grpo`, refused by gate `awq`" in page and "- It was made from {1234}." in page
    assert all(0 < len(client.get_model_version(NAME, number).description) <= 5000 for number in ("1", "2"))


def test_a_refused_version_says_that_it_cannot_be_loaded(version):
    registry.refuse(NAME, "base", version().version, record={"reasons": ["it was unhealthy."]})
    page = mlflow.MlflowClient().get_model_version(NAME, "1").description
    assert "refused by gate `base`" in page and "qrl.load" not in page


def test_a_models_page_explains_its_stages_and_keeps_the_newest_table(version):
    client = mlflow.MlflowClient()
    stages = registry.stages_of(NAME).values()
    registry.publish(NAME, stages, "nothing is there to describe")
    version()
    registry.publish(NAME, stages)
    assert all(f"**`{stage}`**" in client.get_registered_model(NAME).description for stage in names.STAGES)
    registry.publish(NAME, stages, "## Did it survive?\n\n| scheme |\n| --- |\n| nf4 |\n")
    registry.publish(NAME, stages)  # a promotion outside of a study
    page = client.get_registered_model(NAME).description
    assert page.count("| nf4 |") == 1 and page.count("Newest table") == 1 and page.count("**`awq`**") == 1
    registry.publish(NAME, stages, "| nf4 |\n" * 5000)
    assert len(client.get_registered_model(NAME).description) <= 5000
    client.update_registered_model(NAME, "Mine.")
    registry.publish(NAME, stages, "| nf4 |")
    assert client.get_registered_model(NAME).description == "Mine."
