// The tree of a step with search. Branches are made when they are opened: 5,000 leaves cost nothing before that.
"use strict";
(() => {
  const { el, size } = report;
  const SHOWN = 200;
  const OPENED_LEAVES = 40;

  const step = () => report.steps[report.selected.step];
  const part = (bytes) => `${step().array_bytes ? Math.round((100 * bytes) / step().array_bytes) : 0}%`;

  const row = ({ name, type, bytes, depth, onclick, ...more }) =>
    el("button", { class: "row", style: `--depth:${depth};--part:${part(bytes)}`, onclick, ...more },
      el("span", { class: "name" }, name), el("span", { class: "type" }, type), el("span", { class: "bytes" }, size(bytes)));

  const leafRow = (leaf, name, depth) =>
    row({ name, type: `${leaf.dtype || leaf.kind} ${report.shape(leaf.shape)}`, bytes: leaf.bytes, depth,
      onclick: () => choose(leaf.key), "data-key": leaf.key, "aria-current": leaf.key === report.selected.leaf ? "true" : null });

  const choose = (key) => {
    report.select("leaf", key);
    if (matchMedia("(max-width: 860px)").matches) document.getElementById("leaf").scrollIntoView();
  };

  const branch = (node, depth, open) => {
    if (node.leaf && !node.children.size) return leafRow(node.leaf, [el("i", {}, ""), node.name], depth);
    if (!node.children.size) return row({ name: [el("i", {}, ""), node.name], type: node.form, bytes: node.bytes, depth });
    const inside = el("div");
    const arrow = el("i", {}, "▸");
    let made = false;
    const set = (to) => {
      inside.hidden = !to;
      arrow.textContent = to ? "▾" : "▸";
      head.setAttribute("aria-expanded", String(to));
      if (!to || made) return;
      made = true;
      const children = [...node.children.values()];
      if (node.leaf) inside.append(leafRow(node.leaf, "(the value itself)", depth + 1));
      inside.append(report.some(children, SHOWN, (shown) => shown.map((child) => branch(child, depth + 1, children.length === 1))));
    };
    const head = row({ name: [arrow, node.name], type: report.counted(node.count, "leaf", "leaves"), bytes: node.bytes, depth, onclick: () => set(inside.hidden) });
    set(open);
    return el("div", {}, head, inside);
  };

  const whole = () => {
    const root = report.treeOf(step());
    const few = root.count <= OPENED_LEAVES;
    const open = (node, depth) => branch(node, depth, few || root.children.size === 1);
    return el("div", { class: "tree" }, report.some([...root.children.values()], SHOWN, (shown) => shown.map((node) => open(node, 0))));
  };

  /** A name with the words that were searched for marked. */
  const marked = (name, words) => {
    const lower = name.toLowerCase();
    const found = [];
    let at = 0;
    while (at < name.length) {
      let next = -1;
      let length = 0;
      for (const word of words) {
        const index = lower.indexOf(word, at);
        if (index >= 0 && (next < 0 || index < next || (index === next && word.length > length))) [next, length] = [index, word.length];
      }
      if (next < 0) break;
      found.push(name.slice(at, next), el("mark", {}, name.slice(next, next + length)));
      at = next + length;
    }
    found.push(name.slice(at));
    return found;
  };

  const search = (text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = report.leavesOf(step()).filter((leaf) => {
      const searched = `${report.nameOf(leaf)} ${leaf.dtype || leaf.kind} ${report.shape(leaf.shape)}`.toLowerCase().replaceAll("×", "x");
      return words.every((word) => searched.includes(word.replaceAll("×", "x")));
    });
    const bytes = found.reduce((sum, leaf) => sum + leaf.bytes, 0);
    return [
      el("p", { class: "caption", id: "found" }, `${report.counted(found.length, "leaf", "leaves")}, ${size(bytes)}`),
      el("div", { class: "tree" }, found.length ? report.some(found, SHOWN, (shown) => shown.map((leaf) => leafRow(leaf, marked(report.nameOf(leaf), words), 0))) : el("p", { class: "soft small", style: "padding:0 12px" }, "No leaf has all of these words in its path, dtype or shape.")),
    ];
  };

  report.tree = (place) => {
    if (!report.steps.length) return place.remove();
    const input = el("input", { id: "search", type: "search", placeholder: "Search: words of a path, a dtype, a shape such as 4096x", "aria-label": "search the leaves", autocomplete: "off", spellcheck: "false" });
    const list = el("div");
    const show = () => report.fill(list, step().problem ? el("p", { class: "note bad" }, "This step cannot be read.") : input.value.trim() ? search(input.value) : whole());
    let waiting = 0;
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(show, 60);
    });
    const panel = el("div", { class: "leaf", id: "leaf" });
    report.fill(place, el("h2", {}, "Leaves"), el("div", { class: "two" }, el("div", {}, input, list), panel));
    report.on("step", show);
    report.on("leaf", (key) => {
      for (const old of list.querySelectorAll("[aria-current]")) old.removeAttribute("aria-current");
      for (const one of list.querySelectorAll("[data-key]")) if (one.dataset.key === key) one.setAttribute("aria-current", "true");
    });
    show();
    report.leafPanel(panel);
  };
})();
