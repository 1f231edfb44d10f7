// Which layers of a run have which fault, and which suffer from it: of a parameter, its layer.

export const RANK = { error: 3, warning: 2, notice: 1 };

/**
 * For each alert the places of its layers among `names`: `own` of those with the fault, `origin` where it began, and
 * `effects`, place -> what follows there.
 */
export function faultsOf(alerts, names) {
  const places = new Map(names.map((name, n) => [name, n]));
  const placesOf = (sites) => sites.map((site) => placeOf(site, places)).filter((n) => n !== undefined);
  return alerts.map((alert) => {
    const effects = new Map();
    for (const effect of alert.effects) {
      const text = `${effect.rule} ${effect.rule === "starved" ? `by ${alert.layer}` : `after ${alert.rule}`}`;
      for (const n of placesOf(effect.sites)) effects.set(n, text);
    }
    return { own: new Set(placesOf([...alert.sites, alert.layer])), origin: placeOf(alert.layer, places), effects };
  });
}

/** What is wrong at a place, in words: of all alerts, those that are about it first. */
export function wordsAt(n, alerts, faults) {
  const own = alerts.flatMap((alert, number) => {
    const fault = faults[number];
    if (!fault.own.has(n)) return [];
    const several = fault.own.size > 1 || fault.effects.size > 0;
    return [several && fault.origin === n ? `${alert.rule} (origin)` : alert.rule];
  });
  return [...new Set([...own, ...faults.flatMap((fault) => fault.effects.get(n) ?? [])])];
}

/** Whether an alert is about a place, or something follows from it there. */
export function concerns(fault, n) {
  return fault.own.has(n) || fault.effects.has(n);
}

/** Whether an alert is about one of `places`, or about the whole model. */
export function touches(fault, places) {
  const all = [...fault.own, ...fault.effects.keys()];
  return !all.length || all.some((n) => places.has(n));
}

/** For each place the worst severity that concerns it, null where none does; an effect is a notice. */
export function worstOf(alerts, faults, size) {
  const worst = new Array(size).fill(null);
  const raise = (n, severity) => {
    if (!(RANK[worst[n]] >= RANK[severity])) worst[n] = severity;
  };
  alerts.forEach((alert, number) => {
    for (const n of faults[number].own) raise(n, alert.severity);
    for (const n of faults[number].effects.keys()) raise(n, "notice");
  });
  return worst;
}

function placeOf(site, places) {
  for (let name = site; name; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) {
    if (places.has(name)) return places.get(name);
  }
  return undefined;
}
