// The rows of a map: layers, or the modules around them, which are closed to one row where there are many.

const MOST = 64; // rows that a map has at first: each has room for its name

/**
 * The rows of `layers` (places among `names`, in model order): [{label, members (places), module (its name, where the row
 * is a closed module), opens: [{name, rows}] (the open modules that begin here, and how many rows they have)}].
 *
 * At first as many modules are open as there is room for, and those around the places in `origins`; those in `turned` are
 * the other way round. With a `filter` there are only layers with it in their names.
 */
export function rowsOf(names, layers, { origins, turned, filter }) {
  const wanted = filter.toLowerCase();
  if (wanted) return layers.filter((n) => names[n].toLowerCase().includes(wanted)).map((n) => row(names[n], [n]));
  const root = treeOf(names, layers);
  const open = new Set([root]);
  let level = [root];
  let rows = root.children.length;
  while (level.length) {
    const next = level.flatMap((node) => node.children).filter((node) => node.children);
    const more = next.reduce((sum, node) => sum + node.children.length - 1, 0);
    if (!next.length || (rows + more > MOST && layers.length > MOST)) break;
    rows += more;
    next.forEach((node) => open.add(node));
    level = next;
  }
  for (const n of origins) {
    for (let node = root; node?.children; node = node.children.find((child) => child.members.includes(n))) open.add(node);
  }
  const found = [];
  const visit = (node) => {
    if (!node.children) {
      found.push(row(names[node.members[0]], node.members));
      return;
    }
    if (node !== root && open.has(node) === turned.includes(node.name)) {
      found.push({ ...row(`${node.name} (${node.members.length})`, node.members), module: node.name });
      return;
    }
    const begin = found.length;
    node.children.forEach(visit);
    if (node !== root && found[begin]) found[begin].opens.unshift({ name: node.name, rows: found.length - begin });
  };
  visit(root);
  return found;
}

/** The numbers of those `rows` that have a member of which `has` says so. */
export function rowsWith(rows, has) {
  return rows.flatMap((each, i) => (each.members.some(has) ? [i] : []));
}

/** The first and the last layer in `rows`, by name: the ends of a view. */
export function endsOf(rows, names) {
  const last = rows[rows.length - 1].members;
  return { top: names[rows[0].members[0]], bottom: names[last[last.length - 1]] };
}

function row(label, members) {
  return { label, members, module: null, opens: [] };
}

/** Modules with more than one layer in them: {name, members, children}; a leaf is a layer and has no children. */
function treeOf(names, layers) {
  const root = { name: "", members: layers, parts: new Map() };
  for (const n of layers) {
    let node = root;
    const parts = names[n].split(".");
    parts.forEach((part, i) => {
      if (!node.parts.has(part)) node.parts.set(part, { name: parts.slice(0, i + 1).join("."), members: [], parts: new Map() });
      node = node.parts.get(part);
      node.members.push(n);
    });
    node.own = n;
  }
  let found = joined(root);
  while (found.children.length === 1 && found.children[0].children) [found] = found.children; // all are in one module
  return found;
}

/** `node` with its modules as `children`; one with a single thing in it is that thing. */
function joined(node) {
  const own = node.own === undefined ? [] : [{ name: node.name, members: [node.own], children: null }];
  const children = [...own, ...[...node.parts.values()].map(joined)];
  if (node.name !== "" && children.length === 1) return children[0];
  return { name: node.name, members: node.members, children };
}
