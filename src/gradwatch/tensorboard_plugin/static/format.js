// Numbers and steps as people read them; the same forms as in the terminal's table.

export const LOST = 98; // steps that are not in TensorBoard's memory
export const NO_NUMBER = 99; // of a statistic that says no reason
export const NOT_A_NUMBER = 100;
export const INFINITE = 101;

/** Three significant digits: "0.034", "3.4e-5". */
export function short(number) {
  if (Number.isNaN(number)) return "-";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  if (number === 0) return "0";
  const size = Math.abs(Number(number.toPrecision(3))); // 0.01 as float32 is less
  if (size >= 0.01 && size < 1000) return String(Number(number.toPrecision(3)));
  return number.toExponential(1).replace("e+", "e");
}

/** The last number of name `n` in a summary. */
export function lastNumber(summary, n) {
  const state = summary?.state?.[n];
  if (state === NOT_A_NUMBER) return "nan";
  if (state === INFINITE) return "inf";
  return short(summary?.last?.[n] ?? NaN);
}

/** All the digits that a float32 has. */
export function exact(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e-3 && size < 1e6) return String(Number(number.toPrecision(7)));
  return number.toExponential(6).replace(/\.?0+e/, "e").replace("e+", "e");
}

/** What a statistic is, without what is to say of special cases. */
export function briefly(meaning) {
  return meaning.split(";")[0];
}

export function percent(share) {
  if (Number.isNaN(share)) return "-";
  return share > 0 && share < 0.005 ? "<1%" : `${Math.round(100 * share)}%`;
}

/** Digits in groups of three. */
export function count(number) {
  return Math.round(number).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A list of names for a sentence; a long one keeps both ends. */
export function listing(names) {
  if (names.length <= 4) return names.join(", ");
  return `${names[0]}, ${names[1]} … ${names[names.length - 1]} (${names.length} in all)`;
}

/** A name of at most `most` characters: a long one keeps both ends, of which the last tells layers apart. */
export function shortened(name, most) {
  if (name.length <= most) return name;
  const ending = Math.ceil(0.6 * most);
  return `${name.slice(0, most - 1 - ending)}…${name.slice(name.length - ending)}`;
}

/** The layers of an alert, in words. */
export function layersOf(alert) {
  return alert.sites.length ? alert.sites : [alert.layer === "total" ? "the whole model" : alert.layer];
}

/** Where an alert begins on the x-axis. */
export function began(alert) {
  return alert.axis ?? alert.step;
}

/** Where it was noticed. */
export function noticed(alert) {
  return alert.noticed_axis ?? alert.noticed;
}

/** Where it ends, null while it is open. */
export function ended(alert) {
  return alert.closed_axis ?? alert.closed_step;
}

export function period(alert) {
  const from = began(alert);
  const to = ended(alert);
  const found = noticed(alert) === from ? "" : ` (noticed at ${count(noticed(alert))})`;
  const back = alert.times > 1 ? `, came back ${plural(alert.times - 1, "time")}` : "";
  if (to == null) return `since step ${count(from)}${found}, still open${back}`;
  return to === from ? `at step ${count(from)}${found}${back}` : `steps ${count(from)} to ${count(to)}${found}${back}`;
}
