// The difference of any two steps: structure, metrics, and from statistics how the norms moved.
"use strict";
(() => {
  const { el, size, number } = report;
  const SHOWN = 25;
  let chosen = null;

  const describe = (leaf) => `${leaf.dtype || leaf.kind} ${report.shape(leaf.shape)}`;
  const name = (leaf) => el("span", { class: "name" }, report.nameOf(leaf));

  const structure = (a, b) => {
    const before = report.leavesByKey(a);
    const after = report.leavesByKey(b);
    const gone = [...before.values()].filter((leaf) => !after.has(leaf.key));
    const added = [...after.values()].filter((leaf) => !before.has(leaf.key));
    const both = [...after.values()].filter((leaf) => before.has(leaf.key));
    const changed = both.filter((leaf) => describe(leaf) !== describe(before.get(leaf.key)));
    const moved = both.filter((leaf) => leaf.sharding !== before.get(leaf.key).sharding && !changed.includes(leaf));
    return { gone, added, both, changed, moved, before };
  };

  const list = (title, leaves, columns, cells, right) =>
    leaves.length ? el("details", { open: leaves.length <= SHOWN }, el("summary", {}, title), report.some(leaves, SHOWN, (shown) => report.table(columns, shown.map(cells), right))) : null;

  const arrow = (change) => {
    if (!Number.isFinite(change) || change === 0) return change === 0 ? "=" : "–";
    return el("span", { class: change > 0 ? "up" : "down" }, `${change > 0 ? "+" : "−"}${report.percent(Math.abs(change))}`);
  };

  /** Norms of both steps and, where the values were compared, how far they moved. */
  const values = (a, b, both) => {
    const before = report.statisticsAt(a);
    const after = report.statisticsAt(b);
    if (!before || !after) {
      const read = report.statistics.map((one) => one.step).join(", ");
      return el("p", { class: "soft small" }, read ? `How the values moved is not known: arrays were read of steps ${read} only.` : "How the values moved is not known: no arrays were read for this report. ckpt report --stats 2 reads those of the newest two steps, and ckpt diff A B compares element by element.");
    }
    const rows = [];
    for (const leaf of both) {
      const [first, second] = [before.get(leaf.key), after.get(leaf.key)];
      if (!first || !second || first.norm === null || second.norm === null) continue;
      const change = first.norm === second.norm ? 0 : (second.norm - first.norm) / Math.abs(first.norm);
      rows.push({ leaf, first, second, change, rank: second.nan + second.inf > 0 || first.nan + first.inf > 0 ? Infinity : Math.abs(change) });
    }
    rows.sort((x, y) => (Number.isNaN(y.rank) ? 0 : y.rank) - (Number.isNaN(x.rank) ? 0 : x.rank));
    const columns = ["leaf", `norm at ${report.labelOf(a)}`, `norm at ${report.labelOf(b)}`, "change", "NaN, Inf"];
    const bad = (row) => (row.second.nan + row.second.inf ? el("span", { class: "badge bad" }, report.whole(row.second.nan + row.second.inf)) : "0");
    const same = rows.filter((row) => row.change === 0).length;
    return el("div", {},
      el("h3", {}, "How the values moved"),
      el("p", { class: "caption" }, `${report.counted(rows.length, "leaf", "leaves")} with numbers, those whose norm changed most first; ${report.whole(same)} with the same norm. ckpt diff A B compares element by element.`),
      report.some(rows, SHOWN, (shown) => report.table(columns, shown.map((row) => [
        name(row.leaf), number(row.first.norm), number(row.second.norm), arrow(row.change),
        bad(row)]), columns.slice(1))));
  };

  const metrics = (a, b) => {
    const names = [...new Set([...Object.keys(a.metrics ?? {}), ...Object.keys(b.metrics ?? {})])];
    if (!names.length) return null;
    return el("div", {}, el("h3", {}, "Metrics"), report.some(names, SHOWN, (shown) => report.table(["metric", `step ${report.labelOf(a)}`, `step ${report.labelOf(b)}`, "change"],
      shown.map((one) => {
        const [x, y] = [report.value(a.metrics[one] ?? null), report.value(b.metrics[one] ?? null)];
        const both = typeof x === "number" && typeof y === "number";
        return [one, number(x), number(y), both ? number(y - x) : "–"];
      }), [`step ${report.labelOf(a)}`, `step ${report.labelOf(b)}`, "change"])));
  };

  const around = (a, b) => {
    const facts = (step) => ({ ...step.versions, ...step.topology, format: step.layout, metadata: step.metadata });
    const [before, after] = [facts(a), facts(b)];
    const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter((one) => before[one] !== after[one]);
    if (!names.length) return null;
    const text = (value) => (value === undefined || value === null ? "–" : String(value));
    return el("div", {}, el("h3", {}, "Around it"), report.table(["", `step ${report.labelOf(a)}`, `step ${report.labelOf(b)}`], names.map((one) => [one, text(before[one]), text(after[one])])));
  };

  const difference = (a, b) => {
    if (a.problem || b.problem) return el("p", { class: "note bad" }, `Step ${report.labelOf(a.problem ? a : b)} cannot be read.`);
    const { gone, added, both, changed, moved, before } = structure(a, b);
    const same = !gone.length && !added.length && !changed.length && !moved.length;
    const bytes = a.array_bytes === b.array_bytes ? `${size(a.array_bytes)} in both` : `${size(a.array_bytes)} → ${size(b.array_bytes)}`;
    const text = same
      ? `The same structure: ${report.counted(both.length, "leaf", "leaves")}, ${bytes}.`
      : `${report.whole(added.length)} added, ${report.whole(gone.length)} gone, ${report.whole(changed.length)} of another shape or dtype, ${report.whole(moved.length)} sharded otherwise, ${report.whole(both.length - changed.length - moved.length)} the same; ${bytes}.`;
    const one = (leaf) => [name(leaf), describe(leaf), size(leaf.bytes)];
    return [
      el("p", { class: `note ${same ? "" : "warn"}`, id: "structure" }, text),
      list(`Only in step ${report.labelOf(b)} (${report.whole(added.length)})`, added, ["leaf", "type", "bytes"], one, ["bytes"]),
      list(`Only in step ${report.labelOf(a)} (${report.whole(gone.length)})`, gone, ["leaf", "type", "bytes"], one, ["bytes"]),
      list(`Another shape or dtype (${report.whole(changed.length)})`, changed, ["leaf", `step ${report.labelOf(a)}`, `step ${report.labelOf(b)}`], (leaf) => [name(leaf), describe(before.get(leaf.key)), describe(leaf)]),
      list(`Sharded otherwise (${report.whole(moved.length)})`, moved, ["leaf", "type", "bytes"], one, ["bytes"]),
      values(a, b, both),
      el("div", { class: "grid" }, [metrics(a, b), around(a, b)]),
    ];
  };

  const chooser = (index, onchange) => {
    const select = el("select", { onchange: () => onchange(Number(select.value)) }, report.steps.map((step, position) => el("option", { value: position }, `step ${report.labelOf(step)}${step.problem ? " (damaged)" : ""}`)));
    select.value = String(index);
    return select;
  };

  const start = () => {
    const readable = report.steps.map((step, index) => ({ step, index })).filter(({ step }) => !step.problem);
    if (readable.length < 2) return null;
    return [readable[readable.length - 2].index, readable[readable.length - 1].index];
  };

  report.compare = (place) => {
    chosen = start();
    if (!chosen) return place.remove();
    const shown = el("div");
    const show = () => report.fill(shown, difference(report.steps[chosen[0]], report.steps[chosen[1]]));
    const pick = (position) => chooser(chosen[position], (index) => { chosen[position] = index; show(); });
    report.fill(place, el("h2", {}, "Compare two steps"), el("div", { class: "tools" }, pick(0), "→", pick(1)), shown);
    show();
  };
})();
