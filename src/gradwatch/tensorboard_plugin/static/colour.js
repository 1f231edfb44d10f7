// The colours of numbers: viridis, which the colour-blind read and which prints in grey; and the scale from number to colour.

// viridis of matplotlib (Smith and van der Walt, CC0) at 33 even places; its darkest tenth is left to zero
const VIRIDIS =
  "440154 470d60 48186a 482374 472d7b 453781 424086 3e4989 3a528b 365c8d 32658e 2e6d8e 2b758e 277e8e 24868e 218e8d " +
  "1f968b 1f9e89 21a685 29af7f 34b679 44bf70 56c667 6ccd5a 84d44b 9bd93c b5de2b cde11d e5e419 f4e61e fde725 fde725 fde725";
const STOPS = VIRIDIS.split(" ").slice(3, 31).map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

export const ZERO = [10, 10, 10];
export const NOT_FINITE = [213, 94, 0]; // vermilion (Okabe and Ito), which is nowhere in viridis
export const SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]; // lines of runs (Okabe and Ito)

/** Red, green, blue of `place` in [0, 1]. */
export function viridis(place) {
  const at = Math.min(1, Math.max(0, place)) * (STOPS.length - 1);
  const stop = Math.min(STOPS.length - 2, Math.floor(at));
  const rest = at - stop;
  return STOPS[stop].map((from, i) => Math.round(from + rest * (STOPS[stop + 1][i] - from)));
}

export const TABLE = Array.from({ length: 256 }, (_, i) => viridis(i / 255));

const LEAST_SPAN = { log: 1, linear: 1e-9 }; // a decade, so that noise does not look like a fault
const OUTSIDE = 0.005; // share of the numbers beyond each end of the scale

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
  const span = Math.max(log ? LEAST_SPAN.log : Math.max(LEAST_SPAN.linear, 1e-6 * Math.abs(high)), high - low);
  const middle = (low + high) / 2;
  [low, high] = [middle - span / 2, middle + span / 2];
  return { log, low, high };
}
