// The TensorBoard around us: its theme, its reloads, and what its address asks of us.

/** Keep `data-theme` of our document as TensorBoard's is; calls `changed` when it turns. */
export function followTheme(changed) {
  const outer = bodyAround();
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const dark = outer ? outer.classList.contains("dark-mode") : system.matches;
    const theme = dark ? "dark" : "light";
    if (document.documentElement.dataset.theme !== theme) {
      document.documentElement.dataset.theme = theme;
      changed();
    }
  };
  apply();
  if (outer) new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ["class"] });
  else system.addEventListener("change", apply);
}

function bodyAround() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // TensorBoard itself is shown in a page of another origin
  }
}

/** What TensorBoard's address asks of us: `...#gradwatch&p.gradwatch.run=unhealthy` is {run: "unhealthy"}. */
export function linked() {
  const found = {};
  try {
    for (const [name, value] of new URLSearchParams(window.parent.location.hash.slice(1))) {
      if (name.startsWith(OURS)) found[name.slice(OURS.length)] = value;
    }
  } catch {
    // a page of another origin keeps its address to itself
  }
  return found;
}

const OURS = "p.gradwatch.";

/** Call `reloaded` whenever TensorBoard has new data. */
export function connect(reloaded) {
  if (window.parent === window) return;
  const { port1: port, port2 } = new MessageChannel();
  port.onmessage = ({ data }) => {
    const { type, id, isReply } = JSON.parse(data);
    if (isReply) return;
    port.postMessage(JSON.stringify({ type, id, payload: null, error: null, isReply: true }));
    if (type === "experimental.DataReloaded") reloaded();
  };
  window.parent.postMessage("experimental.bootstrap", "*", [port2]);
}
