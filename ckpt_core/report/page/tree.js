// The tree of a step with search, and beside it the leaf that is chosen.
const ROWS_SHOWN = 200;
const OPENED_LEAVES = 40;

const treeRow = (tag, name, type, bytes, depth, properties) => {
  const whole = selectedStep().array_bytes;
  return el(tag, { class: "row", style: `--depth:${depth};--part:${whole ? Math.round((100 * bytes) / whole) : 0}%`, ...properties },
    el("span", { class: "name" }, name), el("span", { class: "type" }, type), el("span", { class: "bytes" }, size(bytes)));
};

const chooseLeaf = (key) => {
  select("leaf", key);
  if (matchMedia("(max-width: 860px)").matches) document.getElementById("leaf").scrollIntoView();
};

const leafRow = (leaf, name, depth) =>
  treeRow("button", name, typeText(leaf), leaf.bytes, depth,
    { onclick: () => chooseLeaf(leaf.key), "data-key": leaf.key, "aria-current": String(leaf.key === selected.leaf) });

const branch = (node, depth, open) => {
  const children = [...node.children.values()];
  if (!children.length) return node.leaf ? leafRow(node.leaf, node.name, depth) : treeRow("div", node.name, node.form, node.bytes, depth);
  return unfold(treeRow("summary", node.name, countedLeaves(node.count), node.bytes, depth), () => [
    node.leaf ? leafRow(node.leaf, "(the value itself)", depth + 1) : "",
    some(children, ROWS_SHOWN, (shown) => shown.map((child) => branch(child, depth + 1, children.length === 1))),
  ], open);
};

const wholeTree = () => {
  const root = treeOf(selectedStep());
  const open = root.count <= OPENED_LEAVES || root.children.size === 1;
  return el("div", { class: "tree" }, some([...root.children.values()], ROWS_SHOWN, (shown) => shown.map((node) => branch(node, 0, open))));
};

/** A name with the words that were searched for marked. */
const marked = (name, words) => {
  const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).sort((a, b) => b.length - a.length);
  return name.split(new RegExp(`(${escaped.join("|")})`, "i")).map((part, index) => (index % 2 ? el("mark", {}, part) : part));
};

const search = (text) => {
  const words = text.toLowerCase().replaceAll("×", "x").split(/\s+/);
  const found = leavesOf(selectedStep()).filter((leaf) => {
    const searched = `${nameOf(leaf)} ${typeText(leaf)}`.toLowerCase().replaceAll("×", "x");
    return words.every((word) => searched.includes(word));
  });
  const rows = (shown) => shown.map((leaf) => leafRow(leaf, marked(nameOf(leaf), words), 0));
  return [
    el("p", { class: "caption", id: "found" }, `${countedLeaves(found.length)}, ${size(found.reduce((sum, leaf) => sum + leaf.bytes, 0))}`),
    found.length ? el("div", { class: "tree" }, some(found, ROWS_SHOWN, rows)) : para("soft small", "No leaf has all of these words in its path, dtype or shape."),
  ];
};

const drawLeaves = (given) => {
  if (!steps.length) return given.remove();
  const list = el("div");
  const panel = el("div", { class: "leaf", id: "leaf" });
  const show = () => {
    const words = input.value.trim();
    if (selectedStep().problem) fill(list, para("note bad", "This step cannot be read."));
    else fill(list, words ? search(words) : wholeTree());
  };
  let waiting = 0;
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(show, 60);
  };
  const input = el("input", { id: "search", type: "search", placeholder: "Search: words of a path, a dtype, a shape such as 4096x",
    "aria-label": "search the leaves", autocomplete: "off", spellcheck: "false", oninput: later });
  fill(given, el("h2", {}, "Leaves"), el("div", { class: "two" }, el("div", {}, input, list), panel));
  onSelect("step", show);
  onSelect("step", () => drawLeaf(panel));
  onSelect("leaf", () => drawLeaf(panel));
  onSelect("leaf", (key) => {
    for (const row of list.querySelectorAll("[data-key]")) row.setAttribute("aria-current", row.dataset.key === key);
  });
  show();
  drawLeaf(panel);
};
