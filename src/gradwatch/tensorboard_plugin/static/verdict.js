// The first line that a person reads: is the run healthy, where not, since when.

import { el } from "./dom.js";
import { began, count, layersOf, listing, period, percent, plural, shortened } from "./format.js";

const SIGNS = { error: "✕", warning: "!", healthy: "✓", stuck: "–", "no end": "…", "gradwatch failed": "–", unmeasured: "–" };
const WORDS = {
  error: "Error",
  warning: "Warning",
  healthy: "Healthy",
  stuck: "Nothing found, but the loss has not fallen",
  "no end": "No alert so far",
  "gradwatch failed": "Nothing found before GradWatch failed",
  unmeasured: "No step was measured",
};
const LONGEST = 48; // characters of a name in the headline
const AMONG = 32; // of one of several

/** The sign of a health, in its colour; nothing where that is not known. */
export function healthSign(kind) {
  if (!SIGNS[kind]) return null;
  return el("span", { class: `health ${kind}`, title: WORDS[kind], role: "img", "aria-label": WORDS[kind] }, SIGNS[kind]);
}

/** An alert in one line: "dead in encoder.0, since step 31, still open". */
export function lineOf(alert, longest = LONGEST) {
  const sites = layersOf(alert);
  const most = sites.length > 1 ? Math.min(AMONG, longest) : longest;
  const where = listing(sites.map((name) => shortened(name, most)));
  return `${alert.rule} in ${where}, ${period(alert)}`;
}

/** The strip of one run. `jump(alert)` shows the alert's place. */
export function verdictOf(run, jump) {
  const serious = run.alerts.filter((alert) => alert.severity !== "notice");
  const { verdict, health: kind } = run;
  const layers = plural(run.names.length - run.totals.length, "layer");
  const resumed = verdict && !run.lost && run.rows < verdict.steps; // in another folder than it began
  const some = Boolean(verdict?.run_steps); // not every step was measured
  let steps = verdict && plural(verdict.steps, some && resumed ? "measured step" : "step");
  if (resumed) steps = `${count(run.rows)} of ${steps} recorded here`;
  else if (some) steps = `${plural(verdict.run_steps, "step")}, ${count(verdict.steps)} of them measured`;
  const extent = verdict
    ? `${layers} over ${steps}, overhead ${percent(Number(verdict.overhead))}`
    : `${layers}, so far up to step ${count(run.last)}: under way, or cut off`;
  let headline = kind === "stuck" ? `Nothing found; ${verdict.stuck}` : WORDS[kind];
  if (serious.length) headline += `: ${lineOf(serious[0])}`;
  const more = serious.length > 1 ? `and ${plural(serious.length - 1, "more incident")}` : null;
  const notes = [
    ...(verdict?.interventions ?? []).map((text) => `Intervention: ${text}`),
    ...(verdict?.notes ?? []),
    ...untrained(verdict?.untrained ?? {}).map((text) => `Not trained: ${text}`),
  ];
  const whole = serious.length ? layersOf(serious[0]).join(", ") : null;
  return el(
    "section",
    { class: `verdict ${kind}`, "aria-label": `Verdict on ${run.run}` },
    el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[kind]),
    el(
      "div",
      { class: "said" },
      el("h2", { title: whole }, headline, more && el("span", { class: "more" }, ` ${more}`)),
      el("p", { class: "quiet" }, el("span", { class: "run", title: run.run }, shortened(run.run, 80)), ` · ${extent}`),
      notes.map((note) => el("p", { class: "quiet noted", title: note }, note)),
    ),
    serious.length > 0 &&
      serious[0].axis !== null && // it began before the record
      el("button", { class: "plain", onclick: () => jump(serious[0]) }, `Show step ${count(began(serious[0]))}`),
  );
}

function untrained(reasons) {
  const byReason = new Map();
  for (const [name, reason] of Object.entries(reasons)) {
    byReason.set(reason, [...(byReason.get(reason) ?? []), name]);
  }
  return [...byReason].map(([reason, names]) => `${listing(names)}, ${reason}`);
}
