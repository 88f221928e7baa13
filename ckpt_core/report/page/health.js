// Health: what is damaged, what was verified and when, who writes, and what is not known.
const PROBLEMS_SHOWN = 20;
const inState = (state) => steps.filter((step) => step.state === state);
const withoutChecksums = () => readable().filter((step) => step.layout !== "ckpt");
const capital = (text) => text[0].toUpperCase() + text.slice(1);

/** Leaves of the newest step whose arrays were read that have NaN or Inf. */
const notFinite = () => [...(statistics.at(-1)?.rows.values() ?? [])].filter(({ nan, inf }) => nan || inf);

const verdict = () => {
  const of = `of ${counted(steps.length, "step")}`;
  const [damaged, unread, verified] = ["damaged", "not readable", "verified"].map((state) => inState(state).length);
  if (damaged) return { kind: "bad", title: `${damaged} damaged`, short: of };
  if (unread) return { kind: "warn", title: `${unread} not readable`, short: of };
  if (notFinite().length) return { kind: "warn", title: "NaN or Inf", short: `in ${countedLeaves(notFinite().length)} of the newest step read` };
  if (!steps.length) return { kind: "", title: "nothing there", short: "" };
  if (verified === steps.length) return { kind: "good", title: "sound", short: "every byte was checked" };
  const why = withoutChecksums().length === steps.length ? "this format has no checksums" : "bytes were not checked";
  return { kind: "unknown", title: "not verified", short: `no damage seen; ${why}` };
};

const damageNote = (step) => {
  if (step.problem) return note(step.unread ? "warn" : "bad", `${capital(stepName(step))} cannot be read`, step.problem);
  const { problems, more_problems: unlisted } = step.verified;
  const more = Math.max(0, problems.length - PROBLEMS_SHOWN) + unlisted;
  const texts = problems.slice(0, PROBLEMS_SHOWN).map((one) => `${one.file}${one.leaf ? ` (${one.leaf})` : ""}: ${one.what}`);
  return note("bad", `${capital(stepName(step))} is damaged`, texts, more > 0 && `and ${more} more`);
};

const notFiniteNote = () => {
  const texts = notFinite().map(({ leaf, nan, inf }) => `${nameOf(leaves[leaf])}: ${whole(nan)} NaN, ${whole(inf)} Inf`);
  const { step } = statistics.at(-1) ?? {};
  return texts.length > 0 && note("warn", `NaN or Inf in ${countedLeaves(texts.length)}${step === null ? "" : ` of step ${step}`}`,
    texts.slice(0, PROBLEMS_SHOWN), texts.length > PROBLEMS_SHOWN && `and ${texts.length - PROBLEMS_SHOWN} more`);
};

const checkedNotes = () => {
  const sound = inState("verified");
  const without = withoutChecksums();
  const bytes = sound.reduce((sum, step) => sum + step.verified.checked_bytes, 0);
  const which = sound.length === steps.length ? "all steps" : `steps ${listed(sound.map(labelOf), 12)}`;
  return [
    sound.length > 0 && note("good", counted(sound.length, "step is sound", "steps are sound"),
      `Every byte was checked against its checksum when this report was made, ${when(data.made_unix_secs)}: ${size(bytes)}; ${which}.`),
    !steps.some((step) => step.verified) && steps.length > without.length && note("", "Bytes were not checked",
      "This report has read the metadata, whose own checksums fit. ckpt report --verify checks every byte; when that was done before is recorded nowhere."),
    without.length > 0 && note("", counted(without.length, "step has no checksums", "steps have no checksums"),
      "They were not written by ckpt, so nothing can be verified."),
  ];
};

const KINDS = {
  unfinished: ["", "A save that is running, or was interrupted"],
  replaced: ["warn", "A step that was being replaced when its writer ended"],
  kept: ["warn", "An old step, kept until the new one is known to be on the disk"],
  "set aside": ["warn", "Damaged, and set aside by a later run"],
  retired: ["", "Left behind by a restore of an older step"],
  writer: ["good", "A living process writes here"],
};

const besideNotes = () => {
  const ofKind = (kind) => data.beside.filter((trace) => trace.kind === kind);
  const text = ({ kind, name, whose, since_unix_secs: since }) => {
    const what = kind === "writer" ? whose || "somebody" : `${name}${whose ? ` (${whose})` : ""}`;
    return `${what}, since ${when(since)}`;
  };
  const notes = Object.entries(KINDS).map(([kind, [colour, title]]) => {
    const texts = ofKind(kind).map(text);
    return texts.length > 0 && note(colour, title, texts.slice(0, PROBLEMS_SHOWN), texts.length > PROBLEMS_SHOWN && `and ${texts.length - PROBLEMS_SHOWN} more`);
  });
  if (data.is_run && !data.looked_beside) notes.push(note("", "Writers and unfinished saves are not shown", "In an object store they cannot be seen from here."));
  else if (data.is_run && !ofKind("writer").length) notes.push(note("", "Nobody writes here", "No living process had claimed the directory when this report was made."));
  return notes;
};

const drawHealth = (given) =>
  fill(given,
    el("h2", {}, "Health"),
    steps.filter((step) => step.problem || step.state === "damaged").map(damageNote),
    notFiniteNote(), checkedNotes(), besideNotes(),
    data.without_checkpoint.length > 0 && note("warn", "Directories without a checkpoint",
      `${data.without_checkpoint.slice(0, 20).join(", ")}: named like steps; their saves never finished, or their files are gone.`),
    data.deleted_meanwhile.length > 0 && note("", "Deleted while this report was made", `steps ${data.deleted_meanwhile.join(", ")}`),
    data.notes.map((text) => note("warn", text)));

const drawAbout = (given) => {
  const read = statistics.map(({ step }) => step).filter((step) => step !== null);
  const of = read.length ? `${read.length === 1 ? "step" : "steps"} ${read.join(", ")}` : "this checkpoint";
  fill(given,
    el("p", {}, `Made ${when(data.made_unix_secs)} by ckpt ${data.made_by} from the metadata of ${counted(steps.length, data.is_run ? "step" : "checkpoint")}. `,
      statistics.length ? `Statistics: the arrays of ${of} were read.` : "No arrays were read."),
    el("p", {}, "This file needs no network and sends nothing anywhere. Charts: Apache ECharts."));
};
