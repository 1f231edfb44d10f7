// Which runs the address asks for, among those that there are.

import { MOST } from "./runs.js";

/** The names of the runs to show: those chosen, one that is the only one or whose layer is asked for, else none. */
export function wantedRuns(runs, state) {
  const known = runs.map((run) => run.name);
  const found = (state.runs ?? []).map((name) => known.find((each) => each === name) ?? nearest(name, known)).filter(Boolean);
  if (found.length) return [...new Set(found)].slice(0, MOST);
  return known.length === 1 || state.layer !== null ? [known[0]] : [];
}

/** The one run whose folder is the same seen from another folder: "version_3" for "lightning_logs/version_3". */
function nearest(name, known) {
  const found = known.filter((each) => each.endsWith(`/${name}`) || name.endsWith(`/${each}`));
  return found.length === 1 ? found[0] : null;
}
