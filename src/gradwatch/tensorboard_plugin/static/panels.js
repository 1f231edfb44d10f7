// What is known of each run that is shown: fetched from the server, and made ready to draw.

import { envelope, grid } from "./api.js";
import { domainOf } from "./colour.js";
import { placedAlerts, touches, worstOf } from "./faults.js";
import { rowsOf } from "./tree.js";

const COLUMNS = 900; // a wide screen's pixels: more could not be seen
const ZEROS = "zero_fraction";

/** The statistic to show for `runs` (answers to `run`): the one chosen where any has it, else the gradient norm. */
export function statisticOf(runs, chosen) {
  const all = [...new Map(runs.flatMap((run) => run.statistics.map((each) => [each.name, each]))).values()];
  return { all, one: all.find((each) => each.name === chosen) ?? all.find((each) => each.name === "grad_norm") ?? all[0] };
}

/** A panel showing `statistic` of a run; `answer`: to `run`. */
export async function panelOf(answer, statistic) {
  const run = { ...answer, alerts: placedAlerts(answer.alerts, answer.names) };
  const has = (name) => run.statistics.some((each) => each.name === name);
  const [map, steps, zeros] = await Promise.all([
    has(statistic.name) ? envelope("map", { run: run.run, statistic: statistic.name, columns: COLUMNS }) : null,
    envelope("steps", { run: run.run, columns: COLUMNS }),
    has(ZEROS) ? envelope("map", { run: run.run, statistic: ZEROS, columns: 1 }) : null,
  ]);
  const base = map ? grid(map.about, map.arrays) : nothing();
  const losses = steps.about.numbers.loss;
  const loss = losses ? grid(losses, steps.arrays, "loss ") : null;
  const layers = run.names.map((_, n) => n).filter((n) => !run.totals.includes(n));
  const begins = [base, loss].filter((each) => each?.columns).map((each) => each.first[0]);
  const none = new Float32Array(run.names.length).fill(NaN);
  return {
    run,
    statistic: statistic.name,
    grid: base,
    zoomed: base,
    whole: [Math.min(run.last, ...begins), run.last + 1], // the run's, not the statistic's: the axis stays
    summary: map?.arrays ?? null,
    usual: map?.arrays.usual ?? none,
    zeros: zeros?.arrays.last ?? null,
    loss,
    zoomedLoss: loss,
    layers,
    status: worstOf(run.alerts, run.names.length),
  };
}

/**
 * Give the panels what they share: the ends of the steps, the scale of the colours; and the rows that each has, with the
 * alerts that are `near`, about one of them. From the state, and whether numbers are drawn as logarithms.
 */
export function tie(panels, { view, filter, turned, colours, log }) {
  const whole = [Math.min(...panels.map((p) => p.whole[0])), Math.max(...panels.map((p) => p.whole[1]))];
  for (const panel of panels) {
    const origins = panel.run.alerts.filter((alert) => alert.severity !== "notice").map((alert) => alert.origin);
    panel.rows = rowsOf(panel.run.names, panel.layers, { origins, turned, filter });
    panel.whole = whole;
    const inside = new Set(panel.rows.flatMap((row) => row.members));
    panel.near = panel.run.alerts.filter((alert) => !filter || touches(alert, inside));
  }
  const relative = colours === "relative";
  const near = colours === "fit" || (view && colours !== "absolute");
  const parts = panels.map((panel) => {
    const { rows, span } = near ? visible(panel, view) : { rows: [{ members: panel.layers }], span: whole };
    const names = rows.flatMap((row) => row.members);
    return { grid: near ? panel.zoomed : panel.grid, names, from: span[0], to: span[1], usual: panel.usual };
  });
  const domain = domainOf(parts, { log, relative });
  for (const panel of panels) panel.domain = domain;
}

/** The rows of `panel` in `view`, and its steps. */
export function visible(panel, view) {
  const { rows } = panel;
  const span = view && view.to > view.from ? [view.from, view.to] : panel.whole;
  const [top, bottom] = view ? [view.top, view.bottom].map((name) => panel.run.names.indexOf(name)) : [-1, -1];
  if (top < 0 || bottom < 0) return { rows, span };
  const inside = rows.filter(({ members }) => members[members.length - 1] >= top && members[0] <= bottom);
  return { rows: inside.length ? inside : rows, span };
}

/** Show the whole run's numbers, whatever finer ones were shown before. */
export function unzoom(panel) {
  Object.assign(panel, { zoomed: panel.grid, zoomedLoss: panel.loss });
}

/**
 * Fetch the steps in `view` more finely, where they were pooled; says whether there is something new to draw. Nothing is
 * changed where `current` says by then that another view is wanted.
 */
export async function zoom(panel, view, current) {
  if (!view || (view.from <= panel.whole[0] && view.to >= panel.whole[1])) return false;
  const asked = { run: panel.run.run, columns: COLUMNS, from: Math.max(0, view.from - 1), to: view.to };
  const [map, steps] = await Promise.all([
    panel.grid.pooled ? envelope("map", { ...asked, statistic: panel.statistic }) : null,
    panel.loss?.pooled ? envelope("steps", asked) : null,
  ]);
  if (!current()) return false;
  const found = map && grid(map.about, map.arrays);
  if (found?.columns) panel.zoomed = found;
  if (steps?.about.numbers.loss) panel.zoomedLoss = grid(steps.about.numbers.loss, steps.arrays, "loss ");
  return Boolean(map || steps);
}

function nothing() {
  const empty = new Float64Array(0);
  const none = new Float32Array(0);
  return { columns: 0, first: empty, last: empty, low: none, high: none, states: new Uint8Array(0), records: 0, pooled: false };
}
