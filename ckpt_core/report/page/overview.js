// The head of the page: what this is, how large, how long saving takes, and whether it is sound.
const median = (values) => {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) / 2)];
};

const card = (kind, name, value, more) =>
  el("div", { class: `card ${kind}` }, el("span", {}, name), el("b", {}, value), more && el("span", {}, more));

const stepsCard = () => {
  const numbers = steps.map((step) => step.step);
  const gaps = new Set(numbers.slice(1).map((step, index) => step - numbers[index]));
  const range = numbers.length > 1 ? `${numbers[0]} to ${numbers.at(-1)}` : `step ${numbers[0]}`;
  return card("", "Steps", whole(numbers.length), gaps.size === 1 ? `${range}, every ${[...gaps][0]}` : range);
};

const newestCards = (newest) => {
  const found = [];
  if (newest.created_unix_secs) {
    const age = data.made_unix_secs - newest.created_unix_secs;
    found.push(card("", data.is_run ? "Newest save" : "Saved", when(newest.created_unix_secs).slice(5, 16),
      age >= 0 && `${seconds(Math.round(age))} before this report`));
  }
  found.push(card("", data.is_run ? "Arrays of a step" : "Arrays", size(newest.array_bytes), countedLeaves(leavesOf(newest).length)));
  return found;
};

const savingCards = () => {
  const found = [];
  const values = (key) => readable().map((step) => step[key]).filter((value) => value !== null);
  const sum = (key) => values(key).reduce((a, b) => a + b, 0);
  if (values("written_bytes").length) {
    const linked = sum("linked_bytes");
    found.push(card("", "On disk", size(sum("written_bytes")), linked ? `and ${size(linked)} linked to earlier steps` : "nothing shared between steps"));
  }
  if (values("snapshot_secs").length) {
    found.push(card("", "A save blocks for", seconds(median(values("snapshot_secs"))),
      `then writes for ${seconds(median(values("write_secs")))}${readable().length > 1 ? " (medians)" : ""}`));
  }
  return found;
};

const provenance = ({ topology, versions, layout }) => {
  const { process_count: processes, device_count: devices, platform } = topology;
  const who = { orbax: "written by Orbax", safetensors: "safetensors" }[layout] ?? "written by ckpt";
  const where = devices ? [counted(processes ?? 1, "process", "processes"), counted(devices, `${platform} device`)] : [];
  const named = ["ckpt-core", "jax", "flax", "torch", "python"].filter((name) => versions[name]);
  return [who, ...where, ...named.map((name) => `${name} ${versions[name]}`)].join(" · ");
};

const drawOverview = (given) => {
  const newest = readable().at(-1);
  const { kind, title, short } = verdict();
  const health = el("a", { href: "#health" }, card(kind, "Health", title, short));
  fill(given,
    el("h1", {}, data.path.replace(/\/+$/, "").split("/").pop() || data.path),
    para("path small mono", data.path),
    !steps.length && para("note", "There are no steps here."),
    el("div", { class: "cards" }, health, data.is_run && steps.length > 0 && stepsCard(), newest && newestCards(newest), savingCards()),
    newest && para("soft small", provenance(newest)),
    data.run_metadata && unfold(el("summary", {}, "Metadata of the run"), () => el("pre", {}, data.run_metadata)));
};
