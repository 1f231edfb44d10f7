// The runs in a table: how each is, what differs between their settings, and a small map; ticked ones are compared.

import { envelope, grid } from "./api.js";
import { domainOf } from "./colour.js";
import { drawing, el, fill } from "./dom.js";
import { count, plural, short, shortened } from "./format.js";
import { painted } from "./paint.js";
import { MOST } from "./run_chooser.js";
import { headingsOf, sorted } from "./sorting.js";
import { sparkline, HEIGHT, WIDTH } from "./sparkline.js";
import { choose } from "./state.js";
import { healthSign, lineOf } from "./verdict.js";

const AT_ONCE = 3; // runs that are asked for at once
const SETTINGS = 4; // settings that have a column of their own
const MAP = [200, 44]; // pixels of a small map
const RANK = { error: 3, warning: 2, "no end": 1, "gradwatch failed": 1, stuck: 0, unmeasured: 0, healthy: 0 };

/** `table.show(listed, health)` draws; `open(name)` opens a run. */
export function runsTable(open) {
  const known = new Map(); // name -> {updated, and summary or failed}
  const ticked = new Set();
  const rows = new Map(); // name -> {said, row}
  const filter = el("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs" });
  const counted = el("span", { class: "quiet", "aria-live": "polite" });
  const compare = el("button", { class: "plain compare", onclick: () => choose({ runs: [...ticked], layer: null, view: null }) }, "Compare");
  const head = el("h2");
  const table = el("table", { class: "layers runs" });
  const element = el(
    "section",
    { class: "runs-overview" },
    el("div", { class: "row" }, head, filter, counted, compare),
    el("div", { class: "scroll" }, table),
  );
  let shown = { runs: [], health: {} };
  let turn = 0;
  filter.addEventListener("input", () => draw());

  function show(runs, health) {
    shown = { runs, health };
    for (const name of [...ticked]) if (!runs.some((run) => run.name === name)) ticked.delete(name);
    draw();
    read();
  }

  /** Ask for what is not known, or has gone on, a few runs at a time. */
  async function read() {
    turn += 1;
    const mine = turn;
    const missing = shown.runs.filter((run) => known.get(run.name)?.updated !== run.updated);
    element.setAttribute("aria-busy", String(missing.length > 0));
    const one = async () => {
      while (missing.length && mine === turn) {
        const run = missing.shift();
        try {
          known.set(run.name, { updated: run.updated, summary: summaryOf(await envelope("summary", { run: run.name })) });
        } catch (error) {
          known.set(run.name, { updated: run.updated, failed: error.message });
        }
        if (mine === turn) later();
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, one));
    if (mine !== turn) return;
    draw();
    element.setAttribute("aria-busy", "false");
  }

  let waiting = false;
  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  }

  function draw() {
    const lines = shown.runs.map((run) => {
      const { summary, failed } = known.get(run.name) ?? {};
      return { health: shown.health[run.name], ...run, ...summary, failed };
    });
    const settings = differing(lines);
    const columns = columnsOf(settings);
    const wanted = filter.value.toLowerCase();
    const some = lines.filter((line) => JSON.stringify([line.name, line.alerts?.map((alert) => alert.rule), line.settings]).toLowerCase().includes(wanted));
    head.textContent = plural(lines.length, "run");
    const unhealthy = lines.filter((line) => RANK[line.health] >= 2).length;
    counted.textContent = [unhealthy ? `${unhealthy} with warnings or errors` : "", some.length < lines.length ? `${some.length} shown` : ""].filter(Boolean).join(", ");
    compare.disabled = ticked.size < 2;
    compare.textContent = ticked.size ? `Compare ${ticked.size}` : "Compare";
    compare.title = `Tick two to ${MOST} runs`;
    const focused = document.activeElement;
    const kept = focused && element.contains(focused) ? [focused.value, focused.dataset.sort] : null;
    const body = el("tbody", {}, sorted(some, columns, "order", worstFirst).map((line) => drawnRow(line, columns)));
    fill(table, el("thead", {}, el("tr", {}, headingsOf(columns, "order"))), body);
    if (kept) [...table.querySelectorAll("button, input")].find((each) => each.value === kept[0] && each.dataset.sort === kept[1])?.focus();
    for (const canvas of table.querySelectorAll("canvas")) canvas.draw();
  }

  /** The row of a run, the same element as long as it says the same: a person may be about to click it. */
  function drawnRow(line, columns) {
    const full = ticked.size >= MOST;
    const said = JSON.stringify([line.name, line.health, line.updated, line.failed, line.run, ticked.has(line.name), full, columns.map((column) => column.key)]);
    const before = rows.get(line.name);
    if (before?.said === said) return before.row;
    const row = rowOf(line, columns);
    rows.set(line.name, { said, row });
    return row;
  }

  function rowOf(line, columns) {
    return el(
      "tr",
      { "data-run": line.name, class: line.health ?? null },
      columns.map((column) => el("td", { class: column.kind, "data-label": column.title }, column.cell(line))),
    );
  }

  function columnsOf(settings) {
    const number = (value) => (value == null ? "not finite" : short(value));
    return [
      {
        key: "compare",
        title: "",
        kind: "tick",
        cell: (line) =>
          el("input", {
            type: "checkbox",
            value: line.name,
            checked: ticked.has(line.name),
            disabled: !ticked.has(line.name) && ticked.size >= MOST,
            "aria-label": `Compare ${line.name}`,
            onchange: (event) => {
              if (event.target.checked) ticked.add(line.name);
              else ticked.delete(line.name);
              draw();
            },
          }),
      },
      { key: "health", title: "health", kind: "health-of", sort: (line) => RANK[line.health] ?? -1, cell: (line) => healthSign(line.health) ?? "…" },
      {
        key: "run",
        title: "run",
        kind: "name",
        sort: (line) => line.name,
        cell: (line) => el("button", { class: "link", value: line.name, title: line.name, onclick: () => open(line.name) }, shortened(line.name, 60)),
      },
      { key: "found", title: "worst incident", kind: "found", sort: (line) => line.worst?.axis ?? line.worst?.step ?? NaN, hint: "by onset", cell: (line) => foundIn(line) },
      {
        key: "loss",
        title: "loss",
        kind: "loss",
        hint: "by its last level",
        sort: (line) => line.loss?.[1] ?? NaN,
        cell: (line) => [
          el("span", { class: "number" }, line.loss ? `${number(line.loss[0])} → ${number(line.loss[1])}` : "-"),
          line.losses && picture(WIDTH, HEIGHT, (canvas) => sparkline(canvas, line.losses, 0, false)),
        ],
      },
      { key: "lr", title: "learning rate", kind: "number", sort: (line) => line.lr?.[0] ?? NaN, cell: (line) => (line.lr ? rateOf(line.lr) : "-") },
      ...settings.map((name) => ({
        key: `set ${name}`,
        title: name,
        kind: "setting",
        sort: (line) => line.settings?.[name] ?? "",
        cell: (line) => el("span", { title: line.settings?.[name] }, shortened(line.settings?.[name] ?? "-", 24)),
      })),
      {
        key: "map",
        title: "gradients",
        kind: "thumbnail",
        hint: "layers from top to bottom, steps from left to right",
        cell: (line) => line.map && el("button", { class: "link", value: "", title: `Open ${line.name}`, onclick: () => open(line.name) }, picture(...MAP, (canvas) => thumbnail(canvas, line))),
      },
      { key: "steps", title: "last step", kind: "number", sort: (line) => line.last, cell: (line) => count(line.last) },
      { key: "updated", title: "at", kind: "when", sort: (line) => line.updated, cell: (line) => new Date(1000 * line.updated).toLocaleString([], { dateStyle: "short", timeStyle: "short" }) },
    ];
  }

  return { element, show };
}

