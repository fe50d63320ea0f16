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
  return section("flow", "The flow of bytes", el("p", { class: "dim", text: `${size(total)} in ${plural(flow.length, "stream")}, from where they lie to where they will lie; copies count for each that gets one.` }), box, table);
}

function ribbons(flow, before, after, width) {
  const sums = [before, after].map((side, at) => side.holders.map((_, number) => flow.reduce((sum, each) => sum + (each[at] === number ? each[2] : 0), 0)));
  const total = Math.max(1, sums[0].reduce((a, b) => a + b, 0));
  const gap = 6, most = Math.max(before.holders.length, after.holders.length);
  const high = Math.max(140, Math.min(520, most * 34)), room = high - gap * (most - 1);
  const label = Math.min(200, Math.floor(width * 0.27)), bar = 14;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${high + 4}`, width, height: high + 4, role: "img", "aria-label": `bytes from ${plural(before.holders.length, "holder")} to ${plural(after.holders.length, "holder")}; the table below says the same` });
  const places = sums.map((column) => { let at = 2; return column.map((sum) => { const height = Math.max(2, (sum / total) * room), start = at; at += height + gap; return { start, height, used: 0 }; }); });
  const left = label + bar, right = width - label - bar, middle = (left + right) / 2;
  for (const [from, to, nbytes] of flow) {
    const a = places[0][from], b = places[1][to], h = (nbytes / total) * room;
    const y0 = a.start + a.used, y1 = b.start + b.used;
    a.used += h; b.used += h;
    picture.append(svg("path", { class: "ribbon", d: `M${left} ${y0}C${middle} ${y0} ${middle} ${y1} ${right} ${y1}V${y1 + h}C${middle} ${y1 + h} ${middle} ${y0 + h} ${left} ${y0 + h}Z`, fill: hue(from), "fill-opacity": 0.45, stroke: hue(from), "stroke-width": 0.5 },
      svg("title", { text: `${before.holders[from].name} to ${after.holders[to].name}: ${size(nbytes)}` })));
  }
  [before, after].forEach((side, at) => side.holders.forEach((holder, number) => {
    const { start, height } = places[at][number];
    if (!sums[at][number]) return;
    picture.append(svg("rect", { x: at ? right : label, y: start, width: bar, height, fill: fillOf(number), stroke: "#0007" }, svg("title", { text: `${holder.name}: ${size(sums[at][number])}` })));
    const name = fitting(side.ranks ? holder.name : shortFile(holder.name), label);
    picture.append(svg("text", { x: at ? right + bar + 5 : label - 5, y: start + Math.max(9, height / 2 + 4), "text-anchor": at ? "start" : "end", text: name }));
  }));
  return picture;
}

function matrix(flow, before, after, width) {
  const bins = [before, after].map((side) => Math.min(BINS, side.holders.length));
  const at = (side, number, of) => Math.floor((number * of) / side.holders.length);
  const cells = new Map();
  for (const [from, to, nbytes] of flow) {
    const key = at(before, from, bins[0]) * BINS + at(after, to, bins[1]);
    cells.set(key, (cells.get(key) || 0) + nbytes);
  }
  const most = Math.max(...cells.values()), left = 84, top = 22;
  const step = Math.max(4, Math.min(18, Math.floor((width - left) / bins[1])));
  const picture = svg("svg", { viewBox: `0 0 ${left + bins[1] * step + 2} ${top + bins[0] * step + 2}`, width: left + bins[1] * step + 2, height: top + bins[0] * step + 2, role: "img", "aria-label": `bytes from ${plural(before.holders.length, "holder")} (rows) to ${plural(after.holders.length, "holder")} (columns); the table below names the largest` });
  picture.append(svg("text", { x: left, y: 14, text: fitting(`to: ${after.holders[0].name} \u2026 ${shortFile(after.holders[after.holders.length - 1].name)}`, width - left) }), svg("text", { x: 0, y: top + 10, text: "from:" }), svg("text", { x: 0, y: top + 24, text: fitting(shortFile(before.holders[0].name), left) }));
  const names = (side, bin, of) => {
    const first = Math.ceil((bin * side.holders.length) / of), last = Math.ceil(((bin + 1) * side.holders.length) / of) - 1;
    return first === last ? side.holders[first].name : `${side.holders[first].name} \u2026 ${side.holders[last].name}`;
  };
  picture.append(svg("rect", { x: left, y: top, width: bins[1] * step, height: bins[0] * step, fill: "none", stroke: "currentColor", "stroke-opacity": 0.3 }));
  for (const [key, nbytes] of cells) {
    const row = Math.floor(key / BINS), column = key % BINS;
    picture.append(svg("rect", { class: "cell", x: left + column * step, y: top + row * step, width: step - 0.5, height: step - 0.5, fill: "var(--heat)", "fill-opacity": (0.15 + 0.85 * (nbytes / most)).toFixed(3) },
      svg("title", { text: `${names(before, row, bins[0])} to ${names(after, column, bins[1])}: ${size(nbytes)}` })));
  }
  return picture;
}
