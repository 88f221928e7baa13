// Puts the page of a run together.
"use strict";
(() => {
  const { el } = report;
  const place = (id) => document.getElementById(id);

  const chooser = () => {
    if (report.steps.length < 2) return;
    const select = el("select", { "aria-label": "step that is shown", onchange: () => report.select("step", Number(select.value)) },
      report.steps.map((step, index) => el("option", { value: index }, `step ${report.labelOf(step)}${step.unread ? " (not readable)" : step.problem ? " (damaged)" : ""}`)));
    const go = (by) => {
      const to = report.selected.step + by;
      if (to >= 0 && to < report.steps.length) report.select("step", to);
    };
    select.value = String(report.selected.step);
    report.on("step", (index) => { select.value = String(index); });
    report.fill(place("chooser"),
      el("button", { "aria-label": "the step before", onclick: () => go(-1) }, "‹"), select,
      el("button", { "aria-label": "the next step", onclick: () => go(1) }, "›"));
  };

  const links = () => {
    for (const link of document.querySelectorAll("nav .links a")) {
      if (!document.querySelector(link.getAttribute("href"))) link.remove();
    }
  };

  report.start(() => {
    const readable = report.steps.map((step, index) => (step.problem ? -1 : index)).filter((index) => index >= 0);
    report.selected.step = readable.length ? readable[readable.length - 1] : Math.max(0, report.steps.length - 1);
    chooser();
    report.overview(place("overview"));
    report.stepsSection(place("steps"));
    report.treemap(place("bytes"));
    report.tree(place("leaves"));
    report.compare(place("compare"));
    report.health(place("health"));
    report.about(place("about"));
    links();
  });
})();
