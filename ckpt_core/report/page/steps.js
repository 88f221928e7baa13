// Steps over time: metrics, how long saves took, what they wrote and linked, and all of it as a table.
const METRICS_SHOWN = 6;
const metricsOf = (among) => [...new Set(among.flatMap((step) => Object.keys(step.metrics)))];

const overSteps = (title, format, series, caption, kind, more) =>
  titled(title, plot(title, overCategories(steps.map(labelOf), format, series, more),
    (chart) => chart.on("click", ({ dataIndex }) => select("step", dataIndex))), caption, kind);

const stacked = (title, format, parts, caption, y) => {
  const series = parts.map(([name, key, color]) =>
    ({ name, type: "bar", data: steps.map((step) => step[key]), barMaxWidth: 34, itemStyle: { color } }));
  return overSteps(title, format, series, caption, "", { legend: {}, grid: { top: 30 }, y });
};

const metricChart = (name) => {
  const values = steps.map((step) => step.metrics[name]);
  const at = (what, isSuch) => {
    const found = steps.filter((_, index) => isSuch(values[index])).map(labelOf);
    return found.length && `${what} at ${found.length === 1 ? "step" : "steps"} ${listed(found, 5)}`;
  };
  const odd = [
    at("not finite", (value) => typeof value === "number" && !Number.isFinite(value)),
    at("no number", (value) => typeof value === "string"),
  ];
  const points = values.map((value) => (Number.isFinite(value) ? value : null));
  const series = { name, type: "line", data: points, showSymbol: steps.length <= 60, lineStyle: { width: 2 } };
  const axes = { x: { boundaryGap: steps.length === 1 }, y: { scale: true } };
  return overSteps(name, number, [series], odd.filter(Boolean).join("; "), "bad", axes);
};

const timesChart = () =>
  stacked("Time of a save", (value) => (value === 0 ? "0" : seconds(value)), [
    ["the program waits", "snapshot_secs", "var(--c1)"],
    ["written in the background", "write_secs", "var(--c0)"],
  ], "Recorded by each save: until it returned, and after that until its commit.");

const bytesChart = () =>
  stacked("Bytes of a step on disk", (value) => size(value).replace(".0 ", " "), [
    ["written", "written_bytes", "var(--c0)"],
    ["linked", "linked_bytes", "var(--c2)"],
  ], "Linked: unchanged, and shared with an earlier step by hard links.",
  byteTicks(Math.max(...steps.map((step) => step.written_bytes + step.linked_bytes))));

const BADGES = { damaged: "bad", verified: "good" };

const stepsTable = () => {
  const row = (step) => [
    el("button", { class: "small", onclick: () => select("step", steps.indexOf(step)) }, labelOf(step)),
    step.problem ? UNKNOWN : el("span", { style: "white-space:nowrap" }, when(step.created_unix_secs)),
    ...[step.array_bytes, step.written_bytes, step.linked_bytes].map(size),
    ...[step.snapshot_secs, step.write_secs].map(seconds),
    Object.entries(step.metrics).slice(0, 6).map(([name, value]) => `${name} ${number(value)}`).join(", "),
    badge(BADGES[step.state] ?? "", step.state),
  ];
  const numbers = ["arrays", "written", "linked", "blocked", "writing"];
  return some([...steps].reverse(), 50, (shown) => table(["step", "saved", ...numbers, "metrics", "state"], shown.map(row), numbers));
};

const drawSteps = (given) => {
  if (!steps.length) return given.remove();
  const has = (key) => readable().some((step) => step[key] !== null);
  const names = metricsOf(steps);
  const charts = el("div", { class: "grid" }, names.slice(0, METRICS_SHOWN).map(metricChart),
    has("snapshot_secs") && timesChart(), has("written_bytes") && bytesChart());
  const hidden = names.slice(METRICS_SHOWN);
  const showHidden = () => {
    more.remove();
    charts.append(...hidden.map(metricChart));
  };
  const more = el("button", { class: "more", onclick: showHidden }, `show ${counted(hidden.length, "more metric")}`);
  fill(given,
    el("h2", {}, data.is_run ? "Steps over time" : "This checkpoint"),
    steps.length > 1 && para("soft", "Click a bar or a step to look into it below."),
    charts,
    hidden.length > 0 && more,
    !names.length && para("soft small", "No metrics were saved with these steps."),
    readable().length > 0 && !has("written_bytes") && para("soft small", "What each save wrote and how long it took is not recorded by this format."),
    unfold(el("summary", {}, "All steps as a table"), stepsTable));
};
