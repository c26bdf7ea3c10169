"use strict";
const CONFIG = { displaylogo: false, displayModeBar: false, responsive: true };
(async () => {
  const byId = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const INK = "#222222";
  const DARK = { [INK]: "#e6e8eb", "#0072B2": "#4da3dd", "#7f7f7f": "#a0a7b0" };
  const folds = document.querySelectorAll("details");

  for (const link of document.querySelectorAll("nav a")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const target = byId(link.hash.slice(1));
      if (target.tagName === "DETAILS") target.open = true;
      target.scrollIntoView();
    });
  }
  try {
    const packed = Uint8Array.from(atob(byId("library").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    const figures = JSON.parse(byId("drawn").textContent);

    const themed = (figure) => {
      let text = JSON.stringify(figure);
      if (dark.matches) for (const [light, other] of Object.entries(DARK)) text = text.replaceAll(light, other);
      const { data, layout } = JSON.parse(text);
      const line = dark.matches ? "#343b44" : "#e4e4e4";
      const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
      const template = { layout: { xaxis: axis, yaxis: axis } };
      const clear = "rgba(0,0,0,0)";
      return { data, layout: { template, paper_bgcolor: clear, plot_bgcolor: clear, ...layout } };
    };
    // A figure in a folded part has no width yet: it is drawn when the part is opened.
    const draw = (root) => {
      for (const box of root.querySelectorAll("[data-figure]")) {
        const fold = box.closest("details");
        if (fold && !fold.open) continue;
        const { data, layout } = themed(figures[box.id]);
        Plotly.react(box, data, layout, CONFIG);
      }
    };
    draw(document);
    for (const fold of folds) fold.addEventListener("toggle", () => draw(fold));
    dark.addEventListener("change", () => draw(document));
    addEventListener("beforeprint", () => { for (const fold of folds) fold.open = true; draw(document); });
    byId("state").remove();
  } catch (error) {
    byId("state").textContent = `The figures cannot be drawn (${error}). Open this page in a browser of 2023 or newer.`;
  }
})();
