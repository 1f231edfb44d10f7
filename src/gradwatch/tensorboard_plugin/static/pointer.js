// What hands do on a heat map: point, drag, click, turn the wheel, and the same by the keyboard.

import { columnAt } from "./api.js";
import { standout } from "./paint.js";

const DRAG = 5; // pixels that make a click a drag
const PAN = 0.2; // share of what is seen by which a key moves it

/**
 * Listen on a heat `map` and tell `act`: hover(map, at, event), view(map, {from, to, rows}, kind), open(map,
 * name), turn(map, module), pin(map, step), region(map, {from, to, rows}).
 */
export function pointing(map, act) {
  const { element } = map;
  let pressed = null;
  let cursor = null;
  let turned = null;

  const spot = (event) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  /** What is at a row and a step: of a closed module the layer that stands out there. */
  function cell(row, step) {
    const { rows } = map.place();
    const { grid, usual, domain } = map.shown();
    const { members } = rows[row];
    const name = standout(grid, members, columnAt(grid, step), { usual, log: domain.log });
    return { name, row, step, among: members.length };
  }

  function under({ x, y }) {
    const place = map.place();
    if (!place) return null;
    const { plot, rows, gutter } = place;
    const row = Math.floor(((y - plot.top) / plot.height) * rows.length);
    const within = x >= plot.left && x < plot.left + plot.width;
    const inRows = row >= 0 && row < rows.length;
    if (x < plot.left && inRows) return { row, label: true, module: moduleAt(rows, row, x < gutter), step: null };
    if (!within || y > plot.top + plot.height) return null;
    const step = Math.floor(place.stepAt(x));
    return inRows ? cell(row, step) : { name: -1, row, step };
  }

  element.addEventListener("pointermove", (event) => {
    const at = spot(event);
    if (pressed && Math.hypot(at.x - pressed.x, at.y - pressed.y) > DRAG) {
      pressed.dragged = true;
      map.frame(boxed(pressed, at), pressed.counts);
      act.hover(map, null);
      return;
    }
    const found = under(at);
    element.style.cursor = found?.label || found?.name >= 0 ? "pointer" : "default";
    element.title = found?.label ? labelTitle(found) : "";
    act.hover(map, found && found.step != null ? found : null, event);
  });
  element.addEventListener("pointerleave", () => {
    if (!pressed) act.hover(map, null);
  });
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !map.place()) return;
    pressed = { ...spot(event), counts: event.shiftKey };
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointercancel", () => {
    pressed = null;
  });
  element.addEventListener("pointerup", (event) => {
    if (!pressed) return;
    const [begun, at] = [pressed, spot(event)];
    pressed = null;
    if (begun.dragged) {
      const box = boxed(begun, at);
      map.point(null);
      const chosen = regionOf(box);
      if (begun.counts) act.region(map, chosen);
      else act.view(map, chosen);
      return;
    }
    const found = under(at);
    if (found?.module != null) act.turn(map, found.module);
    else if (found?.label) act.open(map, map.place().rows[found.row].members[0]);
    else if (found) act.pin(map, found.step);
  });
  element.addEventListener("dblclick", (event) => {
    if (!under(spot(event))?.label) act.view(map, null);
  });
  element.addEventListener(
    "wheel",
    (event) => {
      const focused = document.activeElement === element;
      if (!focused && !event.ctrlKey && !event.metaKey) return; // the page scrolls
      const place = map.place();
      const at = place && under(spot(event));
      if (!at || at.step == null) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        pan(PAN * Math.sign(event.deltaX || event.deltaY), 0);
        return;
      }
      if (!turned) requestAnimationFrame(turn); // a wheel turns faster than a screen is drawn
      turned = { step: at.step, factor: (turned?.factor ?? 1) * (event.deltaY > 0 ? 1.25 : 0.8) };
    },
    { passive: false },
  );

  function turn() {
    const { step, factor } = turned;
    turned = null;
    zoomAt(step, factor);
  }

  function labelTitle({ row, module }) {
    const { rows } = map.place();
    const { names } = map.shown().run;
    if (module === null) return names[rows[row].members[0]];
    return `${rows[row].module !== null ? "Open" : "Close"} ${module}`;
  }

  /** A box as wide or as high as a person drew it; a thin one is meant for the other axis alone. */
  function boxed(begun, at) {
    const { plot, rows } = map.place();
    const clampX = (x) => Math.min(plot.left + plot.width, Math.max(plot.left, x));
    const clampY = (y) => Math.min(plot.top + plot.height, Math.max(plot.top, y));
    let [left, right] = [clampX(Math.min(begun.x, at.x)), clampX(Math.max(begun.x, at.x))];
    let [top, bottom] = [clampY(Math.min(begun.y, at.y)), clampY(Math.max(begun.y, at.y))];
    if (bottom - top < Math.max(12, plot.height / rows.length)) [top, bottom] = [plot.top, plot.top + plot.height];
    else if (right - left < 12) [left, right] = [plot.left, plot.left + plot.width];
    return { left, top, width: right - left, height: bottom - top };
  }

  /** The steps and rows in a box of pixels. */
  function regionOf(box) {
    const { plot, rows, stepAt } = map.place();
    const [first, last] = [box.top, box.top + box.height].map((y) => ((y - plot.top) / plot.height) * rows.length);
    const chosen = rows.slice(Math.floor(first), Math.max(Math.floor(first) + 1, Math.ceil(last - 1e-6)));
    const [from, to] = [Math.floor(stepAt(box.left)), Math.ceil(stepAt(box.left + box.width))];
    return { from, to: Math.max(from + 2, to), rows: chosen };
  }

  function zoomAt(step, factor) {
    const { from, to, rows } = map.place();
    const [whole, end] = map.shown().whole;
    const span = Math.min(end - whole, Math.max(2, (to - from) * factor));
    const begin = Math.min(end - span, Math.max(whole, step - ((step - from) / (to - from)) * span));
    const view = { from: Math.round(begin), to: Math.max(Math.round(begin) + 2, Math.round(begin + span)), rows };
    act.view(map, view, "zoom");
  }

  /** Move what is seen by shares of its steps and rows. */
  function pan(across, down) {
    const { from, to, rows } = map.place();
    const { whole, all } = map.shown();
    const span = to - from;
    const begin = Math.min(whole[1] - span, Math.max(whole[0], from + Math.sign(across) * Math.max(1, Math.abs(across) * span)));
    const first = all.indexOf(rows[0]);
    const by = Math.sign(down) * Math.max(1, Math.round(Math.abs(down) * rows.length));
    const top = Math.min(all.length - rows.length, Math.max(0, first + (down ? by : 0)));
    act.view(map, { from: Math.round(across ? begin : from), to: Math.round(across ? begin + span : to), rows: all.slice(top, top + rows.length) }, "pan");
  }

  element.addEventListener("keydown", (event) => {
    const place = map.place();
    if (!place || event.ctrlKey || event.metaKey || event.altKey) return;
    const { rows, from, to, plot } = place;
    const far = event.shiftKey ? 10 : 1;
    const one = Math.max(1, Math.round((to - from) / plot.width));
    cursor ??= { row: 0, step: Math.floor(from) };
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const row = Math.min(cursor.row, rows.length - 1);
    if (key === "ArrowRight") cursor.step += one * far;
    else if (key === "ArrowLeft") cursor.step -= one * far;
    else if (key === "ArrowDown") cursor.row += far;
    else if (key === "ArrowUp") cursor.row -= far;
    else if (key === "Enter") {
      event.preventDefault();
      const module = moduleAt(rows, row, false);
      if (module !== null) act.turn(map, module);
      else act.open(map, rows[row].members[0]);
      return;
    } else if (key === "c") {
      event.preventDefault();
      const around = openAround(rows, row);
      if (around !== null) act.turn(map, around);
      return;
    } else if (key === " ") {
      event.preventDefault();
      act.pin(map, cursor.step);
      return;
    } else if (key === "+" || key === "=" || key === "w") zoomAt(cursor.step, 0.5);
    else if (key === "-" || key === "s") zoomAt(cursor.step, 2);
    else if (key === "a") pan(-PAN, 0);
    else if (key === "d") pan(PAN, 0);
    else if (key === "PageDown") pan(0, 1);
    else if (key === "PageUp") pan(0, -1);
    else if (key === "0" || key === "Escape") act.view(map, null);
    else return;
    event.preventDefault();
    const now = map.place();
    cursor.row = Math.min(now.rows.length - 1, Math.max(0, cursor.row));
    cursor.step = Math.min(Math.ceil(now.to) - 1, Math.max(Math.floor(now.from), cursor.step));
    act.hover(map, { ...cell(cursor.row, cursor.step), spoken: true });
  });
  element.addEventListener("blur", () => act.hover(map, null));
}

/** The module that a click beside a row is meant for: a closed one, or in the gutter the innermost open one around it. */
function moduleAt(rows, row, inGutter) {
  if (rows[row].module !== null) return rows[row].module;
  return inGutter ? openAround(rows, row) : null;
}

function openAround(rows, row) {
  for (let i = row; i >= 0; i -= 1) {
    const around = rows[i].opens.filter((each) => i + each.rows > row);
    if (around.length) return around[around.length - 1].name;
  }
  return null;
}
