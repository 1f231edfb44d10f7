// What the page says when there is nothing to draw: loading, empty, an error.

import { el } from "./dom.js";

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
