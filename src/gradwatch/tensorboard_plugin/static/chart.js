// One statistic of one layer over time, a line a run, with the alerts that name the layer.

import { columnAt } from "./api.js";
import { numberAxis, stepAxis } from "./axes.js";
import { NOT_FINITE, ZERO } from "./colour.js";
import { drawing, el, themed } from "./dom.js";
import { began, count, ended, LOST, NOT_A_NUMBER } from "./format.js";
import { worded } from "./paint.js";

const LEFT = 54;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 24;
const HEIGHT = 170;

/** `lines`: [{run, colour (of the style sheet), grid, alerts, until: where the run ends}], a grid of one name each. `span`: [from, to] of the steps. */
export function chart({ title, lines, span, log, states }) {
  const canvas = el("canvas", { class: "chart" });
  const readout = el("p", { class: "readout quiet", "aria-live": "polite" });
  const element = el("div", { class: "charted", tabindex: 0, role: "img", "aria-label": `${title} over the steps` }, canvas, readout);
  const of = log ? Math.log10 : (number) => number;
  let place = null;
  let cursor = null;

  function extent() {
    let [low, high] = [Infinity, -Infinity];
    for (const { grid } of lines) {
      for (const values of [grid.low, grid.high]) {
        for (let c = 0; c < grid.columns; c += 1) {
          const number = of(values[c]);
          if (!Number.isFinite(number)) continue;
          low = Math.min(low, number);
          high = Math.max(high, number);
        }
      }
    }
    if (low > high) return [0, 1];
    const least = log ? 0.5 : 1e-3 * Math.max(Math.abs(low), Math.abs(high)) || 1;
    const room = Math.max(least, 1.08 * (high - low));
    return [(low + high - room) / 2, (low + high + room) / 2];
  }

  function draw() {
    const width = element.clientWidth;
    if (!width) return;
    const context = drawing(canvas, width, HEIGHT);
    const [from, to] = span;
    const [low, high] = extent();
    const right = width - RIGHT;
    const bottom = HEIGHT - BOTTOM;
    const x = (step) => LEFT + ((step - from) / (to - from)) * (right - LEFT);
    const y = (number) => bottom - ((number - low) / (high - low)) * (bottom - TOP);
    place = { from, to, right };
    drawAlerts(context, x, right, bottom);
    numberAxis(context, { left: LEFT, right, low, high, log, y });
    stepAxis(context, { left: LEFT, right, top: bottom, from, to, x });
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, right - LEFT, bottom + 2);
    context.clip();
    for (const line of lines) drawLine(context, line, x, y, bottom);
    if (cursor != null) {
      context.fillStyle = themed("cross");
      context.fillRect(x(cursor), TOP, Math.max(1, x(cursor + 1) - x(cursor)), bottom - TOP);
    }
    context.restore();
  }

  function drawAlerts(context, x, right, bottom) {
    for (const [alert, until] of lines.flatMap((line) => line.alerts.map((alert) => [alert, line.until]))) {
      const begin = Math.max(LEFT, x(began(alert)));
      const end = Math.min(right, x(ended(alert) == null ? until : ended(alert) + 1));
      if (end < LEFT || begin > right) continue;
      context.fillStyle = themed(alert.severity);
      context.globalAlpha = 0.07;
      context.fillRect(begin, TOP, Math.max(1, end - begin), bottom - TOP);
      context.globalAlpha = 0.8;
      context.fillRect(begin, TOP, 1, bottom - TOP);
      context.globalAlpha = 1;
    }
  }

  function drawLine(context, { grid, colour }, x, y, bottom) {
    const middle = (c) => x((grid.first[c] + grid.last[c] + 1) / 2);
    const measured = (c) => grid.states[c] === 0 && Number.isFinite(of(grid.high[c]));
    context.strokeStyle = context.fillStyle = themed(colour);
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    let drawn = 0;
    let broken = true;
    for (let c = 0; c < grid.columns; c += 1) {
      if (grid.states[c] === LOST) broken = true;
      if (grid.states[c] >= NOT_A_NUMBER) {
        context.fillStyle = `rgb(${NOT_FINITE})`;
        context.fillRect(middle(c) - 1.5, TOP, 3, 5);
      }
      if (grid.states[c] === 0 && of(grid.low[c]) === -Infinity) {
        context.fillStyle = `rgb(${ZERO})`;
        context.fillRect(middle(c) - 1.5, bottom - 4, 3, 4);
      }
      if (!measured(c)) continue;
      if (broken) context.moveTo(middle(c), y(of(grid.high[c])));
      broken = false;
      context.lineTo(middle(c), y(of(grid.high[c])));
      if (grid.pooled && Number.isFinite(of(grid.low[c]))) context.lineTo(middle(c), y(of(grid.low[c])));
      drawn += 1;
    }
    context.stroke();
    if (drawn > 60) return; // points alone tell how few there are
    context.fillStyle = themed(colour);
    for (let c = 0; c < grid.columns; c += 1) {
      if (measured(c)) context.fillRect(middle(c) - 1.5, y(of(grid.high[c])) - 1.5, 3, 3);
    }
  }

  function read(step) {
    cursor = step;
    draw();
    if (step == null) {
      readout.textContent = "";
      return;
    }
    const said = lines.map(({ run, grid }) => {
      const c = columnAt(grid, step);
      if (c < 0) return null;
      const at = grid.first[c] === grid.last[c] ? count(grid.last[c]) : `${count(grid.first[c])} to ${count(grid.last[c])}`;
      const number = worded(grid, 0, c, states);
      return lines.length > 1 ? `${run}: ${number} (step ${at})` : `step ${at}: ${number}`;
    });
    readout.textContent = said.filter(Boolean).join("; ");
  }

  const stepOf = (pixel) => Math.floor(place.from + ((pixel - LEFT) / (place.right - LEFT)) * (place.to - place.from));
  const within = (step) => Math.max(Math.floor(span[0]), Math.min(Math.ceil(span[1]) - 1, step));
  element.addEventListener("pointermove", (event) => place && read(within(stepOf(event.clientX - element.getBoundingClientRect().left))));
  element.addEventListener("pointerleave", () => read(null));
  element.addEventListener("blur", () => read(null));
  element.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way || !place) return;
    event.preventDefault();
    const pixel = Math.max(1, Math.round((place.to - place.from) / (place.right - LEFT)));
    read(within((cursor ?? Math.floor(span[0]) - way) + way * pixel * (event.shiftKey ? 10 : 1)));
  });
  new ResizeObserver(draw).observe(element);
  return { element, draw };
}
