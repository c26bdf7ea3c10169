"""A key changes with everything that can change a result, and with nothing else."""

import json
import shutil
from pathlib import Path

import pytest

import qrl
from qrl import names, recipe
from qrl.quantize import settings as choices
from qrl.tracking import keys, sources

PACKAGE = Path(qrl.__file__).parent
STEPS = ("train", "merge", "quantize", "evaluate", "diagnose", "compare")


def test_a_key_changes_with_everything_that_matters_and_nothing_else(tmp_path, monkeypatch):
    tiny, longer = recipe.load("tiny"), recipe.load("tiny", {"train.steps": "17"})
    (tmp_path / "train.jsonl").write_text("{}")
    other_data = recipe.load("tiny", {"data": str(tmp_path)})
    made = [keys.trained(tiny, "a", "cpu") for _ in range(2)]
    made += [keys.trained(longer, "a", "cpu"), keys.trained(tiny, "b", "cpu"), keys.trained(tiny, "a", "cuda")]
    made += [keys.trained(other_data, "a", "cpu"), keys.trained(tiny, "a", "cpu", processes=2)]
    made += [keys.merged(tiny, "a", "b", "cpu"), keys.comparison(tiny, ["a"]), keys.comparison(tiny, ["b"])]
    made += [keys.cell(tiny, *cell, "d", "cpu") for cell in (("base", "full"), ("grpo", "full"), ("base", "nf4"))]
    vllm = recipe.load("tiny", {"evaluate.engine": "vllm"})
    made += [keys.cell(vllm, "base", "full", "d", device) for device in ("cpu", "cuda")]
    monkeypatch.setattr(sources, "digests", lambda step: {"train/grpo.py": "other"})
    made += [keys.trained(tiny, "a", "cpu")]
    assert len(set(made)) == len(made) - 1 and made[0] == made[1]


def test_a_changed_environment_file_changes_the_key(tmp_path, monkeypatch):
    before = evaluated()
    monkeypatch.setattr(keys, "VLLM", {"cpu": tmp_path / "conda.yaml"})
    for pins in ("dependencies: []", "dependencies: [vllm]"):
        (tmp_path / "conda.yaml").write_text(pins)
        before, former = evaluated(evaluate__engine="vllm"), before
        assert before != former


# settings


def trained(recipe_name: str = "tiny", teacher: str | None = None, **overrides: str) -> str:
    changed = {key.replace("__", "."): text for key, text in overrides.items()}
    return keys.trained(recipe.load(recipe_name, changed), "digest", "cpu", teacher=teacher)


def evaluated(**overrides: str) -> str:
    changed = {key.replace("__", "."): text for key, text in overrides.items()}
    return keys.cell(recipe.load("tiny", changed), "base", "full", "digest", "cpu")


def test_addresses_names_and_settings_of_other_steps_are_in_no_key():
    free = {
        "registered_name": "mine",
        "model": "elsewhere",
        "device": "cpu",
        "evaluate__n": "7",
        "promote__max_loss": "1",
    }
    assert trained() == trained(**free)
    assert evaluated() == evaluated(registered_name="mine", train__steps="3", benchmark__rounds="9")
    for setting in ({"task": "gsm8k"}, {"prompt": "boxed"}, {"seed": "1"}):
        assert trained() != trained(**setting) and evaluated() != evaluated(**setting)


def test_the_temperature_of_greedy_answers_is_in_no_key():
    assert evaluated() == evaluated(evaluate__temperature="0.5")
    sampled = evaluated(evaluate__samples="2")
    assert evaluated() != sampled != evaluated(evaluate__samples="2", evaluate__temperature="0.5")


def test_limits_of_health_are_in_the_key_of_a_result_and_not_of_its_answers():
    def answered(**overrides: str) -> str:
        own = recipe.load("tiny", {key.replace("__", "."): value for key, value in overrides.items()})
        return keys.answers(own, "base", "full", "digest", "cpu")

    judging = [name for name in recipe.Evaluate.model_fields if name.endswith("_rate")]
    assert len(judging) == 5
    for name in (*judging, "samples_logged"):
        changed = {f"evaluate__{name}": "1"}
        assert answered() == answered(**changed) and evaluated() != evaluated(**changed)
    assert len({answered(), answered(evaluate__n="7"), answered(seed="1"), evaluated()}) == 4
    own = [
        recipe.load("tiny", {"quantize.calibration": "rollouts", **more})
        for more in ({}, {"evaluate.min_eos_rate": "0"})
    ]
    assert len({keys.quantized(each, "gptq", "d", "cpu") for each in own}) == 1  # how a policy answers, no more


