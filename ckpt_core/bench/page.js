// Draws the sections of a benchmark's page: texts, tables, and charts of medians with their spread.
"use strict";
(() => {
  const { el, colour } = report;
  const ROW = 40;
  const LONGEST = 40;
  const DASH = "-"; // where a line of ECharts is interrupted
  const hue = (index) => colour(`--c${index}`);
  const shown = (value) => String(Number(Number(value).toPrecision(6)));
  const shortened = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);
  const tip = (label, text, unit) => `<b>${report.safe(label)}</b><br>${report.safe(text)} ${report.safe(unit)}`;
  const axis = (more, ends) => report.axis({ ...more, axisLabel: { color: colour("--soft"), fontSize: 11, hideOverlap: true, formatter: shown, ...ends } });
  /** Points without a line, or a line without a tooltip: what is drawn over a chart. */
  const over = (data, more) => ({ type: "line", data, silent: true, animation: false, showAllSymbol: true, emphasis: { disabled: true }, lineStyle: { opacity: 0 }, ...more });
  const whiskers = (data, more) => over(data, { symbol: "rect", symbolSize: [1.4, 8], itemStyle: { color: colour("--fg"), opacity: 0.75 }, lineStyle: { color: colour("--fg"), width: 1.4, opacity: 0.75 }, z: 4, ...more });

  /** The option of ECharts for rows of medians, 95 % intervals and single values; on a logarithmic axis the length of a bar would mislead. */
  report.bars = ({ bars, unit, log }) => {
    const name = `${unit}${log ? ", log scale" : ""}`;
    const item = (bar) => ({ color: hue(bar.colour), opacity: bar.pale ? 0.4 : 1 });
    // Each row takes two places of the axis: the label and the median stand in the first, the bar in the second.
    const at = (row) => 2 * row + 1;
    const labels = (right, text) => ({
      type: "category", inverse: true, data: bars.flatMap((_, row) => [String(2 * row), String(at(row))]), position: right ? "right" : "left",
      axisLine: { show: false }, axisTick: { show: false }, splitLine: { show: false },
      axisLabel: { inside: true, margin: 0, interval: 0, color: colour("--fg"), fontSize: 12, fontWeight: right ? 600 : 400, formatter: (place) => (place % 2 ? "" : text(bars[place / 2])) },
    });
    const medians = bars.map((bar, row) => ({ value: [bar.median, at(row)], row, itemStyle: item(bar) }));
    const dots = bars.flatMap((bar, row) => bar.values.map((value) => [value, at(row)]));
    const ends = bars.flatMap(({ interval: [low, high] }, row) => (high === null ? [] : [[log && low <= 0 ? high : low, at(row)], [high, at(row)], [DASH, at(row)]]));
    return {
      ...report.chartBase(),
      grid: { left: 4, right: 8, top: 4, bottom: 38, outerBoundsMode: "none" },
      tooltip: report.tooltip({ trigger: "item", formatter: ({ data }) => tip(bars[data.row].label, bars[data.row].spelled, unit) }),
      xAxis: axis({ type: log ? "log" : "value", name, nameLocation: "end", nameGap: 0, nameTextStyle: { color: colour("--soft"), fontSize: 11, align: "right", verticalAlign: "top", padding: [22, 0, 0, 0] } }, { alignMinLabel: "left", alignMaxLabel: "right" }),
      yAxis: [labels(false, (bar) => shortened(bar.label)), labels(true, (bar) => bar.spelled)],
      series: [
        log
          ? over(medians, { silent: false, symbol: "circle", symbolSize: 12 })
          : { type: "bar", data: medians, barWidth: 14, itemStyle: { borderRadius: 2 }, emphasis: { disabled: true } },
        over(dots, { symbol: "circle", symbolSize: 4, itemStyle: { color: colour("--fg"), opacity: 0.45 }, z: 3 }),
        whiskers(ends),
      ],
    };
  };

  /** The option for a line of medians for each series; both axes are logarithmic. */
  report.lines = ({ lines, x, unit }) => ({
    ...report.chartBase(),
    grid: { left: 56, right: 26, top: 12, bottom: 44, outerBoundsMode: "none" },
    tooltip: report.tooltip({ trigger: "item", formatter: ({ seriesName, data }) => tip(seriesName, data[2], unit) }),
    xAxis: axis({ type: "log", name: `${x} (log); ${unit} (log)`, nameLocation: "middle", nameGap: 28 }),
    yAxis: axis({ type: "log" }),
    series: lines.flatMap((line) => {
      const color = hue(line.colour);
      const ends = line.points.flatMap(([at, , low, high]) => (low > 0 ? [[at, low], [at, high], [at, DASH]] : []));
      return [
        { type: "line", name: line.label, data: line.points.map(([at, median, , , text]) => [at, median, text]), symbol: "circle", symbolSize: 8, lineStyle: { color, width: 2 }, itemStyle: { color }, emphasis: { disabled: true } },
        whiskers(ends, { symbol: "none", lineStyle: { color, width: 1.4, opacity: 0.75 } }),
      ];
    }),
  });

  const chart = (place, option, label) => {
    waiting.push(() => report.draw(place, option));
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", label);
    return place;
  };
  const waiting = [];

  const block = (one) => {
    if (one.title !== undefined) return el("h3", { class: "mono" }, one.title);
    if (one.text !== undefined) return el("p", { class: one.kind }, one.text);
    if (one.pre !== undefined) return el("pre", {}, one.pre);
    if (one.table) return report.table(one.names, one.table, one.right, one.stacked);
    if (one.details !== undefined) return el("details", { open: one.open }, el("summary", {}, one.details), one.blocks.map(block));
    if (one.bars) return chart(el("div", { style: `height:${ROW * one.bars.length + 42}px` }), () => report.bars(one), `${report.counted(one.bars.length, "case", "cases")}, ${one.unit}`);
    const keys = one.lines.map((line) => el("span", {}, el("i", { style: `background:var(--c${line.colour})` }), line.label));
    return [chart(el("div", { style: "height:284px;max-width:640px" }), () => report.lines(one), `${one.unit} over ${one.x}`), el("div", { class: "keys" }, keys)];
  };

  const draw = () => {
    JSON.parse(document.getElementById("data").textContent).sections.forEach((section, index) => {
      const title = el(index ? "h2" : "h1", { class: section.kind }, section.name);
      report.fill(document.getElementById(`s${index}`), title, section.blocks.map(block));
    });
    for (const work of waiting) work();
  };
  report.start(draw);
})();
