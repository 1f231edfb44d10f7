// What the server is asked, and its answers: JSON, or an envelope of arrays.

/** An answer that is an error; its message is meant for people. */
export class Refused extends Error {}

async function ask(question, parameters) {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value != null) asked.set(name, value);
  let response;
  try {
    // beside this module's folder: right under any path prefix and experiment
    response = await fetch(`${new URL(`../${question}`, import.meta.url)}?${asked}`);
  } catch {
    throw new Refused("TensorBoard does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Refused(said.error || `TensorBoard answered ${response.status} to ${question}.`);
}

export async function json(question, parameters = {}) {
  return (await ask(question, parameters)).json();
}

const ARRAYS = { float32: Float32Array, float64: Float64Array, uint8: Uint8Array };

/** Header and arrays of an envelope. */
export async function envelope(question, parameters) {
  const body = await (await ask(question, parameters)).arrayBuffer();
  const length = new DataView(body).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, length)));
  const arrays = {};
  for (const [name, [type, shape, offset]] of Object.entries(about.arrays)) {
    arrays[name] = new ARRAYS[type](body, 4 + length + offset, shape.reduce((product, size) => product * size, 1));
  }
  return { about, arrays };
}

/**
 * Numbers of some names over some columns of time: {columns, first, last, low, high, states, records, pooled}.
 * The number of name n in column c is at [n * columns + c].
 */
export function grid(about, arrays, prefix = "") {
  const low = arrays[`${prefix}low`];
  const first = arrays[`${prefix}from`];
  return {
    columns: first.length,
    first,
    last: arrays[`${prefix}to`],
    low,
    high: arrays[`${prefix}high`] ?? low,
    states: arrays[`${prefix}states`],
    records: about.records,
    pooled: about.pooled,
  };
}

/** The place of the column that holds `step`, or was the last before it; -1 before the first. */
export function columnAt(found, step) {
  let low = 0;
  let high = found.columns;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (found.first[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** How long the last column is drawn: as long as those before it are on average. */
export function spacing(found) {
  if (found.columns < 2) return 1;
  return Math.max(1, (found.first[found.columns - 1] - found.first[0]) / (found.columns - 1));
}
