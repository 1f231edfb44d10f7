// Places on an axis: round numbers for its ticks, and their labels.

import { themed } from "./dom.js";
import { count, short } from "./format.js";

/** Round numbers from `low` to `high`, about `wanted` of them; `whole` ones only if asked for. */
export function ticks(low, high, wanted, { whole = false } = {}) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + span * 1e-9; i += 1) found.push(i * step);
  return found;
}

/** Ticks of an axis in decades: whole ones, or 1, 2 and 5 of each, or round numbers where there are few. */
export function decades(low, high, wanted) {
  if (high - low >= 3) return ticks(low, high, wanted, { whole: true });
  const found = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const digit of [1, 2, 5]) {
      const tick = power + Math.log10(digit);
      if (tick >= low && tick <= high) found.push(tick);
    }
  }
  const few = found.filter((tick) => Math.abs(tick - Math.round(tick)) < 1e-9);
  if (few.length >= 3) return few;
  if (found.length >= 2) return found;
  return ticks(10 ** low, 10 ** high, wanted).filter((number) => number > 0).map(Math.log10);
}

/** The label of a tick on an axis of numbers, given in decades if `log`. */
export function label(tick, log) {
  if (!log) return short(tick);
  const number = Number((10 ** tick).toPrecision(3));
  const power = Math.round(tick);
  return Math.abs(tick - power) < 1e-9 && Math.abs(power) > 2 ? `1e${power}` : short(number).replace(".0e", "e");
}

/** Draw the lines of an axis of numbers, in decades if `log`, and their labels: `y` maps a tick to pixels. */
export function numberAxis(context, { left, right, low, high, log, y }) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of log ? decades(low, high, 4) : ticks(low, high, 4)) {
    context.fillStyle = themed("grid");
    context.fillRect(left, Math.round(y(tick)), right - left, 1);
    context.fillStyle = themed("quiet");
    context.fillText(label(tick, log), left - 6, y(tick));
  }
}

/** Draw the axis of steps below a plot: `x` maps a step to pixels. */
export function stepAxis(context, { left, right, top, from, to, x }) {
  context.fillStyle = context.strokeStyle = themed("quiet");
  context.lineWidth = 1;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const step of ticks(from, to, Math.max(2, (right - left) / 90), { whole: true })) {
    const at = Math.round(x(step)) + 0.5;
    context.beginPath();
    context.moveTo(at, top);
    context.lineTo(at, top + 4);
    context.stroke();
    const text = count(step);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(right - half, Math.max(left + half, at)), top + 6);
  }
}
