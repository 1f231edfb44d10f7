// A layer's numbers over time in one line of a table: extremes are kept, each line on its own scale.

import { NOT_FINITE, ZERO } from "./colour.js";
import { drawing, themed } from "./dom.js";
import { LOST, NOT_A_NUMBER } from "./format.js";

export const WIDTH = 150;
export const HEIGHT = 22;
const LEAST_DECADES = 0.5; // noise stays low

/** Draw the numbers of name `n` of `grid`. */
export function sparkline(canvas, grid, n, log) {
  const context = drawing(canvas, WIDTH, HEIGHT);
  const of = log ? Math.log10 : (number) => number;
  const from = grid.first[0];
  const span = grid.last[grid.columns - 1] - from || 1;
  const lows = new Float64Array(WIDTH).fill(NaN);
  const highs = new Float64Array(WIDTH).fill(NaN);
  const marks = [];
  const broken = new Set(); // pixels at which steps are lost, zero or not finite
  let [low, high] = [Infinity, -Infinity];
  for (let c = 0; c < grid.columns; c += 1) {
    const at = n * grid.columns + c;
    const x = Math.min(WIDTH - 1, Math.round(((grid.first[c] - from) / span) * (WIDTH - 1)));
    if (grid.states[at] === LOST || grid.states[at] >= NOT_A_NUMBER) broken.add(x);
    if (grid.states[at] >= NOT_A_NUMBER) marks.push([x, `rgb(${NOT_FINITE})`, 0]);
    if (grid.states[at] !== 0) continue;
    for (const value of [grid.low[at], grid.high[at]]) {
      const number = of(value);
      if (number === -Infinity) {
        marks.push([x, `rgb(${ZERO})`, HEIGHT - 3]);
        broken.add(x);
      }
      if (!Number.isFinite(number)) continue;
      if (!(lows[x] <= number)) lows[x] = number;
      if (!(highs[x] >= number)) highs[x] = number;
      low = Math.min(low, number);
      high = Math.max(high, number);
    }
  }
  const room = Math.max(high - low, log ? LEAST_DECADES : Number.MIN_VALUE);
  const middle = (high + low) / 2;
  const y = (number) => 3 + (0.5 - (number - middle) / room) * (HEIGHT - 6);
  context.strokeStyle = themed("line");
  context.lineWidth = 1.2;
  context.lineJoin = "round";
  context.beginPath();
  const pieces = [[]]; // of pixels, between those
  for (let x = 0; x < WIDTH; x += 1) {
    if (!Number.isNaN(lows[x])) pieces[pieces.length - 1].push(x);
    else if (broken.has(x)) pieces.push([]);
  }
  for (const piece of pieces) {
    piece.forEach((x, i) => {
      if (i === 0) context.moveTo(x + 0.5, y(highs[x]));
      context.lineTo(x + 0.5, y(highs[x]));
      context.lineTo(x + 0.5, y(lows[x]) + 0.3);
    });
    if (piece.length === 1) context.lineTo(piece[0] + 3.5, y(lows[piece[0]]) + 0.3); // a step alone is seen
  }
  context.stroke();
  for (const [x, colour, top] of marks) {
    context.fillStyle = colour;
    context.fillRect(x - 1, top, 3, 3);
  }
}
