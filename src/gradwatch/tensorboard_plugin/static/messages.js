// What the page says of itself: loading, empty, an error, what is missing, what hands and keys do.

import { el } from "./dom.js";
import { count } from "./format.js";

const HOW = "trainer = L.Trainer(callbacks=[GradWatch()])";

export function loading() {
  return el("div", { class: "message", role: "status", "aria-busy": "true" }, el("div", { class: "spinner" }), el("p", {}, "Loading the record …"));
}

/** There is no run; `foreign` counts what only a later GradWatch can read. */
export function empty(foreign) {
  if (foreign) {
    return el(
      "div",
      { class: "message" },
      el("h2", {}, "These runs were written by another version of GradWatch"),
      el("p", {}, "Install the version that wrote them beside TensorBoard, and start it again."),
    );
  }
  return el(
    "div",
    { class: "message" },
    el("h2", {}, "No run here has a GradWatch record yet"),
    el("p", {}, "Add the callback to a Trainer with a TensorBoard logger, and look at its log directory:"),
    el("pre", {}, el("code", {}, HOW)),
    el("p", { class: "quiet" }, "A run under way appears by itself when TensorBoard reloads."),
  );
}

export function failed(error, again) {
  return el(
    "div",
    { class: "banner", role: "alert" },
    el("p", {}, error.message || String(error)),
    el("button", { class: "plain", onclick: again }, "Try again"),
  );
}

/** What TensorBoard did not keep, in words. */
export function retained(panels) {
  const [short] = panels.filter(({ run }) => run.lost).map(({ run }) => run);
  if (!short) return "";
  const [kept, all] = [short.rows, short.rows + short.lost].map(count);
  return `TensorBoard has kept ${kept} of ${all} steps, at random, and the map is blank at the others. For every step: --samples_per_plugin gradwatch=0`;
}

export const KEYS = [
  "Click a step for its profile over depth, a name for the layer's page, a sign beside a name to open or close its module.",
  "Drag to zoom in, with Shift for the statistics of a region; double click to see all.",
  "The wheel zooms with Ctrl, or once the map is clicked. Keys: W and S or plus and minus zoom, A and D pan, Page up and down move the rows, arrows move a cursor, Space pins its step, C closes its module, Enter opens its layer, 0 shows all.",
].join(" ");
