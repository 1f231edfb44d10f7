// Which runs are shown: one, or up to four side by side.

import { el, fill } from "./dom.js";
import { count } from "./format.js";
import { healthSign } from "./verdict.js";

export const MOST = 4; // runs side by side: what a screen has room for

/** The names of the runs to show: those chosen, one that is the only one or whose layer is asked for, else none. */
export function wantedRuns(runs, state) {
  const known = runs.map((run) => run.name);
  const found = (state.runs ?? []).map((name) => (known.includes(name) ? name : nearest(name, known))).filter(Boolean);
  if (found.length) return [...new Set(found)].slice(0, MOST);
  return known.length === 1 || state.layer !== null ? [known[0]] : [];
}

/** The one run whose folder is the same seen from another folder: "version_3" for "lightning_logs/version_3". */
function nearest(name, known) {
  const found = known.filter((each) => each.endsWith(`/${name}`) || name.endsWith(`/${each}`));
  return found.length === 1 ? found[0] : null;
}

/** A chooser; `choose(names)` gets the wanted runs, in the order of the list. */
export function runChooser(choose) {
  const list = el("div", { class: "menu", role: "group", "aria-label": "Runs" });
  const said = el("span", { class: "chosen" });
  const element = el("details", { class: "chooser" }, el("summary", {}, el("span", { class: "label" }, "Run"), said), list);
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !element.open) return;
    element.open = false;
    element.querySelector("summary").focus();
  });
  document.addEventListener("pointerdown", (event) => {
    if (element.open && !element.contains(event.target)) element.open = false;
  });
  let drawn = "";

  function show(runs, chosen, health) {
    said.textContent = chosen.length === 1 ? chosen[0] : `${chosen.length} runs`;
    said.title = chosen.join(", ");
    const now = JSON.stringify([runs.map((run) => [run.name, run.last]), chosen, health]);
    if (now === drawn) return;
    drawn = now;
    const focused = document.activeElement?.value;
    fill(
      list,
      runs.map(({ name, last, updated }) => {
        const on = chosen.includes(name);
        const box = el("input", {
          type: "checkbox",
          value: name,
          checked: on,
          disabled: !on && chosen.length >= MOST,
          onchange: (event) => {
            const wanted = runs.map((run) => run.name).filter((other) =>
              other === name ? event.target.checked : chosen.includes(other),
            );
            if (wanted.length) choose(wanted);
            else event.target.checked = true; // one is always shown
          },
        });
        const only = el("button", { class: "link", onclick: () => choose([name]) }, "only");
        const when = new Date(1000 * updated).toLocaleString();
        return el(
          "div",
          { class: "choice" },
          el("label", {}, box, healthSign(health[name]), el("span", { class: "name" }, name)),
          el("span", { class: "quiet", title: when }, `to step ${count(last)}`),
          only,
        );
      }),
    );
    if (focused) [...list.querySelectorAll("input")].find((box) => box.value === focused)?.focus();
  }

  return { element, show };
}
