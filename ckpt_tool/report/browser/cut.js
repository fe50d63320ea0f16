// How one tensor is cut: its boxes in two dims, coloured by who holds them, before and after.

const LISTED = 64; // boxes in the list below a drawing

// The two dims to draw: those that are cut into most parts, and of those that aren't the last ones.
function dimsOf(shape, boxes) {
  const parts = shape.map((_, dim) => new Set(boxes.map((box) => (box ? box[dim] : 0))).size);
  const order = shape.map((_, dim) => dim).sort((a, b) => parts[b] - parts[a] || b - a);
  return order.slice(0, 2).sort((a, b) => a - b);
}

function span(box, shape, dim) {
  return box ? [box[dim], box[shape.length + dim]] : [0, shape[dim]];
}

function whoText(side, holders) {
  const first = side.holders[holders[0]].name;
  const name = side.ranks ? first : shortFile(first);
  return holders.length > 1 ? `${name} + ${plural(holders.length - 1, "copy").replace("copys", "copies")}` : name;
}

function boxText(box, shape) {
  if (!shape.length) return "the value";
  return shape.map((_, dim) => { const [start, extent] = span(box, shape, dim); return `${start}:${start + extent}`; }).join(", ");
}

function drawCut(view, row, number, width) {
  const side = view.data.sides[number], shape = view.tensors.shape(row), cut = view.tensors.cut(row, number);
  const boxes = cut[0], dims = dimsOf(shape, boxes);
  const [down, right] = dims.length > 1 ? dims : [null, dims[0] ?? null];
  const extents = [down === null ? 1 : shape[down], right === null ? 1 : shape[right]].map((extent) => Math.max(1, extent));
  const left = down === null ? 4 : 58, wide = Math.min(width, 620) - left - 6;
  const high = down === null || boxes.length === 1 ? 56 : Math.round(Math.max(0.28, Math.min(0.9, extents[0] / extents[1])) * Math.min(wide, 360));
  const label = `${side.title ? `${side.title}: ` : ""}${plural(boxes.length + cut[2], "box").replace("boxs", "boxes")} of ${view.tensors.name(row)}`;
  const picture = svg("svg", { viewBox: `0 0 ${wide + left + 6} ${high + 24}`, width: wide + left + 6, height: high + 24, role: "img", "aria-label": label });
  const seen = new Set();
  boxes.forEach((box, at) => {
    const holders = holdersOf(cut[1][at]);
    const [y, h] = down === null ? [0, 1] : span(box, shape, down), [x, w] = right === null ? [0, 1] : span(box, shape, right);
    const place = `${y},${h},${x},${w}`;
    if (seen.has(place)) return; // others lie behind it, along dims that are not drawn
    seen.add(place);
    const px = left + (x / extents[1]) * wide, pw = (w / extents[1]) * wide, py = (y / extents[0]) * high, ph = (h / extents[0]) * high;
    const text = `${boxText(box, shape)}: ${holders.slice(0, 8).map((holder) => side.holders[holder].name).join("; ")}${holders.length > 8 ? `; ${count(holders.length - 8)} more` : ""}`;
    const isFallback = view.tensors.fallbacks.has(row) && number;
    picture.append(svg("rect", {
      class: "box", x: px + 0.5, y: py + 0.5, width: Math.max(1, pw - 1), height: Math.max(1, ph - 1),
      fill: paintOf(fillOfHolder(side.holders[holders[0]])), stroke: "#000", "stroke-opacity": 0.55,
      "stroke-dasharray": isFallback ? "5 3" : null, "stroke-width": isFallback ? 2 : 1,
    }, svg("title", { text })));
    const name = fitting(whoText(side, holders), pw - 8);
    if (name && ph > 20) {
      const chip = name.length * 6.7 + 8;
      picture.append(svg("rect", { x: px + pw / 2 - chip / 2, y: py + ph / 2 - 8, width: chip, height: 16, rx: 3, fill: "#fff", "fill-opacity": 0.9 }),
        svg("text", { class: "on-chip", x: px + pw / 2, y: py + ph / 2 + 4, "text-anchor": "middle", text: name }));
    }
  });
  if (right !== null) picture.append(svg("text", { x: left, y: high + 16, text: `dim ${right}: ${count(shape[right])} \u2192` }));
  if (down !== null) {
    picture.append(svg("text", { x: 0, y: 11, text: `dim ${down}` }), svg("text", { x: 0, y: 25, text: fitting(count(shape[down]), left) }), svg("text", { x: 0, y: 39, text: "\u2193" }));
  }
  return picture;
}

function cutFigure(view, row, number) {
  const side = view.data.sides[number], cut = view.tensors.cut(row, number), shape = view.tensors.shape(row);
  const title = side.title ? `${side.title}: ` : "";
  if (!cut) return el("div", {}, el("h3", { text: `${title}not there` }));
  const boxes = cut[0].length + cut[2], holders = new Set(cut[1].flatMap(holdersOf));
  const who = `${count(holders.size)} ${side.ranks ? "rank" : "file"}${holders.size === 1 ? "" : "s"}`;
  const text = !cut[0].length ? "no elements" : boxes === 1 ? `whole, on ${who}` : `${count(boxes)} boxes on ${who}`;
  const box = el("div", { class: "cut" });
  if (cut[0].length) drawn(box, (width) => drawCut(view, row, number, width));
  const list = cut[0].slice(0, LISTED).map((each, at) => {
    const names = holdersOf(cut[1][at]).map((holder) => side.holders[holder].name);
    return el("li", { text: `[${boxText(each, shape)}] ${names.slice(0, 8).join("; ")}${names.length > 8 ? `; ${count(names.length - 8)} more` : ""}` });
  });
  if (boxes > list.length) list.push(el("li", { text: `... ${count(boxes - list.length)} more` }));
  return el("div", {}, el("h3", { text: title + text }), box, el("details", {}, el("summary", { text: "boxes in words" }), el("ul", {}, ...list)));
}

function cutSection(view) {
  const body = el("div", {});
  const whole = section("cut", "How a tensor is cut", body);
  const fallbacks = view.data.fallbacks || [];
  if (fallbacks.length) {
    const lines = fallbacks.map(([text, rows]) => {
      const button = el("button", { class: "link", type: "button", text: `\u26a0 ${plural(rows.length, "tensor")}: ${text}` });
      button.addEventListener("click", () => { view.table.only(rows, "fallbacks"); view.select(rows[0]); });
      return el("li", {}, button);
    });
    whole.append(el("h3", { text: "Fallbacks: not cut as was asked for" }), el("ul", { class: "fallbacks" }, ...lines));
  }
  view.showCut = (row) => {
    const tensors = view.tensors, state = tensors.state(row);
    const facts = `${tensors.dtype(row)} [${tensors.shape(row).join(", ")}], ${size(tensors.bytes(row))}`;
    const difference = differenceText(tensors.difference(row)), fallback = tensors.fallbacks.get(row);
    const lines = [
      el("p", { class: "strong", id: "cut-name", text: tensors.name(row) }),
      el("p", { class: "dim state" }, swatch(view.stateFill(state)), `${state}, ${facts}`),
    ];
    if (difference) lines.push(el("p", { text: difference }));
    if (fallback) lines.push(el("p", { class: "warn", text: `\u26a0 fallback: ${fallback}` }));
    body.replaceChildren(...lines, el("div", { class: "pair cuts" }, ...view.data.sides.map((_, number) => cutFigure(view, row, number))));
  };
  return whole;
}
