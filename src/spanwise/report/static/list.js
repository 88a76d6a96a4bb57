"use strict";
// The list of completions: columns that sort and filter. Only the rows that can be seen are in the page, so that thousands are quick.
window.spanwiseList = ({ view, data, make, show, decode, numbers, statuses, fault, sides, changed, open, hints }) => {
  const HEIGHT = 34, MORE = 8, PROMPT = 60; // of a row in pixels; rows beyond the edges; characters of a prompt
  const box = view.querySelector(".token-table"), [head, body] = [box.querySelector("thead"), box.querySelector("tbody")];
  const fold = view.querySelector(".token-listing");
  let rows = [], current = null, columns = [], sorting = { key: "completion", down: false }, filters = {};
  // ---- what two methods make of a completion ----
  const spread = (own, blocks) => { // a method with one block for everything pays every block
    const names = Object.keys(own);
    return (block) => own[block] ?? (names.length === 1 && blocks.length > 1 ? own[names[0]] : undefined);
  };
  const difference = (n) => {
    const [left, right] = sides();
    const [a, b] = [data.credits[n][left], data.credits[n][right]], blocks = [...new Set([...Object.keys(a), ...Object.keys(b)])];
    const [x, y] = [spread(a, blocks), spread(b, blocks)];
    const gaps = blocks.filter((each) => x(each) !== undefined && y(each) !== undefined)
      .map((each) => Math.abs(x(each) / data.units[left] - y(each) / data.units[right]));
    if (gaps.length) return Math.max(...gaps);
    if (blocks.length) return NaN;
    const size = (m) => data.advantages[m].scale || 1; // nothing is known by block: the mean difference of its tokens
    const [u, v] = [left, right].map((m) => numbers(data.advantages[m], n).map((value) => value / size(m)));
    const apart = u.map((value, t) => Math.abs(value - v[t])).filter((gap) => !Number.isNaN(gap));
    return apart.length ? apart.reduce((sum, gap) => sum + gap, 0) / apart.length : NaN;
  };
  const rounded = (x) => x === null || x === undefined || Number.isNaN(x) ? "–" : `${x < 0 ? "−" : ""}${Math.abs(+x.toPrecision(4))}`;
  const state = (n) => [...new Set([fault(n) && `malformed: ${fault(n)}`, ...statuses(n).map((status, m) => status && status !== "ok" ? `${data.objectives[m]} ${status}` : "")])]
    .filter(Boolean).join(", ") || "ok";
  const define = () => {
    const pair = [...new Set(sides())], known = (m) => [...new Set(data.credits.flatMap((each) => Object.keys(each[m])))];
    const column = (key, value, hint = "") => ({ key, value, hint });
    columns = [
      column("completion", (n) => n + 1),
      ...(data.steps.some((step) => step !== null) ? [column("step", (n) => data.steps[n])] : []),
      column("prompt", (n) => decode(data.prompts, n)[0]),
      ...(data.outcome === null ? [] : [column("outcome", (n) => ({ 1: "right", 0: "wrong" }[data.rewards[n][data.outcome]] ?? "not known"))]),
      ...(data.stated.some((each) => each !== null) ? [column("confidence", (n) => data.stated[n])] : []),
      ...data.objectives.map((name, m) => column(`reward ${name}`, (n) => data.rewards[n][m] === null ? null : Number(data.rewards[n][m]))),
      column("status", state),
      ...pair.flatMap((m) => known(m).map((block) => column(`${data.methods[m]}: ${block}`, (n) => data.credits[n][m][block] ?? null, data.glossary.credit))),
      ...(pair.length > 1 ? [column("difference", difference, "The largest gap between the two methods over blocks, each in units of the method's usual credit.")] : []),
    ];
    for (const each of columns) { // asked for again and again while sorting
      const seen = [], plain = each.value;
      each.value = (n) => n in seen ? seen[n] : (seen[n] = plain(n));
    }
  };
  const find = (key) => columns.find((each) => each.key === key);
  // ---- filters and order ----
  const NUMBER = "[-−]?\\d*\\.?\\d+(?:e[-−]?\\d+)?", ONE = new RegExp(`^(<=|>=|<|>|=)?\\s*(${NUMBER})$`, "i"), TWO = new RegExp(`^(${NUMBER})\\s*\\.\\.\\s*(${NUMBER})$`, "i");
  const parse = (text) => Number(text.replace("−", "-"));
  const test = (wanted) => { // ">0.5", "-1..0", "0.25", or words
    const range = TWO.exec(wanted), one = ONE.exec(wanted);
    const number = range ? (x) => x >= parse(range[1]) && x <= parse(range[2]) : one && ((x) => {
      const bound = parse(one[2]);
      return { "<": x < bound, ">": x > bound, "<=": x <= bound, ">=": x >= bound }[one[1]] ?? rounded(x) === rounded(bound);
    });
    const words = wanted.toLowerCase();
    return (value) => typeof value === "number" ? Boolean(number && !Number.isNaN(value) && number(value)) || (!number && rounded(value).includes(words))
      : value === null ? words === "–" || words === "-" || words === "none" : value.toLowerCase().includes(words);
  };
  const fits = (n) => Object.values(filters).every(({ key, passes }) => !find(key) || passes(find(key).value(n)));
  const sorted = (listed) => {
    const by = find(sorting.key) ?? columns[0], sign = sorting.down ? -1 : 1, none = (x) => x === null || Number.isNaN(x);
    return [...listed].sort((a, b) => {
      const [x, y] = [by.value(a), by.value(b)];
      if (none(x) || none(y)) return none(x) - none(y) || a - b; // what is not known comes last, whichever way
      return (typeof x === "number" && typeof y === "number" ? x - y : x < y ? -1 : x > y ? 1 : 0) * sign || a - b;
    });
  };
  const order = (key, down) => { sorting = { key, down }; };
  // ---- drawing ----
  const drawHead = () => {
    const titles = make("tr"), inputs = make("tr", "token-filters");
    for (const { key, hint } of columns) {
      const here = sorting.key === key, button = show(make("button"), key), cell = make("th", "", button);
      [cell.scope, button.ariaLabel] = ["col", `Sort by ${key}`];
      cell.ariaSort = here ? (sorting.down ? "descending" : "ascending") : "none";
      Object.assign(button, { type: "button", onclick: () => changed(() => order(key, here ? !sorting.down : key.includes(":") || key === "difference")) });
      button.append(here ? (sorting.down ? " ↓" : " ↑") : "");
      if (hint) button.dataset.hint = hint;
      const input = Object.assign(make("input"), { type: "text", value: filters[key]?.text ?? "", placeholder: key === "prompt" || key === "status" || key === "outcome" ? "contains" : ">0" });
      input.ariaLabel = `Filter ${key}: words, a number, >0.5 or -1..0`;
      input.addEventListener("input", () => changed(() => {
        if (input.value.trim()) filters[key] = { key, text: input.value, passes: test(input.value.trim()) };
        else delete filters[key];
      }));
      titles.append(cell);
      inputs.append(make("td", "", input));
    }
    head.replaceChildren(titles, inputs);
  };
  const cell = (column, n) => {
    const value = column.value(n), text = typeof value === "string" ? value : rounded(value);
    const element = show(make("td", typeof value === "string" ? "" : "number"), text.length > PROMPT ? `${text.slice(0, PROMPT)}…` : text.replace(/\n/g, " "));
    if (typeof value !== "string") element.dataset.hint = `${column.key} of completion ${n + 1}: ${value === null || Number.isNaN(value) ? "none" : text}`;
    return element;
  };
  const drawRows = () => {
    if (!fold.open) return;
    const above = head.offsetHeight, first = Math.max(0, Math.floor((box.scrollTop - above) / HEIGHT) - MORE);
    const last = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight) / HEIGHT) + MORE);
    const focused = body.contains(document.activeElement) ? Number(document.activeElement.dataset.row) : null;
    const space = (count) => {
      const line = make("tr", "token-space");
      line.append(Object.assign(make("td"), { colSpan: columns.length }));
      line.firstChild.style.height = `${count * HEIGHT}px`;
      line.ariaHidden = "true";
      return line;
    };
    const lines = rows.slice(first, last).map((n, i) => {
      const line = make("tr", n === current ? "current" : "", ...columns.map((each) => cell(each, n)));
      Object.assign(line, { tabIndex: n === current || (first + i === 0 && !rows.includes(current)) ? 0 : -1, ariaRowIndex: first + i + 3, onclick: () => open(n) });
      [line.dataset.row, line.dataset.n] = [first + i, n];
      return line;
    });
    body.replaceChildren(...(first ? [space(first)] : []), ...lines, ...(last < rows.length ? [space(rows.length - last)] : []));
    box.firstElementChild.ariaRowCount = rows.length + 2;
    if (focused !== null) body.querySelector(`[data-row="${focused}"]`)?.focus({ preventScroll: true });
  };
  const reveal = (row) => {
    const above = head.offsetHeight, top = row * HEIGHT;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + HEIGHT + above > box.scrollTop + box.clientHeight) box.scrollTop = top + HEIGHT + above - box.clientHeight;
    drawRows();
  };
  const draw = (listed, n) => {
    [rows, current] = [listed, n];
    const part = data.total > data.steps.length ? ` The file has ${data.total.toLocaleString("en")}; these were chosen evenly.` : "";
    fold.firstElementChild.textContent = `List of completions (${rows.length.toLocaleString("en")} of ${data.steps.length.toLocaleString("en")})`;
    view.querySelector(".token-rows").textContent = `${rows.length.toLocaleString("en")} of ${data.steps.length.toLocaleString("en")} completions on this page.${part} A heading sorts; the fields under it filter.`;
    drawRows();
  };
  const redefine = () => {
    define();
    for (const key of Object.keys(filters)) if (!find(key)) delete filters[key];
    if (!find(sorting.key)) order("completion", false);
    drawHead();
  };
  const clear = () => {
    filters = {};
    drawHead();
  };
  const heads = () => { // without taking the focus from a field that is typed into
    const [titles] = head.children;
    columns.forEach(({ key }, i) => {
      const here = sorting.key === key, button = titles.children[i].firstChild;
      titles.children[i].ariaSort = here ? (sorting.down ? "descending" : "ascending") : "none";
      show((button.replaceChildren(), button), key);
      button.append(here ? (sorting.down ? " ↓" : " ↑") : "");
      button.onclick = () => changed(() => order(key, here ? !sorting.down : key.includes(":") || key === "difference"));
    });
  };
  box.addEventListener("scroll", drawRows, { passive: true });
  fold.addEventListener("toggle", drawRows);
  box.addEventListener("keydown", (event) => {
    const row = Number(event.target.closest?.("[data-row]")?.dataset.row ?? NaN), step = { ArrowUp: -1, ArrowDown: 1, PageUp: -8, PageDown: 8, Home: -Infinity, End: Infinity }[event.key];
    if (event.target.closest("input, button")) return;
    if (event.key === "Enter" && !Number.isNaN(row)) open(rows[row]);
    else if (step === undefined) return;
    else if (!Number.isNaN(row) || event.key === "ArrowDown") {
      const to = Math.min(Math.max((Number.isNaN(row) ? -1 : row) + step, 0), rows.length - 1);
      reveal(to);
      body.querySelectorAll("[data-row]").forEach((line) => { line.tabIndex = Number(line.dataset.row) === to ? 0 : -1; });
      body.querySelector(`[data-row="${to}"]`)?.focus({ preventScroll: true });
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  redefine();
  return { fits, sorted, order, draw, redefine, clear, heads, sorting: () => sorting };
};
