// The choices above the maps: runs, statistic, scale, colours, which layers, and the way back from a zoom.

import { el, fill } from "./dom.js";
import { briefly } from "./format.js";
import { runChooser } from "./run_chooser.js";
import { choose, state } from "./state.js";

const COLOURS = {
  absolute: "One scale for the whole run",
  relative: "Each number beside the layer's own usual one: blue is less, brown is more",
  fit: "The scale fits what is in view",
};

/** `toolbar.show(...)` sets it; every choice goes into the state. */
export function toolbar() {
  const runs = runChooser((names) => choose({ runs: names }));
  const overview = el("button", { class: "plain to-overview", hidden: true, onclick: toOverview }, "← All runs");
  const statistic = el("select", { id: "statistic", onchange: () => choose({ statistic: statistic.value, log: null }) });
  const picked = el("span", { class: "picked" }, el("label", { for: "statistic", class: "label" }, "Statistic"), statistic);
  const meaning = el("p", { class: "meaning quiet" });
  const scales = ["log", "linear"].map((name) =>
    el("button", { class: "segment", onclick: () => choose({ log: name === "log" }) }, name),
  );
  const colours = Object.entries(COLOURS).map(([name, title]) =>
    el("button", { class: "segment", title, value: name, onclick: () => choose({ colours: name }) }, name === "fit" ? "fit to view" : name),
  );
  const filter = el("input", { type: "search", placeholder: "Filter layers", "aria-label": "Filter layers" });
  filter.addEventListener("input", () => choose({ filter: filter.value }, "filter"));
  const all = el("button", { class: "plain show-all", hidden: true, onclick: () => choose({ view: null }) }, "Show all");
  const note = el("p", { class: "note", role: "status" });
  const segments = (label, buttons) => el("div", { class: "segments", role: "group", "aria-label": label }, buttons);
  const coloured = el("span", { class: "picked" }, el("span", { class: "label" }, "Colours"), segments("Colours", colours));
  const element = el(
    "header",
    {},
    el("div", { class: "row" }, overview, runs.element, picked, segments("Scale", scales), coloured, filter, all),
    meaning,
    note,
  );

  function toOverview() {
    choose({ runs: null, layer: null, view: null, step: null });
  }

  function show({ listed, health, chosen, groups, statistics, one, log, said, layered }) {
    runs.show(listed, chosen, health);
    overview.hidden = listed.length < 2;
    if (statistic.dataset.of !== statistics.map((each) => each.name).join()) {
      statistic.dataset.of = statistics.map((each) => each.name).join();
      fill(statistic, grouped(statistics, groups));
    }
    statistic.value = one.name;
    const group = groups[one.group] ? `${one.group}, ${groups[one.group]}. ` : "";
    meaning.textContent = `${one.title} (${one.name}): ${briefly(one.meaning)}${one.sampled ? "; sampled, not at every step" : ""}`;
    meaning.title = [`${group}${one.meaning}`, one.label].filter(Boolean).join(". ");
    scales.forEach((button, i) => button.setAttribute("aria-pressed", String(log === (i === 0))));
    const colour = state.colours ?? (state.view ? "fit" : "absolute");
    colours.forEach((button) => button.setAttribute("aria-pressed", String(button.value === colour)));
    if (document.activeElement !== filter) filter.value = state.filter;
    all.hidden = !state.view || layered;
    picked.hidden = meaning.hidden = coloured.hidden = filter.hidden = layered; // a layer's page has all statistics
    note.textContent = said;
    note.hidden = !said;
  }

  return { element, show };
}

/** The statistics by group, in the groups' order, with plain names. */
function grouped(statistics, groups) {
  return Object.entries(groups).flatMap(([group, about]) => {
    const own = statistics.filter((each) => each.group === group);
    if (!own.length) return [];
    const options = own.map((each) => el("option", { value: each.name, title: each.meaning }, each.title));
    return [el("optgroup", { label: group, title: about }, options)];
  });
}
