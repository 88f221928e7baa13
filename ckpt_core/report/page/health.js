// Health: what is damaged, what was verified and when, who writes, and what is not known.
"use strict";
(() => {
  const { el, size } = report;

  const failed = (step) => step.verified && !step.verified.ok && step.layout === "ckpt";

  const notFinite = () => {
    const newest = report.statistics[report.statistics.length - 1];
    if (!newest) return [];
    return newest.columns.leaf
      .map((leaf, row) => ({ leaf: report.leaves[leaf], nan: newest.columns.nan[row], inf: newest.columns.inf[row], step: newest.step }))
      .filter(({ nan, inf }) => nan || inf);
  };

  report.verdict = () => {
    const { steps } = report;
    const damaged = steps.filter((step) => (step.problem && !step.unread) || failed(step));
    const unread = steps.filter((step) => step.unread);
    const sound = steps.filter((step) => step.verified?.ok);
    const bad = notFinite();
    if (damaged.length) return { kind: "bad", title: `${damaged.length} damaged`, short: `of ${report.counted(steps.length, "step", "steps")}` };
    if (unread.length) return { kind: "warn", title: `${unread.length} not readable`, short: `of ${report.counted(steps.length, "step", "steps")}` };
    if (bad.length) return { kind: "warn", title: "NaN or Inf", short: `in ${report.counted(bad.length, "leaf", "leaves")} of the newest step read` };
    if (sound.length && sound.length === steps.length) return { kind: "good", title: "sound", short: "every byte was checked" };
    if (!steps.length) return { kind: "", title: "nothing there", short: "" };
    return { kind: "", title: "no damage seen", short: steps.every((step) => step.layout !== "ckpt") ? "this format has no checksums" : "bytes not checked" };
  };

  const names = (steps) => `${steps.slice(0, 12).map(report.labelOf).join(", ")}${steps.length > 12 ? ` and ${steps.length - 12} more` : ""}`;
  const note = (kind, title, ...more) => el("div", { class: `note ${kind}` }, el("b", {}, title), more.flat().filter(Boolean).map((one) => el("div", { class: "small" }, one)));

  const damage = (step) => {
    if (step.problem) return note(step.unread ? "warn" : "bad", `Step ${report.labelOf(step)} cannot be read`, step.problem);
    const problems = step.verified.problems.map((one) => `${one.file}${one.leaf ? ` (${one.leaf})` : ""}: ${one.what}`);
    const more = step.verified.more_problems;
    return note("bad", `${step.step === null ? "This checkpoint" : `Step ${step.step}`} is damaged`, problems.slice(0, 20), (problems.length > 20 || more) && `and ${problems.length - Math.min(20, problems.length) + more} more`);
  };

  const checked = () => {
    const { steps, data } = report;
    const verified = steps.filter((step) => step.verified);
    const sound = verified.filter((step) => step.verified.ok);
    const without = steps.filter((step) => !step.problem && step.layout !== "ckpt");
    const found = [];
    if (sound.length) {
      const bytes = sound.reduce((sum, step) => sum + step.verified.checked_bytes, 0);
      found.push(note("good", `${report.counted(sound.length, "step is", "steps are")} sound`, `Every byte was checked against its checksum when this report was made, ${report.when(data.made_unix_secs)}: ${size(bytes)}; ${sound.length === steps.length ? "all steps" : `steps ${names(sound)}`}.`));
    }
    if (!verified.length && steps.length > without.length) {
      found.push(note("", "Bytes were not checked", "This report has read the metadata, whose own checksums fit. ckpt report --verify checks every byte; when that was done before is recorded nowhere."));
    }
    if (without.length) found.push(note("", `${report.counted(without.length, "step has", "steps have")} no checksums`, "They were not written by ckpt, so nothing can be verified."));
    return found;
  };

  const KINDS = {
    unfinished: ["", "A save that is running, or was interrupted"],
    replaced: ["warn", "A step that was being replaced when its writer ended"],
    kept: ["warn", "An old step, kept until the new one is known to be on the disk"],
    "set aside": ["warn", "Damaged, and set aside by a later run"],
    retired: ["", "Left behind by a restore of an older step"],
    writer: ["good", "A living process writes here"],
  };

  const beside = () => {
    const byKind = new Map();
    for (const trace of report.data.beside) byKind.set(trace.kind, [...(byKind.get(trace.kind) ?? []), trace]);
    const notes = [...byKind].map(([kind, traces]) => {
      const [colour, title] = KINDS[kind] ?? ["", kind];
      return note(colour, title, traces.slice(0, 20).map((trace) => `${kind === "writer" ? trace.whose || "somebody" : trace.name}${kind === "unfinished" && trace.whose ? ` (${trace.whose})` : ""}, since ${report.when(trace.since_unix_secs)}`), traces.length > 20 && `and ${traces.length - 20} more`);
    });
    if (!report.data.is_run) return notes;
    if (!report.data.looked_beside) notes.push(note("", "Writers and unfinished saves are not shown", "In an object store they cannot be seen from here."));
    else if (!byKind.has("writer")) notes.push(note("", "Nobody writes here", "No living process had claimed the directory when this report was made."));
    return notes;
  };

  report.health = (place) => {
    const { data, steps } = report;
    const bad = notFinite();
    report.fill(
      place,
      el("h2", {}, "Health"),
      steps.filter((step) => step.problem || failed(step)).map(damage),
      bad.length > 0 && note("warn", `NaN or Inf in ${report.counted(bad.length, "leaf", "leaves")}${bad[0].step === null ? "" : ` of step ${bad[0].step}`}`,
        bad.slice(0, 10).map(({ leaf, nan, inf }) => `${report.nameOf(leaf)}: ${report.whole(nan)} NaN, ${report.whole(inf)} Inf`), bad.length > 10 && `and ${bad.length - 10} more`),
      checked(),
      beside(),
      data.without_checkpoint.length > 0 && note("warn", "Directories without a checkpoint", `${data.without_checkpoint.slice(0, 20).join(", ")}: named like steps; their saves never finished, or their files are gone.`),
      data.deleted_meanwhile.length > 0 && note("", "Deleted while this report was made", `steps ${data.deleted_meanwhile.join(", ")}`),
      data.notes.map((text) => note("warn", text)),
    );
  };

  report.about = (place) => {
    const { data, steps } = report;
    const read = report.statistics.map((one) => one.step).filter((one) => one !== null);
    const stats = report.statistics.length
      ? `Statistics: the arrays of ${read.length ? `${read.length === 1 ? "step" : "steps"} ${read.join(", ")}` : "this checkpoint"} were read.`
      : "No arrays were read.";
    report.fill(place, el("p", {}, `Made ${report.when(data.made_unix_secs)} by ckpt ${data.made_by} from the metadata of ${report.counted(steps.length, data.is_run ? "step" : "checkpoint", data.is_run ? "steps" : "checkpoints")}. ${stats}`),
      el("p", {}, "This file needs no network and sends nothing anywhere. Charts: Apache ECharts."));
  };
})();
