// The sharding of a leaf, drawn: each square is a part of the array, with the devices that hold it.
"use strict";
(() => {
  const { el } = report;
  const MOST_ACROSS = 16;
  const MOST_SQUARES = 256;

  const words = (drawing) => {
    const axes = drawing.axes.map(([name, count]) => `${name} ${count}`).join(" × ");
    const used = new Set(drawing.spec.flat());
    const free = drawing.axes.filter(([name, count]) => !used.has(name) && count > 1).map(([name]) => name);
    return { axes, copied: free };
  };

  const specText = (drawing, shape) =>
    `P(${shape.map((_, dimension) => {
      const axes = drawing.spec[dimension] ?? [];
      return axes.length === 0 ? "·" : axes.length === 1 ? axes[0] : `(${axes.join(", ")})`;
    }).join(", ")})`;

  const span = (size, parts, part) => {
    const step = Math.ceil(size / parts);
    return [Math.min(size, part * step), Math.min(size, (part + 1) * step)];
  };

  /** The position of a part on each dimension, from its number in C order. */
  const places = (parts, number) => {
    const found = [];
    for (let dimension = parts.length - 1; dimension >= 0; dimension -= 1) {
      found.unshift(number % parts[dimension]);
      number = Math.floor(number / parts[dimension]);
    }
    return found;
  };

  const square = (drawing, leaf, number) => {
    const at = places(drawing.parts, number);
    const ranges = leaf.shape.map((size, dimension) => {
      const parts = drawing.parts[dimension] ?? 1;
      return parts === 1 ? ":" : span(size, parts, at[dimension]).join(":");
    });
    const devices = drawing.devices[number];
    const text = devices.length > 6 ? `${devices.slice(0, 5).join(" ")} … ${devices[devices.length - 1]}` : devices.join(" ");
    return el("span", { style: `background:var(--c${number % 7})`, title: `[${ranges.join(", ")}] on devices ${devices.join(", ")}` }, text);
  };

  report.sharding = (leaf) => {
    const drawing = leaf.sharding === null || leaf.sharding === undefined ? null : report.data.shardings[leaf.sharding];
    if (!drawing) return el("p", { class: "soft small" }, "No sharding was saved with this leaf: it was on one device, or in host memory.");
    const { axes, copied } = words(drawing);
    if (!drawing.devices.length) {
      return el("p", { class: "soft small" }, drawing.note, axes && `: mesh ${axes}, ${specText(drawing, leaf.shape)}`);
    }
    const split = drawing.parts.map((count, dimension) => [count, dimension]).filter(([count]) => count > 1);
    const across = split.length ? Math.min(split[split.length - 1][0], MOST_ACROSS) : 1;
    const numbers = drawing.devices.map((_, number) => number).slice(0, MOST_SQUARES);
    const copies = drawing.devices[0].length;
    const text = split.length
      ? `${report.counted(drawing.devices.length, "part", "parts")}${copies > 1 ? `, each on ${copies} devices` : ", each on one device"}`
      : copies > 1 ? `whole on each of ${copies} devices` : `whole on device ${drawing.devices[0][0]}`;
    return el(
      "div",
      {},
      el("p", { class: "small", style: "margin:0" }, el("code", {}, specText(drawing, leaf.shape)), ` over the mesh `, el("code", {}, axes), `: ${text}.`),
      el("div", { class: "mesh", style: `grid-template-columns:repeat(${across},minmax(0,1fr))` }, numbers.map((number) => square(drawing, leaf, number))),
      el("p", { class: "caption" }, `A square is a part of the array; the numbers are ids of devices.${copied.length && copies > 1 ? ` Copied along ${copied.join(", ")}.` : ""}${drawing.devices.length > MOST_SQUARES ? ` The first ${MOST_SQUARES} are drawn.` : ""}`),
    );
  };
})();
