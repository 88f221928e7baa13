// One leaf: its type, its sharding over the mesh, and its statistics over the steps.
/** In which steps a leaf is, and where its type changed. */
const historyOf = (key) => {
  const all = readable();
  const has = all.filter((step) => leavesByKey(step).has(key));
  const type = (step) => data.leaves.type[leavesByKey(step).get(key).id];
  const changes = has.filter((step, index) => index > 0 && type(step) !== type(has[index - 1]));
  const where = has.length === all.length ? `all ${all.length} steps` : `${has.length} of ${all.length} steps, ${labelOf(has[0])} to ${labelOf(has.at(-1))}`;
  return all.length > 1 && `${where}${changes.length ? `; its type changed at ${listed(changes.map(labelOf), 4)}` : ""}`;
};

const normChart = (found) => {
  const series = { name: "norm", type: "line", data: found.map(({ row }) => (Number.isFinite(row.norm) ? row.norm : null)) };
  const option = overCategories(found.map(({ step }) => String(step)), number, [series], { x: { boundaryGap: false }, y: { scale: true } });
  return titled("Norm over the steps", plot("norm over steps", option, undefined, { class: "plot low" }));
};

/** Values between powers of two at the newest step that was read; negative ones below the axis. */
const histogram = ({ step, row }) => {
  const [first, width, ...counts] = row.octaves;
  const negative = counts.filter((_, index) => index % 2 === 0);
  const positive = counts.filter((_, index) => index % 2 === 1);
  const range = (_, place) => `2^${first + place * width} to 2^${first + (place + 1) * width}`;
  const bars = (name, values) => ({ name, type: "bar", barCategoryGap: "12%", data: values });
  const option = overCategories(positive.map(range), (count) => whole(Math.abs(count)),
    [bars("positive", positive), bars("negative", negative.map((count) => -count))],
    { x: { axisLabel: { formatter: (text) => text.split(" ")[0] } } });
  const title = `Magnitudes${step === null ? "" : ` at step ${step}`}: positive above, negative below; zeros are not in it`;
  return titled(title, plot("histogram of magnitudes", option, undefined, { class: "plot low" }));
};

const statisticsTable = (found) => {
  const bad = (count) => (count ? badge("bad", whole(count)) : "0");
  const row = ({ step, row: one }) => [
    step ?? "", ...[one.norm, one.mean, one.std, one.min, one.max].map(number),
    percent(one.zero / one.count), bad(one.nan), bad(one.inf),
  ];
  const numbers = ["norm", "mean", "std", "min", "max", "zero", "NaN", "Inf"];
  return table(["step", ...numbers], [...found].reverse().map(row), numbers);
};

const statisticsOf = (key) => {
  const found = statistics.map(({ step, rows }) => ({ step, row: rows.get(key) })).filter(({ row }) => row);
  const newest = found.at(-1);
  if (newest) return [found.length > 1 && normChart(found), newest.row.octaves.length > 0 && histogram(newest), statisticsTable(found)];
  return para("soft small", statistics.length
    ? "No statistics of this leaf: it has no numbers, or is not in the steps whose arrays were read."
    : "No arrays were read for this report, so nothing is said of the values: ckpt report --stats 2 reads those of the newest two steps.");
};

const drawLeaf = (place) => {
  const step = selectedStep();
  const key = selected.leaf;
  const here = leavesByKey(step).get(key);
  const leaf = here ?? leaves.find((one) => one.key === key);
  if (!leaf) return fill(place, para("note soft", "Choose a leaf, here or in the picture above, to see its type, its sharding and its statistics."));
  const facts = {
    type: `${leaf.dtype}${leaf.kind !== leaf.dtype ? ` (${leaf.kind})` : ""}`,
    shape: shapeText(leaf.shape),
    bytes: `${size(leaf.bytes)}${step.array_bytes ? `, ${percent(leaf.bytes / step.array_bytes)} of the step` : ""}`,
    in: historyOf(key),
  };
  return fill(place, el("div", { class: "panel" },
    el("h3", {}, nameOf(leaf)),
    !here && para("note warn", `The ${stepName(step)} has no such leaf; this is from another step.`),
    el("dl", { class: "facts" }, Object.entries(facts).map(([name, text]) => text && [el("dt", {}, name), el("dd", {}, text)])),
    el("h3", {}, "Sharding"), shardingOf(leaf),
    statisticsOf(key)));
};
