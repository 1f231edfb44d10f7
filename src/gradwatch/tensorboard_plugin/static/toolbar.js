// The choices above the maps: runs, statistic, log or linear, and the way back from a zoom.

import { el, fill } from "./dom.js";
import { briefly } from "./format.js";
import { runChooser } from "./runs.js";
import { choose, state } from "./state.js";

/** `toolbar.show(...)` sets it; every choice goes into the state. */
export function toolbar() {
  const runs = runChooser((names) => choose({ runs: names }));
  const statistic = el("select", { id: "statistic", onchange: () => choose({ statistic: statistic.value, log: null }) });
  const picked = el("span", { class: "picked" }, el("label", { for: "statistic", class: "label" }, "Statistic"), statistic);
  const meaning = el("p", { class: "meaning quiet" });
  const scales = ["log", "linear"].map((name) =>
    el("button", { class: "segment", onclick: () => choose({ log: name === "log" }) }, name),
  );
  const all = el("button", { class: "plain", hidden: true, onclick: () => choose({ view: null }) }, "Show all");
  const note = el("p", { class: "note", role: "status" });
  const element = el(
    "header",
    {},
    el(
      "div",
      { class: "row" },
      runs.element,
      picked,
      el("div", { class: "segments", role: "group", "aria-label": "Scale" }, scales),
      all,
      meaning,
    ),
    note,
  );

  function show({ listed, chosen, statistics, one, log, said, layered }) {
    runs.show(listed, chosen);
    if (statistic.dataset.of !== statistics.map((each) => each.name).join()) {
      statistic.dataset.of = statistics.map((each) => each.name).join();
      fill(statistic, statistics.map((each) => el("option", { value: each.name, title: each.meaning }, each.name)));
    }
    statistic.value = one.name;
    meaning.textContent = briefly(one.meaning);
    meaning.title = [one.meaning, one.label].filter(Boolean).join(". ");
    scales.forEach((button, i) => button.setAttribute("aria-pressed", String(log === (i === 0))));
    all.hidden = !state.view || layered;
    picked.hidden = meaning.hidden = layered; // a layer's page has all statistics
    note.textContent = said;
    note.hidden = !said;
  }

  return { element, show };
}
