// The parameters of one layer in one run: a chart with a line for each, and a table.

import { grid } from "./api.js";
import { chart } from "./chart.js";
import { SERIES } from "./colour.js";
import { el, swatch } from "./dom.js";
import { count, plural, short } from "./format.js";

const NUMBERS = ["median", "min", "max", "last"];

/** `{element, made}`: what to show, and the chart in it or null; null where nothing is known of any. */
export function parametersOf(answer, { layer, run, heading, span, log, states }) {
  const rows = (answer?.about.parameters ?? []).map((about, n) => rowOf(about, answer.arrays, n, layer));
  if (!rows.length) return null;
  const lines = rows.slice(0, SERIES.length).map(({ short: name, grid: found }, n) => ({ run: name, colour: SERIES[n], grid: found, alerts: [] }));
  const made = lines.length > 1 ? chart({ title: `grad_norm of the parameters of ${layer}`, lines, span, log, states }) : null;
  const head = ["parameter", "shape", "elements", ...NUMBERS];
  const table = el(
    "table",
    { class: "layers" },
    el("thead", {}, el("tr", {}, head.map((title, n) => el("th", { scope: "col", class: n > 1 ? "number" : null }, title)))),
    el("tbody", {}, rows.map((row, n) => lineOf(row, made ? SERIES[n] : null, states))),
  );
  const element = el(
    "section",
    { class: "own-parameters", "data-run": run },
    el("h3", {}, `${plural(rows.length, "parameter")}${heading ? ` in ${run}` : ""}`),
    el("p", { class: "quiet" }, "2-norm of each one's gradient at the step, recorded now and then"),
    el("div", { class: "beside" }, made?.element, el("div", { class: "scroll" }, table)),
  );
  return { element, made };
}

function rowOf({ name, shape, ...about }, arrays, n, layer) {
  const of = (kind) => arrays[`parameter ${n} ${kind}`]?.[0];
  return {
    name,
    short: name.startsWith(`${layer}.`) ? name.slice(layer.length + 1) : name,
    shape,
    grid: grid(about, arrays, `parameter ${n} `),
    numbers: NUMBERS.map((kind) => of(kind) ?? NaN),
    state: of("state") ?? 0,
  };
}

function lineOf({ name, short: own, shape, numbers, state }, colour, states) {
  const said = states[state]?.replace(/ \(.*/, "");
  const last = numbers.length - 1;
  return el(
    "tr",
    { "data-parameter": name },
    el("td", { class: "name", title: name }, colour && swatch(colour), own),
    el("td", {}, shape.length ? shape.map(count).join(" × ") : "scalar"),
    el("td", { class: "number" }, count(shape.reduce((product, size) => product * size, 1))),
    numbers.map((number, n) => el("td", { class: "number" }, n === last && said ? said : short(number))),
  );
}
