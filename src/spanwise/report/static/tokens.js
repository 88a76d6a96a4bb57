// The token view: one completion at a time, coloured by the credit of two methods.
// Completions are untrusted: everything is written as text nodes, after hidden characters were made visible.
(() => {
  "use strict";
  const ROW_TOKENS = 1000, ROW_CHARACTERS = 6000, PROMPT_CHARACTERS = 100000, DETAIL_CHARACTERS = 120; // shown at a time
  const FAILED = new Set(["unparsable", "timeout", "error", "broke"]), SLICE = new RegExp(`[^]{1,${ROW_CHARACTERS}}`, "gu"); // never half a character
  // ---- reading ----
  const read = async (view) => {
    const { deflate } = JSON.parse(view.querySelector(".token-data").textContent);
    const bytes = Uint8Array.from(atob(deflate), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  };
  const decode = (column, n) => {
    const codes = column?.codes[n] ?? null, entries = codes === null ? null : [];
    for (let i = 0, point; i < codes?.length; i += point > 0xffff ? 2 : 1) {
      point = codes.codePointAt(i);
      entries.push(column.words[point - (point >= 0xe000 ? 2080 : 32)]);
    }
    return entries;
  };
  const numbers = (column, n) => decode(column, n)?.map((entry) => entry === null ? NaN : Number(entry)) ?? null;
  // Bytes of cut characters come as lone surrogates (U+DC80 to U+DCFF); joined they are characters again.
  const join = (tokens) => tokens.join("").replace(/[\u{dc80}-\u{dcff}]+/gu, (run) =>
    new TextDecoder().decode(Uint8Array.from(run, (half) => half.charCodeAt(0) - 0xdc00)));
  // ---- writing ----
  const { make, show, plain, signed, count, EVERYWHERE } = window.spanwiseText;
  const paint = (element, x, scale, kind) => {
    const share = kind === "probability" ? 1 - x : Math.sqrt(Math.min(1, Math.abs(x) / scale));
    const name = Number.isNaN(x) ? "none" : kind === "probability" ? "surprise" : x > 0 ? "plus" : x < 0 ? "minus" : "zero";
    element.classList.add("token", name); // the smallest credit is a colour; only exactly 0 and what is not trained have none
    if (name !== "none" && name !== "zero") element.style.setProperty("--strength", `${(14 + 86 * share).toFixed(1)}%`);
    return element;
  };

  // ---- one view ----
  const start = (view, data, owner) => {
    const find = (selector) => view.querySelector(selector);
    const control = Object.fromEntries([...view.querySelectorAll("select, input")].map((each) => [each.name, each]));
    const panes = find(".token-panes"), end = find(".token-end");
    const total = data.steps.length, everyone = [...data.steps.keys()];
    const courses = window.spanwiseCourses({ view, data, make, show, plain, count, inspect: (t) => inspect(t) });
    const extras = Object.fromEntries([...courses.columns, ...(data.probabilities ? [["probability", data.probabilities]] : [])]);
    const hints = window.spanwiseHints({ view, box: find(".token-details"), make, show, glossary: data.glossary });
    const steps = window.spanwiseSteps({ view, data, show, plain, moved: (place = at) => {
      select(false, place);
      mark();
    } });
    let listed = everyone, at = 0, shown = null, waiting = [], pinned = null;
    const credit = (side) => data.advantages[control[side].value], name = (side) => data.methods[control[side].value];
    const kind = () => control.colour.value, column = (side) => extras[kind()] ?? credit(side);
    const sides = () => data.methods.length === 1 || kind() !== "credit" ? ["left"] : ["left", "right"];
    const scale = (side, get = column) => (control.scale.value === "own" ? get(side).scale
      : Math.max(...["left", "right"].map((each) => get(each).scale))) || 1;
    const statuses = (n) => decode(data.statuses, n), fault = (n) => decode(data.faults, n)[0];
    const texts = [], text = (n) => texts[n] ??= `${decode(data.prompts, n)[0]}\n${join(decode(data.tokens, n))}`.toLowerCase();
    // ---- which completions, in which order ----
    const fits = {
      "": () => true, well: (n) => !fault(n), malformed: (n) => fault(n),
      absent: (n) => statuses(n).includes("absent"), failed: (n) => statuses(n).some((status) => FAILED.has(status)),
      ...Object.fromEntries(["left", "right"].map((side) => [side, (n) => numbers(credit(side), n).every((x) => !x)])),
    };
    const select = (keep = true, place = 0) => { // keep the completion, or go to a place in the list
      const words = control.search.value.toLowerCase(), outcome = { right: 1, wrong: 0 }[control.outcome.value], current = listed[at];
      listed = list.sorted(steps.members().filter((n) => fits[control.status.value](n) && list.fits(n)
        && (outcome === undefined || data.rewards[n][data.outcome] === outcome) && (!words || text(n).includes(words))));
      at = keep ? Math.max(0, listed.indexOf(current)) : Math.max(0, Math.min(place, listed.length - 1));
      draw();
    };
    const sort = (order) => {
      if (order !== "list") list.order(order === "differ" && data.methods.length > 1 ? "difference" : "completion", order === "differ");
      list.heads();
    };
    // ---- drawing ----
    const rewards = (n) => data.objectives.map((objective, m) => {
      const reward = data.rewards[n][m], status = statuses(n)[m];
      if (reward === null) return [`${objective}: ${status && status !== "ok" ? status : "not given"}`, true];
      return [`${objective} ${plain(Number(reward))}${m !== data.outcome ? "" : { 1: " ✓", 0: " ✗" }[reward] ?? ""}${status === "broke" ? " (broke)" : ""}`, status === "broke"];
    });
    const drawFacts = (n = shown.n) => {
      const facts = [...(data.steps[n] === null ? [] : [[`step ${data.steps[n]}`]]), [count(shown.tokens.length, "token")],
        ...(data.scores[n] === null ? [] : [[data.scores[n]]]),
        [fault(n) ? `malformed: ${fault(n)}` : "well-formed", fault(n)], ...rewards(n)];
      find(".token-facts").replaceChildren(...facts.map(([fact, odd]) => show(make("li", odd ? "odd" : ""), fact)));
      const prompt = decode(data.prompts, n)[0], rest = prompt.length - PROMPT_CHARACTERS, fold = find(".token-prompt");
      fold.open = prompt.length <= 600 && prompt.split("\n").length <= 8;
      fold.firstElementChild.textContent = `Prompt (${count(prompt.length, "character")})`;
      fold.lastElementChild.replaceChildren(show(make("span"), prompt.slice(0, PROMPT_CHARACTERS)),
        rest > 0 ? `\n… ${count(rest, "more character")}` : "");
    };
    const drawLegend = () => {
      const box = find(".token-legend"), probable = kind() === "probability", own = kind() === "credit" && control.scale.value === "own";
      box.replaceChildren();
      for (const side of own ? sides() : ["left"]) {
        box.append(show(make("span"), own ? `credit, ${name(side)}` : kind()));
        const steps = probable ? [1, 0.5, 0.1, 0.01] : [-1, -0.3, -0.05, 0, 0.05, 0.3, 1].map((x) => +(x * scale(side)).toPrecision(2));
        const label = (x, i) => probable ? plain(x) : ({ 0: "≤ ", 6: "≥ " }[i] ?? "") + signed(x);
        box.append(...steps.map((x, i) => paint(make("span", "", label(x, i)), x, scale(side), kind())));
      }
      box.append(paint(make("span", "", kind() === "credit" ? "not trained" : "none"), NaN, 1, kind()));
    };
    const blocksAt = (t, spans) => spans.filter(([, from, to]) => from <= t && t < to).map(([block]) => block);
    // Each block starts a row; a long one goes on in further rows, after a line end where there is one.
    const cut = (tokens, spans) => {
      const rows = [], edges = new Set([0, tokens.length, ...spans.flatMap(([, from, to]) => [from, to])]);
      const borders = [...edges].sort((a, b) => a - b), begun = new Set();
      for (let border = 0, size = 0, row, last = "", t = 0; t < tokens.length; t++) {
        const opens = t === borders[border] && [t, borders[++border]];
        const parts = tokens[t].length > ROW_CHARACTERS ? tokens[t].match(SLICE) : [tokens[t]]; // several of a giant token
        parts.forEach((part, i) => {
          const length = row?.parts.length, first = i === 0 && opens;
          const full = length >= ROW_TOKENS || size + part.length > ROW_CHARACTERS || (length > ROW_TOKENS / 2 && last.endsWith("\n"));
          if (first || full) {
            rows.push(row = { names: first ? blocksAt(t, spans) : row.names, opens: first, parts: [] });
            row.begins = !begun.has(row.names[0]) && begun.add(row.names[0]);
            size = 0;
          }
          row.parts.push([t, last = part]);
          size += part.length;
        });
      }
      return rows;
    };
    const paidHere = (block, m) => { // a method with one block for everything pays it here, too
      const found = data.why[shown.n][m].blocks, [only, ...more] = Object.keys(found), paid = found[block] ? block : more.length ? "" : only;
      return paid ? [make("span", "token-block", " · ", hints.term("credit", "credit", -1), show(make("span"), ` of the ${paid === block ? "block" : paid} ${found[paid].credit}`))] : [];
    };
    const head = (row, side, x) => {
      const values = x.slice(...row.opens).filter((value) => !Number.isNaN(value)), write = kind() === "probability" ? plain : signed;
      let low = Infinity, high = -Infinity;
      for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
      const range = low === high ? `${write(low)} × ` : `${write(low)} to ${write(high)}, `;
      const credited = kind() === "credit", each = values.length ? range + count(values.length, "token") : write(NaN);
      return make("p", "token-head", make("span", "", show(make("b"), row.names.join(" + ") || "no block"), show(make("span"), credited ? ` · ${name(side)} · ` : " · ")),
        make("span", "token-each", ...(credited ? [hints.term("token share", "per token", -1), " "] : []), each),
        ...(credited && row.begins ? paidHere(row.names[0], control[side].value) : []));
    };
    const drawRow = () => {
      const row = waiting.shift(), line = make("div", `token-row ${row.opens ? "opens" : "later"}`);
      for (const { side, x, full } of shown.columns) {
        const body = make("div", "token-text");
        for (const [t, part] of row.parts) {
          body.append(paint(show(make("span"), part), x[t], full, kind()));
          body.lastChild.dataset.token = t;
        }
        line.append(make("div", `token-cell${row.names.length ? "" : " outside"}`, ...(row.opens ? [head(row, side, x)] : []), body));
      }
      panes.append(line);
    };
    const more = new IntersectionObserver((entries) => {
      more.unobserve(end);
      if (waiting.length && entries.some((entry) => entry.isIntersecting)) drawRow();
      if (waiting.length) more.observe(end); // asks again whether the end is near
    }, { rootMargin: "1000px" });
    const draw = () => {
      const n = listed[at], focused = panes.contains(document.activeElement), members = steps.members().length, whole = listed.length === members;
      find(".token-count").textContent = !listed.length ? "No completion fits." : whole && control.order.value === "file"
        ? `${at + 1} of ${members}` : `${at + 1} of ${listed.length}${whole ? "" : " that fit"}: completion ${n + 1} of ${total}`;
      find(".token-body").hidden = find(".token-headline").hidden = !listed.length;
      list.draw(listed, n);
      panes.replaceChildren();
      [shown, waiting, pinned] = [null, [], null];
      if (!listed.length) return;
      control.jump.value = n + 1;
      const made = new Map(), values = (column) => made.get(column)
        ?? made.set(column, numbers(column, n) ?? Array(shown.tokens.length).fill(NaN)).get(column);
      shown = { n, values, tokens: decode(data.tokens, n), spans: data.spans[n] };
      shown.columns = sides().map((side) => ({ side, full: scale(side), x: values(column(side)) }));
      panes.classList.toggle("alone", shown.columns.length === 1);
      why.draw(n, Number(control.left.value), Number(control.right.value));
      [drawFacts, drawLegend, () => courses.draw(n, shown.tokens.length, values), inspect].forEach((step) => step());
      waiting = cut(shown.tokens, shown.spans);
      while (waiting.length && panes.childElementCount < 6 && panes.querySelectorAll(".token").length < ROW_TOKENS) drawRow();
      find(".token-panes .token")?.setAttribute("tabindex", "0");
      if (focused) moves.leave();
      more.observe(end);
    };
    const inspect = (t = null, anchor = find(".token-courses")) => {
      panes.querySelectorAll(".current").forEach((token) => token.classList.remove("current"));
      courses.point(t);
      if (t === null) return hints.hide();
      panes.querySelectorAll(`[data-token="${t}"]`).forEach((token) => token.classList.add("current"));
      const entries = make("dl"), token = shown.tokens[t], rest = token.length - DETAIL_CHARACTERS;
      const add = (term, text) => entries.append(make("div", "", show(make("dt"), term), text.append ? text : show(make("dd"), text)));
      const body = show(make("dd", "token-text"), token.slice(0, DETAIL_CHARACTERS), EVERYWHERE);
      add(`token ${t + 1} of ${shown.tokens.length}`, rest > 0 ? make("dd", "", body, `… ${count(rest, "more character")}`) : body);
      add("block", blocksAt(t, shown.spans).join(" + ") || "none");
      const say = (term, column, write, x = shown.values(column)) => add(term, write(x[t]) + (x[t] && column.rounded ? " (rounded)" : ""));
      data.methods.forEach((method, m) => {
        say(`credit, ${method}`, data.advantages[m], signed);
        const last = shown.values(data.advantages[m]).findLastIndex((x) => !Number.isNaN(x)), stop = data.stops[shown.n]?.[m];
        if (t === last && stop) add(`of it stop credit, ${method}`, signed(stop));
      });
      for (const [extra, column] of Object.entries(extras)) say(extra, column, plain);
      for (const entry of courses.segments(t)) add(...entry);
      add("rewards", rewards(shown.n).map(([reward]) => reward).join(", ") || "none");
      hints.say(entries, anchor);
    };
    const tokenAt = (event) => event.target.closest?.(".token-panes .token");
    const indexAt = (event) => tokenAt(event) ? Number(tokenAt(event).dataset.token) : null;
    const sideOf = (token) => [...token.closest(".token-row").children].indexOf(token.closest(".token-cell"));
    const pin = (t, side) => {
      while (waiting.length && !find(`[data-token="${t}"]`)) drawRow();
      const token = [...panes.querySelectorAll(`[data-token="${t}"]`)].find((each) => sideOf(each) === side);
      if (!token) return;
      panes.querySelectorAll(".token[tabindex]").forEach((each) => each.removeAttribute("tabindex"));
      token.tabIndex = 0;
      token.scrollIntoView({ block: "nearest", behavior: "instant" }); // at once, or the hint is placed where it was
      token.focus({ preventScroll: true });
    };
    // ---- moving ----
    const mark = () => owner && listed.length && history.replaceState(null, "", `#token-${listed[at] + 1}`);
    const go = (to) => {
      const next = Math.min(Math.max(to, 0), listed.length - 1);
      if (next < 0 || next === at) return;
      at = next;
      draw();
      mark();
    };
    const moves = {
      first: () => go(0), previous: () => go(at - 1), next: () => go(at + 1), last: () => go(listed.length - 1),
      leave: () => panes.focus({ preventScroll: true }), reset: () => { control.status.value = control.outcome.value = control.search.value = ""; list.clear(); select(); },
    };
    const open = (n) => {
      steps.open(n);
      if (!listed.includes(n)) moves.reset();
      go(listed.indexOf(n));
    };
    const keys = { ArrowLeft: "previous", k: "previous", ArrowRight: "next", j: "next", Home: "first", End: "last", Escape: "leave" };
    document.addEventListener("keydown", (event) => {
      const { key, target } = event, box = view.getBoundingClientRect(), middle = innerHeight / 2;
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || target.closest?.("input, select, textarea")) return;
      // The view that is looked at takes the keys; on a token the arrows go from token to token.
      const inside = view.contains(target), token = inside && tokenAt(event), step = { ArrowLeft: -1, ArrowRight: 1 }[key];
      if (!(key in keys) || !(inside || (box.top < middle && box.bottom > middle)) || (key === "Escape" && !token)) return;
      event.preventDefault();
      if (token && step) pin(indexAt(event) + step, sideOf(token));
      else moves[keys[key]]();
    });
    view.addEventListener("click", (event) => {
      const button = event.target.closest("[data-go]"), token = tokenAt(event);
      if (button) moves[button.dataset.go]();
      else if (token && getSelection().isCollapsed) pin(indexAt(event), sideOf(token)); // text can still be marked
    });
    const back = () => inspect(pinned, document.activeElement.closest(".token-panes .token") ?? undefined); // to the token that has the focus
    panes.addEventListener("pointerover", (event) => tokenAt(event) ? inspect(indexAt(event), tokenAt(event)) : back());
    panes.addEventListener("pointerleave", back);
    panes.addEventListener("focusin", (event) => inspect(pinned = indexAt(event), tokenAt(event) ?? undefined));
    panes.addEventListener("focusout", ({ relatedTarget }) => relatedTarget && !panes.contains(relatedTarget) && inspect(pinned = null));
    view.addEventListener("change", ({ target }) => {
      if (target === control.jump) open(Math.min(Math.max(Math.round(target.value) || 1, 1), total) - 1);
      else if (target.closest(".token-more")) {
        if (target === control.left || target === control.right) list.redefine();
        if (target === control.order) sort(target.value);
        [label, () => select(target.value !== "differ")].forEach((step) => step());
      }
      if (listed.length) control.jump.value = listed[at] + 1; // also where it was beyond the last one
    });
    control.search.addEventListener("input", () => select());
    const follow = () => {
      const n = Number(/^#token-(\d+)$/.exec(location.hash)?.[1]) - 1;
      if (!owner || !everyone.includes(n)) return;
      open(n);
      view.scrollIntoView();
    };
    addEventListener("hashchange", follow);
    const label = () => {
      for (const side of ["left", "right"]) control.status.querySelector(`[value=${side}]`).textContent = `no credit, ${name(side)}`;
      control.right.closest("label").hidden = control.scale.closest("label").hidden = sides().length === 1;
    };
    for (const side of ["left", "right"]) control[side].append(...data.methods.map((method, m) => new Option(method, m)));
    [control.left.value, control.right.value] = data.pair;
    control.colour.append(...Object.keys(extras).map((extra) => new Option(extra)));
    if (data.methods.length === 1) control.order.closest("label").hidden = control.status.querySelector("[value=right]").hidden = true;
    control.outcome.closest("label").hidden = data.outcome === null;
    show(find(".token-outcome"), data.objectives[data.outcome] ?? "");
    const visit = (n) => {
      open(n);
      if (find(".token-headline").getBoundingClientRect().top < 0) view.scrollIntoView();
    };
    const changed = (change) => {
      const before = list.sorting();
      change();
      if (before !== list.sorting()) control.order.value = "list";
      list.heads();
      select(before === list.sorting());
    };
    const list = window.spanwiseList({ view, data, make, show, decode, numbers, statuses, fault, hints, open: visit, changed,
      sides: () => [Number(control.left.value), Number(control.right.value)] });
    const why = window.spanwiseWhy({ view, data, make, show, decode, count, hints, open: visit,
      outcomes: data.outcome === null ? [] : ["outcome"], rewards: (n) => data.rewards[n].map((reward, m) => reward === null ? statuses(n)[m] || "none" : plain(Number(reward))) });
    control.order.value = data.methods.length > 1 && !steps.any ? "differ" : "file";
    find(".token-app").hidden = false;
    [label, () => sort(control.order.value), () => select(false), follow].forEach((step) => step());
  };

  document.querySelectorAll(".token-view").forEach(async (view, i) => {
    try {
      if (view.querySelector(".token-data")) start(view, await read(view), i === 0);
    } catch (error) {
      view.querySelector(".token-message").textContent = `The completions cannot be shown (${error.message}); try a newer browser.`;
    }
  });
})();
