// From numbers to pixels: where several fall on one pixel, the one that stands out is drawn.

import { NOT_FINITE, TABLES, ZERO } from "./colour.js";
import { count, exact, NO_NUMBER, NOT_A_NUMBER } from "./format.js";
import { spacing } from "./api.js";

const HELD = new Set([1, 4, NO_NUMBER]); // not sampled, another optimizer's step, no number: the last one goes on
const FURTHEST = 256; // columns that a number goes on for

/** The column whose number is drawn in column `c` for name `n`: itself, or the last that has one; -1 without. */
export function drawnColumn(grid, n, c) {
  const row = n * grid.columns;
  for (let at = c; at >= 0 && c - at <= FURTHEST; at -= 1) {
    const state = grid.states[row + at];
    if (state === 0 || state >= NOT_A_NUMBER) return at;
    if (!HELD.has(state)) return -1;
  }
  return -1;
}

/** Runs of pixels that show the same span of things: [{from, to (pixels), first, last (things)}]. */
function segments(pixels, thingAt) {
  const found = [];
  for (let pixel = 0; pixel < pixels; pixel += 1) {
    const [first, last] = thingAt(pixel);
    const before = found[found.length - 1];
    if (before && before.first === first && before.last === last) before.to = pixel + 1;
    else found.push({ from: pixel, to: pixel + 1, first, last });
  }
  return found;
}

function columnSegments(grid, width, from, to) {
  const begins = grid.first;
  const end = grid.last[grid.columns - 1] + spacing(grid);
  const step = (to - from) / width;
  let at = 0;
  return segments(width, (pixel) => {
    const [left, right] = [from + pixel * step, from + (pixel + 1) * step];
    while (at > 0 && begins[at] > left) at -= 1;
    while (at + 1 < grid.columns && begins[at + 1] <= left) at += 1;
    if (right <= begins[0] || left >= end) return [-1, -1];
    let last = at;
    while (last + 1 < grid.columns && begins[last + 1] < right) last += 1;
    return [at, last];
  });
}

const WORD = new Uint32Array(new Uint8Array([1, 0, 0, 0]).buffer)[0] === 1;
const pack = ([red, green, blue]) =>
  WORD ? ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0 : ((red << 24) | (green << 16) | (blue << 8) | 255) >>> 0;
const PACKED = { absolute: Uint32Array.from(TABLES.absolute, pack), relative: Uint32Array.from(TABLES.relative, pack) };
const PACKED_ZERO = pack(ZERO);
const PACKED_NOT_FINITE = pack(NOT_FINITE);

const prepared = new WeakMap(); // grid -> what `standing` made of it

/**
 * What each place of `grid` is drawn as: the number of its least and greatest that is further from its usual one, in
 * decades if `log`; -Infinity for zero there, Infinity for what is not finite, NaN for no number.
 */
function standing(grid, usual, log) {
  const known = prepared.get(grid);
  if (known?.log === log) return known.numbers;
  const numbers = new Float32Array(grid.low.length).fill(NaN);
  for (let n = 0; n < usual.length; n += 1) {
    const middle = log ? Math.log10(usual[n]) : usual[n];
    for (let at = n * grid.columns; at < (n + 1) * grid.columns; at += 1) {
      if (grid.states[at] !== 0) {
        if (grid.states[at] >= NOT_A_NUMBER) numbers[at] = Infinity;
        continue;
      }
      const low = log ? Math.log10(grid.low[at]) : grid.low[at];
      if (grid.low[at] === grid.high[at]) numbers[at] = low;
      else {
        const high = log ? Math.log10(grid.high[at]) : grid.high[at];
        numbers[at] = middle - low > high - middle ? low : high;
      }
    }
  }
  prepared.set(grid, { log, numbers });
  return numbers;
}

/**
 * A canvas of `width` x `height` device pixels: the numbers of `rows` (lists of places among the names, one list a row)
 * over steps `from` to `to`. `usual` is each name's own; what is furthest from it stands out.
 */
export function painted(grid, { rows, from, to, width, height, domain, usual }) {
  const canvas = new OffscreenCanvas(width, height);
  if (!grid.columns || !rows.length) return canvas;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const across = columnSegments(grid, width, from, to);
  const down = segments(height, (pixel) => {
    const first = Math.floor((pixel * rows.length) / height);
    return [first, Math.max(first, Math.ceil(((pixel + 1) * rows.length) / height) - 1)];
  });
  const { log, relative, low, high } = domain;
  const colours = relative ? PACKED.relative : PACKED.absolute;
  const numbers = standing(grid, usual, log);
  const factor = 255 / (high - low);
  const middleOf = (n) => {
    const middle = log ? Math.log10(usual[n]) : usual[n];
    return Number.isFinite(middle) ? middle : relative ? 0 : low;
  };
  const lines = rows.map((places) => places.map((n) => [n, middleOf(n)]));
  for (const { from: top, to: bottom, first: above, last: below } of down) {
    for (const { from: left, to: right, first, last } of across) {
      if (first < 0) continue;
      let distance = -1;
      let shown = NaN;
      for (let r = above; r <= below && shown !== Infinity; r += 1) {
        for (const [n, middle] of lines[r]) {
          const row = n * grid.columns;
          let begin = first;
          let end = last;
          if (begin === end && Number.isNaN(numbers[row + begin])) begin = end = drawnColumn(grid, n, begin);
          for (let at = row + begin; begin >= 0 && at <= row + end; at += 1) {
            const number = numbers[at];
            const away = number === Infinity ? Infinity : Math.abs(number - middle);
            if (away > distance || number === Infinity) {
              distance = away;
              shown = relative ? number - middle : number;
            }
          }
        }
      }
      if (Number.isNaN(shown)) continue;
      let colour = PACKED_ZERO;
      if (shown === Infinity) colour = PACKED_NOT_FINITE;
      else if (shown !== -Infinity) colour = colours[Math.max(0, Math.min(255, Math.round((shown - low) * factor)))];
      for (let y = top; y < bottom; y += 1) pixels.fill(colour, y * width + left, y * width + right);
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** Which of `members` (places) stands out at column `c`: the one furthest from its usual number. */
export function standout(grid, members, c, { usual, log }) {
  let [found, distance] = [members[0], -1];
  if (members.length === 1 || c < 0) return found;
  for (const n of members) {
    const at = drawnColumn(grid, n, c);
    if (at < 0) continue;
    const place = n * grid.columns + at;
    const of = (number) => (log ? Math.log10(number) : number);
    const away = (number) => Math.abs(of(number) - of(usual[n]));
    const far = grid.states[place] >= NOT_A_NUMBER ? Infinity : Math.max(away(grid.low[place]), away(grid.high[place]));
    if (far > distance) [found, distance] = [n, far];
  }
  return found;
}

/** What a place holds, in words. `states`: what each state means. */
export function worded(grid, n, c, states) {
  const at = n * grid.columns + c;
  const state = grid.states[at];
  if (state === 0) {
    const [low, high] = [grid.low[at], grid.high[at]];
    return low === high ? exact(low) : `${exact(low)} to ${exact(high)}`;
  }
  const text = states[state];
  const held = drawnColumn(grid, n, c);
  if (held < 0 || held === c) return text;
  return `${text}; at step ${count(grid.last[held])}: ${worded(grid, n, held, states)}`;
}
