// The colours of numbers: viridis, which the colour-blind read and which prints in grey, or blue and brown on both sides of
// what is usual; and the scale from number to colour.

// the same as in gradwatch.sinks.colormap, which draws the report; a test compares them
const VIRIDIS = "440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725";
// less than usual, as usual, more than usual; ColorBrewer's RdBu and PuOr by their ends
const DIVERGING = "053061 2166ac 4393c3 92c5de e6e6e6 fdb863 e08214 b35806 7f3b08";
const OUTSIDE = 0.002; // share of the numbers beyond each end of the scale
const LEAST_SPAN = 2; // decades

const parts = (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
export const ZERO = parts("8d96a0");
export const NOT_FINITE = parts("e5484d");
export const SERIES = [1, 2, 3, 4, 5, 6].map((n) => `series-${n}`); // lines, by the style sheet's names of their colours

/** 256 colours, [red, green, blue], from the low end of a scale to its high end. */
function table(colours) {
  const stops = colours.split(" ").map(parts);
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1);
    const stop = Math.min(stops.length - 2, Math.floor(at));
    return stops[stop].map((from, channel) => Math.round(from + (at - stop) * (stops[stop + 1][channel] - from)));
  });
}

export const TABLES = { absolute: table(VIRIDIS), relative: table(DIVERGING) };

/**
 * The ends of the colour scale over `parts`, [{grid, names (places), from, to, usual}]: {log, relative, low, high}, in
 * decades if `log`. With `relative` numbers are distances from what is usual for their name, and 0 is in the middle.
 * What lies beyond has the colour of the end.
 */
export function domainOf(parts, { log, relative }) {
  const numbers = [];
  for (const { grid, names, from, to, usual } of parts) {
    const columns = [];
    for (let c = 0; c < grid.columns; c += 1) if (grid.last[c] >= from && grid.first[c] < to) columns.push(c);
    const stride = Math.max(1, Math.floor((names.length * columns.length) / 50000));
    let place = 0;
    for (const n of names) {
      const middle = !relative ? 0 : log ? Math.log10(usual[n]) : usual[n];
      for (const c of columns) {
        place += 1;
        if (place % stride) continue;
        const at = n * grid.columns + c;
        if (grid.states[at] !== 0) continue;
        for (const value of grid.high === grid.low ? [grid.low[at]] : [grid.low[at], grid.high[at]]) {
          const number = (log ? Math.log10(value) : value) - middle;
          if (Number.isFinite(number)) numbers.push(number);
        }
      }
    }
  }
  if (!numbers.length) return { log, relative, low: relative ? -1 : 0, high: 1 };
  const ordered = Float64Array.from(numbers).sort();
  const at = (share) => ordered[Math.round(share * (ordered.length - 1))];
  let [low, high] = [at(OUTSIDE), at(1 - OUTSIDE)];
  if (relative) {
    const wide = Math.max(log ? LEAST_SPAN / 2 : 0, -low, high) || 1;
    return { log, relative, low: -wide, high: wide };
  }
  const span = Math.max(log ? LEAST_SPAN : 1e-6 * Math.abs(high), high - low) || 1;
  const middle = (low + high) / 2;
  [low, high] = [middle - span / 2, middle + span / 2];
  return { log, relative, low, high };
}
