// Elements with text: whatever a name or a message holds, it is shown and never read as HTML.

/** An element `tag` with `attributes` (`on...` are listeners, true and false switch) and `children`: text or elements. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, String(value));
  }
  made.append(...shownOf(children));
  return made;
}

/** Put `children` in the place of what is in `parent`. */
export function fill(parent, ...children) {
  parent.replaceChildren(...shownOf(children));
  return parent;
}

function shownOf(children) {
  const some = children.flat().filter((child) => child != null && child !== false);
  return some.map((child) => (typeof child === "string" ? visible(child) : child));
}

/** `text` with signs for characters that are not seen themselves and could turn or hide what is. */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2028\u2029\u2060-\u206f\ufeff]/g, escaped);
}

function escaped(character) {
  return `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`;
}

/** The font of text in pictures. */
export const FONT = '11px Roboto, "Helvetica Neue", Arial, sans-serif';

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
  context.font = FONT;
  return context;
}

/** The value of one of the style sheet's colours, which follow the theme. */
export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A square in one of these colours, beside what it stands for. */
export function swatch(name) {
  return el("span", { class: "swatch", style: `background:var(--${name})` });
}

/** A name in at most `width` pixels of `context`'s font: outer parts become initials with their numbers, then its middle is cut. */
export function fitted(context, whole, width) {
  const fits = (text) => context.measureText(text).width <= width;
  const parts = visible(whole).split(".");
  for (let i = 0; i + 1 < parts.length && !fits(parts.join(".")); i += 1) {
    if (!/^\d+$/.test(parts[i])) parts[i] = parts[i].replace(/(?<=^.).*?(?=\d*$)/u, "");
  }
  const text = parts.join(".");
  if (fits(text)) return text;
  let kept = text.length;
  const cut = () => `${text.slice(0, kept >> 1)}…${text.slice(text.length - kept + (kept >> 1))}`;
  do kept -= 1;
  while (kept > 1 && !fits(cut()));
  return cut();
}
