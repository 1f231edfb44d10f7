// The names beside a map: where an alert began always, others as far as there is room; and the signs that close modules.

import { fitted, FONT, themed } from "./dom.js";
import { RANK } from "./faults.js";
import { rowsWith } from "./tree.js";

export const GUTTER = 14; // pixels for the signs of modules, left of the names
const LEAST = 13; // pixels that a label needs
const MEASURED = 20; // the longest labels, one of which is the widest
const LOUD = 2;

/** Pixels of the widest label; with `origins` there is room for their marks. */
export function widest(rows, origins) {
  const measure = new OffscreenCanvas(1, 1).getContext("2d");
  measure.font = FONT;
  const labels = rows.map((row) => row.label).sort((a, b) => b.length - a.length);
  const mark = origins ? 26 : 12;
  return Math.max(30, ...labels.slice(0, MEASURED).map((label) => measure.measureText(label).width + mark));
}

/** Draw the labels of a map's rows at their `place`; `shown` says which layers have which fault. */
export function drawLabels(context, place, shown) {
  const { plot, rows, gutter } = place;
  const size = plot.height / rows.length;
  const origins = new Set(shown.alerts.filter((alert) => RANK[alert.severity] >= LOUD).map((alert) => alert.origin));
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const { row, i, y, origin } of placed(rows, { plot, size, origins, status: shown.status })) {
    const severity = worstIn(row, shown.status);
    const middle = plot.top + (i + 0.5) * size;
    const text = fitted(context, row.label, plot.left - 14 - gutter - (origin ? 12 : 0));
    context.fillStyle = severity ? themed(severity) : themed("quiet");
    if (origin) {
      const wide = context.measureText(text).width;
      context.fillStyle = themed(`wash-${severity}`);
      context.fillRect(plot.left - 22 - wide, y - 8, wide + 16, 16);
      context.fillStyle = themed(severity);
      context.font = `bold ${context.font}`;
      context.fillText(fitted(context, row.label, plot.left - 26 - gutter), plot.left - 18, y);
      context.font = context.font.replace("bold ", "");
      context.beginPath(); // points at its row
      context.moveTo(plot.left - 14, y - 4);
      context.lineTo(plot.left - 6, middle);
      context.lineTo(plot.left - 14, y + 4);
      context.fill();
    } else {
      context.fillText(text, plot.left - 8, y);
    }
  }
  // which layers an alert names, also where labels have no room
  rows.forEach((row, i) => {
    const severity = worstIn(row, shown.status);
    if (!severity) return;
    context.fillStyle = themed(severity);
    context.fillRect(plot.left - 5, plot.top + i * size, 3, Math.max(1, size));
  });
  if (gutter) drawModules(context, place, size);
}

/** Which rows are named, and where: those where an alert began first, then unhealthy ones, then evenly spread ones. */
function placed(rows, { plot, size, origins, status }) {
  const at = (i) => plot.top + (i + 0.5) * size;
  const found = [];
  const marked = rowsWith(rows, (n) => origins.has(n));
  const most = Math.floor(plot.height / LEAST);
  let lowest = -Infinity;
  for (const i of marked.slice(0, most)) {
    const y = Math.max(at(i), lowest + LEAST + 2);
    found.push({ row: rows[i], i, y, origin: true });
    lowest = y;
  }
  const beyond = lowest - (plot.top + plot.height);
  if (beyond > 0) found.forEach((label) => (label.y -= beyond)); // pushed below the map
  const free = (y) => found.every((label) => Math.abs(label.y - y) >= LEAST);
  const every = Math.ceil(LEAST / size);
  const unhealthy = rows.flatMap((row, i) => (worstIn(row, status) && !marked.includes(i) ? [i] : []));
  const even = rows.flatMap((_, i) => (i % every === 0 ? [i] : []));
  const rest = every === 1 ? rows.map((_, i) => i) : [...unhealthy, ...even];
  for (const i of new Set(rest)) if (!marked.includes(i) && free(at(i))) found.push({ row: rows[i], i, y: at(i), origin: false });
  return found;
}

function worstIn(row, status) {
  let worst = null;
  for (const n of row.members) if ((RANK[status[n]] ?? 0) > (RANK[worst] ?? 0)) worst = status[n];
  return worst;
}

/** A sign beside each closed module, and a bracket beside the rows of each open one. */
function drawModules(context, { plot, rows }, size) {
  const every = Math.ceil(9 / size);
  let last = -every;
  rows.forEach((row, i) => {
    const y = plot.top + i * size;
    const closed = row.module !== null;
    if (!closed && !row.opens.length) return;
    context.fillStyle = context.strokeStyle = themed("quiet");
    if (row.opens.length) {
      const inner = row.opens[row.opens.length - 1];
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(4.5, y + Math.min(10, size));
      const end = Math.min(plot.top + plot.height, y + inner.rows * size) - 2;
      context.lineTo(4.5, end);
      context.lineTo(8, end);
      context.stroke();
    }
    if (i - last < every) return;
    last = i;
    const middle = y + Math.max(4, size / 2);
    context.beginPath();
    if (closed) {
      context.moveTo(2, middle - 4);
      context.lineTo(7.5, middle);
      context.lineTo(2, middle + 4);
    } else {
      context.moveTo(0.5, middle - 3);
      context.lineTo(8.5, middle - 3);
      context.lineTo(4.5, middle + 3);
    }
    context.fill();
  });
}
