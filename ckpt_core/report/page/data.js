// The data of the page, decoded: steps, leaves, and the tree of a step.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  report.data = data;
  report.steps = data.steps;

  const OTHER = { kind: "", dtype: "", shape: [], bytes: 0, sharding: null };
  const types = data.types.map(([kind, dtype, shape, bytes, sharding]) => ({ kind, dtype, shape, bytes, sharding }));
  report.leaves = data.leaves.path.map((path, id) => {
    const type = types[data.leaves.type[id]] ?? OTHER;
    const item = data.items[data.leaves.item[id]];
    return { id, item, path, key: `${item}\u0000${path}`, typeId: data.leaves.type[id], ...type };
  });

  /** How a leaf is called: its item and path; an item without name is a bare tree of Orbax. */
  report.nameOf = (leaf) => [leaf.item, leaf.path].filter((part) => part !== "").join("/") || "(the value)";
  report.labelOf = (step) => (step.step === null ? "this checkpoint" : String(step.step));

  report.leavesOf = (step) => {
    const found = [];
    for (const [first, end] of data.structures[step.structure] ?? []) {
      for (let id = first; id < end; id += 1) found.push(report.leaves[id]);
    }
    return found;
  };

  const keyed = new Map();
  /** Key -> leaf, of a step. */
  report.leavesByKey = (step) => {
    if (!keyed.has(step.structure)) {
      keyed.set(step.structure, new Map(report.leavesOf(step).map((leaf) => [leaf.key, leaf])));
    }
    return keyed.get(step.structure);
  };

  const unescaped = (part) => part.replaceAll("~1", "/").replaceAll("~0", "~");
  const node = (name, path) => ({ name, path, bytes: 0, count: 0, children: new Map(), leaf: null, form: "" });

  const trees = new Map();
  /** The tree of a step: its items, below them their leaves by path. */
  report.treeOf = (step) => {
    const key = `${step.structure} ${JSON.stringify(step.items)}`;
    if (trees.has(key)) return trees.get(key);
    const root = node(step.step === null ? "checkpoint" : `step ${step.step}`, "");
    const child = (parent, part) => {
      if (!parent.children.has(part)) parent.children.set(part, node(unescaped(part), `${parent.path}/${part}`));
      return parent.children.get(part);
    };
    for (const leaf of report.leavesOf(step)) {
      const parts = leaf.path === "" ? [] : leaf.path.split("/");
      const way = [root];
      if (leaf.item !== "" || parts.length === 0) way.push(child(root, leaf.item || "(the value)"));
      for (const part of parts) way.push(child(way[way.length - 1], part));
      way[way.length - 1].leaf = leaf;
      for (const one of way) {
        one.bytes += leaf.bytes;
        one.count += 1;
      }
    }
    for (const item of step.items ?? []) {
      if (item.leaves) continue;
      const made = child(root, item.name || "(the value)");
      made.form = item.form;
      made.bytes = item.bytes;
      root.bytes += item.bytes;
    }
    if (trees.size > 20) trees.clear();
    trees.set(key, root);
    return root;
  };

  report.statistics = data.statistics.map((columns) => {
    const at = new Map(columns.leaf.map((leaf, row) => [report.leaves[leaf].key, row]));
    const get = (key) => {
      const row = at.get(key);
      if (row === undefined) return null;
      const found = {};
      for (const name of Object.keys(columns)) {
        if (Array.isArray(columns[name])) found[name] = name === "octaves" ? columns[name][row] : report.value(columns[name][row]);
      }
      return found;
    };
    return { step: columns.step, get, columns };
  });
  report.statisticsAt = (step) => report.statistics.find((one) => one.step === step.step) ?? null;
})();
