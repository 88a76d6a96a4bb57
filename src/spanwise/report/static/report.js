"use strict";
// Theme and charts. Charts are drawn when they come near the window, in the colours of the page, and again when those change.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const drawn = new Map(); // chart element -> promise of what vega-embed returns

  const remember = (theme) => {
    try {
      localStorage.setItem("spanwise-theme", theme);
    } catch {
      // a page opened from a file may have no storage; the theme then lasts as long as the page
    }
  };
  try {
    const theme = localStorage.getItem("spanwise-theme");
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch {
    // as above
  }

  let vega = null; // promise that the charts' library is there
  const loadVega = () => (vega ??= (async () => {
    // The bundle lies in the page compressed: a smaller file, and parsing it does not delay the first view.
    const packed = atob(document.getElementById("vega").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
    document.head.append(script);
  })());

  function colours() {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    const [text, muted, line] = [of("--text"), of("--muted"), of("--line")];
    const series = Array.from({ length: 8 }, (_, i) => of(`--series-${i}`));
    const font = getComputedStyle(document.body).fontFamily;
    return {
      background: "transparent",
      font,
      view: { stroke: null },
      axis: {
        labelColor: muted, titleColor: muted, domainColor: line, tickColor: line, gridColor: line, gridOpacity: 0.7,
        labelFontSize: 11, titleFontSize: 11.5, titleFontWeight: 400, titlePadding: 6, labelPadding: 4, tickSize: 4,
      },
      range: { category: series, ordinal: [series[0], series[1], muted, muted, muted], symbol: ["circle", "square", "cross", "diamond", "triangle-up", "triangle-down", "triangle-right", "triangle-left"] },
      mark: { color: series[0] },
      rule: { color: series[0] },
      line: { strokeCap: "round", strokeJoin: "round" },
      style: { reference: { stroke: muted, color: muted, strokeDash: [4, 4], strokeWidth: 1.2, opacity: 0.8 } },
      text: { color: text },
    };
  }

  async function drawAfter(before, element) {
    (await before)?.finalize();
    await loadVega();
    const spec = JSON.parse(document.getElementById(element.dataset.spec).textContent);
    const tooltip = { theme: isDark() ? "dark" : "light" };
    // `ast`: expressions are interpreted, so that the page's policy need not allow eval.
    const options = { mode: "vega-lite", actions: false, renderer: "svg", ast: true, config: colours(), tooltip };
    try {
      return await window.vegaEmbed(element, spec, options);
    } catch (error) {
      element.textContent = `This chart could not be drawn: ${error.message}. Its numbers are in the table below.`;
      console.error(error);
      return null;
    }
  }

  // One drawing of a chart at a time: a second one waits for the first.
  function draw(element) {
    drawn.set(element, drawAfter(drawn.get(element), element));
  }

  const redraw = () => [...drawn.keys()].forEach(draw);
  const charts = document.querySelectorAll(".chart");
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((e) => e.isIntersecting)) {
        seen.unobserve(entry.target);
        if (!drawn.has(entry.target)) draw(entry.target);
      }
    },
    { rootMargin: "300px" },
  );
  // The first view comes before the first chart.
  requestAnimationFrame(() => setTimeout(() => charts.forEach((element) => seen.observe(element))));

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    redraw();
  });
  system.addEventListener("change", redraw);
  addEventListener("beforeprint", () => charts.forEach((element) => drawn.has(element) || draw(element)));
})();
