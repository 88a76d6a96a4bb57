"use strict";
// Text that cannot hide anything; and why a number is what it is: hints beside what they explain, the arithmetic of each block, the other completions of the prompt.
// All sums were written where the credit was computed; nothing here computes one.
window.spanwiseText = (() => {
  const make = (tag, name, ...children) => {
    const element = Object.assign(document.createElement(tag), { className: name ?? "" });
    element.append(...children); // strings become text nodes
    return element;
  };
  const plain = (x) => Number.isNaN(x) ? "none" : (x < 0 ? "−" : "") + Math.abs(x);
  const signed = (x) => Number.isNaN(x) ? "not trained" : (x > 0 ? "+" : "") + plain(x);
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  // Controls, bidi, zero width, blanks that look like nothing; a mark without a base; a fourth mark on one base.
  const HIDDEN = "(?![ \\n\\t])[\\p{C}\\p{Z}\\u034f\\u115f\\u1160\\u2800\\u3164\\uffa0]|^\\p{M}|(?<=\\p{M}{3})\\p{M}+";
  const WHERE_IT_MATTERS = new RegExp(`[\\n\\t]| {2,}|^ $|${HIDDEN}`, "gu"), EVERYWHERE = new RegExp(`[\\n\\t]| +|${HIDDEN}`, "gu");
  const escape = (part) => {
    const hex = (point) => point.toString(16).toUpperCase(), point = part.codePointAt(0);
    if (point >= 0xdc80 && point <= 0xdcff) return `‹${hex(point - 0xdc00)}›`; // a byte
    return /^\p{M}/u.test(part) && point !== 0x34f ? `⟨+${count([...part].length, "mark")}⟩` : `⟨U+${hex(point).padStart(4, "0")}⟩`;
  };
  const show = (element, text, where = WHERE_IT_MATTERS) => { // append text, with what would not be seen made visible
    let from = 0;
    for (const { 0: part, index } of text.matchAll(where)) {
      element.append(text.slice(from, index));
      if (part === "\n" || part === "\t") {
        element.append(make("span", "token-mark", part === "\n" ? "⏎" : "⇥"), where === EVERYWHERE ? "" : part);
      } else if (part[0] === " ") element.append(make("span", "token-mark", "·".repeat(part.length)));
      else if (index === 0 && /^\p{M}$/u.test(part) && part !== "\u034f") element.append(`◌${part}`);
      else element.append(make("span", "token-escape", escape(part)));
      from = index + part.length;
    }
    element.append(text ? text.slice(from) : make("span", "token-escape", "∅")); // some ids write nothing
    return element;
  };
  return { make, show, plain, signed, count, EVERYWHERE };
})();

window.spanwiseHints = ({ view, box, make, show, glossary }) => {
  const narrow = matchMedia("(max-width: 640px)"), GAP = 6;
  let anchor = null;
  // Below what it explains, or above it; on a phone a strip at the lower edge, whose space the page keeps free.
  const place = () => {
    if (!anchor?.isConnected || box.hidden) return;
    box.classList.toggle("strip", narrow.matches);
    [box.style.left, box.style.top] = narrow.matches ? ["", ""] : ["0", "0"]; // where it stood says nothing of its size
    const around = anchor.getBoundingClientRect(), { height, width } = box.getBoundingClientRect();
    document.body.style.paddingBottom = narrow.matches ? `${Math.ceil(box.getBoundingClientRect().height) + GAP}px` : "";
    if (narrow.matches) {
      const over = around.bottom - (innerHeight - box.getBoundingClientRect().height - GAP);
      if (over > 0) scrollBy({ top: Math.min(over, Math.max(0, around.top - GAP)), behavior: "instant" });
      return;
    }
    const below = around.bottom + GAP, above = around.top - height - GAP;
    const top = below + height <= innerHeight ? below : above >= 0 ? above : below;
    box.style.left = `${Math.max(GAP, Math.min(around.left, document.documentElement.clientWidth - width - GAP))}px`;
    box.style.top = `${top}px`;
  };
  const hide = () => {
    [anchor, box.hidden] = [null, true];
    box.replaceChildren();
    document.body.style.paddingBottom = "";
  };
  const say = (content, at) => {
    box.replaceChildren(content);
    [anchor, box.hidden] = [at, false];
    place();
  };
  const term = (word, shown = word, tab = 0) => { // with -1 a click focuses it, and Tab goes past
    const element = make("span", "token-term", shown);
    [element.tabIndex, element.dataset.hint] = [tab, glossary[word] ? `${word}: ${glossary[word]}` : word];
    return element;
  };
  const hinted = (element, text, tab = 0) => {
    [element.tabIndex, element.dataset.hint] = [tab, text];
    return element;
  };
  const from = (event) => event.target.closest?.("[data-hint]");
  for (const kind of ["pointerover", "focusin"]) view.addEventListener(kind, (event) => {
    if (from(event)) say(show(make("p"), from(event).dataset.hint), from(event));
  });
  for (const kind of ["pointerout", "focusout"]) view.addEventListener(kind, (event) => {
    if (from(event) && anchor === from(event)) hide();
  });
  addEventListener("scroll", () => (anchor && !narrow.matches ? place() : null), { capture: true, passive: true });
  addEventListener("resize", place);
  return { say, hide, term, hinted };
};

