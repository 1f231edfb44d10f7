// The TensorBoard around us: its theme, its reloads, and its address, part of which is ours.

const NAME = "gradwatch";
const OURS = `p.${NAME}.`; // before each of our words in TensorBoard's address

/** Keep `data-theme` of our document as TensorBoard's is; calls `changed` when it turns. */
export function followTheme(changed) {
  const outer = around === window ? null : around.document.body;
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

/** TensorBoard's window; ours where the page stands alone, or TensorBoard is shown in a page of another origin. */
const around = outside();

function outside() {
  try {
    return window.parent.document.body ? window.parent : window;
  } catch {
    return window;
  }
}

/** What the address says, `{run: "unhealthy"}` for `...#gradwatch&p.gradwatch.run=unhealthy`; without TensorBoard `...#run=unhealthy`. */
export function readAddress() {
  const found = {};
  for (const [name, value] of words()) {
    if (around === window) found[name] = value;
    else if (name.startsWith(OURS)) found[name.slice(OURS.length)] = value;
  }
  return found;
}

/** Make the address say `own`, in a new entry of the browser's history or, with `again`, in the present one. */
export function writeAddress(own, again) {
  if (!ours()) return;
  const mine = Object.entries(own).map(([name, value]) => [around === window ? name : OURS + name, value]);
  const others = around === window ? [] : words().filter(([name]) => name && name !== NAME && !name.startsWith(OURS));
  const said = [...others, ...mine].map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(value)}`);
  const hash = [...(around === window ? [] : [NAME]), ...said].join("&");
  const { pathname, search } = around.location;
  const address = `${pathname}${search}${hash && `#${hash}`}`;
  if (address === `${pathname}${search}${around.location.hash}`) return;
  try {
    around.history[again ? "replaceState" : "pushState"](around.history.state, "", address);
  } catch {
    // a browser takes a hundred entries in half a minute
  }
}

/** Call `moved` when the address has become another by hand, or by Back. */
export function followAddress(moved) {
  around.addEventListener("popstate", () => ours() && moved());
}

/** Whether TensorBoard shows our tab. */
function ours() {
  return around === window || around.location.hash === "" || words()[0]?.[0] === NAME;
}

function words() {
  return [...new URLSearchParams(around.location.hash.slice(1).replaceAll("+", "%2B"))];
}

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
