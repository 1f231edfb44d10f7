// Which layers of a run have which fault, and which suffer from it: of a parameter, its layer.

export const RANK = { error: 3, warning: 2, notice: 1 };

/**
 * `alerts` with the places of their layers among `names`: `own` of those with the fault, `origin` where it began, and
 * `effectsAt`, place -> what follows there.
 */
export function placedAlerts(alerts, names) {
  const places = new Map(names.map((name, n) => [name, n]));
  const placesOf = (sites) => sites.map((site) => placeOf(site, places)).filter((n) => n !== undefined);
  return alerts.map((alert) => {
    const effectsAt = new Map();
    for (const effect of alert.effects) {
      const text = `${effect.rule} ${effect.rule === "starved" ? `by ${alert.layer}` : `after ${alert.rule}`}`;
      for (const n of placesOf(effect.sites)) effectsAt.set(n, text);
    }
    return { ...alert, own: new Set(placesOf([...alert.sites, alert.layer])), origin: placeOf(alert.layer, places), effectsAt };
  });
}

/** What is wrong at a place, in words: of all alerts, those that are about it first. */
export function wordsAt(n, alerts) {
  const own = alerts.flatMap((alert) => {
    if (!alert.own.has(n)) return [];
    const several = alert.own.size > 1 || alert.effectsAt.size > 0;
    return [several && alert.origin === n ? `${alert.rule} (origin)` : alert.rule];
  });
  return [...new Set([...own, ...alerts.flatMap((alert) => alert.effectsAt.get(n) ?? [])])];
}

/** Whether an alert is about a place, or something follows from it there. */
export function concerns(alert, n) {
  return alert.own.has(n) || alert.effectsAt.has(n);
}

/** Whether an alert is about one of `places`, or about the whole model. */
export function touches(alert, places) {
  const all = [...alert.own, ...alert.effectsAt.keys()];
  return !all.length || all.some((n) => places.has(n));
}

/** For each of `size` places the worst severity that concerns it, null where none does; an effect is a notice. */
export function worstOf(alerts, size) {
  const worst = new Array(size).fill(null);
  const raise = (n, severity) => {
    if (!(RANK[worst[n]] >= RANK[severity])) worst[n] = severity;
  };
  for (const alert of alerts) {
    for (const n of alert.own) raise(n, alert.severity);
    for (const n of alert.effectsAt.keys()) raise(n, "notice");
  }
  return worst;
}

function placeOf(site, places) {
  for (let name = site; name; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) {
    if (places.has(name)) return places.get(name);
  }
  return undefined;
}
