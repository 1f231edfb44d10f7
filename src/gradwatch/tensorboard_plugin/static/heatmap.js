// The heat map of one run: layers by steps, with alerts on the time axis and the loss above it.

import { columnAt, spacing } from "./api.js";
import { stepAxis } from "./axes.js";
import { NOT_FINITE } from "./colour.js";
import { drawing, el, fitted, themed } from "./dom.js";
import { began, ended, LOST, NOT_A_NUMBER, noticed } from "./format.js";
import { drawLabels, GUTTER, widest } from "./labels.js";
import { painted } from "./paint.js";
import { pointing } from "./pointer.js";
import { rowsWith } from "./tree.js";

const MARKS = 24; // pixels of the strip with the alerts
const LOSS = 34;
const AXIS = 24;
const RIGHT = 10;
export const SHAPES = { error: "triangle", warning: "diamond", notice: "dot" };

/**
 * `map.show(what)` draws {run, statistic, grid, whole, domain, usual, loss, status, alerts}, as a panel has them, in the
 * `rows` and the `span` of steps in view, of `all` rows; and what is kept, {pinned, region}. `act` has what a person's hand
 * does: view, hover, open, turn, pin, region; and `resized`.
 */
export function heatmap(act) {
  const canvas = el("canvas", { class: "map" });
  const over = el("canvas", { class: "over" });
  const element = el(
    "div",
    { class: "heatmap", tabindex: 0, role: "application", "aria-describedby": "map-keys" },
    canvas,
    over,
  );
  let shown = null;
  let place = null;

  function show(what) {
    shown = what;
    element.setAttribute("aria-label", `Heat map of ${what.statistic}, run ${what.run.run}`);
    draw();
  }

  function draw() {
    if (!shown || !element.clientWidth) return;
    place = layout(element.clientWidth, shown);
    element.dataset.plot = JSON.stringify(place.plot); // for the tests, which point at cells
    const context = drawing(canvas, place.width, place.height);
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(place.plot.width * ratio), Math.round(place.plot.height * ratio)];
    const rows = place.rows.map((row) => row.members);
    const image = painted(shown.grid, { ...shown, rows, from: place.from, to: place.to, width: wide, height: high });
    context.fillStyle = themed("void");
    const [begin, end] = recorded();
    context.fillRect(begin, place.plot.top, Math.max(0, end - begin), place.plot.height);
    context.drawImage(image, place.plot.left, place.plot.top, place.plot.width, place.plot.height);
    drawLabels(context, place, shown);
    if (shown.loss) drawLoss(context);
    drawAlerts(context);
    const { left, width, top, height } = place.plot;
    stepAxis(context, { left, right: left + width, top: top + height, from: place.from, to: place.to, x: place.x });
    point(null);
  }

  /** Where the steps of the run begin and end in the plot, in pixels. */
  function recorded() {
    const { plot, x } = place;
    const { grid } = shown;
    if (!grid.columns) return [plot.left, plot.left];
    const end = x(grid.last[grid.columns - 1] + spacing(grid));
    return [Math.max(plot.left, x(grid.first[0])), Math.min(plot.left + plot.width, end)];
  }

  function drawLoss(context) {
    const { plot } = place;
    const { loss } = shown;
    const top = plot.top - MARKS - LOSS + 2;
    const bottom = top + LOSS - 8;
    let [low, high] = [Infinity, -Infinity];
    const pieces = [[]]; // of columns, between steps that are lost or not finite
    for (let c = 0; c < loss.columns; c += 1) {
      if (loss.states[c] === LOST || loss.states[c] >= NOT_A_NUMBER) pieces.push([]);
      if (loss.last[c] < place.from || loss.first[c] > place.to || loss.states[c] !== 0) continue;
      pieces[pieces.length - 1].push(c);
      low = Math.min(low, loss.low[c]);
      high = Math.max(high, loss.high[c]);
    }
    const y = (number) => bottom - ((number - low) / (high - low || 1)) * (bottom - top);
    context.save();
    context.beginPath();
    context.rect(plot.left, 0, plot.width, plot.top);
    context.clip();
    context.strokeStyle = themed("quiet");
    context.lineWidth = 1.2;
    context.beginPath();
    for (const piece of pieces) {
      piece.forEach((c, i) => {
        const at = [place.x(loss.first[c] + 0.5), y(loss.high[c])];
        if (i === 0) context.moveTo(...at);
        context.lineTo(...at);
        if (loss.pooled) context.lineTo(place.x(loss.last[c] + 0.5), y(loss.low[c]));
      });
      if (piece.length !== 1) continue; // a step alone is as wide as its column, and seen
      const middle = (place.x(loss.first[piece[0]]) + place.x(loss.last[piece[0]] + 1)) / 2;
      const half = Math.max(1.5, middle - place.x(loss.first[piece[0]]));
      context.moveTo(middle - half, y(loss.high[piece[0]]));
      context.lineTo(middle + half, y(loss.high[piece[0]]));
    }
    context.stroke();
    context.fillStyle = `rgb(${NOT_FINITE})`;
    for (let c = 0; c < loss.columns; c += 1) {
      if (loss.states[c] < NOT_A_NUMBER) continue;
      const left = place.x(loss.first[c]);
      context.fillRect(left, top, Math.max(2, place.x(loss.last[c] + 1) - left + 0.5), 3);
    }
    context.restore();
    context.fillStyle = themed("quiet");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText("loss", plot.left - 8, (top + bottom) / 2);
  }

  function drawAlerts(context) {
    const { plot, rows, x } = place;
    const size = plot.height / rows.length;
    for (const alert of shown.alerts) {
      const at = Math.round(x(began(alert) + 0.5));
      context.fillStyle = context.strokeStyle = themed(alert.severity);
      const [first, last] = recorded();
      const end = ended(alert);
      const [from, until] = [Math.max(at, first), Math.min(last, end == null ? Infinity : x(end + 1))];
      if (until > from + 8) {
        context.globalAlpha = 0.35;
        context.fillRect(from, plot.top - 13, until - from, 3);
        context.globalAlpha = 1;
      }
      if (at < plot.left - 1 || at > plot.left + plot.width + 1) continue;
      const own = rowsWith(rows, (n) => alert.own.has(n));
      if (own.length) {
        context.setLineDash([4, 3]);
        context.lineWidth = 1;
        context.beginPath();
        context.moveTo(at + 0.5, plot.top - 6);
        context.lineTo(at + 0.5, plot.top + (own[own.length - 1] + 1) * size);
        context.stroke();
        context.setLineDash([]);
      }
      const seen = Math.round(x(noticed(alert) + 0.5));
      if (seen > at + 8 && seen < plot.left + plot.width) {
        mark(context, SHAPES[alert.severity], seen, plot.top - 12, { hollow: true });
      }
      mark(context, SHAPES[alert.severity], at, plot.top - 12);
    }
  }

  /** The cross-hair at a step and a name's place, or nowhere; another map's may be over this one too. */
  function point(at) {
    if (!place) return;
    const context = drawing(over, place.width, place.height);
    drawKept(context);
    if (!at) return;
    const { plot, rows } = place;
    const row = rows.findIndex((each) => each.members.includes(at.name));
    const size = plot.height / rows.length;
    context.fillStyle = themed("cross");
    const c = columnAt(shown.grid, at.step);
    if (c >= 0) {
      const begin = Math.max(plot.left, place.x(shown.grid.first[c]));
      const next = c + 1 < shown.grid.columns ? shown.grid.first[c + 1] : shown.grid.last[c] + spacing(shown.grid);
      const end = Math.min(plot.left + plot.width, place.x(next));
      context.fillRect(begin, plot.top - MARKS, Math.max(1, end - begin), plot.height + MARKS);
    }
    if (row < 0) return;
    context.fillRect(plot.left, plot.top + row * size, plot.width, Math.max(1, size));
    context.fillStyle = themed("surface");
    const name = fitted(context, shown.run.names[at.name], plot.left - 14 - place.gutter);
    const middle = Math.min(plot.top + plot.height - 7, Math.max(plot.top + 7, plot.top + (row + 0.5) * size));
    context.fillRect(place.gutter, middle - 8, plot.left - 6 - place.gutter, 16);
    context.fillStyle = themed("ink");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(name, plot.left - 8, middle);
  }

  /** The step that is pinned, and the region whose statistics are shown. */
  function drawKept(context) {
    const { plot, x, rows } = place;
    context.strokeStyle = context.fillStyle = themed("accent");
    if (shown.pinned != null && shown.pinned >= place.from && shown.pinned < place.to) {
      const at = x(shown.pinned + 0.5);
      context.fillRect(at - 0.75, plot.top - 4, 1.5, plot.height + 8);
      mark(context, "dot", at, plot.top - 6);
    }
    if (!shown.region) return;
    const size = plot.height / rows.length;
    const [left, right] = [Math.max(plot.left, x(shown.region.from)), Math.min(plot.left + plot.width, x(shown.region.to))];
    const inside = rowsWith(rows, (n) => shown.region.names.has(shown.run.names[n]));
    if (right <= left || !inside.length) return;
    const [top, bottom] = [plot.top + inside[0] * size, plot.top + (inside[inside.length - 1] + 1) * size];
    context.lineWidth = 1.5;
    context.setLineDash([5, 3]);
    context.strokeRect(left, top, right - left, bottom - top);
    context.setLineDash([]);
  }

  /** A frame while a person drags; of a region whose statistics are wanted it is dashed. */
  function frame(box, dashed) {
    const context = drawing(over, place.width, place.height);
    context.fillStyle = themed("cross");
    context.fillRect(box.left, box.top, box.width, box.height);
    context.strokeStyle = themed(dashed ? "accent" : "ink");
    if (dashed) context.setLineDash([5, 3]);
    context.strokeRect(box.left + 0.5, box.top + 0.5, box.width, box.height);
  }

  const map = { element, show, point, frame, place: () => place, shown: () => shown };
  pointing(map, act);
  new ResizeObserver(() => {
    if (place && element.clientWidth !== place.width) {
      draw();
      act.resized();
    }
  }).observe(element);
  return map;
}

