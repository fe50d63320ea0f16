// The bytes that go from holder to holder: ribbons between few, a matrix between many.

const FEW = 20; // holders on a side up to which there are ribbons
const BINS = 48; // rows and columns of a matrix

function flowSection(view) {
  const flow = view.data.flow;
  if (!flow || !flow.length) return null;
  const [before, after] = view.data.sides;
  const box = el("div", { class: "flow" });
  const few = before.holders.length <= FEW && after.holders.length <= FEW;
  drawn(box, (width) => (few ? ribbons(flow, before, after, width) : matrix(flow, before, after, width)));
  const total = flow.reduce((sum, each) => sum + each[2], 0);
  const largest = [...flow].sort((a, b) => b[2] - a[2]).slice(0, 50);
  const rows = largest.map(([from, to, nbytes]) => el("tr", {}, el("td", { text: before.holders[from].name }), el("td", { text: after.holders[to].name }), el("td", { class: "right", text: size(nbytes) })));
  const head = el("tr", {}, el("th", { scope: "col", text: "from" }), el("th", { scope: "col", text: "to" }), el("th", { scope: "col", class: "right", text: "bytes" }));
  const table = el("details", {}, el("summary", { text: flow.length > 50 ? "the 50 largest as a table" : "as a table" }), el("div", { class: "wide" }, el("table", {}, head, ...rows)));
  return section("flow", "The flow of bytes", el("p", { class: "dim", text: `${size(total)} in ${plural(flow.length, "stream")}, from where they are stored to where they are written; copies count for each that gets one.` }), box, table);
}

// What each holder gives (side 0) or gets (side 1).
function sumsOf(flow, side, number) {
  const sums = side.holders.map(() => 0);
  for (const entry of flow) sums[entry[number]] += entry[2];
  return sums;
}

// Where the bars of one side stand. perByte: pixels of a byte.
function barsOf(sums, perByte, gap) {
  let at = 2;
  return sums.map((sum) => {
    const bar = { start: at, height: Math.max(2, sum * perByte), used: 0 };
    at += bar.height + gap;
    return bar;
  });
}

