// What the page shows, as far as a person has chosen it: it outlives a reload, and is in the address.

const KEY = "gradwatch";
const listeners = new Set();

export const state = { runs: null, statistic: null, log: null, view: null, layer: null, sort: "", filter: "" };

/** Change some of the state, and tell who listens. */
export function choose(changes) {
  Object.assign(state, changes);
  const kept = JSON.stringify(state);
  try {
    sessionStorage.setItem(KEY, kept);
    history.replaceState(null, "", `${location.pathname}${location.search}#${encodeURIComponent(kept)}`);
  } catch {
    // storage is off: nothing is remembered
  }
  for (const listener of listeners) listener(changes);
}

export function listen(listener) {
  listeners.add(listener);
}

/** Take up what the address says, else what this browser tab showed last; `linked` is from TensorBoard's own address. */
export function recall(linked) {
  const hash = decodeURIComponent(location.hash.slice(1));
  for (const kept of [hash, safely(() => sessionStorage.getItem(KEY))]) {
    const found = kept && safely(() => JSON.parse(kept));
    if (found && typeof found === "object") {
      for (const name of Object.keys(state)) if (name in found) state[name] = found[name];
      break;
    }
  }
  if (typeof linked.run === "string") Object.assign(state, { runs: [linked.run], view: null });
  if (typeof linked.statistic === "string") state.statistic = linked.statistic;
  if (typeof linked.layer === "string") state.layer = linked.layer;
  if (!Array.isArray(state.runs) || !state.runs.every((run) => typeof run === "string")) state.runs = null;
  for (const name of ["sort", "filter"]) if (typeof state[name] !== "string") state[name] = "";
}

function safely(action) {
  try {
    return action();
  } catch {
    return null;
  }
}