def test_the_memory_of_an_engine_that_answers_is_in_no_key():
    assert evaluated() == evaluated(evaluate__gpu_memory_utilization="0.5")
    assert evaluated() != evaluated(evaluate__batch_size="7")


def test_thresholds_that_only_warn_are_in_no_key_and_probes_always_are():
    for threshold in ({"watch__window": "9"}, {"watch__max_truncation": "0.1"}, {"watch__max_reference_kl": "0.1"}):
        assert trained() == trained(**threshold)
        assert trained(watch__stop="entropy") != trained(watch__stop="entropy", **threshold)
    assert len({trained(), trained(watch__stop="entropy"), trained(watch__probe_every="2")}) == 3


def test_how_chats_are_rendered_and_questions_selected_is_in_keys_unless_as_ever(tmp_path):
    (tmp_path / "own.yaml").write_text("user: 'Q: {question}'")
    as_ever = {"chat__template_kwargs": "{}", "train__selection": "random", "evaluate__selection": "random"}
    for made in (trained, evaluated):
        assert made(**as_ever) == made()
        assert len({made(), made(prompt=str(tmp_path / "own.yaml")), made(chat__template_kwargs="{a: 1}")}) == 3
    assert trained(train__selection="first") != trained() == trained(evaluate__selection="first")
    assert evaluated(evaluate__selection="first") != evaluated() == evaluated(train__selection="first")
    covered = recipe.load("tiny").key_settings("train", "evaluate", "quantize")
    assert not [key for key in covered if key.startswith("chat") or "selection" in key]  # as in stores made before
    own = recipe.load("tiny", {"prompt": str(tmp_path / "own.yaml")})
    (tmp_path / "moved.yaml").write_text("# elsewhere\nuser: 'Q: {question}'")
    assert keys.cell(own, "base", "full", "digest", "cpu") == evaluated(prompt=str(tmp_path / "moved.yaml"))
    thinking = recipe.load("tiny", {"chat.template_kwargs": "{a: 1}"})
    both = [keys.quantized(each, "nf4", "d", "cpu") for each in (thinking, recipe.load("tiny"))]
    assert both[0] != both[1]


def test_settings_of_an_engine_that_does_not_run_are_in_no_key():
    for setting in ({"rollout__sleep": "off"}, {"rollout__max_engine_kl": "0.5"}, {"rollout__is_correction": "none"}):
        assert trained() == trained(**setting)
    for name in recipe.Rollout.model_fields:
        assert (f"rollout.{name}" in recipe.load("tiny").key_settings("rollout")) is (name == "engine")


def test_where_a_server_listens_is_in_no_key():
    later = {
        "rollout.max_gap_growth": "9",
        "rollout.min_sequence_ess": "0.5",
        "rollout.adapter": "slot",
    }  # in no key while they have their defaults
    covered = recipe.load("tiny", {"rollout.engine": "vllm", **later}).key_settings("rollout")
    assert not set(later) & set(recipe.load("tiny", {"rollout.engine": "vllm"}).key_settings("rollout"))
    assert {f"rollout.{name}" for name in recipe.Rollout.model_fields} - set(covered) == {
        "rollout.server",
        "rollout.server_timeout_s",
        "rollout.server_group_port",
    }


def test_a_teacher_counts_by_its_digest_and_not_by_its_address():
    assert trained(teacher="a", train__teacher="one") == trained(teacher="a", train__teacher="other")
    assert trained(teacher="a", train__teacher="one") != trained(teacher="b", train__teacher="one")


