// Bytes by module, state and dtype: areas in two levels.

const LEAST = 0.002; // of all bytes: what is less is put together

function sums(view, by) {
  const { tensors, data } = view, found = new Map(), modules = data.templates.map(moduleOf);
  const amount = new Float64Array(data.kinds.length);
  for (let row = 0; row < tensors.count; row += 1) amount[tensors.kinds[row]] += tensors.sizes[tensors.kinds[row]];
  data.kinds.forEach((kind, number) => {
    const words = { module: modules[kind[0]], state: data.states[kind[1]], dtype: data.dtypes[kind[2]][0] };
    const outer = words[by], inner = by === "module" ? `${words.state} ${words.dtype}` : words.module;
    if (!found.has(outer)) found.set(outer, new Map());
    found.get(outer).set(inner, (found.get(outer).get(inner) || 0) + amount[number]);
  });
  const total = amount.reduce((a, b) => a + b, 0);
  const groups = [...found].map(([name, inner]) => ({ name, items: [...inner].map(([item, bytes]) => ({ name: item, bytes })), bytes: [...inner.values()].reduce((a, b) => a + b, 0) }));
  groups.sort((a, b) => b.bytes - a.bytes);
  const large = groups.filter((group) => group.bytes >= LEAST * total), small = groups.slice(large.length);
  if (small.length) large.push({ name: `${plural(small.length, "other")}`, items: [{ name: "", bytes: small.reduce((sum, group) => sum + group.bytes, 0) }], bytes: small.reduce((sum, group) => sum + group.bytes, 0), rest: true });
  return { groups: large.filter((group) => group.bytes), total };
}

// Bruls, Huizing and van Wijk 2000, "Squarified Treemaps": rows of items as nearly square as may be.
function squarified(items, x, y, width, height) {
  const total = items.reduce((sum, item) => sum + item.bytes, 0), places = [];
  let rest = [...items].sort((a, b) => b.bytes - a.bytes), scale = (width * height) / (total || 1);
  while (rest.length) {
    const short = Math.min(width, height);
    let row = [], area = 0, worst = Infinity;
    for (const item of rest) {
      const more = area + item.bytes * scale, side = more / short;
      const ratio = Math.max(...[...row, item].map((each) => { const length = (each.bytes * scale) / side; return Math.max(side / length, length / side); }));
      if (row.length && ratio > worst) break;
      row.push(item); area = more; worst = ratio;
    }
    const side = area / short;
    let at = 0;
    for (const item of row) {
      const length = (item.bytes * scale) / side;
      places.push(width < height ? { item, x: x + at, y, width: length, height: side } : { item, x, y: y + at, width: side, height: length });
      at += length;
    }
    if (width < height) { y += side; height -= side; } else { x += side; width -= side; }
    rest = rest.slice(row.length);
  }
  return places;
}

function treemap(view, by, width) {
  const { groups, total } = sums(view, by), high = Math.round(Math.max(220, Math.min(420, width * 0.42)));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${high}`, width, height: high, role: "group", "aria-label": `bytes by ${by}` });
  const nodes = [], names = svg("g", { class: "names", "aria-hidden": "true" });
  squarified(groups, 0, 0, width, high).forEach((place, number) => {
    const { item: group, x, y, width: w, height: h } = place;
    const share = ((100 * group.bytes) / total).toFixed(1), text = `${group.name}: ${size(group.bytes)}, ${share} %`;
    const node = svg("g", { class: "tile", role: "button", "aria-label": text }, svg("title", { text }));
    node.append(svg("rect", { x: x + 1, y: y + 1, width: Math.max(0.5, w - 2), height: Math.max(0.5, h - 2), fill: fillOf(number), stroke: "var(--ground)" }));
    const top = h > 34 && w > 40 ? 20 : 0;
    if (top && group.items.length > 1) for (const inner of squarified(group.items, x + 3, y + top, w - 6, h - top - 3)) {
      node.append(svg("rect", { x: inner.x + 0.5, y: inner.y + 0.5, width: Math.max(0.5, inner.width - 1), height: Math.max(0.5, inner.height - 1), fill: "#fff", "fill-opacity": 0.35, stroke: "#000", "stroke-opacity": 0.35 }, svg("title", { text: `${group.name}, ${inner.item.name}: ${size(inner.item.bytes)}` })));
      const name = fitting(inner.item.name, inner.width - 4);
      if (name && inner.height > 15) names.append(chip(name, inner.x + 4, inner.y + 13));
    }
    const amount = size(group.bytes), name = fitting(group.name, w - 16 - 6.7 * amount.length);
    const label = name ? `${name} ${amount}` : fitting(group.name, w - 8);
    if (label && h > 18) names.append(chip(label, x + 5, y + 14));
    pressable(node, () => { if (!group.rest) view.table.search(by === "module" ? `module:${group.name}` : `${by}:${group.name}`); });
    nodes.push(node);
  });
  picture.append(...nodes, names);
  roving(picture, nodes, () => 1);
  return picture;
}

function chip(text, x, y) {
  return svg("g", {}, svg("rect", { x: x - 2, y: y - 10, width: text.length * 6.7 + 4, height: 13, rx: 2, fill: "#fff", "fill-opacity": 0.88 }), svg("text", { class: "on-chip", x, y, text }));
}

function treemapSection(view) {
  if (!view.tensors.count) return null;
  const box = el("div", { class: "treemap" });
  let by = "module";
  const again = drawn(box, (width) => treemap(view, by, width));
  const choices = ["module", "state", "dtype"].map((word) => {
    const input = el("input", { type: "radio", name: "by", value: word });
    input.checked = word === by;
    input.addEventListener("change", () => { by = word; again(); });
    return el("label", {}, input, word);
  });
  return section("treemap", "Bytes by module, state and dtype", el("fieldset", {}, el("legend", { text: "by" }), ...choices), box);
}
