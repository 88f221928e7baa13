// Where the bytes are: the tree of a step as rectangles, a few levels at a time; a click goes deeper.
const LEVELS = 3;
const MOST_OF_A_NODE = 300;
let colouring = "group";
let shownNode = "";

/** A position in a list says nothing without the name of the list. */
const tileName = (node, parent) => (parent && /^\d+$/.test(node.name) ? `${parent.name}/${node.name}` : node.name);

/** A chain of single children is one rectangle: `state`, `params`, `model` says no more than its end. */
const tile = (node, parent, colourOf, group, place = 0) => {
  let name = tileName(node, parent);
  while (node.children.size === 1 && !node.leaf) {
    [node] = node.children.values();
    name += `/${node.name}`;
  }
  const about = node.leaf ? typeText(node.leaf) : node.form || countedLeaves(node.count);
  const made = { id: node.path, name, value: node.bytes, about, leaf: node.leaf?.key, itemStyle: { color: colourOf(node, group, place) } };
  const children = [...node.children.values()].filter((child) => child.bytes).sort((a, b) => b.bytes - a.bytes);
  const smaller = children.splice(MOST_OF_A_NODE);
  made.children = children.map((child, index) => tile(child, node, colourOf, group ?? index, index));
  if (smaller.length) {
    const value = smaller.reduce((sum, child) => sum + child.bytes, 0);
    made.children.push({ name: `${smaller.length} smaller`, value, about: "not drawn", itemStyle: { color: "var(--c7)" } });
  }
  made.children.reverse(); // of two of one size ECharts draws the later one first
  return made;
};

const treemapOption = (root, step) => {
  const dtypes = dtypesOf(root).map(([name]) => name);
  const colour = (index) => `var(--c${Math.max(index, 0) % 8})`;
  const ofDtype = (node) => colour(dtypes.indexOf(dtypesOf(node)[0]?.[0]));
  // neighbours of a group have shades of its colour
  const ofGroup = (_, group = 0, place) => `color-mix(in oklab, ${colour(group)} ${100 - 8 * (place % 4)}%, black)`;
  const { name, children, ...whole } = tile(root, null, colouring === "dtype" ? ofDtype : ofGroup);
  const tooltip = ({ data: one }) =>
    one?.about ? `<b>${safe(one.name)}</b><br>${size(one.value)} · ${percent(one.value / root.bytes)}<br>${safe(one.about)}` : "";
  return {
    tooltip: { formatter: tooltip },
    series: {
      type: "treemap",
      name: `${stepName(step)}${name}`,
      data: children.length ? children : [{ name: name.slice(1), ...whole }],
      left: 0, right: 0, top: 28, bottom: 0,
      roam: false,
      nodeClick: false,
      leafDepth: LEVELS,
      visibleMin: 120,
      breadcrumb: { top: 0, left: 0, height: 22, itemStyle: { color: "var(--panel)", borderColor: "var(--line)", textStyle: { color: "var(--fg)" } } },
      label: { color: "var(--tile)", fontSize: 12, lineHeight: 16, overflow: "truncate", formatter: ({ data: one }) => `${one.name}\n${size(one.value)}` },
      upperLabel: { show: true, height: 19, color: "var(--fg)", fontSize: 12, overflow: "truncate", padding: [0, 5], formatter: ({ data: one }) => `${one.name}  ${size(one.value)}` },
      itemStyle: { borderColor: "var(--bg)", borderWidth: 1, gapWidth: 1 },
      levels: [{ itemStyle: { borderWidth: 0, gapWidth: 3 }, upperLabel: { show: false } }, { upperLabel: { fontWeight: 600 } }],
    },
  };
};

const drawTreemap = (given) => {
  if (!steps.length) return given.remove();
  const goTo = (chart, targetNodeId) => chart.dispatchAction({ type: "treemapRootToNode", targetNodeId });
  const ready = (chart) => {
    goTo(chart, shownNode); // the same place in another step, if it is there
    chart.on("treemapRootToNode", ({ targetNode, targetNodeId }) => { shownNode = targetNode?.getId() ?? targetNodeId; });
    chart.on("click", ({ data: one }) => {
      if (one?.leaf) {
        select("leaf", one.leaf);
        document.getElementById("leaves").scrollIntoView();
      } else if (one?.children?.length) goTo(chart, one.id);
    });
  };
  const pick = (name) => el("button", { "aria-pressed": String(colouring === name), onclick: () => { colouring = name; draw(); } }, `by ${name}`);
  const draw = () => {
    const step = selectedStep();
    const root = treeOf(step);
    const key = ([name, bytes], index) => el("span", {}, colouring === "dtype" && el("i", { style: `background:var(--c${index % 8})` }), `${name} ${size(bytes)}`);
    const empty = leavesOf(step).filter((leaf) => leaf.bytes === 0).length;
    const without = empty ? ` ${counted(empty, "leaf without bytes (text, empty arrays) is", "leaves without bytes (text, empty arrays) are")} not drawn.` : "";
    fill(given, el("h2", {}, "Where the bytes are"), step.problem
      ? para("note bad", `This cannot be read: ${step.problem}`)
      : [
          el("div", { class: "tools" }, el("div", { class: "choice", role: "group", "aria-label": "colours" }, pick("group"), pick("dtype"))),
          root.bytes ? plot("bytes of the leaves, as areas", treemapOption(root, step), ready, { id: "treemap" }) : para("note", "Nothing here has bytes."),
          el("div", { class: "keys" }, dtypesOf(root).map(key)),
          para("caption", `Uncompressed bytes of ${stepName(step)}; click a rectangle to look into it, or its name above to go back.${without}`),
        ]);
  };
  onSelect("step", draw);
  draw();
};
