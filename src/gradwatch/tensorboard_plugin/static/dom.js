// Elements with text: whatever a name or a message holds, it is shown and never read as HTML.

/** An element `tag` with `attributes` (`on...` are listeners, true and false switch) and `children`: text or elements. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, String(value));
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

/** Put `children` in the place of what is in `parent`. */
export function fill(parent, ...children) {
  parent.replaceChildren(...children.flat().filter((child) => child != null && child !== false));
  return parent;
}

/** A canvas's context for drawing in CSS pixels, `width` by `height` of them, sharp on any screen. */
export function drawing(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The value of one of the style sheet's colours, which follow the theme. */
export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** `text` in at most `width` pixels of `context`'s font; it loses its beginning, since a layer's end tells it apart. */
export function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context.measureText(`…${text.slice(middle)}`).width <= width) high = middle;
    else low = middle + 1;
  }
  return `…${text.slice(low)}`;
}