window.spanwiseWhy = ({ view, data, make, show, decode, rewards, outcomes, hints, open, count }) => {
  const { term, hinted } = hints;
  const FACTOR = "credit = weight · (reward − baseline) / scale; a weight or scale of 1 is left out";
  const siblings = (n) => data.groups[n] === null ? [] : [...data.groups.keys()].filter((i) => data.groups[i] === data.groups[n]);
  const headline = (n, methods) => show(view.querySelector(".token-headline"),
    `${decode(data.openings, n)[0]}: ${methods.map((m) => decode(data.clauses[m], n)[0]).join(", ")}.`);
  const sum = (text, hint) => hinted(show(make("code", "token-sum"), text), hint);
  const note = (text) => {
    const named = text.startsWith("baseline "), box = make("span", "token-note", ...(named ? [term("baseline"), " "] : []));
    return show(box, named ? text.slice(9) : text);
  };
  const reason = (block, found) => {
    const box = make("div", "token-reason", make("p", "token-reason-head", hinted(show(make("b"), block), `block: ${data.glossary.block}`),
      make("span", "", " ", term("credit"), " ", hinted(make("span", "token-credit", found.credit), `credit of the ${block}: ${found.credit}`)),
      ...(found.each ? [make("span", "", " ", term("token share", "per token"), " ", hinted(make("span", "token-credit", found.each), `a token of it: ${found.each} ${found.share}`))] : [])));
    if (found.warning) box.append(show(make("p", "token-warning"), found.warning));
    if (found.total) box.append(make("p", "", sum(found.total, `The block is paid by ${count(found.terms.length, "objective")}: their credits add up.`)));
    for (const each of found.terms) {
      const line = make("p", "token-part", hinted(show(make("b"), each.objective), `objective: ${data.glossary.objective}`), " ");
      if (each.sum) line.append(sum(each.sum, FACTOR));
      else line.append(hinted(make("span", "token-credit", each.credit), `what ${each.objective} credits the block with`));
      const parts = [each.worth && make("span", "token-worth", `where ${each.worth}`), note(each.note)].filter(Boolean);
      line.append(...parts.flatMap((part) => [" · ", part]));
      if (each.said) line.append(" · ", show(make("q", "token-said"), each.said));
      box.append(line);
    }
    if (found.share) box.append(show(make("p", "token-share"), found.share));
    return box;
  };
  const drawWhy = (n, methods) => {
    const box = view.querySelector(".token-why");
    box.replaceChildren(make("h3", "", "Why these numbers"), make("p", "token-note", data.sharing));
    if (data.answers[n] !== null) box.append(make("p", "token-gold", make("b", "", "Gold answer "), show(make("span", "token-text"), data.answers[n])));
    const columns = make("div", "token-columns");
    for (const m of methods) {
      const found = data.why[n][m], column = make("div", "token-method", show(make("h4"), data.methods[m]));
      if (found.note) column.append(show(make("p", "token-note"), found.note));
      column.append(...Object.entries(found.blocks).map(([block, each]) => reason(block, each)));
      if (found.stop) column.append(make("p", "token-stop", term("stop credit"), " ", show(make("code", "token-sum"), found.stop)));
      if (!found.note && !found.stop && !Object.keys(found.blocks).length) column.append(make("p", "token-note", "No credit by block is recorded."));
      columns.append(column);
    }
    box.append(columns);
  };
  const table = (heads, rows) => {
    const made = make("table", "", make("thead", "", make("tr", "", ...heads)), make("tbody", "", ...rows));
    const box = make("div", "token-scroll", made);
    [box.tabIndex, box.role, box.ariaLabel] = [0, "region", "The completions of this prompt; scroll sideways for more columns"];
    return box;
  };
  const drawGroup = (n, methods) => {
    const box = view.querySelector(".token-group"), group = siblings(n), last = methods.at(-1);
    box.replaceChildren(make("h3", "", data.groups[n] === null ? "The prompt's other completions"
      : group.length === 1 ? "The only completion of this prompt" : `All ${group.length} completions of this prompt`));
    if (data.groups[n] === null) box.append(make("p", "token-note", "The file does not say which completions were compared."));
    if (group.length < 2) return;
    const shown = methods.flatMap((m) => [...new Set(group.flatMap((i) => Object.keys(data.credits[i][m])))].map((block) => [m, block]));
    const heads = ["completion", ...outcomes, ...data.objectives, ...shown.map(([m, block]) => `${data.methods[m]}: ${block}`), "compared in"]
      .map((name) => Object.assign(show(make("th"), name), { scope: "col" }));
    if (data.glossary.stratum) hinted(heads.at(-1), `stratum: ${data.glossary.stratum} These are the objectives in which ${data.methods[last]} compares the two.`);
    const own = data.why[n][last].strata;
    const rows = group.map((i) => {
      const button = make("button", "", `${i + 1}`), cells = rewards(i), same = Object.keys(own).filter((name) => data.why[i][last].strata[name] === own[name]);
      Object.assign(button, { type: "button", disabled: i === n, onclick: () => open(i), ariaLabel: `Go to completion ${i + 1}` });
      const verdict = outcomes.map(() => ({ 1: "✓ right", 0: "✗ wrong" }[data.rewards[i][data.outcome]] ?? "not known"));
      const credit = shown.map(([m, block]) => {
        const x = data.credits[i][m][block], said = x === undefined ? "–" : `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x)}`;
        return hinted(make("span", "", said), `credit of ${block} under ${data.methods[m]}: ${x === undefined ? "the block is not there" : said}`, -1);
      });
      const row = make("tr", i === n ? "current" : "", make("td", "", button), ...[...verdict, ...cells].map((text) => show(make("td"), text)),
        ...credit.map((each) => make("td", "", each)), show(make("td"), i === n ? "this one" : same.join(", ") || "nothing"));
      return row;
    });
    box.append(table(heads, rows));
  };
  const draw = (n, left, right) => {
    const methods = [...new Set([left, right])];
    view.querySelector(".token-headline").replaceChildren();
    headline(n, methods);
    drawWhy(n, methods);
    drawGroup(n, methods);
  };
  return { draw };
};
