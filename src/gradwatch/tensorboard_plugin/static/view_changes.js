// What a person changes on a map: the view, open modules, the pinned step.

import { began } from "./format.js";
import { choose, state } from "./state.js";

/** Show `wanted`, {from, to, rows}, of `map`; null shows all. Views of one `kind` that follow each other are one. */
export function view(map, wanted, kind) {
  if (!wanted) {
    if (state.view) choose({ view: null });
    return;
  }
  const { names } = map.shown().run;
  const { rows } = wanted;
  const last = rows[rows.length - 1].members;
  const whole = rows.length === map.shown().all.length;
  const [top, bottom] = whole ? ["", ""] : [names[rows[0].members[0]], names[last[last.length - 1]]];
  const [begin, end] = map.shown().whole;
  const everything = whole && wanted.from <= begin && wanted.to >= end;
  choose({ view: everything ? null : { from: wanted.from, to: wanted.to, top, bottom } }, kind);
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
  const inside = rows.flatMap((row, i) => (row.members.some((n) => alert.own.has(n)) ? [i] : []));
  const few = rows.length > 60 && inside.length > 0;
  const shown = few ? rows.slice(Math.max(0, inside[0] - 5), inside[inside.length - 1] + 6) : rows;
  const { names } = panel.run;
  const last = shown[shown.length - 1].members;
  const [top, bottom] = few ? [names[shown[0].members[0]], names[last[last.length - 1]]] : ["", ""];
  choose({ layer: null, view: { from: Math.max(from, at - around), to: Math.min(to, at + 2 * around), top, bottom } });
  panel.map.element.scrollIntoView({ block: "nearest" });
  panel.map.element.focus({ preventScroll: true });
  const n = names.indexOf(alert.layer);
  panel.map.point({ step: at, name: n >= 0 ? n : alert.own.values().next().value ?? -1 });
}