/** Where everything is, in CSS pixels, for a map `width` wide. */
function layout(width, shown) {
  const gutter = shown.rows.some((row) => row.module !== null || row.opens.length) ? GUTTER : 0;
  const left = Math.ceil(Math.min(widest(shown.rows, shown.alerts.length > 0) + 16 + gutter, Math.max(width * 0.3, 90), 260));
  const top = MARKS + (shown.loss ? LOSS : 6);
  const most = Math.max(160, Math.min(520, window.innerHeight - 300));
  const height = Math.round(Math.min(most, Math.max(90, shown.rows.length * 22)));
  const plot = { left, top, width: Math.max(40, width - left - RIGHT), height };
  const [from, to] = shown.span;
  const x = (step) => plot.left + ((step - from) / (to - from)) * plot.width;
  const stepAt = (pixel) => from + ((pixel - plot.left) / plot.width) * (to - from);
  return { width, height: top + height + AXIS, plot, gutter, rows: shown.rows, from, to, x, stepAt };
}

/** A mark of a severity: each has a shape of its own beside its colour. It stands on the onset; a hollow one on the notice. */
export function mark(context, shape, x, y, { hollow = false } = {}) {
  context.beginPath();
  if (shape === "triangle") {
    context.moveTo(x - 6, y - 6);
    context.lineTo(x + 6, y - 6);
    context.lineTo(x, y + 5);
  } else if (shape === "diamond") {
    context.moveTo(x, y - 6);
    context.lineTo(x + 6, y);
    context.lineTo(x, y + 6);
    context.lineTo(x - 6, y);
  } else {
    context.arc(x, y, 4, 0, 2 * Math.PI);
  }
  context.closePath();
  if (hollow) {
    context.lineWidth = 1.5;
    context.stroke();
  } else {
    context.fill();
  }
}
