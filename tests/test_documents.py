"""Markdown keeps its promises: the tree of files is true, links lead somewhere, pages stay short.

`python -m tests.test_documents --write`, in the project's root, writes the tree of qrl/README.md again.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAP = ROOT / "qrl" / "README.md"
BLOCK = re.compile(r"(?<=<!-- tree -->\n\n```\n).*?(?=```)", re.DOTALL)
SHOWN = ("qrl", "tests")
CLOSED = {  # folders that the tree shows as one line
    "qrl/tiny/model": "weights, tokenizer, model card",
    "tests/benchmarks/answer/export": "answers by question and cell, measures of weights",
    "tests/benchmarks/answer/found": "the page, its figures and all tables, as report.py writes them",
    "tests/benchmarks/answer/methods": "answers by question and cell, of question 5's own runs",
    "tests/cases": "cases as data: graders, logs of other tools",
}
COLUMN, LONGEST = 34, 90  # where clauses begin, and their longest, in characters


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout", allow_module_level=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def clause(path: Path) -> str:
    """Return a file in a few words: a docstring's first sentence, a page's title, a recipe's first comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix == ".md":
        text = text[text.index("# ") + 2 :].partition("\n")[0]
    elif path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")
    elif path.suffix in (".yaml", ".yml", ".txt"):
        comments = [line.removeprefix("#").strip() for line in text.split("\n")]
        text = " ".join(comments[: next(i for i, line in enumerate(text.split("\n")) if not line.startswith("#"))])
    else:
        return ""
    sentence = re.split(r"(?<=[.?!])\s", " ".join(text.split("\n\n")[0].split()))[0].rstrip(".")
    for separator in (": ", "; ", ", "):
        if len(sentence) <= LONGEST:
            break
        kept = sentence[: LONGEST + 1].rpartition(separator)[0]
        sentence = kept if len(kept) > LONGEST // 3 else sentence
    return sentence


def tree() -> str:
    """Return a line for every tracked file of `SHOWN`; a package's line is that of its `__init__.py`."""
    return "\n".join(line for top in SHOWN for line in folder(top, tracked(), 0)) + "\n"


def folder(path: str, files: list[str], depth: int) -> Iterator[str]:
    """Yield the lines of one folder: its own, its files', its folders'."""
    package = f"{path}/__init__.py"
    yield line(Path(path).name + "/", depth, CLOSED.get(path) or (clause(ROOT / package) if package in files else ""))
    if path in CLOSED:
        return
    inside = sorted({file.removeprefix(path + "/").split("/")[0] for file in files if file.startswith(path + "/")})
    for name in [name for name in inside if f"{path}/{name}" in files and name != "__init__.py"]:
        yield line(name, depth + 1, clause(ROOT / path / name))
    for name in [name for name in inside if f"{path}/{name}" not in files]:
        yield from folder(f"{path}/{name}", files, depth + 1)


def line(name: str, depth: int, words: str) -> str:
    """Return one line of the tree: `  name        clause`."""
    return ("  " * depth + name).ljust(COLUMN - 1) + f" {words}" if words else "  " * depth + name


def test_the_tree_is_what_git_tracks():
    assert BLOCK.search(MAP.read_text(encoding="utf-8"))[0] == tree(), (
        "qrl/README.md shows another tree: run `python -m tests.test_documents --write`"
    )


def test_a_module_says_in_a_short_clause_what_it_is():
    modules = [path for path in tracked() if path.endswith(".py") and path.startswith(SHOWN)]
    clauses = {path: clause(ROOT / path) for path in modules}
    wrong = {path: words for path, words in clauses.items() if not 0 < len(words) <= LONGEST}
    assert not wrong, f"docstrings should begin with a sentence of at most {LONGEST} characters: {wrong}"


@pytest.mark.parametrize("path", [path for path in tracked() if path.endswith(".md")])
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        page = (ROOT / path).parent / target if target else ROOT / path
        assert page.exists(), f"{path} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(page), f"{path} links to {link}: {page.name} has no such heading"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_pictures_are_small():
    pictures = list((ROOT / ".github" / "images").iterdir())
    assert pictures and all(path.stat().st_size < 200_000 for path in pictures)


def test_tables_of_the_readme_are_terse():
    """Check that no cell has more than twelve words: the table of commands is read at a glance."""
    rows = re.findall(r"^\| .*\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    cells = [re.sub(r"\]\([^)]*\)|[`*\[\]]", "", cell) for row in rows for cell in row.strip("|").split("|")]
    assert [cell for cell in cells if len(cell.split()) > 12] == []


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    page = MAP.read_text(encoding="utf-8")
    MAP.write_text(BLOCK.sub(lambda match: tree(), page), encoding="utf-8")
