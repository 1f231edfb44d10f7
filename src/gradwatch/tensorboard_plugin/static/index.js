// The page: what is chosen is fetched, what is fetched is drawn. TensorBoard calls `render`.

import { alertList } from "./alerts.js";
import { Refused } from "./api.js";
import { el, fill } from "./dom.js";
import { began, count } from "./format.js";
import { heatmap } from "./heatmap.js";
import { connect, followTheme, linked } from "./host.js";
import { layerPage } from "./layer.js";
import { legend } from "./legend.js";
import { empty, failed, loading } from "./messages.js";
import { panelOf, runOf, runsOf, statisticOf, tie, unzoom, visible, zoom } from "./panels.js";
import { choose, listen, recall, state } from "./state.js";
import { layerTable } from "./table.js";
import { toolbar } from "./toolbar.js";
import { described, tooltip } from "./tooltip.js";
import { verdictOf } from "./verdict.js";

const KEYS =
  "Drag to zoom in, double click to zoom out, click to open a layer. Keys: arrows move, plus and minus zoom, 0 shows all, Enter opens the layer.";

const REST = 120; // milliseconds without a further zoom before finer numbers are fetched

const bar = toolbar();
const tip = tooltip();
const trouble = el("div");
const verdicts = el("div", { class: "verdicts" });
const maps = el("div", { class: "maps" });
const colours = el("div");
const overview = el("div", { class: "overview" });
const page = el("section", { class: "layer-page", hidden: true });
const table = layerTable(open);
const keys = el("p", { id: "map-keys", class: "quiet keys" }, KEYS);
const main = el("main", {}, trouble, bar.element, overview, page);

let listed = null; // the answer to `runs`
let panels = [];
let one = null; // the statistic shown
let turn = 0; // which fetch is the latest
let waiting = 0;

export async function render() {
  document.title = "GradWatch";
  document.documentElement.lang = "en";
  const sheet = el("link", { rel: "stylesheet", href: new URL("./style.css", import.meta.url).href });
  const styled = new Promise((done) => {
    sheet.addEventListener("load", done);
    sheet.addEventListener("error", done);
  });
  document.head.append(sheet);
  document.body.append(main, tip.element, tip.spoken);
  followTheme(() => panels.length && draw());
  fill(overview, loading());
  bar.element.hidden = true;
  recall(linked());
  listen(chosen);
  await styled;
  await refresh();
  connect(() => refresh({ quietly: true }));
}

/** Fetch all that is shown; `quietly` changes nothing on the screen until it is there, and nothing if nothing is new. */
async function refresh({ quietly = false } = {}) {
  turn += 1;
  const mine = turn;
  try {
    const found = await runsOf();
    if (mine !== turn) return;
    const before = JSON.stringify([listed?.runs, panels.map((panel) => panel.run.run)]);
    listed = found;
    if (!listed.runs.length) {
      panels = [];
      bar.element.hidden = true;
      page.hidden = true;
      overview.hidden = false;
      fill(trouble);
      fill(overview, empty(listed.foreign));
      return;
    }
    const known = new Set(listed.runs.map((run) => run.name));
    const wanted = (state.runs ?? []).filter((name) => known.has(name));
    const names = wanted.length ? wanted : [listed.runs[0].name];
    if (quietly && panels.length && before === JSON.stringify([listed.runs, names])) return;
    const runs = await Promise.all(names.map(runOf));
    const statistics = statisticOf(runs, state.statistic);
    const made = await Promise.all(runs.map((run) => panelOf(run, statistics.one)));
    if (mine !== turn) return;
    const old = new Map(panels.map((panel) => [panel.run.run, panel.map]));
    panels = made;
    one = statistics.one;
    for (const panel of panels) panel.map = old.get(panel.run.run) ?? heatmap({ hover, view, open: openRow, resized: hide });
    tie(panels, logOf(one.log));
    bar.statistics = statistics.all;
    fill(trouble);
    const near = state.view;
    await Promise.all(made.map((panel) => zoom(panel, near, () => mine === turn && near === state.view)));
    if (mine === turn) draw();
  } catch (error) {
    if (mine !== turn) return;
    if (!(error instanceof Refused)) console.warn(error);
    if (!panels.length) fill(overview);
    fill(trouble, failed(error, () => refresh()));
  }
}

function logOf(log) {
  return state.log ?? log;
}

/** A person has chosen something. */
function chosen(changes) {
  if ("runs" in changes || "statistic" in changes) refresh();
  else if ("view" in changes) {
    panels.forEach(unzoom);
    if ("layer" in changes) draw();
    else show();
  }
  else if ("log" in changes) {
    tie(panels, logOf(one.log));
    draw();
  } else if ("layer" in changes) draw();
}

function draw() {
  const name = state.layer;
  const known = name != null && panels.some((panel) => panel.run.names.includes(name));
  set(known);
  page.hidden = !known;
  overview.hidden = known;
  if (known) {
    fill(overview);
    const mine = turn;
    const current = () => mine === turn && state.layer === name;
    const act = { open, close: () => choose({ layer: null }), jump };
    const drawn = { panels, layer: name, states: listed.states, logOf: (each) => each && state.log !== false, act, current };
    if (page.dataset.layer !== name) fill(page, loading());
    page.dataset.layer = name;
    layerPage(page, drawn).catch((error) => fill(trouble, failed(error, () => refresh())));
    return;
  }
  delete page.dataset.layer;
  const several = panels.length > 1;
  fill(verdicts, panels.map((panel) => verdictOf(panel.run, (alert) => jump(panel, alert))));
  fill(colours, legend(panels[0].domain, one));
  maps.classList.toggle("several", several);
  fill(maps, panels.map((panel) => sideOf(panel, several)));
  fill(overview, verdicts, maps, several && colours, several && keys, table.element);
  show();
  table.show(panels, listed.states);
}

