// The page: what is chosen is fetched, what is fetched is drawn. TensorBoard calls `render`.

import { alertList } from "./alerts.js";
import { json, Refused } from "./api.js";
import { el, fill } from "./dom.js";
import { jump, pin, turnModule, view } from "./view_changes.js";
import { heatmap } from "./heatmap.js";
import { connect, followTheme } from "./host.js";
import { layerPage } from "./layer.js";
import { legend } from "./legend.js";
import { empty, failed, KEYS, loading, retained } from "./messages.js";
import { minimap } from "./minimap.js";
import { runsTable } from "./overview.js";
import { panelOf, statisticOf, tie, unzoom, visible, zoom } from "./panels.js";
import { depthProfile } from "./profile.js";
import { regionStatistics } from "./region.js";
import { wantedRuns } from "./run_chooser.js";
import { choose, recall, state } from "./state.js";
import { layerTable } from "./table.js";
import { toolbar } from "./toolbar.js";
import { described, tooltip } from "./tooltip.js";
import { verdictOf } from "./verdict.js";

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
const allRuns = runsTable((name) => choose({ runs: [name], view: null, step: null }));
const profile = depthProfile({ open, pin: (step) => choose({ step: step === null ? null : Math.max(0, step) }, "step") });
const region = regionStatistics({ zoom: zoomToRegion, close: () => showRegion(null) });
const keys = el("details", { class: "quiet keys" }, el("summary", {}, "Mouse and keys"), el("p", { id: "map-keys" }, KEYS));
const main = el("main", {}, trouble, bar.element, overview, page);

let listed = null; // the answer to `runs`
let health = {}; // of each run
let panels = [];
let offered = []; // the statistics of the runs shown
let one = null; // that which is drawn
let shownRegion = null; // the region whose statistics are shown: {from, to, names}
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
  followTheme(() => (panels.length || listed) && draw());
  fill(overview, loading());
  bar.element.hidden = true;
  recall(chosen);
  await styled;
  await refresh();
  connect(() => refresh({ quietly: true }));
}

/** Fetch all that is shown; `quietly` changes nothing on the screen until it is there, and nothing if nothing is new. */
async function refresh({ quietly = false } = {}) {
  turn += 1;
  const mine = turn;
  try {
    const found = await json("runs");
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
    const names = wantedRuns(listed.runs, state);
    if (quietly && (panels.length || !names.length) && before === JSON.stringify([listed.runs, names])) return;
    askHealth(mine);
    if (!names.length) {
      panels = [];
      fill(trouble);
      draw();
      return;
    }
    const runs = await Promise.all(names.map((run) => json("run", { run })));
    if (mine === turn && !panels.length) fill(overview, runs.map((run) => verdictOf(run, () => {})), loading());
    const statistics = statisticOf(runs, state.statistic);
    const made = await Promise.all(runs.map((run) => panelOf(run, statistics.one)));
    if (mine !== turn) return;
    const old = new Map(panels.map((panel) => [panel.run.run, panel]));
    panels = made;
    offered = statistics.all;
    one = statistics.one;
    for (const panel of panels) {
      panel.map = old.get(panel.run.run)?.map ?? heatmap({ hover, view, open: (map, n) => open(map.shown().run.names[n]), turn: turnModule, pin, region: chosenRegion, resized: hide });
      panel.mini = old.get(panel.run.run)?.mini ?? minimap((from, to, rows) => view(panel.map, { from, to, rows }, "pan"));
    }
    bind();
    fill(trouble);
    const near = state.view;
    await Promise.all(made.map((panel) => zoom(panel, near, () => mine === turn && near === state.view)));
    if (mine === turn) bind();
    if (mine === turn) draw();
  } catch (error) {
    if (mine !== turn) return;
    if (!(error instanceof Refused)) console.warn(error);
    if (!panels.length) fill(overview);
    fill(trouble, failed(error, () => refresh()));
  }
}

async function askHealth(mine) {
  const found = await json("health").catch(() => ({})); // the page does without
  if (mine !== turn || JSON.stringify(found) === JSON.stringify(health)) return;
  health = found;
  if (panels.length) showChoices(!page.hidden);
  else if (allRuns.element.isConnected) allRuns.show(listed.runs, health);
}

function logOf(log) {
  return state.log ?? log;
}

/** Give the panels what they share, as it is chosen now. */
function bind() {
  tie(panels, { ...state, log: logOf(one.log) });
}

