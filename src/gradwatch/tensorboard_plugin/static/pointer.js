// What hands do on a heat map: point, drag to zoom, click to open a layer, and the same by the keyboard.

const DRAG = 5; // pixels that make a click a drag

/** Listen on `panel` (a heat map) and tell `act`: hover(panel, at, event), view(panel, {from, to, rows}), open(name). */
export function pointing(panel, act) {
  const { element } = panel;
  let pressed = null;
  let cursor = null;
  let turned = null;

  const spot = (event) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  function under({ x, y }) {
    const place = panel.place();
    if (!place) return null;
    const { plot, rows } = place;
    const row = Math.floor(((y - plot.top) / plot.height) * rows.length);
    const within = x >= plot.left && x < plot.left + plot.width;
    const inRows = row >= 0 && row < rows.length;
    if (x < plot.left && inRows) return { name: rows[row], row, label: true, step: null };
    if (!within || y > plot.top + plot.height) return null;
    return { name: inRows ? rows[row] : -1, row, step: Math.floor(place.stepAt(x)), x };
  }

  element.addEventListener("pointermove", (event) => {
    const at = spot(event);
    if (pressed && Math.hypot(at.x - pressed.x, at.y - pressed.y) > DRAG) {
      pressed.dragged = true;
      panel.frame(boxed(pressed, at));
      act.hover(panel, null);
      return;
    }
    const found = under(at);
    element.style.cursor = found?.label || found?.name >= 0 ? "pointer" : "default";
    act.hover(panel, found && found.step != null ? found : null, event);
  });
  element.addEventListener("pointerleave", () => {
    if (!pressed) act.hover(panel, null);
  });
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !panel.place()) return;
    pressed = spot(event);
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
      panel.point(null);
      zoomTo(box);
    } else {
      const found = under(at);
      if (found?.name >= 0) act.open(panel, found.name);
    }
  });
  element.addEventListener("dblclick", () => act.view(panel, null));
  element.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      const place = panel.place();
      const at = place && under(spot(event));
      if (!at || at.step == null) return;
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

  /** A box as wide or as high as a person drew it; a thin one is meant for the other axis alone. */
  function boxed(begun, at) {
    const { plot, rows } = panel.place();
    const clampX = (x) => Math.min(plot.left + plot.width, Math.max(plot.left, x));
    const clampY = (y) => Math.min(plot.top + plot.height, Math.max(plot.top, y));
    let [left, right] = [clampX(Math.min(begun.x, at.x)), clampX(Math.max(begun.x, at.x))];
    let [top, bottom] = [clampY(Math.min(begun.y, at.y)), clampY(Math.max(begun.y, at.y))];
    if (bottom - top < Math.max(12, plot.height / rows.length)) [top, bottom] = [plot.top, plot.top + plot.height];
    else if (right - left < 12) [left, right] = [plot.left, plot.left + plot.width];
    return { left, top, width: right - left, height: bottom - top };
  }

  function zoomTo(box) {
    const { plot, rows, stepAt } = panel.place();
    const [first, last] = [box.top, box.top + box.height].map((y) => ((y - plot.top) / plot.height) * rows.length);
    const chosen = rows.slice(Math.floor(first), Math.max(Math.floor(first) + 1, Math.ceil(last - 1e-6)));
    const [from, to] = [Math.floor(stepAt(box.left)), Math.ceil(stepAt(box.left + box.width))];
    act.view(panel, { from, to: Math.max(from + 2, to), rows: chosen });
  }

  function zoomAt(step, factor) {
    const { from, to, rows } = panel.place();
    const [whole, end] = panel.shown().whole;
    const span = Math.min(end - whole, Math.max(2, (to - from) * factor));
    const begin = Math.min(end - span, Math.max(whole, step - ((step - from) / (to - from)) * span));
    act.view(panel, { from: Math.round(begin), to: Math.round(begin + span), rows });
  }

  element.addEventListener("keydown", (event) => {
    const place = panel.place();
    if (!place || event.ctrlKey || event.metaKey || event.altKey) return;
    const { rows, from, to, plot } = place;
    const far = event.shiftKey ? 10 : 1;
    const one = Math.max(1, Math.round((to - from) / plot.width));
    cursor ??= { row: 0, step: Math.floor(from) };
    if (event.key === "ArrowRight") cursor.step += one * far;
    else if (event.key === "ArrowLeft") cursor.step -= one * far;
    else if (event.key === "ArrowDown") cursor.row += far;
    else if (event.key === "ArrowUp") cursor.row -= far;
    else if (event.key === "Enter") {
      event.preventDefault();
      act.open(panel, rows[Math.min(cursor.row, rows.length - 1)]);
      return;
    } else if (event.key === "+" || event.key === "=") zoomAt(cursor.step, 0.5);
    else if (event.key === "-") zoomAt(cursor.step, 2);
    else if (event.key === "0" || event.key === "Escape") act.view(panel, null);
    else return;
    event.preventDefault();
    const now = panel.place();
    cursor.row = Math.min(now.rows.length - 1, Math.max(0, cursor.row));
    cursor.step = Math.min(Math.ceil(now.to) - 1, Math.max(Math.floor(now.from), cursor.step));
    act.hover(panel, { name: now.rows[cursor.row], row: cursor.row, step: cursor.step, spoken: true });
  });
  element.addEventListener("blur", () => act.hover(panel, null));
}