function sideOf(panel, several) {
  const list = alertList(panel.run, { jump: (alert) => jump(panel, alert), open });
  const loud = panel.run.alerts.length ? ` (${panel.run.alerts.length})` : "";
  return el(
    "section",
    { class: "side", "data-run": panel.run.run },
    el("div", { class: "mapped" }, several && el("h3", {}, panel.run.run), panel.map.element, !several && [colours, keys]),
    el("aside", { "aria-label": `Alerts of ${panel.run.run}` }, el("h3", {}, `Alerts${loud}`), list),
  );
}

/** Draw the maps as they are, then again when the steps in view have come in full. */
function show() {
  set(false);
  paint();
  clearTimeout(waiting);
  const mine = turn;
  const near = state.view;
  const current = () => mine === turn && near === state.view;
  waiting = setTimeout(async () => {
    const news = await Promise.all(panels.map((panel) => zoom(panel, near, current).catch(() => false)));
    if (current() && news.some(Boolean)) paint();
  }, REST);
}

/** Set the choices above to what is shown: the maps, or a layer's page. */
function set(layered) {
  bar.element.hidden = false;
  const chosenRuns = panels.map((panel) => panel.run.run);
  const log = logOf(one.log);
  bar.show({ listed: listed.runs, chosen: chosenRuns, statistics: bar.statistics, one, log, said: retained(), layered });
}

function paint() {
  for (const panel of panels) {
    const { rows, span } = visible(panel, state.view);
    const { run, statistic, whole, domain, medians, nearLoss: loss, faults, status, zoomed } = panel;
    const shown = { run, statistic, whole, domain, medians, loss, faults, status, rows, span, grid: zoomed, alerts: run.alerts };
    panel.map.show(shown);
  }
}

/** What TensorBoard did not keep, in words. */
function retained() {
  const [short] = panels.filter(({ run }) => run.lost).map(({ run }) => run);
  if (!short) return "";
  const [kept, all] = [short.rows, short.rows + short.lost].map(count);
  return `TensorBoard has kept ${kept} of ${all} steps, at random, and the map is blank at the others. For every step: --samples_per_plugin gradwatch=0`;
}

function hover(map, at, event) {
  if (!at) {
    for (const panel of panels) panel.map.point(null);
    hide();
    return;
  }
  const layer = at.name >= 0 ? map.shown().run.names[at.name] : null;
  for (const panel of panels) {
    panel.map.point({ step: at.step, name: layer == null ? -1 : panel.run.names.indexOf(layer) });
  }
  const lines = described(panels.map((panel) => panel.map), map, at, listed.states);
  const { plot, rows, x } = map.place();
  const box = map.element.getBoundingClientRect();
  const [left, top] = event
    ? [event.clientX, event.clientY]
    : [box.left + x(at.step), box.top + plot.top + ((at.row + 0.5) * plot.height) / rows.length];
  tip.show(lines, left, top, at.spoken);
}

function hide() {
  tip.hide();
}

function view(map, wanted) {
  hide();
  if (!wanted) {
    choose({ view: null });
    return;
  }
  const { names } = map.shown().run;
  const rows = wanted.rows.map((n) => names[n]);
  choose({ view: { from: wanted.from, to: wanted.to, top: rows[0], bottom: rows[rows.length - 1] } });
}

function openRow(map, n) {
  open(map.shown().run.names[n]);
}

function open(layer) {
  hide();
  choose({ layer });
  window.scrollTo(0, 0);
}

/** Show the place of `alert`: the steps around its beginning, its layers, and a cross-hair at the first of them. */
function jump(panel, alert) {
  const [from, to] = panel.whole;
  const around = Math.max(10, Math.round((to - from) / 40));
  const at = Math.min(to - 1, Math.max(from, began(alert)));
  const own = panel.layers.filter((n) => panel.faults[panel.run.alerts.indexOf(alert)]?.own.has(n));
  const few = panel.layers.length > 60 && own.length > 0;
  const first = few ? Math.max(0, panel.layers.indexOf(own[0]) - 5) : 0;
  const last = few ? panel.layers.indexOf(own[own.length - 1]) + 5 : panel.layers.length - 1;
  const rows = panel.layers.slice(first, last + 1).map((n) => panel.run.names[n]);
  const steps = { from: Math.max(from, at - around), to: Math.min(to, at + 2 * around) };
  choose({ layer: null, view: { ...steps, top: rows[0], bottom: rows[rows.length - 1] } });
  panel.map.element.scrollIntoView({ block: "nearest" });
  panel.map.element.focus({ preventScroll: true });
  const n = panel.run.names.indexOf(alert.layer);
  panel.map.point({ step: at, name: n >= 0 ? n : own[0] ?? -1 });
}
