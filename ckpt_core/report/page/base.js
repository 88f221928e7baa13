// Elements, texts of numbers, and what is selected.
const UNKNOWN = "–";

/** Text is set as text, so names cannot become HTML. */
const fill = (place, ...children) => {
  place.replaceChildren(...children.flat(4).filter((child) => child != null && child !== false));
  return place;
};

const el = (tag, properties = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  return fill(made, children);
};

const whole = (count) => Number(count).toLocaleString("en-US");

const counted = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

const countedLeaves = (count) => counted(count, "leaf", "leaves");

const size = (bytes) => {
  if (bytes == null) return UNKNOWN;
  if (bytes < 1024) return `${bytes} B`;
  const power = Math.min(Math.floor(Math.log2(bytes) / 10), 5);
  const count = bytes / 1024 ** power;
  return `${count.toFixed(count < 100 ? 1 : 0)} ${"KMGTP"[power - 1]}iB`;
};

const number = (value) => {
  if (value == null) return UNKNOWN;
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "∞").replace("-", "−");
  const magnitude = Math.abs(value);
  if (Number.isInteger(value) && magnitude < 1e7) return whole(value);
  const text = magnitude >= 1e5 || magnitude < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
};

const percent = (part) => {
  if (!Number.isFinite(part)) return UNKNOWN;
  if (part > 0 && part < 0.001) return "<0.1 %";
  return `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
};

const seconds = (secs) => {
  if (secs == null) return UNKNOWN;
  if (secs < 1) return `${number(1000 * secs)} ms`;
  if (secs < 120) return `${number(secs)} s`;
  if (secs < 7200) return `${(secs / 60).toFixed(0)} min`;
  return secs < 172800 ? `${(secs / 3600).toFixed(0)} h` : `${(secs / 86400).toFixed(0)} days`;
};

/** As 2026-01-31 12:00:00, which is how dates are written in Sweden. */
const when = (unixSecs) => {
  const date = new Date(1000 * unixSecs);
  return unixSecs == null || Number.isNaN(date.getTime()) ? "at an unknown time" : date.toLocaleString("sv-SE");
};

/** The first texts of many in one line. */
const listed = (texts, shown) =>
  `${texts.slice(0, shown).join(", ")}${texts.length > shown ? ` and ${texts.length - shown} more` : ""}`;

const para = (kind, ...children) => el("p", { class: kind }, children);

const badge = (kind, text) => el("span", { class: `badge ${kind}` }, text);

const note = (kind, title, ...more) =>
  el("div", { class: `note ${kind}` }, el("b", {}, title),
    more.flat().filter(Boolean).map((one) => el("div", { class: "small" }, one)));

/** A table; cells are text or elements, and columns named in `right` are numbers. */
const table = (names, rows, right = []) => {
  const row = (tag, cells) =>
    el("tr", {}, cells.map((cell, index) => el(tag, { class: right.includes(names[index]) && "n" }, cell)));
  return el("div", { class: "scroll" },
    el("table", {}, el("thead", {}, row("th", names)), el("tbody", {}, rows.map((cells) => row("td", cells)))));
};

/** A list of which the first `shown` are there, and a button for the others. */
const some = (rows, shown, draw) => {
  const place = el("div");
  const show = (count) => {
    const left = rows.length - count;
    const text = `show ${whole(Math.min(left, 4 * shown))} of ${whole(left)} more`;
    fill(place, draw(rows.slice(0, count)), left > 0 && el("button", { class: "more", onclick: () => show(count + 4 * shown) }, text));
  };
  show(shown);
  return place;
};

/** What is made when it is first opened: 5,000 leaves cost nothing before that. */
const unfold = (summary, draw, open = false) => {
  const grow = ({ target }) => {
    if (target.open && target.children.length === 1) target.append(...[draw()].flat());
  };
  return el("details", { open, ontoggle: grow }, summary);
};

/** What goes wrong is shown, not hidden in the console. */
const guarded = (work) => {
  try {
    work();
  } catch (error) {
    const text = `This page could not draw itself: ${error}. The data are in it all the same, in the element with the id "data".`;
    document.querySelector("main").prepend(para("note bad", text));
    throw error;
  }
};

const listeners = { step: [], leaf: [] };
const selected = { step: 0, leaf: null };
const onSelect = (what, listener) => listeners[what].push(listener);
const select = (what, value) => {
  if (selected[what] === value) return;
  selected[what] = value;
  for (const listener of listeners[what]) listener(value);
};
