// Where the bytes are: the tree of a step as rectangles. Only a few levels are drawn at a time; a click goes deeper.
"use strict";
(() => {
  const { el, size } = report;
  const DEPTH = 3;
  const MOST_TILES = 900;
  let shown = null;
  let colouring = "group";

  /** A chain of single children is one rectangle: `state`, `params`, `model` says no more than its end. */
  const collapsed = (node) => {
    let name = node.name;
    let end = node;
    while (end.children.size === 1 && !end.leaf) {
      end = end.children.values().next().value;
      name += `/${end.name}`;
    }
    return { name, node: end };
  };

  const typeOf = (node) => {
    if (node.leaf) return node.leaf.dtype || node.leaf.kind;
    const sums = new Map();
    const visit = (one) => {
      if (one.leaf) sums.set(one.leaf.dtype || one.leaf.kind, (sums.get(one.leaf.dtype || one.leaf.kind) ?? 0) + one.leaf.bytes);
      for (const child of one.children.values()) visit(child);
    };
    visit(node);
    if (!sums.size) return node.form || "files";
    return [...sums].sort((a, b) => b[1] - a[1])[0][0];
  };

  const tiles = (root, colourOf) => {
    const least = root.bytes / 4000;
    let left = MOST_TILES;
    const tile = (node, depth, group) => {
      const { name, node: end } = collapsed(node);
      const made = { name, value: end.bytes, node: end, itemStyle: { color: colourOf(end, group) } };
      const children = [...end.children.values()].filter((child) => child.bytes > 0).sort((a, b) => b.bytes - a.bytes);
      if (depth >= DEPTH || !children.length || left <= children.length) return made;
      const drawn = children.filter((child) => child.bytes >= least);
      left -= drawn.length;
      made.children = drawn.map((child, index) => tile(child, depth + 1, depth === 0 ? index : group));
      const rest = children.length - drawn.length;
      if (rest && drawn.length) {
        made.children.push({ name: `${rest} smaller`, value: children.slice(drawn.length).reduce((sum, one) => sum + one.bytes, 0), node: end, itemStyle: { color: report.colour("--c7") } });
      }
      return made;
    };
    return tile(root, 0, 0).children ?? [tile(root, 0, 0)];
  };

  const dtypes = () => {
    const sums = new Map();
    for (const leaf of report.leavesOf(report.steps[report.selected.step])) {
      const name = leaf.dtype || leaf.kind;
      sums.set(name, (sums.get(name) ?? 0) + leaf.bytes);
    }
    return [...sums].filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]);
  };

  const option = (root) => {
    const colours = report.colours();
    const names = dtypes().map(([name]) => name);
    const colourOf =
      colouring === "dtype"
        ? (node) => colours[Math.max(names.indexOf(typeOf(node)), 0) % colours.length]
        : (node, group) => colours[group % colours.length];
    const border = (width, gap) => ({ borderColor: report.colour("--gap"), borderWidth: width, gapWidth: gap });
    const header = { show: true, height: 20, color: report.colour("--fg"), fontSize: 12, fontWeight: 600, overflow: "truncate", padding: [0, 5] };
    return {
      ...report.chartBase(),
      tooltip: report.tooltip({
        formatter: ({ data }) => {
          if (!data?.node) return "";
          const { node } = data;
          const what = node.leaf ? `${node.leaf.dtype || node.leaf.kind} ${report.shape(node.leaf.shape)}` : node.form ? `${node.form}` : report.counted(node.count, "leaf", "leaves");
          return `<b>${report.safe(data.name)}</b><br>${size(data.value)} · ${report.percent(data.value / root.bytes)}<br>${report.safe(what)}`;
        },
      }),
      series: [
        {
          type: "treemap",
          data: tiles(root, colourOf),
          left: 0, right: 0, top: 0, bottom: 0,
          roam: false,
          nodeClick: false,
          breadcrumb: { show: false },
          label: { show: true, color: report.colour("--tile"), fontSize: 12, lineHeight: 16, overflow: "truncate", formatter: ({ data }) => `${data.name}\n${size(data.value)}` },
          upperLabel: { ...header, formatter: ({ data }) => `${data.name}  ${size(data.value)}` },
          levels: [
            { itemStyle: border(0, 3), upperLabel: { show: false } },
            { itemStyle: { ...border(2, 1), borderColorSaturation: undefined }, upperLabel: header },
            { itemStyle: border(1, 1), upperLabel: { ...header, height: 17, fontSize: 11, fontWeight: 400 } },
            { itemStyle: border(1, 1) },
          ],
        },
      ],
    };
  };

  const crumbs = (way) => {
    const parts = way.map((node, index) =>
      index === way.length - 1 ? el("b", {}, node.name) : [el("button", { onclick: () => go(way.slice(0, index + 1)) }, node.name), "›"],
    );
    return el("div", { class: "crumbs", "aria-label": "where in the tree" }, parts);
  };

  let place = null;
  let way = [];
  const go = (to) => {
    way = to;
    redraw();
  };

  const wayTo = (root, target) => {
    if (root === target) return [root];
    for (const child of root.children.values()) {
      const rest = wayTo(child, target);
      if (rest) return [root, ...rest];
    }
    return null;
  };

  const clicked = ({ data }) => {
    if (!data?.node) return;
    if (data.node.leaf) {
      report.select("leaf", data.node.leaf.key);
      document.getElementById("leaves").scrollIntoView();
    } else if (data.node.children.size && data.node !== shown) go(wayTo(report.treeOf(report.steps[report.selected.step]), data.node));
  };

  const redraw = () => {
    const step = report.steps[report.selected.step];
    const root = report.treeOf(step);
    // The same place in another step, as far as it is there.
    const kept = [root];
    for (const node of way.slice(1)) {
      const next = [...kept[kept.length - 1].children.values()].find((child) => child.name === node.name);
      if (!next || next.leaf) break;
      kept.push(next);
    }
    way = kept;
    shown = way[way.length - 1];
    const plot = el("div", { id: "treemap", role: "img", "aria-label": "bytes of the leaves, as areas" });
    const pick = (name, text) => el("button", { "aria-pressed": String(colouring === name), onclick: () => { colouring = name; redraw(); } }, text);
    const keys = dtypes().map(([name, bytes], index) =>
      el("span", {}, colouring === "dtype" && el("i", { style: `background:var(--c${index % 8})` }), `${name} ${size(bytes)}`),
    );
    const empty = report.leavesOf(step).filter((leaf) => leaf.bytes === 0).length;
    report.fill(
      place,
      el("h2", {}, "Where the bytes are"),
      step.problem
        ? el("p", { class: "note bad" }, `Step ${report.labelOf(step)} cannot be read: ${step.problem}`)
        : [
            el("div", { class: "tools" }, crumbs(way), el("div", { class: "choice", role: "group", "aria-label": "colours" }, pick("group", "by group"), pick("dtype", "by dtype"))),
            shown.bytes ? plot : el("p", { class: "note" }, "Nothing here has bytes."),
            el("div", { class: "keys" }, keys),
            el("p", { class: "caption" }, `Uncompressed bytes of step ${report.labelOf(step)}; click a rectangle to look into it.${empty ? ` ${report.counted(empty, "leaf without bytes (text, empty arrays) is", "leaves without bytes (text, empty arrays) are")} not drawn.` : ""}`),
          ],
    );
    if (!step.problem && shown.bytes) report.draw(plot, () => option(shown), clicked);
  };

  report.treemap = (given) => {
    if (!report.steps.length) return given.remove();
    place = given;
    report.on("step", redraw);
    redraw();
  };
})();
