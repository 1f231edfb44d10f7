// What is known of each run that is shown: fetched from the server, and made ready to draw.

import { envelope, grid, json } from "./api.js";
import { domainOf } from "./colour.js";
import { faultsOf, worstOf } from "./faults.js";

const COLUMNS = 900; // a wide screen's pixels: more could not be seen
const ZEROS = "zero_fraction";

/** The statistic to show for `runs` (answers to `run`): the one chosen where any has it, else the gradient norm. */
export function statisticOf(runs, chosen) {
  const all = [...new Map(runs.flatMap((run) => run.statistics.map((each) => [each.name, each]))).values()];
  return { all, one: all.find((each) => each.name === chosen) ?? all.find((each) => each.name === "grad_norm") ?? all[0] };
}

/** A panel for `run` showing `statistic`. */
export async function panelOf(run, statistic) {
  const has = (name) => run.statistics.some((each) => each.name === name);
  const [map, steps, zeros] = await Promise.all([
    has(statistic.name) ? envelope("map", { run: run.run, statistic: statistic.name, columns: COLUMNS }) : null,
    envelope("steps", { run: run.run, columns: COLUMNS }),
    has(ZEROS) ? envelope("map", { run: run.run, statistic: ZEROS, columns: 1 }) : null,
  ]);
  const faults = faultsOf(run.alerts, run.names);
  const base = map ? grid(map.about, map.arrays) : nothing(run.names.length);
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
    medians: map?.arrays.median ?? none,
    zeros: zeros?.arrays.last ?? null,
    loss,
    nearLoss: loss,
    layers,
    faults,
    status: worstOf(run.alerts, faults, run.names.length),
  };
}

/** Give the panels what they share: the ends of the steps, and the scale of the colours. */
export function tie(panels, log) {
  const whole = [Math.min(...panels.map((p) => p.whole[0])), Math.max(...panels.map((p) => p.whole[1]))];
  const domain = domainOf(panels.map((panel) => layersOnly(panel)), log);
  for (const panel of panels) Object.assign(panel, { whole, domain });
}

/** The rows of `panel` in `view`, and its steps. */
export function visible(panel, view) {
  const from = view ? panel.layers.findIndex((n) => panel.run.names[n] === view.top) : -1;
  const to = view ? panel.layers.findIndex((n) => panel.run.names[n] === view.bottom) : -1;
  const rows = from >= 0 && to >= from ? panel.layers.slice(from, to + 1) : panel.layers;
  return { rows, span: view && view.to > view.from ? [view.from, view.to] : panel.whole };
}

/** Show the whole run's numbers, whatever finer ones were shown before. */
export function unzoom(panel) {
  Object.assign(panel, { zoomed: panel.grid, nearLoss: panel.loss });
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
  if (steps?.about.numbers.loss) panel.nearLoss = grid(steps.about.numbers.loss, steps.arrays, "loss ");
  return Boolean(map || steps);
}

export async function runsOf() {
  return json("runs");
}

export async function runOf(name) {
  return json("run", { run: name });
}

/** The numbers of the layers: the totals are another thing, and would widen the scale. */
function layersOnly({ grid: all, layers }) {
  if (layers.length === all.low.length / (all.columns || 1)) return all;
  const pick = (values) => {
    const found = new Float32Array(layers.length * all.columns);
    layers.forEach((n, i) => found.set(values.subarray(n * all.columns, (n + 1) * all.columns), i * all.columns));
    return found;
  };
  const low = pick(all.low);
  return { low, high: all.high === all.low ? low : pick(all.high) };
}

function nothing(names) {
  const empty = new Float64Array(0);
  const none = new Float32Array(0);
  return { columns: 0, first: empty, last: empty, low: none, high: none, states: new Uint8Array(0), records: 0, pooled: false, names };
}
