// The difference of any two steps: structure, metrics, and from statistics how the norms moved.
const DIFFERENCES_SHOWN = 25;
const leafName = (leaf) => el("span", { class: "name" }, nameOf(leaf));
const manyRows = (names, rows, draw, right) => some(rows, DIFFERENCES_SHOWN, (shown) => table(names, shown.map(draw), right));
const headed = (title, ...more) => el("div", {}, el("h3", {}, title), more);

const structureOf = (a, b) => {
  const [before, after] = [leavesByKey(a), leavesByKey(b)];
  const gone = [...before.values()].filter((leaf) => !after.has(leaf.key));
  const added = [...after.values()].filter((leaf) => !before.has(leaf.key));
  const both = [...after.values()].filter((leaf) => before.has(leaf.key));
  const changed = both.filter((leaf) => typeText(leaf) !== typeText(before.get(leaf.key)));
  const moved = both.filter((leaf) => leaf.sharding !== before.get(leaf.key).sharding && !changed.includes(leaf));
  return { gone, added, both, changed, moved, before };
};

const leafList = (title, found, names = ["leaf", "type", "bytes"], row = (leaf) => [leafName(leaf), typeText(leaf), size(leaf.bytes)]) =>
  found.length > 0 && unfold(el("summary", {}, `${title} (${whole(found.length)})`), () => manyRows(names, found, row, ["bytes"]), found.length <= DIFFERENCES_SHOWN);

const changeText = (change) => {
  if (!Number.isFinite(change)) return UNKNOWN;
  return change ? el("span", { class: change > 0 ? "up" : "down" }, `${change > 0 ? "+" : "−"}${percent(Math.abs(change))}`) : "=";
};

/** Norms of both steps, those that moved most first; before them, leaves with NaN or Inf. */
const valuesMoved = (a, b, both) => {
  const [before, after] = [a, b].map((one) => statistics.find(({ step }) => step === one.step)?.rows);
  if (!before || !after) {
    const read = statistics.map(({ step }) => step).join(", ");
    return para("soft small", "How the values moved is not known: ", read
      ? `arrays were read of steps ${read} only.`
      : "no arrays were read for this report. ckpt report --stats 2 reads those of the newest two steps, and ckpt diff A B compares element by element.");
  }
  const rows = both.flatMap((leaf) => {
    const [first, second] = [before.get(leaf.key), after.get(leaf.key)];
    if (first?.norm == null || second?.norm == null) return [];
    const change = first.norm === second.norm ? 0 : (second.norm - first.norm) / Math.abs(first.norm);
    const odd = first.nan + first.inf + second.nan + second.inf;
    return { leaf, first, second, change, rank: odd ? Infinity : Math.abs(change) || 0 };
  });
  rows.sort((x, y) => (x.rank === y.rank ? 0 : y.rank - x.rank));
  const names = ["leaf", `norm at ${labelOf(a)}`, `norm at ${labelOf(b)}`, "change", "NaN, Inf"];
  const row = ({ leaf, first, second, change }) => {
    const odd = second.nan + second.inf;
    return [leafName(leaf), number(first.norm), number(second.norm), changeText(change), odd ? badge("bad", whole(odd)) : "0"];
  };
  const same = rows.filter(({ change }) => change === 0).length;
  const caption = `${countedLeaves(rows.length)} with numbers, those whose norm changed most first; ${whole(same)} with the same norm. ckpt diff A B compares element by element.`;
  return headed("How the values moved", para("caption", caption), manyRows(names, rows, row, names.slice(1)));
};

const metricsTable = (a, b, names) => {
  const row = (name) => {
    const [x, y] = [a.metrics[name], b.metrics[name]];
    return [name, number(x), number(y), typeof x === "number" && typeof y === "number" ? number(y - x) : UNKNOWN];
  };
  const found = metricsOf([a, b]);
  return found.length > 0 && headed("Metrics", manyRows(["metric", ...names, "change"], found, row, [...names, "change"]));
};

const aroundTable = (a, b, names) => {
  const [before, after] = [a, b].map((step) => ({ ...step.versions, ...step.topology, format: step.layout, metadata: step.metadata }));
  const rows = Object.keys({ ...before, ...after }).filter((name) => before[name] !== after[name])
    .map((name) => [name, ...[before, after].map((facts) => String(facts[name] ?? UNKNOWN))]);
  return rows.length > 0 && headed("Around it", table(["", ...names], rows));
};

const difference = (a, b) => {
  if (a.problem || b.problem) return para("note bad", `The ${stepName(a.problem ? a : b)} cannot be read.`);
  const { gone, added, both, changed, moved, before } = structureOf(a, b);
  const same = !gone.length && !added.length && !changed.length && !moved.length;
  const bytes = a.array_bytes === b.array_bytes ? `${size(a.array_bytes)} in both` : `${size(a.array_bytes)} → ${size(b.array_bytes)}`;
  const text = same
    ? `The same structure: ${countedLeaves(both.length)}, ${bytes}.`
    : `${whole(added.length)} added, ${whole(gone.length)} gone, ${whole(changed.length)} of another shape or dtype, ${whole(moved.length)} sharded otherwise, ${whole(both.length - changed.length - moved.length)} the same; ${bytes}.`;
  const names = [a, b].map(stepName);
  return [
    el("p", { class: `note ${same ? "" : "warn"}`, id: "structure" }, text),
    leafList(`Only in ${names[1]}`, added),
    leafList(`Only in ${names[0]}`, gone),
    leafList("Another shape or dtype", changed, ["leaf", ...names], (leaf) => [leafName(leaf), typeText(before.get(leaf.key)), typeText(leaf)]),
    leafList("Sharded otherwise", moved),
    valuesMoved(a, b, both),
    el("div", { class: "grid" }, metricsTable(a, b, names), aroundTable(a, b, names)),
  ];
};

const drawCompare = (given) => {
  const chosen = readable().slice(-2).map((step) => steps.indexOf(step));
  if (chosen.length < 2) return given.remove();
  const shown = el("div");
  const show = () => fill(shown, difference(steps[chosen[0]], steps[chosen[1]]));
  const choice = (position, label) => stepChoice(chosen[position], label, (index) => { chosen[position] = index; show(); });
  fill(given, el("h2", {}, "Compare two steps"), el("div", { class: "tools" }, choice(0, "the first step"), "→", choice(1, "the second step")), shown);
  show();
};
