// The colours of numbers: viridis, which the colour-blind read and which prints in grey; and the scale from number to colour.

// the same as in gradwatch.sinks.colormap, which draws the report; a test compares them
const VIRIDIS = "440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725";
const parts = (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
const STOPS = VIRIDIS.split(" ").map(parts);
const OUTSIDE = 0.002; // share of the numbers beyond each end of the scale
const LEAST_SPAN = 2; // decades

export const ZERO = parts("8d96a0");
export const NOT_FINITE = parts("e5484d");
export const SERIES = [1, 2, 3, 4, 5, 6].map((n) => `series-${n}`); // lines, by the style sheet's names of their colours

/** Red, green, blue of `place` in [0, 1]. */
export function viridis(place) {
  const at = Math.min(1, Math.max(0, place)) * (STOPS.length - 1);
  const stop = Math.min(STOPS.length - 2, Math.floor(at));
  const rest = at - stop;
  return STOPS[stop].map((from, i) => Math.round(from + rest * (STOPS[stop + 1][i] - from)));
}

export const TABLE = Array.from({ length: 256 }, (_, i) => viridis(i / 255));

/**
 * The ends of the colour scale over all `grids`: {log, low, high}, in decades if `log`.
 * What lies beyond has the colour of the end.
 */
export function domainOf(grids, log) {
  const numbers = [];
  for (const grid of grids) {
    const all = grid.low.length;
    const stride = Math.max(1, Math.floor(all / 50000));
    for (const values of grid.high === grid.low ? [grid.low] : [grid.low, grid.high]) {
      for (let i = 0; i < all; i += stride) {
        const number = log ? Math.log10(values[i]) : values[i];
        if (Number.isFinite(number)) numbers.push(number);
      }
    }
  }
  if (!numbers.length) return { log, low: 0, high: 1 };
  const ordered = Float64Array.from(numbers).sort();
  const at = (share) => ordered[Math.round(share * (ordered.length - 1))];
  let [low, high] = [at(OUTSIDE), at(1 - OUTSIDE)];
  const span = Math.max(log ? LEAST_SPAN : Math.max(1e-9, 1e-6 * Math.abs(high)), high - low);
  const middle = (low + high) / 2;
  [low, high] = [middle - span / 2, middle + span / 2];
  return { log, low, high };
}
