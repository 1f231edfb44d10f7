// The number under the pointer, in words.

import { columnAt } from "./api.js";
import { el, fill } from "./dom.js";
import { concerns } from "./faults.js";
import { began, count, ended, short } from "./format.js";
import { drawnColumn, worded } from "./paint.js";

const AWAY = 14; // pixels from the pointer

export function tooltip() {
  const element = el("div", { class: "tooltip", hidden: true });
  const spoken = el("div", { class: "unseen", "aria-live": "polite" });

  /** Show `lines` beside the point (`x`, `y`) of the window; with `aloud` a screen reader reads them. */
  function show(lines, x, y, aloud) {
    fill(element, lines.map(([text, kind]) => el("div", { class: kind }, text)));
    element.hidden = false;
    const box = element.getBoundingClientRect();
    const left = x + AWAY + box.width > window.innerWidth ? x - AWAY - box.width : x + AWAY;
    const top = y + AWAY + box.height > window.innerHeight ? y - AWAY - box.height : y + AWAY;
    element.style.left = `${Math.max(0, left)}px`;
    element.style.top = `${Math.max(0, top)}px`;
    if (aloud) spoken.textContent = lines.map(([text]) => text).join(". ");
  }

  function hide() {
    element.hidden = true;
  }

  return { element, spoken, show, hide };
}

/** What there is to say of the place `at` of `map`, and of the same layer and step in the other `maps`: [[text, class]]. */
export function described(maps, map, at, states) {
  const { run, statistic, grid } = map.shown();
  const lines = [];
  const layer = at.name >= 0 ? run.names[at.name] : null;
  if (layer) lines.push([layer, "title"]);
  const c = columnAt(grid, at.step);
  if (c < 0) return [...lines, [`step ${count(at.step)}: before the first record`, ""]];
  const [first, last] = [grid.first[c], grid.last[c]];
  lines.push([first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`, "step"]);
  if (layer) {
    for (const other of maps) {
      const what = other.shown();
      const n = what.run.names.indexOf(layer);
      const column = columnAt(what.grid, at.step);
      const text = n < 0 || column < 0 ? "-" : worded(what.grid, n, column, states);
      lines.push([maps.length > 1 ? `${what.run.run}: ${text}` : `${statistic} ${text}`, "value"]);
      if (maps.length === 1) lines.push([compared(what, n, column), "quiet"]);
    }
    if (run.modules[at.name]) lines.push([run.modules[at.name], "quiet"]);
  }
  for (const alert of map.shown().alerts) {
    const near = layer ? concerns(alert, at.name) : true;
    const end = ended(alert) ?? Infinity;
    if (near && began(alert) <= last && end >= first) lines.push([`${alert.severity}: ${alert.rule}`, alert.severity]);
  }
  if (at.among > 1) lines.push([`of ${at.among} layers in this row the one that is furthest from its usual`, "quiet"]);
  return lines.filter(([text]) => text);
}

/** How a number is beside the layer's usual one, in words. */
function compared({ grid, usual, domain }, n, column) {
  const held = n < 0 || column < 0 ? -1 : drawnColumn(grid, n, column);
  if (held < 0 || !Number.isFinite(usual[n])) return "";
  const number = grid.high[n * grid.columns + held];
  const ratio = domain.log && number > 0 && usual[n] > 0 ? `${short(number / usual[n])} times its ` : "";
  return `${ratio}usual ${short(usual[n])}`;
}
