// The head of the page: what this is, how large, how long saving takes, and whether it is sound.
"use strict";
(() => {
  const { el, size, seconds } = report;

  const median = (numbers) => {
    const sorted = numbers.filter((one) => typeof one === "number").sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
  };
  const sum = (numbers) => {
    const known = numbers.filter((one) => typeof one === "number");
    return known.length ? known.reduce((a, b) => a + b, 0) : null;
  };
  const card = (kind, name, value, more) =>
    el("div", { class: `card ${kind}` }, el("span", {}, name), el("b", {}, value), more && el("span", {}, more));

  const stepsCard = (steps) => {
    const numbers = steps.map((step) => step.step);
    const gaps = new Set(numbers.slice(1).map((number, index) => number - numbers[index]));
    const every = gaps.size === 1 ? `, every ${[...gaps][0]}` : "";
    const range = numbers.length > 1 ? `${numbers[0]} to ${numbers[numbers.length - 1]}${every}` : `step ${numbers[0]}`;
    return card("", "Steps", report.whole(numbers.length), range);
  };

  const healthCard = () => {
    const { kind, title, short } = report.verdict();
    return el("a", { href: "#health", style: "text-decoration:none;color:inherit" }, card(kind, "Health", title, short));
  };

  const provenance = (step) => {
    if (!step) return "";
    const { process_count: processes, device_count: devices, platform } = step.topology ?? {};
    const where = devices ? `by ${report.counted(processes ?? 1, "process", "processes")} on ${devices} ${platform} device${devices === 1 ? "" : "s"}` : "";
    const with_ = ["ckpt-core", "jax", "flax", "torch", "python"]
      .filter((name) => step.versions?.[name])
      .map((name) => `${name} ${step.versions[name]}`);
    const who = step.layout === "orbax" ? "written by Orbax" : step.layout === "safetensors" ? "safetensors" : "written by ckpt";
    return [`${who} ${where}`.trim(), ...with_].join(" · ");
  };

  report.overview = (place) => {
    const { data, steps } = report;
    const readable = steps.filter((step) => !step.problem);
    const newest = readable[readable.length - 1];
    const name = data.path.replace(/\/+$/, "").split("/").pop() || data.path;
    const cards = [];
    if (data.is_run && steps.length) cards.push(stepsCard(steps));
    if (newest) {
      const age = data.made_unix_secs - newest.created_unix_secs;
      if (newest.created_unix_secs) {
        const ago = age >= 0 ? `${seconds(Math.round(age))} before this report` : "";
        cards.push(card("", data.is_run ? "Newest save" : "Saved", report.when(newest.created_unix_secs).slice(5, 16), ago));
      }
      const leaves = report.leavesOf(newest).length;
      cards.push(card("", data.is_run ? "Arrays of a step" : "Arrays", size(newest.array_bytes), report.counted(leaves, "leaf", "leaves")));
      const written = sum(readable.map((step) => step.written_bytes));
      const linked = sum(readable.map((step) => step.linked_bytes));
      if (written !== null) {
        cards.push(card("", "Written", size(written), linked ? `and ${size(linked)} linked to earlier steps` : "nothing shared between steps"));
      }
      const blocked = median(readable.map((step) => step.snapshot_secs));
      const write = median(readable.map((step) => step.write_secs));
      if (blocked !== null) {
        cards.push(card("", "A save blocks for", seconds(blocked), `then writes for ${seconds(write)}${readable.length > 1 ? " (medians)" : ""}`));
      }
    }
    cards.push(healthCard());
    report.fill(
      place,
      el("h1", {}, name),
      el("p", { class: "path small mono" }, data.path),
      !steps.length && el("p", { class: "note" }, "There are no steps here."),
      el("div", { class: "cards" }, cards),
      el("p", { class: "soft small" }, provenance(newest)),
      data.run_metadata && el("details", {}, el("summary", {}, "Metadata of the run"), el("pre", {}, data.run_metadata)),
    );
  };
})();
