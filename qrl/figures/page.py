"""Self-contained HTML pages with plotly's figures: they open from MLflow's artifacts, from a mail or from a disk.

plotly's JavaScript is embedded, compressed, which makes a page of 2 MB instead of 5; browsers since 2023 unpack it.
Nothing is fetched, so a page also works inside the sandboxed frame in which MLflow shows artifacts.
"""

import base64
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from qrl.figures.canvas import INK
from qrl.workspace import write_atomically


class Section(NamedTuple):
    """A part of the page."""

    title: str
    finding: str  # one sentence; may be empty
    content: Sequence[str | dict | None]  # HTML from `html`, or plots; None is left out
    folded: bool = False  # shown as a line that opens


def write(title: str, head: str, sections: Sequence[Section], path: str | Path, foot: str = "") -> None:
    """Write the page, whole or not at all; `title` is of the browser's tab, `head` and `foot` are from `html`."""
    plots = []
    for section in sections:
        plots += [item for item in section.content if isinstance(item, dict)]
    figures = {f"figure{number}": plot for number, plot in enumerate(plots)}
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")  # `<!--<script` would swallow what follows
    text = html("page", title=title, head=head, sections=sections, foot=foot, figures=data, library=_plotly())
    with write_atomically(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")


def html(macro: str, **values: object) -> str:
    """Return what a macro of page.html makes of values; it escapes those that no other macro returned."""
    return getattr(_macros(), macro)(**values).strip()


@cache
def _macros() -> ModuleType:
    """Return the template's macros; jinja2 escapes values, since names and answers come from models and users."""
    from jinja2 import Environment, PackageLoader

    folder = Environment(loader=PackageLoader("qrl", "figures"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return folder.get_template("page.html").module


@cache
def _plotly() -> str:
    """Return plotly's JavaScript, packed. Its Python package takes a second to import and is not needed."""
    script = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(script, mtime=0)).decode()


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return values as JSON knows them: NaN and infinity become null."""
    return [float(value) if math.isfinite(value) else None for value in values]


def axis(title: str, **options: object) -> dict:
    """Return an axis of plotly's."""
    return {"title": {"text": title}, **options}


def plotly_figure(traces: list[dict], title: str, height: int, **layout: object) -> dict:
    """Return a plot as `write` expects it; its title becomes text of the page, which wraps on a narrow screen.

    The page's script replaces the colours `INK`, blue and grey where the reader prefers a dark page.
    """
    margin = {"l": 60, "r": 15, "t": 20, "b": 50}
    return {
        "title": title,
        "data": traces,
        "layout": {"height": height, "font": {"color": INK, "size": 13}, "margin": margin, **layout},
    }
