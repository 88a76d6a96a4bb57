"use strict";
// Theme, charts, terms, wide tables and paper. Charts take their colours from the page's own variables, so a theme needs no redraw.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

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
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
  });

  // --- charts

  let vega = null; // promise that the charts' library is there
  const loadVega = () => (vega ??= (async () => {
    // The bundle lies in the page compressed: a smaller file, and parsing it does not delay the first view.
    const packed = atob(document.getElementById("vega").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
    document.head.append(script);
  })());

  const [text, muted, line] = ["var(--text)", "var(--muted)", "var(--line)"];
  const series = Array.from({ length: 8 }, (_, i) => `var(--series-${i})`);
  const config = () => ({
    background: "transparent",
    font: getComputedStyle(document.body).fontFamily,
    view: { stroke: null },
    axis: {
      labelColor: muted, titleColor: muted, domainColor: line, tickColor: line, gridColor: line, gridOpacity: 0.7,
      labelFontSize: 11, titleFontSize: 11.5, titleFontWeight: 400, titlePadding: 6, labelPadding: 4, tickSize: 4,
    },
    range: { category: series, ordinal: [series[0], series[1], muted, muted, muted], symbol: ["circle", "square", "cross", "diamond", "triangle-up", "triangle-down", "triangle-right", "triangle-left"] },
    mark: { color: series[0] },
    rule: { color: series[0] },
    line: { strokeCap: "round", strokeJoin: "round" },
    style: { reference: { stroke: muted, color: muted, strokeDash: [4, 4], strokeWidth: 1.2, opacity: 0.8 }, pointed: { fill: muted, stroke: null } },
    text: { color: text },
  });

  // What is pointed at in a chart: a row for each series, beside the pointer and inside the window.
  const told = document.createElement("div");
  told.id = "values";
  told.hidden = true;
  document.body.append(told);
  let found = null; // what is told, as long as the pointer is there
  const place = ({ clientX, clientY }) => {
    told.hidden = false;
    const gap = 14, right = clientX + gap + told.offsetWidth <= root.clientWidth;
    const left = right ? clientX + gap : Math.max(0, clientX - gap - told.offsetWidth);
    const below = clientY + gap + told.offsetHeight <= innerHeight;
    told.style.left = `${Math.min(left, root.clientWidth - told.offsetWidth)}px`;
    told.style.top = `${below ? clientY + gap : Math.max(0, clientY - gap - told.offsetHeight)}px`;
  };
  const values = (_, event, __, pointed) => {
    found = pointed || null;
    told.hidden = !found;
    if (!found) return;
    const table = document.createElement("table");
    for (const [name, value] of Object.entries(found)) {
      const row = table.insertRow();
      row.insertCell().textContent = name;
      row.insertCell().textContent = value === "null" || value === "NaN" ? "unknown" : value;
    }
    told.replaceChildren(table);
    place(event);
  };
  addEventListener("scroll", () => (told.hidden = true), { passive: true });
  addEventListener("pointermove", (event) => {
    const inside = event.target instanceof Element && event.target.closest(".chart");
    if (found && inside) place(event);
    else told.hidden = true;
  });

  async function draw(element) {
    const spec = JSON.parse(document.getElementById(element.dataset.spec).textContent);
    // `ast`: expressions are interpreted, so that the page's policy need not allow eval.
    const options = { mode: "vega-lite", actions: false, renderer: "svg", ast: true, config: config(), tooltip: values };
    try {
      await loadVega();
      await window.vegaEmbed(element, spec, options);
    } catch (error) {
      element.textContent = `This chart could not be drawn: ${error.message}. Its numbers are in the table below.`;
      console.error(error);
    }
  }

  const waiting = new Set(document.querySelectorAll(".chart"));
  const drawOnce = (element) => (waiting.delete(element) ? draw(element) : null);
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((e) => e.isIntersecting)) {
        seen.unobserve(entry.target);
        drawOnce(entry.target);
      }
    },
    { rootMargin: "300px" },
  );
  // Paper does not wait: what is not near is drawn, one chart at a time, when there is nothing else to do.
  const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 200));
  const drawRest = () => idle(async () => {
    const [next] = waiting;
    if (next) await drawOnce(next);
    if (waiting.size) drawRest();
  });
  // The first view comes before the first chart.
  requestAnimationFrame(() => setTimeout(() => {
    waiting.forEach((element) => seen.observe(element));
    setTimeout(drawRest, 2000);
  }));

  // --- paper: everything that carries numbers is unfolded

  let folded = [];
  addEventListener("beforeprint", () => {
    [...waiting].forEach(drawOnce);
    folded = [...document.querySelectorAll("main details:not([open])")].filter((e) => !e.closest(".token-view") && !e.matches(".long"));
    folded.forEach((e) => (e.open = true));
  });
  addEventListener("afterprint", () => folded.splice(0).forEach((e) => (e.open = false)));

  // --- wide tables say that they go on, and can be scrolled by the keyboard

  for (const frame of document.querySelectorAll(".wide")) {
    const inner = frame.firstElementChild;
    const mark = () => {
      const rest = inner.scrollWidth - inner.clientWidth;
      frame.classList.toggle("more-left", inner.scrollLeft > 1);
      frame.classList.toggle("more-right", inner.scrollLeft < rest - 1);
      if (rest > 1 || inner.scrollHeight - inner.clientHeight > 1) inner.tabIndex = 0;
      else inner.removeAttribute("tabindex");
    };
    inner.addEventListener("scroll", mark, { passive: true });
    new ResizeObserver(mark).observe(inner);
  }

  // --- terms: one box, below the term or above it, never on it; Escape takes it away

  const box = document.createElement("div");
  box.id = "says";
  box.setAttribute("role", "tooltip");
  box.hidden = true;
  document.body.append(box);
  let term = null, leaving = 0;
  const hide = () => {
    term?.removeAttribute("aria-describedby");
    [term, box.hidden] = [null, true];
  };
  const show = (element) => {
    clearTimeout(leaving);
    if (element === term) return;
    hide();
    term = element;
    box.textContent = element.dataset.says;
    box.hidden = false;
    element.setAttribute("aria-describedby", "says");
    const [line] = element.getClientRects(), gap = 6;
    const left = Math.min(Math.max(line.left, 8), root.clientWidth - box.offsetWidth - 8);
    const all = element.getBoundingClientRect();
    const above = all.bottom + gap + box.offsetHeight > innerHeight && all.top - gap - box.offsetHeight > 0;
    box.style.left = `${left + scrollX}px`;
    box.style.top = `${(above ? all.top - gap - box.offsetHeight : all.bottom + gap) + scrollY}px`;
  };
  const termOf = (event) => (event.target instanceof Element ? event.target.closest(".term") : null);
  addEventListener("pointerover", (event) => {
    const here = termOf(event);
    if (here) show(here);
    else if (event.target === box) clearTimeout(leaving);
    else if (term && term !== document.activeElement) {
      clearTimeout(leaving);
      leaving = setTimeout(hide, 150);
    }
  });
  addEventListener("focusin", (event) => (termOf(event) ? show(termOf(event)) : term && hide()));
  addEventListener("focusout", (event) => termOf(event) && hide());
  addEventListener("click", (event) => (termOf(event) ? show(termOf(event)) : event.target !== box && hide()));
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
  addEventListener("scroll", () => term && term !== document.activeElement && hide(), { passive: true });
})();
