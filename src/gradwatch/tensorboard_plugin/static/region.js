// What there is to say of a region of a map: a person drags over it with Shift.

import { json } from "./api.js";
import { el, fill } from "./dom.js";
import { count, percent, plural, short } from "./format.js";

/** `region.show(panels, {from, to, names}, statistic)` asks and says; null for the region hides. `act`: zoom(), close(). */
export function regionStatistics(act) {
  const said = el("div", { class: "region-said", role: "status" });
  const element = el(
    "section",
    { class: "region", hidden: true, "aria-label": "Statistics of the region" },
    said,
    el("button", { class: "plain", onclick: act.zoom }, "Zoom to it"),
    el("button", { class: "plain", onclick: act.close }, "Close"),
  );
  let turn = 0;

  async function show(panels, region, statistic) {
    turn += 1;
    const mine = turn;
    element.hidden = !region;
    if (!region) return;
    fill(said, el("p", { class: "quiet" }, "Reading …"));
    const lines = await Promise.all(panels.map((panel) => ask(panel, region, statistic)));
    if (mine !== turn) return;
    fill(said, lines.map((line) => el("p", {}, line)));
  }

  return { element, show };
}

async function ask(panel, { from, to, names }, statistic) {
  const { run } = panel.run;
  const places = panel.layers.filter((n) => names.has(panel.run.names[n]));
  const where = `${run}, steps ${count(from)} to ${count(to - 1)}: `;
  if (!places.length || !panel.run.statistics.some((each) => each.name === statistic.name)) return `${where}nothing of it was recorded.`;
  const layers = ranges(places);
  try {
    const found = await json("region", { run, statistic: statistic.name, from, to: to - 1, layers });
    if (!found.numbers) return `${where}${plural(found.layers, "layer")} without a number.`;
    const zeros = `exact zeros ${percent(found.zeros / found.numbers)}`;
    const lost = found.nonfinite ? `, ${plural(found.nonfinite, "number")} not finite` : "";
    return `${where}${statistic.title} of ${plural(found.layers, "layer")}: median ${short(found.median)}, least ${short(found.min)}, most ${short(found.max)}, ${zeros}${lost}; ${plural(found.numbers, "number")}.`;
  } catch (error) {
    return `${where}${error.message}`;
  }
}

/** Places as "3-10,15". */
function ranges(places) {
  const found = [];
  for (const n of places) {
    const before = found[found.length - 1];
    if (before && before[1] === n - 1) before[1] = n;
    else found.push([n, n]);
  }
  return found.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join();
}
