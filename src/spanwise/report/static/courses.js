"use strict";
// The course of a critic's values along a completion: a line for each value, with a tick where a segment opens.
// The token view makes it and says which completion and which token; a token that is pointed at here is one there.
window.spanwiseCourses = ({ view, data, make, show, plain, count, inspect }) => {
  const BINS = 600; // a completion of more than twice as many tokens shares them out
  const box = view.querySelector(".token-courses"), template = view.querySelector(".token-chart").content.firstElementChild;
  const nameOf = ({ name }, noun = "value") => name ? `${noun}, ${name}` : noun;
  const extent = (numbers) => numbers.filter(Number.isFinite)
    .reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
  // One scale for all completions: a flat critic looks flat.
  const extents = data.values.map(({ words }) => extent(words.map((word) => word === null ? NaN : Number(word))));
  let drawn = [], size = 0, pinned = null;

  // What is not known is a gap. Of a long completion each bin has its lowest and its highest value.
  const line = (x, low, high) => {
    const width = size > 2 * BINS ? Math.ceil(size / BINS) : 1, path = [];
    for (let first = 0, open = false; first < size; first += width) {
      const known = Array.from({ length: Math.min(width, size - first) }, (_, i) => first + i).filter((t) => Number.isFinite(x[t]));
      known.sort((a, b) => x[a] - x[b]);
      for (const t of known.length ? [...new Set([known[0], known.at(-1)])].sort((a, b) => a - b) : []) {
        path.push(`${open ? "L" : "M"}${t + 0.5} ${(0.84 - (0.8 * (x[t] - low)) / (high - low || 1)).toFixed(4)}${open ? "" : "h0"}`);
        open = true;
      }
      open &&= known.length > 0;
    }
    return path.join("");
  };
  const add = (column, [low, high], x, opens) => {
    const [lowest, highest] = extent(x), chart = template.cloneNode(true), find = (name) => chart.querySelector(name);
    if (lowest > highest) return; // this completion has none
    const said = `${plain(lowest)} to ${plain(highest)}${data.segments ? `, ${count(opens.length + 1, "segment")}` : ""}`;
    const cell = Math.max(1, size / BINS / 2), ticks = new Set(opens.map((t) => Math.round(t / cell) * cell)); // that can be told apart
    find("svg").setAttribute("viewBox", `0 0 ${size} 1`);
    find("svg").setAttribute("aria-label", `${nameOf(column)} before each token: ${said}`);
    find(".token-ticks").setAttribute("d", [...ticks].map((t) => `M${t} 0.85V1`).join(""));
    find(".token-line").setAttribute("d", line(x, low, high));
    find(".token-high").textContent = plain(high);
    find(".token-low").textContent = low < high ? plain(low) : "";
    box.append(make("p", "token-course-head", show(make("b"), nameOf(column)), ` before each token · ${said}`), chart);
    drawn.push({ column, x, opens, cursor: find(".token-cursor") });
  };
  const draw = (n, tokens, values) => {
    box.replaceChildren();
    [drawn, size, pinned] = [[], tokens, null];
    data.values.forEach((column, s) => add(column, extents[s], values(column), data.opens[n][column.name] ?? []));
    if (drawn.length && data.segments) box.append(make("p", "token-course-head", data.segments));
  };
  const point = (t) => drawn.forEach(({ cursor }) => cursor.setAttribute("d", t === null ? "" : `M${t + 0.5} 0V1`));
  const segments = (t) => drawn.filter(({ x }) => data.segments && !Number.isNaN(x[t])).map(({ column, opens }) =>
    [nameOf(column, "segment"), `${opens.filter((start) => start <= t).length + 1} of ${opens.length + 1}`]);
  const under = ({ target, clientX }) => { // the token whose value is there
    const frame = target.closest("svg")?.getBoundingClientRect();
    return frame ? Math.min(Math.max(Math.floor(((clientX - frame.left) / frame.width) * size), 0), size - 1) : null;
  };
  box.addEventListener("pointermove", (event) => inspect(under(event) ?? pinned));
  box.addEventListener("click", (event) => inspect(pinned = under(event)));
  box.addEventListener("pointerleave", () => inspect(pinned));
  return { columns: data.values.map((column) => [nameOf(column), column]), draw, point, segments };
};
