// The sharding of a leaf, drawn: each square is a part of the array, with the devices that hold it.
const MOST_ACROSS = 16;
const MOST_SQUARES = 256;

const specText = (drawing, shape) => {
  const one = (_, dimension) => {
    const axes = drawing.spec[dimension] ?? [];
    return axes.length > 1 ? `(${axes.join(", ")})` : axes[0] ?? "·";
  };
  return `P(${shape.map(one).join(", ")})`;
};

/** What a part holds of each dimension; parts are numbered in C order. */
const rangesText = (drawing, shape, part) => {
  const found = [];
  for (let dimension = shape.length - 1; dimension >= 0; dimension -= 1) {
    const parts = drawing.parts[dimension] ?? 1;
    const length = Math.ceil(shape[dimension] / parts);
    const [begin, end] = [part % parts, (part % parts) + 1].map((place) => Math.min(shape[dimension], place * length));
    found.unshift(parts === 1 ? ":" : `${begin}:${end}`);
    part = Math.floor(part / parts);
  }
  return `[${found.join(", ")}]`;
};

const shardingOf = (leaf) => {
  if (leaf.sharding === null) return para("soft small", "No sharding was saved with this leaf: it was on one device, or in host memory.");
  const drawing = data.shardings[leaf.sharding];
  const { axes, devices, parts } = drawing;
  const mesh = axes.map(([name, count]) => `${name} ${count}`).join(" × ");
  const spec = specText(drawing, leaf.shape);
  if (!devices.length) return para("soft small", drawing.note, mesh && `: mesh ${mesh}, ${spec}`);
  const copies = devices[0].length;
  const each = devices.length > 1
    ? `${counted(devices.length, "part")}, each on ${copies > 1 ? `${copies} devices` : "one device"}`
    : `whole on ${copies > 1 ? `each of ${copies} devices` : `device ${devices[0][0]}`}`;
  const split = new Set(drawing.spec.flat());
  const copied = axes.filter(([name, count]) => !split.has(name) && count > 1).map(([name]) => name);
  const square = (ids, part) => {
    const text = ids.length > 6 ? `${ids.slice(0, 5).join(" ")} … ${ids.at(-1)}` : ids.join(" ");
    return el("span", { style: `background:var(--c${part % 7})`, title: `${rangesText(drawing, leaf.shape, part)} on devices ${ids.join(", ")}` }, text);
  };
  const across = Math.min(parts.findLast((count) => count > 1) ?? 1, MOST_ACROSS);
  return [
    para("small", el("code", {}, spec), " over the mesh ", el("code", {}, mesh), `: ${each}.`),
    el("div", { class: "mesh", style: `grid-template-columns:repeat(${across},minmax(0,1fr))` }, devices.slice(0, MOST_SQUARES).map(square)),
    para("caption", "A square is a part of the array; the numbers are ids of devices.",
      copied.length > 0 && ` Copied along ${copied.join(", ")}.`, devices.length > MOST_SQUARES && ` The first ${MOST_SQUARES} are drawn.`),
  ];
};
