// The colour bar, and what the colours beside it mean.

import { decades, label, ticks } from "./axes.js";
import { NOT_FINITE, TABLES, ZERO } from "./colour.js";
import { drawing, el, themed } from "./dom.js";

const WIDTH = 260;
const BAR = 12;

/** The legend of `domain` for a statistic. */
export function legend(domain, statistic) {
  const worded = (tick) => (domain.relative ? times(tick, domain.log) : label(tick, domain.log));
  const canvas = el("canvas", { class: "bar", role: "img", "aria-label": `Colours from ${worded(domain.low)} to ${worded(domain.high)}` });
  const table = domain.relative ? TABLES.relative : TABLES.absolute;
  const context = drawing(canvas, WIDTH + 40, BAR + 18);
  for (let x = 0; x < WIDTH; x += 1) {
    context.fillStyle = `rgb(${table[Math.round((255 * x) / (WIDTH - 1))]})`;
    context.fillRect(20 + x, 0, 1, BAR);
  }
  context.fillStyle = themed("quiet");
  context.textAlign = "center";
  context.textBaseline = "top";
  const wide = domain.high - domain.low;
  const found = domain.log && !domain.relative ? decades(domain.low, domain.high, 6) : ticks(domain.low, domain.high, 4);
  for (const tick of found) {
    const x = 20 + ((tick - domain.low) / wide) * WIDTH;
    context.fillRect(x, BAR, 1, 3);
    context.fillText(worded(tick), x, BAR + 5);
  }
  const key = (colour, text) => el("span", { class: "key" }, el("span", { class: "swatch", style: colour && `background:rgb(${colour})` }), text);
  return el(
    "div",
    { class: "legend" },
    el("span", { class: "quiet" }, `${statistic.title}${domain.relative ? ", relative to each layer's usual" : domain.log ? ", log" : ""}`),
    canvas,
    domain.log && key(ZERO, "zero"),
    key(NOT_FINITE, "not finite"),
    key(null, "not measured"),
  );
}

/** A distance from what is usual: "x0.1", "as usual", "+0.2". */
function times(tick, log) {
  if (tick === 0) return "as usual";
  if (!log) return `${tick > 0 ? "+" : ""}${label(tick, false)}`;
  return `x${label(tick, true)}`;
}