def test_calibration_texts_of_training_count_by_their_content(tmp_path):
    plain = keys.trained(recipe.load("tiny"), "base", "cpu")
    found = set()
    for name, content in (("a.jsonl", "1"), ("b.jsonl", "1"), ("a.jsonl", "2")):
        (tmp_path / name).write_text(content)
        calibrated = recipe.load("tiny", {"train.qat_calibration": str(tmp_path / name)})
        found.add(keys.trained(calibrated, "base", "cpu"))
    assert len(found) == 2 and plain not in found


def test_a_format_of_a_file_counts_by_its_content(tmp_path):
    file, made = tmp_path / "own.yaml", []
    typed = {"train.qat": str(file), "quantize.format": str(file)}
    for content in ("a: 1", "a: 1", "a: 2"):
        file.write_text(content)
        own = recipe.load("tiny", typed)
        settings = choices.settings_of(names.RTN_FILE, own.quantize, 0)
        made.append(
            (keys.trained(own, "m", "cpu"), keys.quantized(own, names.RTN_FILE, "m", "cpu"), settings.digest(None))
        )
    assert made[0] == made[1] and not set(made[0]) & set(made[2])
    other = recipe.load("tiny", {"quantize.format": str(file)})
    assert keys.quantized(other, "nf4", "m", "cpu") == keys.quantized(recipe.load("tiny"), "nf4", "m", "cpu")


def test_a_seed_counts_in_quantization_where_calibration_has_none_of_its_own():
    def key(**typed):
        given = {name.replace("__", "."): value for name, value in typed.items()}
        return keys.quantized(recipe.load("tiny", given), "gptq", "m", "cpu")

    assert key(seed="1") != key(seed="2")
    assert (
        key(seed="1", quantize__calibration_seed="5") == key(seed="2", quantize__calibration_seed="5") == key(seed="5")
    )


def test_a_scheme_is_stored_alike_whichever_other_schemes_a_study_has():
    one, both = (recipe.load("tiny", {"quantize.schemes": schemes}) for schemes in ("nf4", "nf4,awq"))
    assert keys.quantized(one, "nf4", "digest", "cpu") == keys.quantized(both, "nf4", "digest", "cpu")
    assert "quantize.schemes" not in both.key_settings("quantize")


# sources


@pytest.fixture
def package(tmp_path):
    """A copy of the package that a test may change."""
    return shutil.copytree(PACKAGE, tmp_path / "qrl", ignore=shutil.ignore_patterns("__pycache__", "model"))


def digests(package: Path) -> dict[str, str]:
    return {step: sources.digests(step, package) for step in STEPS}


