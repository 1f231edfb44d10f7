// A layer's page: every statistic of it over time, in each of the runs shown, and the alerts that name it.

import { alertList } from "./alerts.js";
import { envelope, grid } from "./api.js";
import { chart } from "./chart.js";
import { SERIES } from "./colour.js";
import { el, fill, swatch } from "./dom.js";
import { concerns, wordsAt } from "./faults.js";
import { briefly, exact, lastNumber, short, shortened } from "./format.js";
import { parametersOf } from "./parameters.js";

const FIRST = ["grad_norm", "signal_rms", "signal_norm", "update_ratio", "weight_norm", "output_rms"];
const CHECKS = "checks"; // the group of statistics that rules ask for: last
const COLUMNS = 600;
const LONGEST = 120; // characters of a name in the headline

/** Fill `element` with the page of `layer`; resolves when it is drawn. `act`: open(name), close(), jump(panel, alert). */
export async function layerPage(element, { panels, layer, states, logOf, act, current }) {
  const answers = await Promise.all(
    panels.map(async (panel) => {
      if (!panel.run.names.includes(layer)) return null;
      return envelope("layer", { run: panel.run.run, layer, columns: COLUMNS });
    }),
  );
  if (!current()) return;
  const home = panels.find((panel) => panel.run.names.includes(layer));
  const { names, modules } = home.run;
  const place = names.indexOf(layer);
  const neighbour = (way) => names.find((_, n) => n === place + way && !home.run.totals.includes(n));
  const span = [Math.min(...panels.map((p) => p.whole[0])), Math.max(...panels.map((p) => p.whole[1]))];
  const several = panels.length > 1;
  const charts = [];
  const constants = [];
  for (const { name, title, meaning, log, label, sampled } of ordered(panels)) {
    const lines = panels.flatMap((panel, i) => {
      const answer = answers[i];
      if (!answer?.about.statistics[name]) return [];
      const found = grid(answer.about.statistics[name], answer.arrays, `${name} `);
      const n = panel.run.names.indexOf(layer);
      const alerts = panel.run.alerts.filter((alert) => concerns(alert, n));
      return [{ run: panel.run.run, colour: SERIES[i], grid: found, alerts, until: panel.run.last + 1 }];
    });
    const said = lines.map((line) => constant(line.grid));
    const counts = lines.map((line) => line.grid.records.toLocaleString("en")).join(", ");
    const often = sampled ? `sampled: ${counts} ${counts === "1" ? "number" : "numbers"} over the run` : "";
    const counted = often && el("span", { class: "quiet often" }, ` ${often}`);
    if (lines.length && said.every((text) => text !== null)) {
      constants.push(el("li", { title: `${name}: ${meaning}` }, el("b", {}, title), ` ${[...new Set(said)].join(", ")}`, counted));
    } else if (lines.length) {
      const made = chart({ title: `${title} of ${layer}`, lines, span, log: logOf(log), states });
      charts.push({
        made,
        card: el(
          "article",
          { class: "card", "data-statistic": name },
          el("h3", {}, title, counted),
          el("p", { class: "quiet", title: [meaning, label].filter(Boolean).join(". ") }, briefly(meaning)),
          made.element,
        ),
      });
    }
  }
  const own = panels
    .map((panel, i) => parametersOf(answers[i], { layer, run: panel.run.run, heading: several, span, log: logOf(true), states }))
    .filter(Boolean);
  const inside = names.filter((name) => name.startsWith(`${layer}.`));
  const link = (name, text = name) => el("button", { class: "link", onclick: () => act.open(name) }, text);
  fill(
    element,
    el(
      "div",
      { class: "row" },
      el("button", { class: "plain back", onclick: act.close }, "← All layers"),
      [-1, 1].map((way) => neighbour(way) && link(neighbour(way), `${way < 0 ? "↑" : "↓"} ${neighbour(way)}`)),
    ),
    el("h2", { class: "layer-name", tabindex: -1, title: layer }, shortened(layer, LONGEST), el("span", { class: "quiet" }, ` ${modules[place]}`)),
    layer.length > LONGEST && el("details", { class: "quiet full-name" }, el("summary", {}, "Full name"), layer),
    several &&
      el("p", { class: "legend" }, panels.map((panel, i) => el("span", {}, swatch(SERIES[i]), panel.run.run))),
    panels.map((panel) => statusOf(panel, layer, several)),
    panels.map((panel) => alertsOf(panel, layer, act, several)),
    el("div", { class: "cards" }, charts.map(({ card }) => card)),
    constants.length > 0 && el("p", { class: "quiet" }, "The same wherever it was measured:"),
    constants.length > 0 && el("ul", { class: "constants" }, constants),
    own.map(({ element: section }) => section),
    inside.length > 0 && el("p", { class: "inside" }, "Inside it: ", inside.flatMap((name) => [link(name), " "])),
  );
  for (const { made } of [...charts, ...own]) made?.draw();
}

/** How the layer is, in a line: also where nothing is wrong. */
function statusOf(panel, layer, several) {
  const n = panel.run.names.indexOf(layer);
  if (n < 0) return several && el("p", { class: "layer-status quiet" }, `${panel.run.run}: not in this run`);
  const words = wordsAt(n, panel.run.alerts);
  const said = words.length ? words.join(", ") : panel.run.totals.includes(n) ? "all layers together" : `ok: no alert ${panel.run.verdict ? "" : "so far "}is about it`;
  const usual = panel.usual[n];
  const numbers = Number.isFinite(usual) && panel.statistic === "grad_norm" ? `; its gradient is usually ${short(usual)}, ${lastNumber(panel.summary, n)} at last` : "";
  return el(
    "p",
    { class: `layer-status badge ${panel.status[n] ?? "healthy"}` },
    several && el("span", { class: "quiet" }, `${panel.run.run}: `),
    `${said}${numbers}`,
  );
}

function alertsOf(panel, layer, act, several) {
  const n = panel.run.names.indexOf(layer);
  const alerts = panel.run.alerts.filter((alert) => concerns(alert, n));
  if (!alerts.length) return null;
  const list = alertList({ ...panel.run, alerts }, { open: act.open, jump: (alert) => act.jump(panel, alert) });
  return el("section", { class: "own-alerts" }, several && el("h3", {}, panel.run.run), list);
}

/** The statistics of all runs, those that matter most first. */
function ordered(panels) {
  const all = new Map(panels.flatMap((panel) => panel.run.statistics.map((each) => [each.name, each])));
  const rank = ({ name, group }) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length + (group === CHECKS));
  return [...all.values()].sort((a, b) => rank(a) - rank(b));
}

/** The number that all of the grid has, in words; null if it has several. */
function constant(found) {
  const same = found.low.every((number) => number === found.low[0]) && found.high.every((number) => number === found.low[0]);
  return same && found.states.every((state) => state === 0) ? exact(found.low[0]) : null;
}
