"""Markdown keeps its promises: the map of folders is true, links lead somewhere, tables are terse.

`python -m tests.test_documents --write`, in the project's root, writes the map of qrl/README.md again.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qrl import recipe

ROOT = Path(__file__).parents[1]
MAP = ROOT / "qrl" / "README.md"
BLOCK = re.compile(r"(?<=<!-- folders -->\n\n).*?(?=<!-- end of folders -->)", re.DOTALL)
WITHOUT_INIT = {"examples": "Walks for users: a study by hand, a notebook, a real model with a task of its own"}
LONGEST = 90  # characters of a module's first sentence


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout", allow_module_level=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def clause(module: Path) -> str:
    """Return the first sentence of a module's docstring, cut at a colon, semicolon or comma if it is long."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?!])\s", paragraph)[0].rstrip(".")
    for separator in (": ", "; ", ", "):
        if len(sentence) <= LONGEST:
            break
        shorter = sentence[: LONGEST + 1].rpartition(separator)[0]
        if len(shorter) > LONGEST // 3:
            sentence = shorter
    return sentence


def folders() -> list[str]:
    """Return the names of the package's folders, of the first level."""
    return sorted({path.split("/")[1] for path in tracked() if re.match(r"qrl/[^/]+/", path)})


def map_of_folders() -> str:
    """Return a table with a row for each folder: its name, with a link to its page if it has one, and its purpose."""
    rows = ["| folder | what it does |", "|---|---|"]
    for folder in folders():
        path = ROOT / "qrl" / folder
        name = f"[`{folder}/`]({folder}/README.md)" if (path / "README.md").exists() else f"`{folder}/`"
        purpose = WITHOUT_INIT.get(folder) or clause(path / "__init__.py")
        rows.append(f"| {name} | {purpose} |")
    return "\n".join(rows) + "\n\n"


def test_the_map_names_every_folder():
    shown = BLOCK.search(MAP.read_text(encoding="utf-8"))[0]
    assert re.findall(r"`([a-z_]+)/`", shown) == folders()
    assert shown == map_of_folders(), "qrl/README.md shows another map: run `python -m tests.test_documents --write`"


@pytest.mark.process
def test_a_module_says_in_a_short_clause_what_it_is():
    modules = [path for path in tracked() if path.endswith(".py") and path.startswith(("qrl", "tests"))]
    clauses = {path: clause(ROOT / path) for path in modules}
    wrong = {path: words for path, words in clauses.items() if not 0 < len(words) <= LONGEST}
    assert not wrong, f"docstrings should begin with a sentence of at most {LONGEST} characters: {wrong}"


def top_level_names(module: Path) -> set[str]:
    """Return what a module offers as attributes: what it defines, assigns and imports, and a package's modules."""
    names = {path.stem for path in module.parent.iterdir()} if module.name == "__init__.py" else set()
    for statement in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return names


@pytest.mark.process
def test_docstrings_name_functions_that_exist():
    """A function that gets another name is found by its uses, but not in the prose: `cells.answer_questions`."""
    modules: dict[str, set[str]] = {}
    paths = [ROOT / path for path in tracked() if path.startswith("qrl/") and path.endswith(".py")]
    for path in paths:
        name = path.parent.name if path.stem == "__init__" else path.stem
        modules[name] = modules.get(name, set()) | top_level_names(path)
    elsewhere = re.compile(r"qrl\.\w+|mlflow\.|vllm\.|.*\.(py|md|yaml|json)$")  # tags, other packages, files
    missing = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for reference in re.findall(r"`([a-z_.]+\.\w+)(?:\(\))?`", text):
            module, name = reference.split(".")[-2:]
            is_ours = module in modules and reference not in recipe.fields() and not elsewhere.match(reference)
            if is_ours and name not in modules[module]:
                missing.append(f"{path.relative_to(ROOT)}: {reference}")
    assert not missing


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


INTERVAL = re.compile(r"\[[−+]?\d[\d.]*, [−+]?\d[\d.]*\]")


@pytest.mark.parametrize("path", ["qrl/train/which.md", "tests/benchmarks/reading.md"])
def test_every_interval_that_a_page_repeats_is_on_a_page_that_its_row_links_to(path):
    page = ROOT / path
    checked = 0
    for row in page.read_text(encoding="utf-8").splitlines():
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", row)]
        sources = "\n".join((page.parent / link).read_text(encoding="utf-8") for link in links)
        for interval in INTERVAL.findall(row):
            assert interval in sources, f"{path}: {interval} is on none of {', '.join(links) or 'no linked page'}"
            checked += 1
    assert checked >= 10


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_pictures_are_small():
    pictures = list((ROOT / ".github" / "images").iterdir())
    assert pictures and all(path.stat().st_size < 200_000 for path in pictures)


def test_tables_of_the_readme_are_terse():
    """Check that no cell has more than twelve words: a table is read at a glance."""
    rows = re.findall(r"^\| .*\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    cells = [re.sub(r"\]\([^)]*\)|[`*\[\]]", "", cell) for row in rows for cell in row.strip("|").split("|")]
    assert [cell for cell in cells if len(cell.split()) > 12] == []


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    page = MAP.read_text(encoding="utf-8")
    MAP.write_text(BLOCK.sub(lambda match: map_of_folders(), page), encoding="utf-8")