def change(file: Path, former: str, present: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert former in text, f"{file} has changed: choose another line"
    file.write_text(text.replace(former, present, 1), encoding="utf-8")


def test_a_copy_of_the_package_has_the_same_digests(package):
    assert digests(package) == digests(PACKAGE)


def test_comments_docstrings_layout_figures_and_markdown_change_no_key(package):
    before = digests(package)
    reward = package / "train" / "reward.py"
    change(reward, '"""', '"""Another beginning. ')  # the module's docstring
    change(reward, "\ndef ", "\n# a comment\n\n\n\ndef ")
    reward.write_text(reward.read_text() + "\n\n# the end\n")
    change(package / "train" / "README.md", "#", "# Another title:")
    change(package / "figures" / "canvas.py", "\nimport", "\nANOTHER = 1\nimport")
    change(package / "tracking" / "runs.py", "_SYSTEM_METRICS_EVERY_S = 5", "_SYSTEM_METRICS_EVERY_S = 6")
    assert digests(package) == before


@pytest.mark.process
@pytest.mark.parametrize(
    ("file", "steps"),
    [
        ("train/grpo.py", {"train", "merge"}),
        ("steps/train.py", {"train", "merge"}),
        ("quantize/settings.py", {"quantize"}),
        ("compare/outcomes.py", {"compare"}),
        ("diagnose/weights.py", {"diagnose"}),
        ("evaluate/cells.py", {"evaluate"}),
        ("names.py", set(STEPS)),
    ],
)
def test_a_changed_number_changes_the_keys_of_the_steps_that_it_can_change(package, file, steps):
    before = digests(package)
    path = package / file
    path.write_text(path.read_text(encoding="utf-8") + "\nADDED = 1\n", encoding="utf-8")
    added = digests(package)
    assert {step for step in STEPS if added[step] != before[step]} == steps
    change(path, "ADDED = 1", "ADDED = 2")
    assert {step for step, digest in digests(package).items() if digest != added[step]} == steps


def test_data_beside_a_source_counts_byte_by_byte(package):
    before = digests(package)
    (package / "train" / "template.jinja").write_text("{{ question }}")
    assert {step for step, digest in digests(package).items() if digest != before[step]} == {"train", "merge"}


@pytest.fixture
def small(tmp_path) -> Path:
    """A package with two sources."""
    package = tmp_path / "small"
    (package / "steps").mkdir(parents=True)
    (package / "steps" / "train.py").write_text("from qrl import names\n")
    (package / "names.py").write_text("NF4 = 'nf4'\n")
    return package


def cached(path: Path | None, package: Path, monkeypatch) -> dict[str, str]:
    """Return the digests of a training's sources as a process that finds this cache does."""
    with monkeypatch.context() as patch:
        cache = sources.Cache(path)
        patch.setattr(sources, "_cache", lambda: cache)
        return sources.digests("train", package)


def test_what_is_found_out_of_sources_is_kept_for_the_next_process(small, tmp_path, monkeypatch):
    path, expected = tmp_path / "cache" / "sources.json", sources.digests("train", small)
    assert set(expected) == {"steps/train.py", "names.py"}
    assert cached(path, small, monkeypatch) == expected and path.is_file()
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_parse", lambda source: pytest.fail("it is parsed again"))
        assert cached(path, small, monkeypatch) == expected
    change(small / "names.py", "'nf4'", "'nf5'")
    assert cached(path, small, monkeypatch)["names.py"] != expected["names.py"]


@pytest.mark.parametrize("text", ["", "[]", "3", '{"a": 3}', '{"a": []}', '{"a": ["digest"'])
def test_a_damaged_cache_is_none(small, text, tmp_path, monkeypatch):
    path = tmp_path / "sources.json"
    path.write_text(text)
    assert cached(path, small, monkeypatch) == sources.digests("train", small)
    assert len(json.loads(path.read_text())) == 2


@pytest.mark.parametrize("place", ["file/sources.json", None])
def test_where_nothing_can_be_written_sources_are_parsed_in_each_process(small, tmp_path, place, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    path = place and tmp_path / place
    assert cached(path, small, monkeypatch) == sources.digests("train", small)


def test_a_user_without_a_home_has_no_cache(small, monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as pathlib says of a container's unknown user

    expected = sources.digests("train", small)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "home", no_home)
        patch.delenv("XDG_CACHE_HOME", raising=False)
        sources._cache.cache_clear()
        assert sources.digests("train", small) == expected
    sources._cache.cache_clear()


def test_sources_are_found_through_late_imports_and_modules_named_in_strings():
    found = {file.relative_to(PACKAGE).as_posix() for file in sources.files("evaluate")}
    assert {"names.py", "evaluate/cells.py", "engine/vllm.py", "tasks/math/worker.py"} <= found
    assert not any(name.startswith(("train/", "tracking/", "cli", "figures")) or name.endswith(".md") for name in found)


def test_a_group_size_that_the_model_decides_counts_as_the_same_one_that_is_chosen():
    def key(scheme, size="auto", **resolved):
        given = recipe.load("tiny", {"quantize.group_size": str(size)})
        return keys.quantized(given, scheme, "digest", "cpu", **resolved)

    for scheme in ("awq", "gptq", "rtn-int4"):
        assert key(scheme) == key(scheme, group_size=128) == key(scheme, 128) == key(scheme, 128, group_size=64)
        assert key(scheme, group_size=64) == key(scheme, 64) != key(scheme)
    assert key("nf4", group_size=64) == key("nf4", 32) == key("nf4")


def test_a_group_size_counts_in_a_training_whose_format_has_groups():
    def key(qat, **resolved):
        return keys.trained(recipe.load("tiny", {"train.qat": qat}), "base", "cpu", **resolved)

    assert key("int4", group_size=128) == key("int4") != key("int4", group_size=64) != key("int4", group_size=32)
    assert key("int8", group_size=64) == key("int8") and key("none", group_size=64) == key("none")
