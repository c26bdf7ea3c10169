"""One HTML page that needs nothing else, made of plotly's figures: it opens from MLflow's artifacts, from a mail or from a disk.

plotly's JavaScript lies inside, compressed, which makes a page of 2 MB out of 5; browsers since 2023 unpack it themselves. Nothing is
fetched, so the page works in the frame without rights in which MLflow shows artifacts.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from qrl.figures.canvas import INK

CONFIG = {"displaylogo": False, "displayModeBar": False, "responsive": True}
STYLE = (
    "body{font:15px/1.5 sans-serif;color:#222;max-width:1100px;margin:2em auto;padding:0 1em}h1{font-size:1.5em;margin-top:0}h3{font-size:1em;font-weight:normal;margin:1.5em 0 0}"
    "h2{font-size:1.05em;margin:2.5em 0 0;color:#6b6b6b;font-weight:normal}p,nav{color:#6b6b6b}nav a{margin-right:1.2em;color:#0072B2}"
)
SCRIPT = """
(async () => {
  const say = (text) => { document.getElementById("state").textContent = text; };
  try {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    const drawn = JSON.parse(document.getElementById("drawn").textContent);
    for (const [name, figure] of Object.entries(drawn)) Plotly.newPlot(name, figure.data, figure.layout, CONFIG);
    say("");
  } catch (error) { say(`The figures cannot be drawn (${error}): open this page in a browser of 2023 or newer.`); }
})();
"""


class Section(NamedTuple):
    """A part of the page."""

    title: str
    found: str  # the finding, in a sentence
    figures: Sequence[dict | None]  # of `laid`; None is left out


def write(title: str, note: str, sections: Iterable[Section], path: str | Path) -> None:
    """Writes the page, whole or not at all.

    Args:
        title: of the browser's tab.
        note: how to read it, at the top.
        sections: in order.
        path: the HTML file.
    """
    drawn: dict[str, dict] = {}
    links, body = [], []
    for number, section in enumerate(sections):
        links.append(f'<a href="#part{number}">{html.escape(section.title)}</a>')
        body.append(f'<h2 id="part{number}">{html.escape(section.title)}</h2><h1>{html.escape(section.found)}</h1>')
        for figure in filter(None, section.figures):
            name = f"figure{len(drawn)}"
            drawn[name] = figure
            body.append(
                f'<h3>{html.escape(figure["title"])}</h3><div id="{name}" style="min-height:{figure["layout"]["height"]}px"></div>'
            )
    data = json.dumps(drawn, allow_nan=False).replace("</", "<\\/")
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style></head><body>'
        f'<p>{html.escape(note)}</p><nav>{"".join(links)}</nav><p id="state">Drawing…</p>{"".join(body)}'
        f'<script id="drawn" type="application/json">{data}</script><script id="library" type="text/plain">{_javascript()}</script>'
        f"<script>const CONFIG = {json.dumps(CONFIG)};{SCRIPT}</script></body></html>"
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _javascript() -> str:
    """plotly's own, from its package, packed; the rest of that package takes a second to import and is not needed."""
    whole = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(whole, mtime=0)).decode()


def numbers(values: Iterable[float]) -> list[float | None]:
    """As JSON knows them: NaN and infinity are null."""
    return [float(value) if math.isfinite(value) else None for value in values]


def laid(drawn: list[dict], title: str, height: int, **axes: dict) -> dict:
    """A figure as `write` takes it; its title is the page's own text, which wraps in a narrow frame."""
    margin = {"l": 90, "r": 20, "t": 20, "b": 50}
    return {
        "title": title,
        "data": drawn,
        "layout": {"height": height, "font": {"color": INK}, "margin": margin, **axes},
    }
