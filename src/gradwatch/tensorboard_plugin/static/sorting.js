// Tables that a click on a heading sorts: down, up, and back to the order without a choice.

import { el } from "./dom.js";
import { choose, state } from "./state.js";

/** The key of the column that `state[kept]` sorts by, and "down" or "up"; nothing without a choice. */
function choiceOf(kept) {
  return /^(.*) (up|down)$/.exec(state[kept])?.slice(1) ?? [];
}

/** The cells of the head of `columns`: those with `sort` are sorted by, and `state[kept]` says which. */
export function headingsOf(columns, kept) {
  const [key, direction] = choiceOf(kept);
  return columns.map((column) => {
    const order = column.sort ? (key !== column.key ? "none" : direction === "down" ? "descending" : "ascending") : null;
    const arrow = { ascending: " ↑", descending: " ↓" }[order] ?? "";
    const title = column.sort
      ? el(
          "button",
          { "data-sort": column.key, value: "", title: column.hint, onclick: () => turn(column.key, kept) },
          column.title,
          el("span", { class: "arrow", "aria-hidden": "true" }, arrow),
        )
      : column.title || el("span", { class: "unseen" }, column.key);
    return el("th", { scope: "col", class: column.kind, "aria-sort": order }, title);
  });
}

function turn(key, kept) {
  const [now, direction] = choiceOf(kept);
  const next = now !== key ? "down" : direction === "down" ? "up" : "";
  choose({ [kept]: next && `${key} ${next}` });
}

/** `lines` in the order that `state[kept]` says, else in that of the comparison `otherwise`. NaN goes last. */
export function sorted(lines, columns, kept, otherwise) {
  const [key, direction] = choiceOf(kept);
  const column = columns.find((each) => each.key === key && each.sort);
  if (!column) return [...lines].sort(otherwise);
  const sign = direction === "up" ? 1 : -1;
  return [...lines].sort((a, b) => {
    const [x, y] = [column.sort(a), column.sort(b)];
    const [noX, noY] = [Number.isNaN(x), Number.isNaN(y)];
    if (noX || noY) return noX - noY;
    return sign * (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y);
  });
}
