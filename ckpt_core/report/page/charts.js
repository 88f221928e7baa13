// Charts: what all have in common is a theme. Their colours are the page's CSS variables, so they follow the reader's theme.
const softText = { color: "var(--soft)", fontSize: 11 };
const softLine = { lineStyle: { color: "var(--line)" } };
// ECharts lightens the colour under the pointer, which it cannot do with a variable.
const plain = { emphasis: { disabled: true } };

const THEME = {
  animation: !matchMedia("(prefers-reduced-motion: reduce)").matches && !navigator.webdriver && steps.length < 200,
  animationDuration: 250,
  color: [0, 1, 2, 3, 4, 5, 6, 7].map((index) => `var(--c${index})`),
  textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: "var(--fg)" },
  grid: { left: 4, right: 14, top: 12, bottom: 2, containLabel: true },
  legend: { textStyle: { color: "var(--soft)", fontSize: 12 }, itemWidth: 12, itemHeight: 8, left: 0, top: 0 },
  tooltip: {
    confine: true,
    backgroundColor: "var(--panel)",
    borderColor: "var(--line)",
    textStyle: { color: "var(--fg)", fontSize: 12 },
    extraCssText: "white-space: normal; max-width: 320px; overflow-wrap: anywhere",
  },
  categoryAxis: { axisLine: softLine, axisTick: { show: false }, axisLabel: { ...softText, hideOverlap: true } },
  valueAxis: { splitNumber: 3, splitLine: softLine, axisLabel: softText },
  bar: { ...plain, stack: "all" },
  line: { ...plain, symbolSize: 6 },
  treemap: { ...plain, animationDurationUpdate: 250 },
};

/** The place of a chart, which is drawn once it is in the page and has a size. */
const plot = (title, option, ready = () => {}, properties = {}) => {
  const place = el("div", { class: "plot", role: "img", "aria-label": title, ...properties });
  queueMicrotask(() => place.isConnected && guarded(() => {
    const chart = echarts.init(place, THEME, { renderer: "svg" });
    chart.setOption(option);
    ready(chart);
    new ResizeObserver((_, sizes) => {
      if (place.clientWidth) chart.resize();
      if (place.isConnected) return;
      chart.dispose();
      sizes.disconnect();
    }).observe(place);
  }));
  return place;
};

const titled = (title, chart, caption, kind = "") =>
  el("div", { class: "panel" }, el("h3", {}, title), chart, caption && para(`caption ${kind}`, caption));

/** The options of a line or bar chart over categories; `format` is of the values. */
const overCategories = (labels, format, series, { x, y, ...more } = {}) => ({
  tooltip: { trigger: "axis", axisPointer: { type: series[0].type === "bar" ? "shadow" : "line" }, valueFormatter: format },
  xAxis: { type: "category", data: labels, ...x },
  yAxis: { type: "value", axisLabel: { formatter: format }, ...y },
  series,
  ...more,
});

/** Ticks for bytes: powers of two, since they are written in KiB and MiB. */
const byteTicks = (most) => {
  const top = Math.max(most, 4);
  const interval = 2 ** Math.ceil(Math.log2(top / 4));
  return { interval, max: interval * Math.ceil(top / interval) };
};

/** Text for a tooltip, which ECharts takes as HTML. */
const safe = (text) => String(text).replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
