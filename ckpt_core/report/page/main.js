// Puts the page of a run together.
const place = (id) => document.getElementById(id);

const stepChooser = () => {
  const step = (by, name, sign) => {
    const to = selected.step + by;
    return el("button", { "aria-label": name, disabled: !steps[to], onclick: () => select("step", to) }, sign);
  };
  const show = () => fill(place("chooser"), step(-1, "the step before", "‹"),
    stepChoice(selected.step, "step that is shown", (index) => select("step", index)), step(1, "the next step", "›"));
  onSelect("step", show);
  show();
};

guarded(() => {
  const newest = steps.findLastIndex((step) => !step.problem);
  selected.step = newest >= 0 ? newest : Math.max(0, steps.length - 1);
  if (steps.length > 1) stepChooser();
  drawOverview(place("overview"));
  drawSteps(place("steps"));
  drawTreemap(place("bytes"));
  drawLeaves(place("leaves"));
  drawCompare(place("compare"));
  drawHealth(place("health"));
  drawAbout(place("about"));
  for (const link of document.querySelectorAll("nav .links a")) if (!place(link.hash.slice(1))) link.remove();
  document.documentElement.dataset.drawn = "yes";
});
