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

// Where the drawing of a tensor lies: the dims that go down and right, their extents, and its place in the picture.
function frameOf(shape, boxes, width) {
  const dims = dimsOf(shape, boxes);
  const [down, right] = dims.length > 1 ? dims : [null, dims[0] ?? null];
  const rows = Math.max(1, down === null ? 1 : shape[down]), columns = Math.max(1, right === null ? 1 : shape[right]);
  const left = down === null ? 4 : 58, wide = Math.min(width, 620) - left - 6;
  const isFlat = down === null || boxes.length === 1;
  const high = isFlat ? 56 : Math.round(Math.max(0.28, Math.min(0.9, rows / columns)) * Math.min(wide, 360));
  return { down, right, rows, columns, left, wide, high };
}

function drawCut(view, row, number, width) {
  const side = view.data.sides[number], shape = view.tensors.shape(row), cut = view.tensors.cut(row, number);
  const boxes = cut[0], frame = frameOf(shape, boxes, width);
  const label = `${side.title ? `${side.title}: ` : ""}${plural(boxes.length + cut[2], "box").replace("boxs", "boxes")} of ${view.tensors.name(row)}`;
  const whole = { width: frame.wide + frame.left + 6, height: frame.high + 24 };
  const picture = svg("svg", { viewBox: `0 0 ${whole.width} ${whole.height}`, ...whole, role: "img", "aria-label": label });

  const isFallback = view.tensors.fallbacks.has(row) && number;
  const seen = new Set();
  boxes.forEach((box, at) => {
    const place = placeOf(box, shape, frame);
    const key = `${place.y},${place.height},${place.x},${place.width}`;
    if (seen.has(key)) return; // others lie behind it, along dims that are not drawn
    seen.add(key);
    picture.append(...boxShapes(side, holdersOf(cut[1][at]), place, boxText(box, shape), isFallback));
  });
  picture.append(...dimLabels(shape, frame));
  return picture;
}

// Where a box is drawn, in pixels.
function placeOf(box, shape, { down, right, rows, columns, left, wide, high }) {
  const [top, height] = down === null ? [0, 1] : span(box, shape, down);
  const [start, width] = right === null ? [0, 1] : span(box, shape, right);
  return { x: left + (start / columns) * wide, width: (width / columns) * wide, y: (top / rows) * high, height: (height / rows) * high };
}

// A box in the colour of who holds it, with the name where there is room.
function boxShapes(side, holders, { x, y, width, height }, indices, isFallback) {
  const names = holders.slice(0, 8).map((holder) => side.holders[holder].name).join("; ");
  const text = `${indices}: ${names}${holders.length > 8 ? `; ${count(holders.length - 8)} more` : ""}`;
  const shapes = [svg("rect", {
    class: "box", x: x + 0.5, y: y + 0.5, width: Math.max(1, width - 1), height: Math.max(1, height - 1),
    fill: paintOf(fillOfHolder(side.holders[holders[0]])), stroke: "#000", "stroke-opacity": 0.55,
    "stroke-dasharray": isFallback ? "5 3" : null, "stroke-width": isFallback ? 2 : 1,
  }, svg("title", { text }))];

  const name = fitting(whoText(side, holders), width - 8);
  if (name && height > 20) {
    const chipWidth = name.length * 6.7 + 8, middle = x + width / 2;
    shapes.push(svg("rect", { x: middle - chipWidth / 2, y: y + height / 2 - 8, width: chipWidth, height: 16, rx: 3, fill: "#fff", "fill-opacity": 0.9 }),
      svg("text", { class: "on-chip", x: middle, y: y + height / 2 + 4, "text-anchor": "middle", text: name }));
  }
  return shapes;
}

function dimLabels(shape, { down, right, left, high }) {
  const labels = [];
  if (right !== null) labels.push(svg("text", { x: left, y: high + 16, text: `dim ${right}: ${count(shape[right])} \u2192` }));
  if (down !== null) {
    const lines = [`dim ${down}`, fitting(count(shape[down]), left), "\u2193"];
    labels.push(...lines.map((text, at) => svg("text", { x: 0, y: 11 + 14 * at, text })));
  }
  return labels;
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
