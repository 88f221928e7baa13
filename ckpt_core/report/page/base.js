// The object that all modules share: elements, texts of numbers, and what is selected.
"use strict";
const report = {};

(() => {
  const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB"];

  /** An element with properties and children; text is set as text, so names cannot become HTML. */
  report.el = (tag, properties = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name === "class") made.className = value;
      else if (name === "style") made.style.cssText = value;
      else made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
    return made;
  };

  report.fill = (place, ...children) => {
    place.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
    return place;
  };

  report.size = (count) => {
    if (count === null || count === undefined) return "–";
    if (count < 1024) return `${count} B`;
    let unit = -1;
    while (count >= 1024 && unit < UNITS.length - 1) {
      count /= 1024;
      unit += 1;
    }
    return `${count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${UNITS[unit]}`;
  };

  report.whole = (count) => Number(count).toLocaleString("en-US");

  /** JSON has no NaN and no infinities, so they come as text. */
  report.value = (given) =>
    given === "NaN" ? NaN : given === "Infinity" ? Infinity : given === "-Infinity" ? -Infinity : given;

  report.number = (given) => {
    const value = report.value(given);
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return report.whole(value);
    const size = Math.abs(value);
    const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
    return text.replace("-", "−");
  };

  report.percent = (part) => {
    if (!Number.isFinite(part)) return "–";
    if (part === 0) return "0 %";
    const shown = 100 * part;
    return shown < 0.1 ? "<0.1 %" : `${shown >= 10 ? shown.toFixed(0) : shown.toFixed(1)} %`;
  };

  report.seconds = (secs) => {
    if (secs === null || secs === undefined) return "–";
    if (secs < 1) return `${report.number(1000 * secs)} ms`;
    if (secs < 120) return `${report.number(secs)} s`;
    if (secs < 7200) return `${(secs / 60).toFixed(0)} min`;
    return secs < 172800 ? `${(secs / 3600).toFixed(0)} h` : `${(secs / 86400).toFixed(0)} days`;
  };

  report.when = (unixSecs) => {
    const date = new Date(1000 * unixSecs);
    if (unixSecs === null || unixSecs === undefined || Number.isNaN(date.getTime())) return "at an unknown time";
    const two = (number) => String(number).padStart(2, "0");
    const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
    return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  };

  report.counted = (count, one, many) => `${report.whole(count)} ${count === 1 ? one : many}`;

  report.shape = (shape) => (shape.length ? shape.join("×") : "scalar");

  /** A table; cells are text or elements, and columns named in `right` are numbers. A `stacked` one is a list on a narrow screen. */
  report.table = (names, rows, right = [], stacked = false) => {
    const cell = (tag, content, index) =>
      report.el(tag, { class: right.includes(names[index]) ? "n" : null, "data-name": stacked && names[index] }, content);
    return report.el(
      "div",
      { class: "scroll" },
      report.el(
        "table",
        { class: stacked && "stack" },
        report.el("thead", {}, report.el("tr", {}, names.map((name, index) => cell("th", name, index)))),
        report.el("tbody", {}, rows.map((row) => report.el("tr", {}, row.map((one, index) => cell("td", one, index))))),
      ),
    );
  };

  /** A list of which the first `shown` are there, and a button for the others. */
  report.some = (rows, shown, draw) => {
    const place = report.el("div");
    const show = (count) => {
      report.fill(place, draw(rows.slice(0, count)));
      if (count >= rows.length) return;
      const more = `show ${report.whole(Math.min(rows.length - count, 4 * shown))} of ${report.whole(rows.length - count)} more`;
      place.append(report.el("button", { class: "more", onclick: () => show(count + 4 * shown) }, more));
    };
    show(shown);
    return place;
  };

  /** Draws the page. What goes wrong is shown, not hidden in the console. */
  report.start = (draw) => {
    try {
      draw();
      document.documentElement.dataset.drawn = "yes";
    } catch (error) {
      document.querySelector("main").prepend(report.el("p", { class: "note bad" }, `This page could not draw itself: ${error}. The data are in it all the same, in the element with the id "data".`));
      throw error;
    }
  };

  const listeners = { step: [], leaf: [] };
  report.selected = { step: 0, leaf: null };
  report.on = (what, listener) => listeners[what].push(listener);
  report.select = (what, value) => {
    if (report.selected[what] === value) return;
    report.selected[what] = value;
    for (const listener of listeners[what]) listener(value);
  };
})();
