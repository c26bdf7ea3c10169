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
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from qrl.figures.canvas import INK
from qrl.workspace import written_whole

CONFIG = {"displaylogo": False, "displayModeBar": False, "responsive": True}


class Section(NamedTuple):
    """A part of the page."""

    title: str
    finding: str  # one sentence; may be empty
    content: Sequence[str | dict | None]  # HTML as it is to appear, or figures of `laid`; None is left out
    folded: bool = False  # shown as a line that opens


def write(title: str, head: str, sections: Sequence[Section], path: str | Path, foot: str = "") -> None:
    """Write the page, whole or not at all; `title` is of the browser's tab, `head` and `foot` are HTML."""
    figures: dict[str, dict] = {}
    body = "".join(_section(number, section, figures) for number, section in enumerate(sections))
    links = "".join(f'<a href="#part{number}">{escape(part.title)}</a>' for number, part in enumerate(sections))
    data = json.dumps(figures, allow_nan=False).replace("</", "<\\/")
    style, script = ((files("qrl.figures") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f'{head}<nav>{links}</nav><p id="state" class="faint">Drawing the figures…</p>{body}{foot}'
        f'<script id="drawn" type="application/json">{data}</script>'
        f'<script id="library" type="text/plain">{_plotly()}</script>'
        f"<script>const CONFIG = {json.dumps(CONFIG)};{script}</script></body></html>"
    )
    with written_whole(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")


def _section(number: int, section: Section, figures: dict[str, dict]) -> str:
    """Return a section's HTML, and add its figures to `figures` under the ids that the HTML uses."""
    content = ""
    for item in section.content:
        if isinstance(item, dict):
            name, height = f"figure{len(figures)}", item["layout"]["height"]
            figures[name] = item
            content += f"<h3>{escape(item['title'])}</h3>"
            content += f'<div id="{name}" data-figure style="height:{height}px"></div>'
        else:
            content += item or ""
    head = f"<h2>{escape(section.title)}</h2>"
    finding = f"<p>{escape(section.finding)}</p>" if section.finding else ""
    if section.folded:
        return f'<details id="part{number}"><summary>{head}{finding}</summary>{content}</details>'
    return f'<section id="part{number}">{head}{finding}{content}</section>'


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table, its cells escaped; it scrolls on a narrow screen."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


@cache
def _plotly() -> str:
    """Return plotly's JavaScript, packed. Its Python package takes a second to import and is not needed."""
    whole = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(whole, mtime=0)).decode()


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return values as JSON knows them: NaN and infinity become null."""
    return [float(value) if math.isfinite(value) else None for value in values]


def axis(title: str, **more: object) -> dict:
    """Return an axis of plotly's."""
    return {"title": {"text": title}, **more}


def laid(drawn: list[dict], title: str, height: int, **layout: object) -> dict:
    """Return a figure as `write` expects it; its title becomes text of the page, which wraps on a narrow screen.

    The page's script replaces the colours `INK`, blue and grey where the reader prefers a dark page.
    """
    margin = {"l": 60, "r": 15, "t": 20, "b": 50}
    return {
        "title": title,
        "data": drawn,
        "layout": {"height": height, "font": {"color": INK, "size": 13}, "margin": margin, **layout},
    }
