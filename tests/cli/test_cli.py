"""The command line: bad input gets a sentence and exit code 2, and leaves no run behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qrl
from qrl import cli, tasks, tiny
from qrl.cli import ending
from qrl.errors import BadInput

ROOT = Path(qrl.__file__).parents[1]
ROW = {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}


def run(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "qrl", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def here(monkeypatch, capsys):
    """Run a command in this process, whose signals and libraries keep their settings; exit code and stderr."""
    monkeypatch.setattr(ending.process, "prepare_process", lambda: None)
    monkeypatch.setattr(ending.signals, "guard", lambda **_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def command(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        return ended.value.code, capsys.readouterr().err

    return command


@pytest.fixture
def broken(tmp_path) -> dict[str, str]:
    """Make folders with one defect each, and return them by name."""
    folders = {}
    for name in ("no-weights", "truncated", "no-template", "python", "not-jsonl", "no-answer", "one-row"):
        folder = tmp_path / name
        shutil.copytree(tiny.PATH, folder)
        folders[name] = str(folder)
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    whole = (tmp_path / "truncated" / "model.safetensors").read_bytes()
    (tmp_path / "truncated" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    settings = tmp_path / "no-template" / "tokenizer_config.json"
    settings.write_text(
        json.dumps({key: value for key, value in json.loads(settings.read_text()).items() if key != "chat_template"})
    )
    (tmp_path / "no-template" / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "python" / "modeling.py").write_text("raise SystemExit('executed')")
    for name, line in (("not-jsonl", "not json"), ("no-answer", '{"question": "1 + 1?"}')):
        for split in ("train", "test"):
            (tmp_path / name / f"{split}.jsonl").write_text(json.dumps(ROW) + "\n" + line + "\n")
    for split in ("train", "test"):
        (tmp_path / "one-row" / f"{split}.jsonl").write_text(json.dumps(ROW | {"question": split}) + "\n")
    return folders


BAD = {
    "unknown step": (["trian"], "No such command"),
    "no step": ([], "Commands:\n  study"),
    "a model whose name no folder can have": (["train", "--model", "a" * 5000], "longer than a path may be"),
    "a recipe whose name no file can have": (["train", "--recipe", "a" * 5000 + ".yaml"], "longer than a path may be"),
    "a flag as -P rank=true arrives": (
        ["compare", "--rank", "true", "--counts", "a.json", "--out", "out"],
        "not --counts",
    ),
    "unknown option": (["train", "--train.stpes", "3"], "--train.stpes"),
    "wrong type": (["train", "--train.steps", "banana"], "'train.steps' is 'banana'"),
    "out of range": (["train", "--train.temperature", "0"], "'train.temperature'"),
    "a scheme twice": (["study", "--quantize.schemes", "nf4,nf4"], "each once"),
    "no scheme": (["study", "--quantize.schemes", ","], "names nothing"),
    "a name that only the last step needs": (
        ["study", "--registered_name", "a/b", "--quantize.schemes", "nf4"],
        "registered_name is 'a/b'",
    ),
    "a prompt file that is not there": (["evaluate", "--prompt", "own.yaml"], "/store/own.yaml: expected a YAML file"),
    "a prompt file whose name no file can have": (
        ["train", "--prompt", "a" * 5000 + ".yaml"],
        "longer than a path may be",
    ),
    "a prompt of another task": (
        ["study", "--prompt", "{{user: '{{question}}', tasks: [math]}}", "--quantize.schemes", "nf4"],
        "is for math, as its `tasks` say, but the task is arithmetic",
    ),
    "a variable that the chat template lacks": (
        ["evaluate", "--chat.template_kwargs", '{{"enable_thinking": false}}'],
        "sets 'enable_thinking', but this is no variable of the model's chat template",
    ),
    "the first of generated questions": (["train", "--train.selection", "first"], "has no first rows"),
    "a server that renders otherwise": (
        ["serve", "--stage", "awq", "--chat.template_kwargs", "{{a: 1}}"],
        "serve renders chats as the version was evaluated",
    ),
    "unknown recipe": (["study", "--recipe", "tinny"], "no recipe 'tinny'"),
    "unknown scheme": (["quantize", "--scheme", "gguf"], "no scheme 'gguf'"),
    "one scheme named twice": (["quantize", "--scheme", "nf4,int8,nf4"], "repeats a scheme"),
    "schemes of two environments at once": (
        ["quantize", "--scheme", "nf4,awq,int8"],
        "nf4,int8 and awq need different",
    ),
    "awq of no model, in whatever environment": (
        ["quantize", "--scheme", "awq", "--models", "base=no/such/folder"],
        "no model 'no/such/folder'",
    ),
    "awq where nobody builds its environment": (
        ["quantize", "--scheme", "awq"],
        "mlflow run . -e quantize … --env-manager uv",
    ),
    "a study with awq where nobody builds its environment": (
        ["study", "--device", "cpu"],
        "mlflow run . -e main … --env-manager uv",
    ),
    "a sweep with awq where nobody builds its environment": (
        ["sweep", "--device", "cpu"],
        "mlflow run . -e sweep … --env-manager uv",
    ),
    "eight bits of a scheme that has four": (
        ["quantize", "--scheme", "nf4", "--quantize.bits", "8"],
        "quantize.bits = 8",
    ),
    "a study that no scheme of heeds a choice": (
        ["study", "--quantize.schemes", "nf4,int8", "--quantize.group_size", "64"],
        "nf4, int8",
    ),
    "a cell beside a rollback": (["promote", "--stage", "grpo", "--rollback", "--cell", "0123"], "takes no --cell"),
    "a sweep of no arm": (["sweep", "--arms", ","], "names nothing"),
    "an answering engine where nobody builds its environment": (
        ["evaluate", "--evaluate.engine", "vllm", "--device", "cpu"],
        "projects/vllm_cpu, but",
    ),
    "unknown scheme of a cell": (["evaluate", "--cells", "base:gguf=qrl-tiny"], "no scheme 'gguf'"),
    "variant that is a path": (["evaluate", "--cells", "../x:full=qrl-tiny"], "no name for a variant"),
    "variant without a name": (["quantize", "--models", "a/b=qrl-tiny"], "no name for a variant"),
    "no cell between commas": (["evaluate", "--cells", ","], "names nothing"),
    "model that the store lacks": (["evaluate", "--cells", "base:full=models:/m-none"], "no model 'models:/m-none'"),
    "version that the store lacks": (["diagnose", "--trained", "models:/qrl-tiny/7"], "no model 'models:/qrl-tiny/7'"),
    "adapter that the store lacks": (["merge", "--adapter", "runs:/0123/adapter"], "no run '0123'"),
    "cells between commas and spaces": (["compare", "--cells", " , 0123 ,"], "no run '0123'"),
    "no cells to compare": (["compare", "--cells", ","], "--cells is ',', which names nothing"),
    "no stage to promote to": (["promote", "--stage", " ", "--cell", "0123"], "--stage is ' ', which names nothing"),
    "cells that the store lacks": (["compare", "--cells", "0123,4567"], "no run '0123'"),
    "full precision as quantized": (
        ["diagnose", "--trained", "qrl-tiny", "--quantized", "grpo:nf4=qrl-tiny", "--out", "out"],
        "full-precision checkpoint, but a quantized one",
    ),
    "cell of no scheme": (
        ["diagnose", "--trained", "qrl-tiny", "--quantized", "grpo:full=qrl-tiny", "--out", "out"],
        "no quantized cell of the two",
    ),
    "folder that cannot be made": (["diagnose", "--trained", "qrl-tiny", "--out", "/proc/none"], "/proc/none"),
    "no file to grade": (["grade", "--task", "gsm8k", "--out", "out.jsonl"], "--file"),
    "wrong label of a cell": (["evaluate", "--cells", "base:nf4=qrl-tiny"], "stored as full precision"),
    "unknown task": (["evaluate", "--task", "trivia"], "'task' is 'trivia'"),
    "unknown template": (["train", "--prompt", "shout"], "no prompt template 'shout'"),
    "unknown stage": (["serve", "--stage", "gold"], "no stage 'gold'"),
    "unknown stage to promote to": (["promote", "--stage", "gold", "--cell", "x"], "no stage 'gold'"),
    "stage without a version": (["serve", "--stage", "awq"], "has no version yet"),
    "no such run": (["promote", "--stage", "base", "--cell", "0123"], "no run '0123'"),
    "a setting without effect, reported before anything else": (
        ["evaluate", "--evaluate.temperature", "0.7", "--model", "no/such/folder"],
        "evaluate.temperature = 0.7 means nothing",
    ),
    "no such model": (["train", "--model", "no/such/folder"], "no model 'no/such/folder'"),
    "no weights": (["train", "--model", "{no-weights}"], "neither model.safetensors nor"),
    "truncated weights": (["evaluate", "--model", "{truncated}"], "truncated"),
    "no chat template": (["train", "--model", "{no-template}"], "without a chat template"),
    "code in a checkpoint": (["evaluate", "--model", "{python}"], "modeling.py"),
    "data that is not JSONL": (["evaluate", "--data", "{not-jsonl}"], "line 2"),
    "data without answers": (["train", "--data", "{no-answer}"], "line 2"),
    "one held-out question": (["evaluate", "--data", "{one-row}"], "supports no error bar"),
    "one held-out question, before any training": (
        ["train", "--data", "{one-row}", "--train.prompts_per_step", "1", "--train.micro_batch", "8"],
        "supports no error bar",
    ),
    "no such data": (["train", "--data", "/no/such/folder"], "no data folder"),
    "batch that does not divide": (["train", "--train.micro_batch", "7"], "does not divide"),
    "adapter keys with all weights": (["train", "--train.lora_rank", "8"], "train.method = full"),
    "a packed base with all weights": (["train", "--train.base_storage", "nf4"], "too few bits"),
    "no such target": (
        ["train", "--train.method", "qlora", "--train.lora_targets", "qkv"],
        "which is no linear of the model",
    ),
    "targets that name nothing": (["train", "--train.method", "lora", "--train.lora_targets", ","], "names nothing"),
    "a rollout setting that nothing heeds": (["train", "--rollout.kv_cache", "fp8"], "rollout.kv_cache = fp8"),
    "a watcher named twice": (["train", "--watch.stop", "signal,signal"], "each watcher once"),
    "two inputs to compare": (["compare", "--counts", "a.json", "--cells", "b"], "one of"),
    "no file to compare": (["compare", "--questions", "none.csv", "--out", "out"], "none.csv"),
    "no number of seconds": (
        ["serve", "--stage", "awq", "--engine", "vllm", "--follow", "nan"],
        "nan is not a finite number",
    ),
    "no share of a memory": (
        ["serve", "--stage", "awq", "--gpu-memory-utilization", "nan"],
        "nan is not a finite number",
    ),
    "port out of range": (["serve", "--stage", "awq", "--port", "99999"], "--port"),
}


AS_A_PROCESS = {
    "no step",
    "unknown option",
    "truncated weights",
    "awq where nobody builds its environment",
    "cells that the store lacks",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_sentence_and_exit_code_2_and_no_run(case, broken, store, here):
    words, says = BAD[case]
    code, stderr = here(*(word.format(**broken) for word in words))
    assert code == 2 and says in stderr, stderr
    import mlflow

    assert mlflow.MlflowClient().search_runs(["0"]) == []


@pytest.mark.process
@pytest.mark.parametrize("case", sorted(AS_A_PROCESS))
def test_bad_input_of_a_process_gets_no_traceback(case, broken, store):
    words, says = BAD[case]
    done = run(*(word.format(**broken) for word in words), cwd=Path.cwd())
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    import mlflow

    assert mlflow.MlflowClient().search_runs(["0"]) == []


@pytest.mark.parametrize(
    "words",
    [
        ["quantize", "--scheme", "gguf"],
        ["quantize", "--scheme", "nf4"],
        ["study", "--device", "cpu"],
        ["train", "--model", "nope"],
    ],
)
def test_a_run_id_left_in_the_environment_hides_no_sentence(words, store, here, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0123456789abcdef")
    code, stderr = here(*words)
    assert code == 2 and "qrl: " in stderr and "0123456789abcdef" in stderr, stderr


def test_a_python_without_the_projects_packages_gets_a_sentence():
    words = [sys.executable, "-S", "-m", "qrl", "train", "--help"]  # -S: without site-packages
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("qrl: The package 'psutil' is not installed for "), done
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_was_deleted_is_bad_input(tmp_path, here, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, said = here("recipes")
    assert code == 2 and "current folder was deleted" in said


def test_cuda_on_a_machine_without_one_is_bad_input(store, here):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code, stderr = here("evaluate", "--device", "cuda")
    assert code == 2 and "no GPU" in stderr


@pytest.mark.process
def test_a_read_only_store_is_refused_before_the_work(tmp_path):
    if os.geteuid() == 0:
        uri = "sqlite:////proc/qrl/mlflow.db"  # root writes anywhere but here
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        uri = f"sqlite:///{tmp_path}/locked/mlflow.db"
    done = run("evaluate", cwd=tmp_path, MLFLOW_TRACKING_URI=uri)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.process
def test_a_full_disk_gets_a_sentence_whichever_library_meets_it(tmp_path):
    """The error of safetensors is no OSError, and no tracking URI moves the folder of work in progress."""
    lines = [
        "import resource, numpy, pathlib, safetensors.numpy",
        "from qrl.tracking import store_errors",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))",
        "def rust(): safetensors.numpy.save_file({'a': numpy.zeros(9999)}, 'a.safetensors')",
        "def plain(): pathlib.Path('.qrl').write_bytes(bytes(9999))",
        "for write in (rust, plain):",
        "    try: write()",
        "    except Exception as error: print(type(error).__name__, store_errors.explain(error))",
        "print(store_errors.explain(OSError(28, 'No space left on device', '.qrl/train-0')))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    rust, plain, work = done.stdout.splitlines()
    assert rust.startswith("SafetensorError Nothing can be written (File too large): raise `ulimit -f`"), done.stdout
    assert plain.startswith("OSError Nothing can be written (File too large)"), done.stdout
    assert work.endswith("start qrl from a folder on another disk."), done.stdout


@pytest.mark.process
def test_counts_of_the_seed_study_give_its_deltas_and_no_verdict(tmp_path):
    counts = {"n": 100, "base": {"full": 68, "nf4": 65, "awq": 58}, "grpo": {"full": 72, "nf4": 68, "awq": 67}}
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    done = run("compare", "--counts", "counts.json", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    deltas = [table[scheme]["delta"]["estimate"] for scheme in ("full", "nf4", "awq")]
    assert deltas == pytest.approx([0.04, 0.03, 0.09])
    assert [table[scheme]["gain_survival"]["estimate"] for scheme in ("nf4", "awq")] == pytest.approx([-0.01, 0.05])
    assert {table[scheme]["verdict"] for scheme in ("nf4", "awq")} == {"inconclusive"}
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
@pytest.mark.process
def test_a_terminal_that_knows_no_minus_sign_still_gets_the_table(tmp_path):
    (tmp_path / "counts.json").write_text(
        '{"n": 100, "base": {"full": 68, "nf4": 65}, "grpo": {"full": 72, "nf4": 68}}'
    )
    words = [sys.executable, "-m", "qrl", "compare", "--counts", "counts.json", "--out", "out"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, encoding="latin-1", check=False)
    assert done.returncode == 0 and r"\u22120.010 [\u22120.192, +0.172]" in done.stdout, done.stderr


@pytest.mark.process
def test_grade_adds_verdicts_to_rows(tmp_path):
    rows = [{"completion": "so\n#### 1,000", "answer": "1000", "id": 7}, {"completion": "about 18", "answer": "18"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(
        "grade", "--task", "gsm8k", "--file", "in.jsonl", "--out", "out.jsonl", cwd=tmp_path
    )  # as -P file= arrives
    assert done.returncode == 0 and "n = 2" in done.stdout, done.stderr
    graded = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["strict"], row["flexible"]) for row in graded] == [(True, True), (False, True)]
    assert graded[0]["id"] == 7 and graded[1]["parsed"] is None


@pytest.mark.slow
@pytest.mark.process
def test_grade_of_math_judges_boxes_and_tells_what_it_could_not(tmp_path):
    answers = [r"\boxed{\frac{2}{12}}", r"\boxed{10^{10^{10}}}", "\ud800 1/6", r"\boxed{7}"]
    rows = [{"completion": completion, "answer": r"\frac{1}{6}"} for completion in answers]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("grade", "--task", "math", "in.jsonl", "--out", "out.jsonl", cwd=tmp_path)
    assert done.returncode == 1 and "on 1 of 4" in done.stderr and "longer than 3 s" in done.stderr, done.stderr
    graded = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["strict"], row["flexible"], row.get("fault")) for row in graded] == [
        (True, True, None), (False, False, "timeout"), (False, True, None), (False, False, None),
    ]  # fmt: skip
    assert graded[2]["completion"] == "\ud800 1/6"


def test_grade_of_math_names_the_line_without_an_answer(tmp_path, here):
    (tmp_path / "in.jsonl").write_text('{"completion": "1", "answer": "1"}\n{"completion": "2", "answer": " "}\n')
    code, stderr = here("grade", "--task", "math", f"{tmp_path}/in.jsonl", "--out", f"{tmp_path}/out.jsonl")
    assert code == 2 and "line 2" in stderr and "empty" in stderr


def test_grades_help_names_every_task():
    assert ", ".join(tasks.TASKS) in next(
        option.help for option in cli.cli.commands["grade"].params if option.name == "task"
    )


def test_a_prompt_of_another_form_is_refused_before_anything_runs(tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, stderr = here("train", "--task", "math", "--prompt", "answer-line", "--model", str(tiny.PATH))
    assert code == 2 and "prompt=boxed" in stderr
    assert not (tmp_path / "mlflow.db").exists()


def test_grade_names_the_line_that_is_wrong(tmp_path, here):
    (tmp_path / "in.jsonl").write_text('{"completion": "1", "answer": "1"}\n{"completion": "2"}\n')
    code, stderr = here("grade", "--task", "gsm8k", f"{tmp_path}/in.jsonl", "--out", f"{tmp_path}/out.jsonl")
    assert code == 2 and "line 2" in stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
@pytest.mark.process
def test_diagnose_of_two_folders_needs_no_store_and_leaves_a_folders_other_files_alone(tmp_path):
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "figures" / "matrix.png").write_text("a comparison's, say")
    done = run("diagnose", "--base", str(tiny.PATH), "--trained", str(tiny.PATH), "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    import pandas as pd

    frame = pd.read_parquet(tmp_path / "out" / "weights.parquet")
    wanted = {
        "variant",
        "tensor",
        "numel",
        "abs_outlier_frac",
        "channel_outlier_frac",
        "kurtosis",
        "w4_relative_mse",
        "w4_snr_db",
    }
    assert wanted <= set(frame.columns) and set(frame["variant"]) == {"base", "grpo"}
    assert frame["code_flip_rate"].eq(0).all()
    made = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert made == {"matrix.png", "layer_error.png", "weights_moved.png", "weights_spread.png", "weights.html"}
    assert not (tmp_path / "mlflow.db").exists()


def test_help_of_every_command_shows_its_options():
    from click.testing import CliRunner

    from qrl import cli

    for name in cli.cli.commands:
        shown = CliRunner().invoke(cli.cli, [name, "--help"])
        assert (
            shown.exit_code == 0
            and "--help" in shown.output
            and cli.cli.commands[name].help.split(".")[0][:30] in shown.output
        )


def shown(*words: str) -> str:
    from click.testing import CliRunner

    result = CliRunner().invoke(cli.cli, words, terminal_width=10_000)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train"], "tiny"),
        (["sweep"], "tiny-ptq"),
        (["train", "--recipe", "tiny-lora"], "tiny-lora"),
        (["study", "--model", "/a/model", "--device", "cpu"], "instruct-cpu"),
        (["study", "--task=math", "--device=cpu"], "math-cpu"),
        (["train", "--recipe", "no such recipe"], "tiny"),
    ],
)
def test_help_shows_the_values_of_the_recipe_that_would_run(words, name):
    from qrl import recipe

    text = " ".join(shown(*words, "--help-all").split())
    values = recipe.load(name).flat("train")
    for key in ("train.steps", "train.learning_rate", "train.loss", "train.method", "prompt"):
        assert f"[{name}: {values[key]}]" in text


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["serve", "--help-all"], "evaluate.tensor_parallel"),
        (["serve", "--help-all"], "evaluate.kv_cache_gib"),
        (["benchmark", "--help"], "evaluate.engine"),
    ],
)
def test_help_shows_the_single_fields_that_a_command_reads_of_other_sections(words, key):
    assert f"--{key} " in shown(*words) and "--train.steps" not in shown(*words)


@pytest.mark.process
def test_help_imports_nothing_heavy():
    code = "import sys\nfrom qrl.cli import cli\n"
    code += "for name in cli.commands: cli.main([name, '--help'], standalone_mode=False)\n"
    code += "sys.exit(str({'mlflow', 'numpy', 'pandas', 'scipy', 'torch'} & set(sys.modules)))"
    asked = [sys.executable, "-c", code]
    done = subprocess.run(asked, cwd=Path(qrl.__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n", done.stderr


def test_help_of_a_study_has_the_ten_options_that_matter_and_three_examples():
    from qrl import recipe

    text = shown("study", "--help")
    options = [line.split()[0] for line in text.splitlines() if line.startswith("  --") and "help" not in line]
    assert options[0] == "--recipe" and {"--model", "--data", "--quantize.schemes"} < set(options)
    assert options[-1] == "--yes" and len(options[:-1]) == 10
    assert sum(line.startswith("  qrl study") for line in text.splitlines()) == 3
    every = shown("study", "--help-all")
    assert all(f"--{key} " in every for key in recipe.fields() if not key.startswith("benchmark."))


def test_recipes_are_listed_and_one_is_shown_as_a_file_that_loads_to_it(tmp_path):
    from qrl import recipe

    listed = shown("recipes").splitlines()
    assert [line.split()[0] for line in listed] == recipe.names() and "two CPU cores" in listed[-4]
    assert "Not run on real weights" in listed[0]
    (tmp_path / "mine.yaml").write_text(shown("recipes", "tiny-qlora"))
    assert recipe.load(str(tmp_path / "mine.yaml")) == recipe.load("tiny-qlora")


def test_schemes_are_listed_with_what_was_measured():
    from qrl import names

    text = shown("schemes")
    heads = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert set(heads) - {"rtn-*"} == {names.KV_FP8} | {
        name for name in names.QUANTIZED_SCHEMES if name not in names.ROUNDED
    }
    table = (ROOT / "tests" / "benchmarks" / "results" / "quantization.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("| ")]
    measured = {row[0]: row for row in rows if row[0] in heads}
    assert len(measured) == 15
    for row in measured.values():
        assert f"{row[1]} bits a weight, accuracy − full {row[-1]}, n = 1,000" in text


@pytest.mark.process
@pytest.mark.parametrize("model", ["./trained", "runs/trained"])
def test_a_relative_model_of_mlflow_run_gets_the_absolute_path_to_try(model, tmp_path, monkeypatch):
    """MLflow starts a step in the project's folder and itself stays in the user's: this process plays MLflow."""
    monkeypatch.chdir(tmp_path)
    program = f"from qrl import source\ntry: source.locate({model!r})\nexcept Exception as error: print(error)"
    variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "MLFLOW_RUN_ID": "0123"}

    def sentence() -> str:
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout

    assert f"counts from {ROOT}" in sentence() and f"{tmp_path / model}, if you meant that" in sentence()
    (tmp_path / model).mkdir(parents=True)
    assert f"{tmp_path / model}, which exists" in sentence()
    variables.pop("MLFLOW_RUN_ID")
    assert "absolute" not in sentence()


@pytest.mark.process
def test_a_step_is_handed_over_with_its_options_as_typed_after_a_check(monkeypatch, tmp_path):
    from qrl.steps import serve
    from qrl.study import build, environments

    done = []
    monkeypatch.setenv("QRL_API_KEY", "")
    monkeypatch.setattr(build, "environment_for", lambda *_: tmp_path)
    monkeypatch.setattr(environments, "hand_over", lambda *arguments: done.append(arguments))
    monkeypatch.setattr(serve, "check_stage", lambda *_, **where: done.append(where))
    words = ["serve", "--stage", "base", "--engine", "vllm", "--follow", "--api-key", "secret", "--device", "cuda"]
    cli.cli.main([*words, "--gpu-memory-utilization", "0.3"], standalone_mode=False)
    checked, (folder, step, options) = done
    assert checked == {"host": "127.0.0.1", "port": 8000} and (folder, step) == (tmp_path, "serve")
    assert options == {
        "recipe": "auto",
        "device": "cuda",
        "stage": "base",
        "engine": "vllm",
        "follow": "5.0",
        "gpu-memory-utilization": "0.3",
    }
    assert os.environ["QRL_API_KEY"] == "secret"  # not a parameter, which the run would keep


def test_a_package_without_its_checkout_says_what_it_lacks(monkeypatch, tmp_path):
    from qrl.study import environments

    monkeypatch.setattr(environments, "ROOT", tmp_path)
    for words in (["train"], ["sweep"], ["evaluate"], ["diagnose", "--trained", "x"], ["compare", "--cells", "0123"]):
        with pytest.raises(BadInput, match=f"`{words[0]}` needs MLproject"):
            cli.cli.main(words, standalone_mode=False)


@pytest.mark.process
def test_a_recipe_for_a_gpu_ends_a_study_on_a_cpu_at_once(here):
    code, said = here("study", "--recipe", "instruct", "--device", "cpu", "--model", str(tiny.PATH))
    assert code == 2 and "sized for a GPU" in said and "recipe=instruct-cpu" in said and "--yes" in said
