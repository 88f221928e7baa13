// One leaf: its type, its sharding over the mesh, and its statistics over the steps.
"use strict";
(() => {
  const { el, size, number } = report;

  /** In which steps a leaf is, and where its type changed. */
  const history = (key) => {
    const readable = report.steps.filter((step) => !step.problem);
    const has = readable.filter((step) => report.leavesByKey(step).has(key));
    const changes = has.filter((step, index) => index > 0 && report.leavesByKey(step).get(key).typeId !== report.leavesByKey(has[index - 1]).get(key).typeId);
    const where = has.length === readable.length ? `all ${readable.length} steps` : `${has.length} of ${readable.length} steps, ${report.labelOf(has[0])} to ${report.labelOf(has[has.length - 1])}`;
    return readable.length > 1 ? `${where}${changes.length ? `; its type changed at ${changes.slice(0, 4).map(report.labelOf).join(", ")}` : ""}` : null;
  };

  const numbersOf = (key) =>
    report.statistics.map((one) => ({ step: one.step, row: one.get(key) })).filter(({ row }) => row !== null);

  const course = (found) => {
    const plot = el("div", { class: "plot low", role: "img", "aria-label": "norm over steps" });
    const option = () => report.overCategories({
      labels: found.map(({ step }) => String(step)),
      format: number,
      x: { boundaryGap: false },
      y: { scale: true },
      series: [{ name: "norm", type: "line", data: found.map(({ row }) => (Number.isFinite(row.norm) ? row.norm : null)), symbolSize: 6, itemStyle: { color: report.colour("--c0") } }],
    });
    return { plot, option, panel: el("div", { style: "margin-top:14px" }, el("h3", {}, "Norm over the steps"), plot) };
  };

  const power = (exponent) => `2^${exponent}`;

  /** Values between powers of two at the newest step that was read; negative ones below the axis. */
  const histogram = (found) => {
    const { step, row } = found[found.length - 1];
    const [first, width, ...counts] = row.octaves;
    const bars = counts.length / 2;
    const places = [...Array(bars).keys()];
    const name = (place) => `${power(first + place * width)} to ${power(first + (place + 1) * width)}`;
    const plot = el("div", { class: "plot low", role: "img", "aria-label": "histogram of magnitudes" });
    const bar = (title, values, colour) => ({ name: title, type: "bar", stack: "all", barCategoryGap: "12%", data: values, itemStyle: { color: report.colour(colour) } });
    const option = () => report.overCategories({
      labels: places.map(name),
      format: (value) => report.whole(Math.abs(value)),
      shadow: true,
      x: { axisLabel: { color: report.colour("--soft"), fontSize: 11, formatter: (text) => text.split(" ")[0] } },
      series: [
        bar("positive", places.map((place) => counts[2 * place + 1]), "--c0"),
        bar("negative", places.map((place) => -counts[2 * place]), "--c1"),
      ],
    });
    const title = `Magnitudes${step === null ? "" : ` at step ${step}`}: positive above, negative below; zeros are not in it`;
    return { plot, option, panel: el("div", { style: "margin-top:14px" }, el("h3", {}, title), plot) };
  };

  const unread = () =>
    report.statistics.length
      ? "No statistics of this leaf: it has no numbers, or is not in the steps whose arrays were read."
      : "No arrays were read for this report, so nothing is said of the values: ckpt report --stats 2 reads those of the newest two steps.";

  const table = (found) =>
    report.table(
      ["step", "norm", "mean", "std", "min", "max", "zero", "NaN", "Inf"],
      [...found].reverse().map(({ step, row }) => [
        step === null ? "" : String(step),
        ...[row.norm, row.mean, row.std, row.min, row.max].map(number),
        row.count ? report.percent(row.zero / row.count) : "–",
        row.nan ? el("span", { class: "badge bad" }, report.whole(row.nan)) : "0",
        row.inf ? el("span", { class: "badge bad" }, report.whole(row.inf)) : "0",
      ]),
      ["norm", "mean", "std", "min", "max", "zero", "NaN", "Inf"],
    );

  const show = (place) => {
    const step = report.steps[report.selected.step];
    const key = report.selected.leaf;
    const leaf = key === null ? null : report.leavesByKey(step).get(key) ?? report.leaves.find((one) => one.key === key);
    if (!leaf) return report.fill(place, el("p", { class: "note soft" }, "Choose a leaf, here or in the picture above, to see its type, its sharding and its statistics."));
    const here = report.leavesByKey(step).has(key);
    const found = numbersOf(key);
    const charts = [];
    if (found.length > 1) charts.push(course(found));
    if (found.length && found[found.length - 1].row.octaves.length) charts.push(histogram(found));
    const facts = [
      ["type", `${leaf.dtype || leaf.kind}${leaf.kind && leaf.dtype ? ` (${leaf.kind})` : ""}`],
      ["shape", report.shape(leaf.shape)],
      ["bytes", `${size(leaf.bytes)}${step.array_bytes ? `, ${report.percent(leaf.bytes / step.array_bytes)} of the step` : ""}`],
      ["in", history(key)],
    ].filter(([, text]) => text);
    report.fill(
      place,
      el("div", { class: "panel" },
        el("h3", { style: "font-size:16px" }, report.nameOf(leaf)),
        !here && el("p", { class: "note warn" }, `Step ${report.labelOf(step)} has no such leaf; this is from another step.`),
        el("dl", { class: "facts" }, facts.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
        el("h3", {}, "Sharding"), report.sharding(leaf),
        el("div", { style: "height:10px" }),
        charts.map((one) => one.panel),
        found.length ? table(found) : el("p", { class: "soft small" }, unread())),
    );
    for (const one of charts) report.draw(one.plot, one.option);
  };

  report.leafPanel = (place) => {
    report.on("leaf", () => show(place));
    report.on("step", () => show(place));
    show(place);
  };
})();
