// What a person changes on a map: the view, open modules, the pinned step.

import { began } from "./format.js";
import { choose, state } from "./state.js";
import { endsOf, rowsWith } from "./tree.js";

const ALL_ROWS = { top: "", bottom: "" };

/** Show `wanted`, {from, to, rows}, of `map`; null shows all. Views of one `kind` that follow each other are one. */
export function view(map, wanted, kind) {
  if (!wanted) {
    if (state.view) choose({ view: null });
    return;
  }
  const { run, all, whole } = map.shown();
  const { from, to, rows } = wanted;
  const every = rows.length === all.length;
  const everything = every && from <= whole[0] && to >= whole[1];
  choose({ view: everything ? null : { from, to, ...(every ? ALL_ROWS : endsOf(rows, run.names)) } }, kind);
}

/** Close an open module, or open a closed one. */
export function turnModule(map, module) {
  const turned = state.turned.includes(module) ? state.turned.filter((name) => name !== module) : [...state.turned, module];
  choose({ turned });
}

export function pin(map, step) {
  map.element.focus({ preventScroll: true });
  choose({ step }, "step");
}

/** Show the place of `alert`: the steps around its beginning, its rows, and a cross-hair at the first of them. */
export function jump(panel, alert) {
  const [from, to] = panel.whole;
  const around = Math.max(10, Math.round((to - from) / 40));
  const at = Math.min(to - 1, Math.max(from, began(alert)));
  const { rows } = panel;
  const inside = rowsWith(rows, (n) => alert.own.has(n));
  const { names } = panel.run;
  let ends = ALL_ROWS;
  if (rows.length > 60 && inside.length) ends = endsOf(rows.slice(Math.max(0, inside[0] - 5), inside[inside.length - 1] + 6), names);
  choose({ layer: null, view: { from: Math.max(from, at - around), to: Math.min(to, at + 2 * around), ...ends } });
  panel.map.element.scrollIntoView({ block: "nearest" });
  panel.map.element.focus({ preventScroll: true });
  const n = names.indexOf(alert.layer);
  panel.map.point({ step: at, name: n >= 0 ? n : alert.own.values().next().value ?? -1 });
}
