// What the page shows, as far as a person has chosen it. The address says all of it: a link shows the same, Back goes back.

import { followAddress, readAddress, writeAddress } from "./host.js";

const SERIES = 1500; // milliseconds within which one kind of change goes on, as the turns of a wheel: one entry of history

const NONE = {
  runs: null, // names, null for all: the overview
  statistic: null,
  log: null, // whether numbers are drawn as logarithms, null as fits the statistic
  colours: null, // "absolute", "relative", "fit", null as fits the view
  view: null, // {from, to, top, bottom}: steps, and the first and last layer
  layer: null, // whose page is shown
  step: null, // the one whose profile over depth is shown
  turned: [], // modules whose rows are open though they would be closed, or closed though they would be open
  sort: "", // of the layers: "column up" or "column down"
  order: "", // of the runs, likewise
  filter: "",
};

const SAID = {
  runs: {
    read: ({ run, runs }) => {
      if (run !== undefined) return [run];
      const found = runs === undefined ? [] : JSON.parse(runs);
      return found.length && found.every((name) => typeof name === "string") ? found : null;
    },
    write: (names) => (names.length === 1 ? { run: names[0] } : { runs: JSON.stringify(names) }),
  },
  log: { read: ({ scale }) => ({ log: true, linear: false })[scale] ?? null, write: (log) => ({ scale: log ? "log" : "linear" }) },
  colours: {
    read: ({ colours }) => (["absolute", "relative", "fit"].includes(colours) ? colours : null),
    write: (colours) => ({ colours }),
  },
  view: {
    read: ({ steps, top, bottom }) => {
      const [, from, to] = /^(\d{1,15})-(\d{1,15})$/.exec(steps ?? "") ?? [];
      return Number(to) > Number(from) ? { from: Number(from), to: Number(to), top: top ?? "", bottom: bottom ?? "" } : null;
    },
    write: ({ from, to, top, bottom }) => ({ steps: `${from}-${to}`, ...(top && { top }), ...(bottom && { bottom }) }),
  },
  step: { read: ({ step }) => (/^\d{1,15}$/.test(step ?? "") ? Number(step) : null), write: (step) => ({ step: String(step) }) },
  turned: {
    read: ({ modules }) => {
      const found = modules === undefined ? [] : JSON.parse(modules);
      return Array.isArray(found) ? found.filter((name) => typeof name === "string") : [];
    },
    write: (names) => ({ modules: JSON.stringify(names) }),
  },
};

let last = { kind: "", at: -SERIES };
let listener = null; // gets every change

export const state = { ...NONE };

/** Change some of the state, and tell the listener. Changes of one `kind` that come soon after each other are one. */
export function choose(changes, kind = "") {
  Object.assign(state, changes);
  const now = performance.now();
  writeAddress(written(), kind !== "" && kind === last.kind && now - last.at < SERIES);
  last = { kind, at: now };
  listener(changes);
}

/** Take up what the address says, now and whenever it says something else. `changed` gets every later change. */
export function recall(changed) {
  listener = changed;
  Object.assign(state, read());
  followAddress(() => {
    const before = { ...state };
    Object.assign(state, read());
    const changes = Object.keys(NONE).filter((name) => JSON.stringify(before[name]) !== JSON.stringify(state[name]));
    last = { kind: "", at: -SERIES };
    if (changes.length) listener(Object.fromEntries(changes.map((name) => [name, state[name]])));
  });
}

function written() {
  const said = {};
  for (const [name, value] of Object.entries(state)) {
    if (value === null || value === "" || value.length === 0) continue;
    Object.assign(said, SAID[name] ? SAID[name].write(value) : { [name]: value });
  }
  return said;
}

/** The state that the address means; what it says wrongly counts as not said. */
function read() {
  const address = readAddress();
  const found = { ...NONE };
  for (const name of Object.keys(NONE)) {
    try {
      found[name] = SAID[name] ? SAID[name].read(address) : address[name] ?? NONE[name];
    } catch {
      // no JSON, for example
    }
  }
  return found;
}
