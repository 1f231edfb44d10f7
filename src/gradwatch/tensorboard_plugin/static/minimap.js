// The whole map in a strip, with a frame around what is in view; a drag moves it.

import { drawing, el, themed } from "./dom.js";
import { painted } from "./paint.js";

const HEIGHT = 36;

/**
 * `minimap.show(panel, seen, place)` draws what is `seen` of a panel, {rows, span}, below the map that is laid out at
 * `place`; with null for `seen` it hides. `move(from, to, rows)` gets where the frame was dragged to.
 */
export function minimap(move) {
  const canvas = el("canvas", { class: "minimap", role: "img", "aria-label": "The whole run, with a frame around what is shown above" });
  const element = el("div", { class: "mini", hidden: true }, canvas);
  let shown = null;
  let held = null;

  function show(panel, seen, place) {
    shown = seen && place ? { panel, seen, place } : null;
    element.hidden = !shown;
    if (shown) draw();
  }

  function draw() {
    const { panel, seen, place } = shown;
    const { left, width } = place.plot;
    element.style.paddingLeft = `${left}px`;
    const context = drawing(canvas, width, HEIGHT);
    const [from, to] = panel.whole;
    const rows = panel.rows.map((row) => row.members);
    const image = painted(panel.grid, { ...panel, rows, from, to, width: Math.round(width), height: HEIGHT });
    context.fillStyle = themed("void");
    context.fillRect(0, 0, width, HEIGHT);
    context.globalAlpha = 0.55;
    context.drawImage(image, 0, 0, width, HEIGHT);
    context.globalAlpha = 1;
    const box = frame();
    context.drawImage(image, box.x, box.y, box.width, box.height, box.x, box.y, box.width, box.height);
    context.strokeStyle = themed("ink");
    context.lineWidth = 2;
    context.strokeRect(box.x + 1, box.y + 1, Math.max(1, box.width - 2), Math.max(1, box.height - 2));

    function frame() {
      const x = ((seen.span[0] - from) / (to - from)) * width;
      const end = ((seen.span[1] - from) / (to - from)) * width;
      const first = panel.rows.indexOf(seen.rows[0]);
      const y = (first / panel.rows.length) * HEIGHT;
      return { x, y, width: Math.max(3, end - x), height: Math.max(3, (seen.rows.length / panel.rows.length) * HEIGHT) };
    }
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const { panel } = shown;
    const step = panel.whole[0] + ((event.clientX - box.left) / box.width) * (panel.whole[1] - panel.whole[0]);
    return { step, row: ((event.clientY - box.top) / box.height) * panel.rows.length };
  }

  function drag(event) {
    const { panel, seen } = shown;
    const { step, row } = at(event);
    const span = seen.span[1] - seen.span[0];
    const from = Math.min(panel.whole[1] - span, Math.max(panel.whole[0], step - span / 2));
    const many = seen.rows.length;
    const first = Math.min(panel.rows.length - many, Math.max(0, Math.round(row - many / 2)));
    move(Math.round(from), Math.round(from + span), panel.rows.slice(first, first + many));
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (!shown || event.button !== 0) return;
    held = event.pointerId;
    canvas.setPointerCapture(event.pointerId);
    drag(event);
  });
  canvas.addEventListener("pointermove", (event) => held !== null && shown && drag(event));
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (held = null));
  return { element, show };
}
