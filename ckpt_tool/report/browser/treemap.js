// Bytes by module, state and dtype: areas in two levels.

const LEAST = 0.002; // of all bytes: what is less is put together

// The bytes of every word (a module, a state or a dtype) and of what is inside it, the largest first.
function groupsBy(view, by) {
  const { tensors, data } = view, modules = data.templates.map(moduleOf);
  const amounts = new Float64Array(data.kinds.length);
  for (let row = 0; row < tensors.count; row += 1) amounts[tensors.kinds[row]] += tensors.bytes(row);

  const found = new Map();
  data.kinds.forEach((kind, number) => {
    const words = { module: modules[kind[0]], state: data.states[kind[1]], dtype: data.dtypes[kind[2]][0] };
    const inner = by === "module" ? `${words.state} ${words.dtype}` : words.module;
    if (!found.has(words[by])) found.set(words[by], new Map());
    const group = found.get(words[by]);
    const item = group.get(inner) || { name: inner, words, bytes: 0 };
    item.bytes += amounts[number];
    group.set(inner, item);
  });

  const total = amounts.reduce((a, b) => a + b, 0);
  const sumOf = (items) => items.reduce((sum, item) => sum + item.bytes, 0);
  const groups = [...found].map(([name, inner]) => ({ name, items: [...inner.values()], bytes: sumOf([...inner.values()]) }));
  groups.sort((a, b) => b.bytes - a.bytes);
  const large = groups.filter((group) => group.bytes >= LEAST * total), small = groups.slice(large.length);
  if (small.length) large.push({ name: plural(small.length, "other"), items: [], bytes: sumOf(small), rest: true });
  return { groups: large.filter((group) => group.bytes), total };
}

// The fill of a group, from the palette of what it is grouped by.
function fillOfGroup(view, by, group, number) {
  const { palette, dtypes } = view.data;
  if (group.rest) return [palette.rest, 0];
  if (by === "state") return view.stateFill(group.name);
  if (by === "dtype") return palette.dtypes[dtypes.findIndex(([name]) => name === group.name)];
  return fillAmong(palette.modules, number);
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

// What is inside a group: the states of a module in their colours, or, where there is one state, its dtypes in theirs;
// modules, which have no room for colours, as lines.
function innerTile(view, by, group, place) {
  const { item, x, y, width, height } = place;
  const kind = by !== "module" ? null : view.states.length > 1 ? "state" : "dtype";
  const fill = kind ? paintOf(fillOfGroup(view, kind, { name: item.words[kind] }, 0)) : "none";
  return svg("rect", {
    x: x + 0.5, y: y + 0.5, width: Math.max(0.5, width - 1), height: Math.max(0.5, height - 1),
    fill, stroke: "#000", "stroke-opacity": 0.45, "pointer-events": "all",
  }, svg("title", { text: `${group.name}, ${item.name}: ${size(item.bytes)}` }));
}

// The name of a tile with its bytes; without them where they would leave no room for the name's last component.
function tileLabel(group, width) {
  const amount = size(group.bytes), last = group.name.slice(group.name.lastIndexOf(".") + 1);
  const room = width - 16 - 6.7 * amount.length;
  const name = 6.7 * (last.length + 1) + 6 <= room || 6.7 * group.name.length + 6 <= room ? fitting(group.name, room) : "";
  return name ? `${name} ${amount}` : fitting(group.name, width - 8);
}

function treemap(view, by, width) {
  const { groups, total } = groupsBy(view, by), high = Math.round(Math.max(220, Math.min(420, width * 0.42)));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${high}`, width, height: high, role: "group", "aria-label": `bytes by ${by}` });
  const nodes = [], names = svg("g", { class: "names", "aria-hidden": "true" });
  squarified(groups, 0, 0, width, high).forEach((place, number) => {
    const { item: group, x, y, width: w, height: h } = place;
    const share = ((100 * group.bytes) / total).toFixed(1), text = `${group.name}: ${size(group.bytes)}, ${share} %`;
    const node = svg("g", { class: "tile", role: "button", "aria-label": text }, svg("title", { text }));
    node.append(svg("rect", {
      x: x + 1, y: y + 1, width: Math.max(0.5, w - 2), height: Math.max(0.5, h - 2),
      fill: paintOf(fillOfGroup(view, by, group, number)), stroke: "var(--ground)",
    }));
    const top = h > 34 && w > 40 ? 20 : 0;
    if (top && group.items.length > 1) for (const inner of squarified(group.items, x + 3, y + top, w - 6, h - top - 3)) {
      node.append(innerTile(view, by, group, inner));
      const name = fitting(inner.item.name, inner.width - 4);
      if (name && inner.height > 15) names.append(chip(name, inner.x + 4, inner.y + 13));
    }
    const label = tileLabel(group, w);
    if (label && h > 18) names.append(chip(label, x + 5, y + 14));
    pressable(node, () => { if (!group.rest) view.table.search(`${by}:${group.name}`); });
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
