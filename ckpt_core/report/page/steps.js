// Steps over time: metrics, how long saves took, what they wrote and linked, and all of it as a table.
"use strict";
(() => {
  const { el, size, seconds, number } = report;
  const METRICS_SHOWN = 6;

  const labels = () => report.steps.map(report.labelOf);
  const choose = (event) => report.select("step", event.dataIndex);

  const chart = (title, option, caption, bad) => {
    const plot = el("div", { class: "plot", role: "img", "aria-label": title });
    return { plot, option, panel: el("div", { class: "panel" }, el("h3", {}, title), plot, caption && el("p", { class: `caption ${bad ? "bad" : ""}` }, caption)) };
  };

  const bars = (title, series, format, caption) =>
    chart(
      title,
      () => report.overCategories({
        top: 30,
        labels: labels(),
        format,
        shadow: true,
        more: { legend: report.legend() },
        series: series.map(({ name, values, colour }) => ({ name, type: "bar", stack: "one", data: values, barMaxWidth: 34, itemStyle: { color: report.colour(colour) } })),
      }),
      caption,
    );

  const line = (name) => {
    const values = report.steps.map((step) => report.value(step.metrics?.[name] ?? null));
    const odd = report.steps.filter((_, index) => typeof values[index] === "number" && !Number.isFinite(values[index]));
    const text = report.steps.filter((_, index) => typeof values[index] === "string");
    const at = (steps) => `${steps.slice(0, 5).map(report.labelOf).join(", ")}${steps.length > 5 ? ` and ${steps.length - 5} more` : ""}`;
    const parts = [
      odd.length && `not finite at ${odd.length === 1 ? "step" : "steps"} ${at(odd)}`,
      text.length && `no number at ${text.length === 1 ? "step" : "steps"} ${at(text)}`,
    ].filter(Boolean);
    return chart(
      name,
      () => report.overCategories({
        labels: labels(),
        format: (value) => number(value),
        x: { boundaryGap: report.steps.length === 1 },
        y: { scale: true },
        series: [{
          name,
          type: "line",
          data: values.map((value) => (typeof value === "number" && Number.isFinite(value) ? value : null)),
          showSymbol: report.steps.length <= 60,
          symbolSize: 6,
          lineStyle: { width: 2 },
          itemStyle: { color: report.colour("--c0") },
        }],
      }),
      parts.join("; "),
      true,
    );
  };

  const table = () => {
    const rows = report.steps.map((step, index) => ({ step, index }));
    return report.some(rows.reverse(), 50, (shown) =>
      report.table(
        ["step", "saved", "arrays", "written", "linked", "blocked", "writing", "metrics", "state"],
        shown.map(({ step, index }) => [
          el("button", { class: "small", onclick: () => report.select("step", index) }, report.labelOf(step)),
          step.problem ? "–" : el("span", { style: "white-space:nowrap" }, report.when(step.created_unix_secs)),
          size(step.array_bytes),
          size(step.written_bytes),
          size(step.linked_bytes),
          seconds(step.snapshot_secs),
          seconds(step.write_secs),
          Object.entries(step.metrics ?? {}).slice(0, 6).map(([name, value]) => `${name} ${number(value)}`).join(", "),
          report.stateOf(step),
        ]),
        ["arrays", "written", "linked", "blocked", "writing"],
      ),
    );
  };

  report.stateOf = (step) => {
    if (step.unread) return el("span", { class: "badge" }, "not readable");
    if (step.problem) return el("span", { class: "badge bad" }, "damaged");
    if (!step.verified) return el("span", { class: "badge" }, "not verified");
    if (step.verified.ok) return el("span", { class: "badge good" }, "verified");
    const none = step.layout !== "ckpt";
    return el("span", { class: `badge ${none ? "" : "bad"}` }, none ? "no checksums" : "damaged");
  };

  /** Charts are drawn once they are in the page, where they have a size. */
  const show = (place, charts) => {
    place.append(...charts.map((one) => one.panel));
    for (const one of charts) report.draw(one.plot, one.option, choose);
  };

  report.stepsSection = (place) => {
    const { steps } = report;
    const readable = steps.filter((step) => !step.problem);
    if (!steps.length) return place.remove();
    const names = [...new Set(readable.flatMap((step) => Object.keys(step.metrics ?? {})))];
    const charts = el("div", { class: "grid" });
    const more = el("button", { class: "more", onclick: () => { more.remove(); show(charts, names.slice(METRICS_SHOWN).map(line)); } });
    more.textContent = `show ${report.counted(names.length - METRICS_SHOWN, "more metric", "more metrics")}`;
    const unknown = [
      !names.length && "No metrics were saved with these steps.",
      readable.length && readable.every((step) => step.written_bytes === null) && "What each save wrote and how long it took is not recorded by this format.",
    ].filter(Boolean);
    const title = report.data.is_run ? "Steps over time" : "This checkpoint";
    report.fill(
      place,
      el("h2", {}, title),
      el("p", { class: "lead" }, steps.length > 1 ? "Click a bar or a step to look into it below." : ""),
      charts,
      names.length > METRICS_SHOWN && more,
      unknown.map((text) => el("p", { class: "soft small" }, text)),
      el("details", { ontoggle: (event) => { if (event.target.open && event.target.children.length === 1) event.target.append(table()); } },
        el("summary", {}, "All steps as a table")),
    );
    const found = names.slice(0, METRICS_SHOWN).map(line);
    if (readable.some((step) => typeof step.snapshot_secs === "number")) {
      found.push(bars("Time of a save", [
        { name: "the program waits", values: steps.map((step) => step.snapshot_secs ?? null), colour: "--c1" },
        { name: "written in the background", values: steps.map((step) => step.write_secs ?? null), colour: "--c0" },
      ], (value) => (value === 0 ? "0" : seconds(value)), "Recorded by each save: until it returned, and after that until its commit."));
    }
    if (readable.some((step) => typeof step.written_bytes === "number")) {
      found.push(bars("Bytes of a step on disk", [
        { name: "written", values: steps.map((step) => step.written_bytes ?? null), colour: "--c0" },
        { name: "linked", values: steps.map((step) => step.linked_bytes ?? null), colour: "--c2" },
      ], (value) => (value === null || value === undefined ? "–" : size(value)), "Linked: unchanged, and shared with an earlier step by hard links."));
    }
    show(charts, found);
  };
})();