/** A person has chosen something, or gone back. */
function chosen(changes) {
  const has = (...names) => names.some((name) => name in changes);
  hide();
  if (has("runs", "statistic")) {
    showRegion(null);
    refresh();
  } else if (!panels.length) {
    if (has("layer")) refresh();
    else if (has("order")) allRuns.show(listed.runs, health);
  } else if (has("layer", "view", "log", "colours", "turned", "filter")) {
    if (has("view")) panels.forEach(unzoom);
    bind();
    if (has("layer") || !page.hidden) {
      draw();
      return;
    }
    show();
    if (has("log", "filter")) table.show(panels, listed.states);
    if (has("filter")) panels.forEach(listAlerts);
  } else if (has("step")) show();
  else if (has("sort")) table.show(panels, listed.states);
}

function draw() {
  const name = state.layer;
  const known = name != null && panels.some((panel) => panel.run.names.includes(name));
  hide();
  page.hidden = !known;
  overview.hidden = known;
  if (!panels.length) {
    bar.element.hidden = true;
    delete page.dataset.layer;
    fill(overview, allRuns.element);
    allRuns.show(listed.runs, health);
    return;
  }
  showChoices(known);
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
  fill(verdicts, !several && verdictOf(panels[0].run, (alert) => jump(panels[0], alert)));
  maps.classList.toggle("several", several);
  fill(maps, panels.map((panel) => sideOf(panel, several)));
  fill(overview, verdicts, maps, several && colours, several && keys, region.element, profile.element, table.element);
  show();
  table.show(panels, listed.states);
}

function sideOf(panel, several) {
  panel.alerts = el("aside", { "aria-label": `Alerts of ${panel.run.run}` });
  listAlerts(panel);
  return el(
    "section",
    { class: "side", "data-run": panel.run.run },
    several && verdictOf(panel.run, (alert) => jump(panel, alert)),
    el("div", { class: "mapped" }, panel.map.element, panel.mini.element, !several && [colours, keys]),
    panel.alerts,
  );
}

function listAlerts(panel) {
  const alerts = panel.near;
  const all = panel.run.alerts.length;
  const said = !all ? "" : alerts.length < all ? ` (${alerts.length} of ${all})` : ` (${all})`;
  const list = alertList({ ...panel.run, alerts }, { jump: (alert) => jump(panel, alert), open });
  fill(panel.alerts, el("h3", {}, `Alerts${said}`), alerts.length < all && !alerts.length ? el("p", { class: "quiet" }, "None about these layers.") : list);
}

/** Draw the maps as they are, then again when the steps in view have come in full. */
function show() {
  showChoices(false);
  paint();
  profile.show(panels, state.step, offered);
  clearTimeout(waiting);
  const mine = turn;
  const near = state.view;
  const current = () => mine === turn && near === state.view;
  waiting = setTimeout(async () => {
    const news = await Promise.all(panels.map((panel) => zoom(panel, near, current).catch(() => false)));
    if (!current() || !news.some(Boolean)) return;
    bind();
    paint();
  }, REST);
}

/** Set the choices above to what is shown: the maps, or a layer's page. */
function showChoices(layered) {
  bar.element.hidden = false;
  const chosenRuns = panels.map((panel) => panel.run.run);
  const log = logOf(one.log);
  bar.show({ listed: listed.runs, health, chosen: chosenRuns, groups: listed.groups, statistics: offered, one, log, said: retained(panels), layered });
}

function paint() {
  fill(colours, legend(panels[0].domain, one));
  for (const panel of panels) {
    const seen = visible(panel, state.view);
    const { rows, span } = seen;
    const { run, statistic, whole, domain, usual, zoomedLoss: loss, status, zoomed } = panel;
    const kept = { pinned: state.step, region: shownRegion, all: panel.rows };
    panel.map.show({ run, statistic, whole, domain, usual, loss, status, rows, span, grid: zoomed, alerts: panel.near, ...kept });
    const part = span[0] > whole[0] || span[1] < whole[1] || rows.length < panel.rows.length;
    panel.mini.show(panel, part ? seen : null, panel.map.place());
  }
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

/** The statistics of a part of a map are wanted; the same part of the others is said too. */
function chosenRegion(map, { from, to, rows }) {
  const { names } = map.shown().run;
  showRegion({ from, to, names: new Set(rows.flatMap((row) => row.members.map((n) => names[n]))) });
}

function showRegion(found) {
  shownRegion = found;
  region.show(panels, shownRegion, one);
  if (panels.length && page.hidden) paint();
}

function zoomToRegion() {
  const [panel] = panels;
  const rows = panel.rows.filter((row) => row.members.some((n) => shownRegion.names.has(panel.run.names[n])));
  const { from, to } = shownRegion;
  showRegion(null);
  if (rows.length) view(panel.map, { from, to, rows });
}

function open(layer) {
  hide();
  choose({ layer });
  window.scrollTo(0, 0);
}
