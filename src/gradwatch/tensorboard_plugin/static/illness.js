// Which layers of a run which alert names: of a parameter, its layer.

const RANK = { error: 3, warning: 2, notice: 1 };

/** For each alert the set of the places of its layers among `names`. */
export function sickBy(alerts, names) {
  const places = new Map(names.map((name, n) => [name, n]));
  return alerts.map((alert) => {
    const found = new Set();
    for (const site of [...alert.sites, alert.layer]) {
      for (let name = site; name; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) {
        if (!places.has(name)) continue;
        found.add(places.get(name));
        break;
      }
    }
    return found;
  });
}

/** For each place the worst severity that concerns it, null where none does. */
export function worstOf(alerts, sick, size) {
  const worst = new Array(size).fill(null);
  alerts.forEach((alert, number) => {
    for (const n of sick[number]) if (!(RANK[worst[n]] >= RANK[alert.severity])) worst[n] = alert.severity;
  });
  return worst;
}
