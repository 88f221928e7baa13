// The data of the page, decoded: steps, leaves, and the tree of a step.
const data = JSON.parse(document.getElementById("data").textContent);
const { steps } = data;

/** JSON has no NaN and no infinities, so they come as text. */
const decoded = (value) => (["NaN", "Infinity", "-Infinity"].includes(value) ? Number(value) : value);

for (const step of steps) {
  for (const name of Object.keys(step.metrics)) step.metrics[name] = decoded(step.metrics[name]);
}

const leaves = data.leaves.path.map((path, id) => {
  const [kind, dtype, shape, bytes, sharding] = data.types[data.leaves.type[id]];
  const item = data.items[data.leaves.item[id]];
  if (path === "(root)") path = "";
  return { id, item, path, key: `${item}\u0000${path}`, dtype: dtype || kind, kind, shape, bytes, sharding };
});

const shapeText = (shape) => (shape.length ? shape.join("×") : "scalar");
const typeText = (leaf) => `${leaf.dtype} ${shapeText(leaf.shape)}`;
/** How a leaf is called: its item and path; an item without name is a bare tree of Orbax. */
const nameOf = (leaf) => [leaf.item, leaf.path].filter((part) => part !== "").join("/") || "(the value)";
const stepName = (step) => (step.step === null ? "this checkpoint" : `step ${step.step}`);
/** On an axis. */
const labelOf = (step) => (step.step === null ? "this checkpoint" : String(step.step));
const readable = () => steps.filter((step) => !step.problem);
const selectedStep = () => steps[selected.step];

const stepChoice = (index, label, onchange) => {
  const option = (step, position) =>
    el("option", { value: position, selected: position === index }, `${stepName(step)}${step.problem ? ` (${step.state})` : ""}`);
  return el("select", { "aria-label": label, onchange: ({ target }) => onchange(Number(target.value)) }, steps.map(option));
};

/** A function of a step that is worked out once for each key. */
const remembered = (keyOf, work) => {
  const known = new Map();
  return (step) => {
    const key = keyOf(step);
    if (!known.has(key)) known.set(key, work(step));
    return known.get(key);
  };
};

const leavesOf = (step) => (data.structures[step.structure] ?? []).flatMap(([first, end]) => leaves.slice(first, end));
const leavesByKey = remembered((step) => step.structure, (step) => new Map(leavesOf(step).map((leaf) => [leaf.key, leaf])));

const unescaped = (part) => part.replaceAll("~1", "/").replaceAll("~0", "~");
const makeNode = (name, path) => ({ name, path, bytes: 0, count: 0, children: new Map(), leaf: null, form: "", dtypes: new Map() });
const childOf = (parent, part) => {
  if (!parent.children.has(part)) parent.children.set(part, makeNode(unescaped(part), `${parent.path}/${part}`));
  return parent.children.get(part);
};

/** The tree of a step: its items, below them their leaves by path. */
const treeOf = remembered((step) => `${step.structure} ${JSON.stringify(step.items)}`, (step) => {
  const root = makeNode("", "");
  for (const leaf of leavesOf(step)) {
    const parts = leaf.path === "" ? [] : leaf.path.split("/");
    if (leaf.item !== "" || parts.length === 0) parts.unshift(leaf.item || "(the value)");
    const way = [root];
    for (const part of parts) way.push(childOf(way.at(-1), part));
    way.at(-1).leaf = leaf;
    for (const node of way) {
      node.bytes += leaf.bytes;
      node.count += 1;
      node.dtypes.set(leaf.dtype, (node.dtypes.get(leaf.dtype) ?? 0) + leaf.bytes);
    }
  }
  for (const item of step.items.filter((one) => !one.leaves)) {
    const node = childOf(root, item.name || "(the value)");
    node.form = item.form;
    node.bytes = item.bytes;
    root.bytes += item.bytes;
  }
  return root;
});

/** The dtypes of a node with their bytes, the largest first. */
const dtypesOf = (node) => [...node.dtypes].filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]);

/** Of each step whose arrays were read: key of a leaf -> numbers about it. */
const statistics = data.statistics.map(({ step, ...columns }) => ({
  step,
  rows: new Map(columns.leaf.map((id, row) =>
    [leaves[id].key, Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, decoded(values[row])]))])),
}));
