// Every layer in a line: its trend, its numbers and how it is; sorted by what a person clicks.

import { el, fill } from "./dom.js";
import { RANK, wordsAt } from "./faults.js";
import { lastNumber, NO_NUMBER, percent, short, shortened } from "./format.js";
import { headingsOf, sorted } from "./sorting.js";
import { HEIGHT, sparkline, WIDTH } from "./sparkline.js";
import { state } from "./state.js";

const NUMBERS = ["median", "min", "max", "last"];
const AT_ONCE = 100; // rows
const LONGEST = 100; // characters of a name: two lines

/** `table.show(panels, states)` draws; `open(name)` opens a layer's page. */
export function layerTable(open) {
  const counted = el("span", { class: "quiet", "aria-live": "polite" });
  const table = el("table", { class: "layers" });
  const scroll = el("div", { class: "scroll" }, table);
  const element = el("section", { class: "tabled" }, el("div", { class: "row" }, el("h2", {}, "Layers"), counted), scroll);
  const pictures = new Map();
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        seen.unobserve(target);
        pictures.get(target)?.();
        pictures.delete(target);
      }
    },
    { root: scroll, rootMargin: "200px" },
  );

  function show(panels, states) {
    const columns = columnsOf(panels, states);
    const lines = ordered(linesOf(panels), columns);
    const wanted = state.filter.toLowerCase();
    const left = lines.filter((line) => line.total || line.name.toLowerCase().includes(wanted));
    const all = lines.filter((line) => !line.total).length;
    const some = left.filter((line) => !line.total).length;
    counted.textContent = some === all ? `${all} layers` : `${some} of ${all} layers`;
    seen.disconnect();
    pictures.clear();
    const focused = document.activeElement?.dataset?.sort;
    const body = el("tbody");
    fill(table, head(panels, columns), body);
    append(body, left, columns);
    if (focused) [...table.querySelectorAll("button")].find((button) => button.dataset.sort === focused)?.focus();
  }

  /** The first rows now, the others when the browser has time: a thousand take a tenth of a second. */
  function append(body, lines, columns) {
    if (body.parentNode !== table) return; // sorted again meanwhile
    body.append(...lines.slice(0, AT_ONCE).map((line) => rowOf(line, columns)));
    if (lines.length > AT_ONCE) requestIdleCallback(() => append(body, lines.slice(AT_ONCE), columns));
  }

  function head(panels, columns) {
    const several = panels.length > 1;
    const own = columns.filter((column) => column.panel === panels[0]).length;
    const groups = several && [
      el("th", { colspan: columns.length - panels.length * own }),
      ...panels.map((panel) => el("th", { colspan: own, class: "group", scope: "colgroup" }, panel.run.run)),
    ];
    return el("thead", {}, several && el("tr", {}, groups), el("tr", {}, headingsOf(columns, "sort")));
  }

  function rowOf(line, columns) {
    const cells = columns.map((column) => {
      const cell = el("td", { class: column.kind });
      if (column.key === "name") {
        cell.append(el("button", { class: "link", onclick: () => open(line.name), title: line.name }, shortened(line.name, LONGEST)));
      } else if (column.picture) {
        const place = line.places.get(column.panel);
        const canvas = el("canvas", { style: `width:${WIDTH}px;height:${HEIGHT}px`, "aria-hidden": "true" });
        cell.append(canvas);
        if (place !== undefined && column.panel.grid.columns) {
          pictures.set(canvas, () => sparkline(canvas, column.panel.grid, place, column.panel.domain.log));
          seen.observe(canvas);
        }
      } else if (column.badge) {
        const { text, kind } = column.badge(line);
        cell.append(el("span", { class: `badge ${kind}` }, text));
      } else {
        cell.textContent = column.text(line);
      }
      return cell;
    });
    return el("tr", { class: line.total ? "total" : null, "data-layer": line.name }, cells);
  }

  return { element, show };
}

/** A line for each name of any panel, in the first one's order. */
function linesOf(panels) {
  const lines = new Map();
  for (const panel of panels) {
    panel.run.names.forEach((name, n) => {
      if (!lines.has(name)) {
        const total = panel.run.totals.includes(n);
        lines.set(name, { name, total, module: panel.run.modules[n], places: new Map(), worst: 0, order: lines.size });
      }
      const line = lines.get(name);
      line.places.set(panel, n);
      line.worst = Math.max(line.worst, RANK[panel.status[n]] ?? 0);
    });
  }
  return [...lines.values()];
}

function columnsOf(panels, states) {
  const columns = [
    { key: "name", title: "layer", kind: "name", sort: (line) => line.name },
    { key: "module", title: "module", kind: "module", sort: (line) => line.module, text: (line) => line.module },
  ];
  panels.forEach((panel, i) => {
    const numbers = panels.length > 1 ? ["median", "last"] : NUMBERS;
    const number = (name) => (line) => panel.summary?.[name]?.[line.places.get(panel)] ?? NaN;
    const badge = (line) => statusOf(panel, line, states);
    columns.push({ key: `status-${i}`, title: "status", kind: "status", panel, badge, sort: (line) => badge(line).rank });
    columns.push({ key: `trend ${i}`, title: "trend", kind: "trend", picture: true, panel });
    for (const name of numbers) {
      const sort = number(name);
      columns.push({ key: `${name}-${i}`, title: name, kind: "number", panel, sort, text: (line) => (name === "last" ? lastNumber(panel.summary, line.places.get(panel)) : short(sort(line))) });
    }
    if (panels.length === 1 && panel.zeros) {
      const sort = (line) => panel.zeros[line.places.get(panel)] ?? NaN;
      const hint = "share of the gradient that is exactly zero, when it was last measured";
      columns.push({ key: "zero", title: "zero", kind: "number", panel, sort, hint, text: (line) => percent(sort(line)) });
    }
  });
  return columns;
}

function statusOf(panel, line, states) {
  const n = line.places.get(panel);
  if (n === undefined) return { text: "not in this run", kind: "absent", rank: -2 };
  const words = wordsAt(n, panel.run.alerts);
  if (words.length) return { text: words.join(", "), kind: panel.status[n], rank: RANK[panel.status[n]] };
  if (line.total) return { text: "", kind: "none", rank: -3 };
  const state = panel.summary?.state?.[n];
  if (state && state < NO_NUMBER) return { text: states[state].replace(/ \(.*/, ""), kind: "absent", rank: -1 };
  return { text: "ok", kind: "healthy", rank: 0 };
}

/** Totals first; then as a person sorted them, else those that alerts name before the others. */
function ordered(lines, columns) {
  const all = sorted(lines, columns, "sort", (a, b) => b.worst - a.worst || a.order - b.order);
  return [...all.filter((line) => line.total), ...all.filter((line) => !line.total)];
}