function ribbons(flow, before, after, width) {
  const sides = [before, after], sums = sides.map((side, number) => sumsOf(flow, side, number));
  const total = Math.max(1, sums[0].reduce((a, b) => a + b, 0));
  const gap = 6, most = Math.max(before.holders.length, after.holders.length);
  const high = Math.max(140, Math.min(520, most * 34)), perByte = (high - gap * (most - 1)) / total;
  const label = Math.min(200, Math.floor(width * 0.27)), bar = 14;
  const left = label + bar, right = width - label - bar;
  const text = `bytes from ${plural(before.holders.length, "holder")} to ${plural(after.holders.length, "holder")}; the table below says the same`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${high + 4}`, width, height: high + 4, role: "img", "aria-label": text });

  const bars = sums.map((column) => barsOf(column, perByte, gap));
  for (const [from, to, nbytes] of flow) {
    const source = bars[0][from], target = bars[1][to], height = nbytes * perByte;
    const path = ribbonPath(left, source.start + source.used, right, target.start + target.used, height);
    source.used += height;
    target.used += height;
    const colour = before.holders[from].colour;
    picture.append(svg("path", { class: "ribbon", d: path, fill: colour, "fill-opacity": 0.5, stroke: colour, "stroke-width": 0.5 },
      svg("title", { text: `${before.holders[from].name} to ${after.holders[to].name}: ${size(nbytes)}` })));
  }

  sides.forEach((side, at) => side.holders.forEach((holder, number) => {
    if (!sums[at][number]) return;
    const { start, height } = bars[at][number];
    const name = fitting(side.ranks ? holder.name : shortFile(holder.name), label);
    picture.append(
      svg("rect", { x: at ? right : label, y: start, width: bar, height, fill: holder.colour, stroke: "var(--dim)" }, svg("title", { text: `${holder.name}: ${size(sums[at][number])}` })),
      svg("text", { x: at ? right + bar + 5 : label - 5, y: start + Math.max(9, height / 2 + 4), "text-anchor": at ? "start" : "end", text: name }));
  }));
  return picture;
}

function ribbonPath(left, from, right, to, height) {
  const middle = (left + right) / 2;
  return `M${left} ${from}C${middle} ${from} ${middle} ${to} ${right} ${to}V${to + height}C${middle} ${to + height} ${middle} ${from + height} ${left} ${from + height}Z`;
}

function matrix(flow, before, after, width) {
  const bins = [before, after].map((side) => Math.min(BINS, side.holders.length));
  const binOf = (side, number, of) => Math.floor((number * of) / side.holders.length);
  const cells = new Map();
  for (const [from, to, nbytes] of flow) {
    const key = binOf(before, from, bins[0]) * BINS + binOf(after, to, bins[1]);
    cells.set(key, (cells.get(key) || 0) + nbytes);
  }
  const most = Math.max(...cells.values());
  const left = Math.min(130, Math.floor(width * 0.28)), top = 40;
  const step = Math.max(4, Math.min(18, Math.floor((width - left) / bins[1])));
  const wide = bins[1] * step, high = bins[0] * step;
  const label = `bytes from ${plural(before.holders.length, "holder")} (rows) to ${plural(after.holders.length, "holder")} (columns); the table below names the largest`;
  const picture = svg("svg", { viewBox: `0 0 ${left + wide + 2} ${top + high + 2}`, width: left + wide + 2, height: top + high + 2, role: "img", "aria-label": label });
  picture.append(...axisNames(before, after, left, top, wide, high));
  picture.append(svg("rect", { x: left, y: top, width: wide, height: high, fill: "none", stroke: "currentColor", "stroke-opacity": 0.3 }));
  for (const [key, nbytes] of cells) {
    const row = Math.floor(key / BINS), column = key % BINS;
    const text = `${namesOf(before, row, bins[0])} to ${namesOf(after, column, bins[1])}: ${size(nbytes)}`;
    picture.append(svg("rect", {
      class: "cell", x: left + column * step, y: top + row * step, width: step - 0.5, height: step - 0.5,
      fill: "var(--heat)", "fill-opacity": opacityOf(nbytes / most),
    }, svg("title", { text })));
  }
  return el("div", {}, bytesScale(most), picture);
}

function opacityOf(share) {
  return (0.15 + 0.85 * share).toFixed(3);
}

// The holders of a row or of a column.
function namesOf(side, bin, of) {
  const first = Math.ceil((bin * side.holders.length) / of), last = Math.ceil(((bin + 1) * side.holders.length) / of) - 1;
  return first === last ? side.holders[first].name : `${side.holders[first].name} \u2026 ${side.holders[last].name}`;
}

// The first and the last holder along both axes.
function axisNames(before, after, left, top, wide, high) {
  const nameOf = (holder) => shortFile(holder.name);
  const text = (x, y, anchor, words, room) => svg("text", { x, y, "text-anchor": anchor, text: fitting(words, room) });
  const lastFrom = before.holders[before.holders.length - 1], lastTo = after.holders[after.holders.length - 1];
  return [
    text(left, 14, "start", "to (columns) \u2192", wide),
    text(left, 32, "start", nameOf(after.holders[0]), wide / 2), text(left + wide, 32, "end", nameOf(lastTo), wide / 2),
    text(0, 14, "start", "from (rows) \u2193", left),
    text(left - 6, top + 10, "end", nameOf(before.holders[0]), left - 6), text(left - 6, top + high - 2, "end", nameOf(lastFrom), left - 6),
  ];
}

// What a shade is in bytes.
function bytesScale(most) {
  const shares = [0.25, 0.5, 0.75, 1];
  const steps = shares.map((share) => {
    const box = svg("svg", { class: "swatch", viewBox: "0 0 14 14", "aria-hidden": "true" },
      svg("rect", { x: 0.5, y: 0.5, width: 13, height: 13, fill: "var(--heat)", "fill-opacity": opacityOf(share), stroke: "var(--dim)" }));
    return el("li", {}, box, size(share * most));
  });
  return el("ul", { class: "key scale", "aria-label": "scale" }, el("li", { class: "dim", text: "linear:" }), ...steps);
}
