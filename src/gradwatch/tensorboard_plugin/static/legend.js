// The colour bar, and what the colours beside it mean.

import { decades, label, ticks } from "./axes.js";
import { NOT_FINITE, TABLE, ZERO } from "./colour.js";
import { drawing, el, themed } from "./dom.js";

const WIDTH = 260;
const BAR = 12;

/** The legend of `domain` for a statistic described as `meaning`. */
export function legend(domain, statistic) {
  const canvas = el("canvas", { class: "bar", role: "img", "aria-label": `Colours from ${label(domain.low, domain.log)} to ${label(domain.high, domain.log)}` });
  const context = drawing(canvas, WIDTH + 40, BAR + 18);
  for (let x = 0; x < WIDTH; x += 1) {
    context.fillStyle = `rgb(${TABLE[Math.round((255 * x) / (WIDTH - 1))]})`;
    context.fillRect(20 + x, 0, 1, BAR);
  }
  context.font = '11px Roboto, "Helvetica Neue", Arial, sans-serif';
  context.fillStyle = themed("quiet");
  context.textAlign = "center";
  context.textBaseline = "top";
  const wide = domain.high - domain.low;
  for (const tick of domain.log ? decades(domain.low, domain.high, 6) : ticks(domain.low, domain.high, 5)) {
    const x = 20 + ((tick - domain.low) / wide) * WIDTH;
    context.fillRect(x, BAR, 1, 3);
    context.fillText(label(tick, domain.log), x, BAR + 5);
  }
  const key = (colour, text) => el("span", { class: "key" }, el("span", { class: "swatch", style: colour && `background:rgb(${colour})` }), text);
  return el(
    "div",
    { class: "legend" },
    el("span", { class: "quiet" }, `${statistic.name}${domain.log ? ", log" : ""}`),
    canvas,
    domain.log && key(ZERO, "zero"),
    key(NOT_FINITE, "not finite"),
    key(null, "not measured"),
  );
}
