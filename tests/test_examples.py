"""The Python face: the example notebook's cells give the outputs stored in it, and a study returns what it found.

`python -m tests.test_examples --write`, in the project's root, stores the outputs of today.
"""

import ast
import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import qrl

NOTEBOOKS = sorted((Path(qrl.__file__).parent / "examples").glob("*.ipynb"))
CELLS = {("base", "full"): 2, ("grpo", "full"): 7, ("base", "nf4"): 2, ("grpo", "nf4"): 6}


def executed(notebook: dict) -> list[dict]:
    """Return the notebook's cells with the outputs that a kernel would store, run in this process in order."""
    names: dict = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        ran = {}
        if cell["cell_type"] == "code":
            count += 1
            ran = {"execution_count": count, "outputs": outputs("".join(cell["source"]), names, count)}
        cells.append(cell | ran)
    return cells


def outputs(source: str, names: dict, count: int) -> list[dict]:
    """Return what a cell prints, and how its last expression shows itself."""
    *statements, last = ast.parse(source).body
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        value = None
        if isinstance(last, ast.Expr):
            value = (compiled(statements, names), eval(ast.unparse(last), names))[1]
        else:
            compiled([*statements, last], names)
    stored = []
    if text := printed.getvalue():
        stored.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {"text/html": "_repr_html_", "text/markdown": "_repr_markdown_", "text/plain": "__repr__"}
        data = {kind: getattr(value, method)() for kind, method in shown.items() if hasattr(value, method)}
        data = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
        stored.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return stored


def compiled(statements: list[ast.stmt], names: dict) -> None:
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_gives_the_outputs_that_it_shows(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell, now in zip(notebook["cells"], executed(notebook), strict=True):
        assert cell == now, "run `python -m tests.test_examples --write`"
    assert len(notebook["cells"]) <= 10 and path.stat().st_size < 20_000


@pytest.mark.process
def test_the_package_imports_nothing_heavy_and_its_rooms_are_functions():
    code = (
        "import sys, qrl; heavy = {'pandas', 'numpy', 'torch', 'mlflow', 'pydantic', 'scipy'} & set(sys.modules); "
        "import qrl.study.pipeline, qrl.compare.table, inspect; "
        "print(heavy, callable(qrl.study), callable(qrl.compare), list(inspect.signature(qrl.compare).parameters))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() True True ['data', 'columns', 'where', 'reference', 'margin', 'missing']"
    with pytest.raises(AttributeError, match="no attribute 'diagnoze'"):
        qrl.diagnoze  # noqa: B018


def test_a_study_returns_its_comparison(store, monkeypatch, tmp_path):
    from qrl.study import pipeline
    from qrl.tracking import contents, runs

    asked = []
    rows = [(v, s, q, int(q % 10 < right)) for (v, s), right in CELLS.items() for q in range(60)]
    frame = pd.DataFrame(rows, columns=["variant", "scheme", "question", "correct"])
    with runs.step("study") as run:
        (tmp_path / "out").mkdir()
        frame.to_parquet(tmp_path / "out" / "questions.parquet")
        contents.log_folder(tmp_path / "out")
    monkeypatch.setattr(pipeline, "study", lambda *words: asked.append(words) or run.info.run_id)
    found = qrl.study("tiny", **{"train.steps": 3, "compare.margin": 0.1})
    assert asked[0][0].train.steps == 3 and asked[0][1]["train.steps"] == "3"
    assert found.run_id == run.info.run_id and found.comparison.margin == 0.1
    assert str(found) == found._repr_markdown_() == qrl.compare(frame, margin=0.1).markdown()
    with pytest.raises(AttributeError):
        found.run_id = ""


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"] = executed(notebook)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