function picture(width, height, draw) {
  const canvas = el("canvas", { style: `width:${width}px;height:${height}px`, "aria-hidden": "true" });
  canvas.draw = () => draw(canvas);
  return canvas;
}

function summaryOf({ about, arrays }) {
  const serious = about.alerts.filter((alert) => alert.severity !== "notice");
  return {
    ...about,
    worst: serious[0],
    more: Math.max(0, serious.length - 1),
    map: about.small.map && grid(about.small.map, arrays, "map "),
    usual: arrays["map usual"],
    losses: about.small.loss && grid(about.small.loss, arrays, "loss "),
  };
}

function foundIn(line) {
  if (line.failed) return el("span", { class: "error" }, line.failed);
  if (line.alerts === undefined) return el("span", { class: "quiet" }, "…");
  if (line.worst) return [el("span", { class: line.worst.severity }, lineOf(line.worst, 40)), line.more > 0 && el("span", { class: "quiet" }, ` and ${line.more} more`)];
  if (line.health === "gradwatch failed") return "none before GradWatch failed";
  if (line.stuck) return line.stuck;
  return el("span", { class: "quiet" }, line.ended ? "none" : "none so far; under way, or cut off");
}

/** The first rate; where it changes, the highest and the last too. */
function rateOf([first, highest, last]) {
  const steady = Math.abs(highest - first) <= 1e-6 * first && Math.abs(last - first) <= 1e-6 * Math.abs(first);
  if (steady) return short(first);
  return highest > Math.max(first, last) ? `${short(first)} → ${short(highest)} → ${short(last)}` : `${short(first)} → ${short(last)}`;
}

function thumbnail(canvas, { map, usual }) {
  const [width, height] = MAP;
  const context = drawing(canvas, width, height);
  if (!map.columns) return;
  const names = usual.length;
  const [from, to] = [map.first[0], map.last[map.columns - 1] + 1];
  const places = Array.from({ length: names }, (_, n) => n);
  const domain = domainOf([{ grid: map, names: places, from, to, usual }], { log: true, relative: false });
  const image = painted(map, { rows: places.map((n) => [n]), from, to, width, height, domain, usual });
  context.drawImage(image, 0, 0, width, height);
}

/** The settings that differ between the runs, those that divide them most evenly first. */
function differing(lines) {
  const known = lines.filter((line) => line.settings);
  const names = new Set(known.flatMap((line) => Object.keys(line.settings)));
  const found = [...names].map((name) => [name, new Set(known.map((line) => line.settings[name])).size]);
  return found.filter(([, size]) => size > 1).sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).slice(0, SETTINGS).map(([name]) => name);
}

/** The worst first, and of those the latest. */
function worstFirst(a, b) {
  return (RANK[b.health] ?? -1) - (RANK[a.health] ?? -1) || b.updated - a.updated;
}
