// The first line that a person reads: is the run healthy, where not, since when.

import { el } from "./dom.js";
import { began, count, listing, period, percent, plural } from "./format.js";

const SIGNS = { error: "✕", warning: "!", healthy: "✓", open: "…" };
const WORDS = { error: "Error", warning: "Warning" };

/** The strip of one run. `jump(alert)` shows the alert's place. */
export function verdictOf(run, jump) {
  const loud = run.alerts.filter((alert) => alert.severity !== "notice");
  const { verdict } = run;
  const kind = loud.length ? loud[0].severity : verdict ? "healthy" : "open";
  const layers = plural(run.names.length - run.totals.length, "layer");
  const extent = verdict
    ? `${layers} over ${plural(verdict.steps, "step")}, overhead ${percent(Number(verdict.overhead))}`
    : `${layers}, so far up to step ${count(run.last)}: under way, or cut off`;
  let headline = verdict ? (verdict.stuck ? `Nothing found; ${verdict.stuck}` : "Healthy") : "No alert so far";
  if (loud.length) {
    const first = loud[0];
    headline = `${WORDS[first.severity]}: ${first.rule} in ${listing(first.sites.length ? first.sites : [first.layer])}, ${period(first)}`;
  }
  const more = loud.length > 1 ? `and ${plural(loud.length - 1, "more incident")}` : null;
  const notes = [
    ...(verdict?.interventions ?? []).map((text) => `Intervention: ${text}`),
    ...(verdict?.notes ?? []),
    ...untrained(verdict?.untrained ?? {}).map((text) => `Never got a gradient: ${text}`),
  ];
  return el(
    "section",
    { class: `verdict ${kind}`, "aria-label": `Verdict on ${run.run}` },
    el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[kind]),
    el(
      "div",
      { class: "said" },
      el("h2", {}, headline, more && el("span", { class: "more" }, ` ${more}`)),
      el("p", { class: "quiet" }, el("span", { class: "run" }, run.run), ` · ${extent}`),
      notes.map((note) => el("p", { class: "quiet" }, note)),
    ),
    loud.length > 0 &&
      el("button", { class: "plain", onclick: () => jump(loud[0]) }, `Show step ${count(began(loud[0]))}`),
  );
}

function untrained(reasons) {
  const byReason = new Map();
  for (const [name, reason] of Object.entries(reasons)) {
    byReason.set(reason, [...(byReason.get(reason) ?? []), name]);
  }
  return [...byReason].map(([reason, names]) => `${listing(names).replace(" layers)", " parameters)")}, ${reason}`);
}
