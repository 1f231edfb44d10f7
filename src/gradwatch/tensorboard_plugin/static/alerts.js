// The alerts of a run as a list; each jumps to its place on the map.

import { mark, SHAPES } from "./heatmap.js";
import { drawing, el, themed } from "./dom.js";
import { layersOf, listing, period } from "./format.js";

/** `jump(alert)` shows the place; `open(layer)` the layer's page. */
export function alertList(run, { jump, open }) {
  if (!run.alerts.length) return el("p", { class: "quiet" }, run.verdict ? "No alert." : "No alert so far.");
  const known = new Set(run.names);
  return el("ol", { class: "alerts" }, run.alerts.map((alert) => item(alert, known, { jump, open })));
}

function effectOf({ rule, sites }) {
  return sites.length ? `${rule} in ${listing(sites)}` : rule;
}

function item(alert, known, { jump, open }) {
  const sign = el("canvas", { class: "mark", "aria-hidden": "true" });
  const context = drawing(sign, 16, 16);
  context.fillStyle = themed(alert.severity);
  mark(context, SHAPES[alert.severity], 8, 9);
  const where = listing(layersOf(alert));
  return el(
    "li",
    { class: alert.severity },
    el(
      "button",
      { class: "jump", onclick: () => jump(alert), title: "Show it on the map" },
      sign,
      el("span", { class: "what" }, el("b", {}, `${alert.severity}: ${alert.rule}`), ` ${period(alert)}`),
    ),
    known.has(alert.layer)
      ? el("button", { class: "where link", title: "Open the page of this layer", onclick: () => open(alert.layer) }, where)
      : el("p", { class: "where" }, where),
    el("p", {}, alert.message),
    alert.effects.length > 0 && el("p", {}, `What follows: ${alert.effects.map(effectOf).join("; ")}.`),
    el("p", { class: "remedy" }, el("b", {}, "Try: "), alert.remedy),
  );
}
