// Charts follow the reader's theme and the width of their place; their colours are the page's CSS variables.
"use strict";
(() => {
  const charts = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches || navigator.webdriver;

  report.colour = colour;
  report.colours = () => [0, 1, 2, 3, 4, 5, 6, 7].map((index) => colour(`--c${index}`));

  /** Draws a chart into an element, and again whenever the theme changes; `option` is a function. */
  report.draw = (place, option, onclick) => {
    charts.get(place)?.chart.dispose();
    const chart = echarts.init(place, null, { renderer: "svg" });
    if (onclick) chart.on("click", onclick);
    charts.set(place, { chart, option });
    chart.setOption(option());
    sizes.observe(place);
    return chart;
  };

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const found = charts.get(target);
      if (!found) continue;
      if (!target.isConnected) {
        found.chart.dispose();
        charts.delete(target);
        sizes.unobserve(target);
      } else if (target.clientWidth) found.chart.resize();
    }
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { chart, option } of charts.values()) chart.setOption(option(), true);
  });

  /** What all charts have in common. */
  report.chartBase = () => ({
    animation: !still && !(report.steps?.length >= 200),
    animationDuration: 250,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colour("--fg") },
    color: report.colours(),
  });

  report.tooltip = (more) => ({
    confine: true,
    backgroundColor: colour("--panel"),
    borderColor: colour("--line"),
    textStyle: { color: colour("--fg"), fontSize: 12 },
    extraCssText: "white-space: normal; max-width: 320px; overflow-wrap: anywhere",
    ...more,
  });

  const grid = (top) => ({ left: 4, right: 14, top, bottom: 2, containLabel: true });

  const axis = (more) => ({
    axisLine: { lineStyle: { color: colour("--line") } },
    axisTick: { show: false },
    axisLabel: { color: colour("--soft"), fontSize: 11, hideOverlap: true },
    splitLine: { lineStyle: { color: colour("--line") } },
    nameTextStyle: { color: colour("--soft"), fontSize: 11 },
    ...more,
  });

  /** The options of a line or bar chart over categories; `format` is of the values. */
  report.overCategories = ({ top = 12, labels, format, more = {}, x = {}, y = {}, shadow = false, series }) => ({
    ...report.chartBase(),
    grid: grid(top),
    ...more,
    tooltip: report.tooltip({ trigger: "axis", ...(shadow && { axisPointer: { type: "shadow" } }), valueFormatter: format }),
    xAxis: axis({ type: "category", data: labels, ...x }),
    yAxis: axis({ type: "value", ...y, splitNumber: 3, axisLine: { show: false }, axisLabel: { color: colour("--soft"), fontSize: 11, formatter: format } }),
    series,
  });

  report.legend = () => ({ textStyle: { color: colour("--soft"), fontSize: 12 }, itemWidth: 12, itemHeight: 8, left: 0, top: 0 });

  /** Text for a tooltip, which ECharts takes as HTML. */
  report.safe = (text) =>
    String(text).replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
})();
