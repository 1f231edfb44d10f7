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

const PATIENCE = 500; // milliseconds that TensorBoard is given to say what its address asks

/** Call `reloaded` whenever TensorBoard has new data. Resolves to what its address asks of us (`p.gradwatch.run=`). */
export function connect(reloaded) {
  if (window.parent === window) return Promise.resolve({});
  const { port1: port, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    setTimeout(() => resolve({}), PATIENCE);
    port.onmessage = ({ data }) => {
      const message = JSON.parse(data);
      if (message.isReply) {
        resolve(message.payload ?? {});
        return;
      }
      if (message.type === "experimental.DataReloaded") reloaded();
      port.postMessage(JSON.stringify({ type: message.type, id: message.id, payload: null, error: null, isReply: true }));
    };
    window.parent.postMessage("experimental.bootstrap", "*", [port2]);
    const question = { type: "experimental.GetURLPluginData", id: 0, payload: null, error: null, isReply: false };
    port.postMessage(JSON.stringify(question));
  });
}
