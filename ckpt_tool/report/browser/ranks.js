// Who holds what: a cell for each rank, in the order of the mesh; for each file where no file is a rank's.

const DENSE = 96; // holders above which cells are small
const ROWS_OF = ["vpp", "pp", "mp", "dp", "shard"]; // dims that go down; the others go across

function sumOf(holder) {
  let tensors = 0, bytes = 0;
  for (const [number, nbytes] of Object.values(holder.states)) { tensors += number; bytes += nbytes; }
  return { tensors, bytes };
}

// How many cells stand side by side: the ranks that differ only in dims that go across.
function across(side) {
  const holders = side.holders;
  if (!side.ranks) return 0;
  const key = (holder) => ROWS_OF.filter((dim) => dim in holder.at).map((dim) => holder.at[dim]).join(",");
  const first = key(holders[0]);
  let length = 0;
  while (length < holders.length && key(holders[length]) === first) length += 1;
  return holders.length % length === 0 && length < holders.length ? length : 0;
}

function ranksOf(view, number) {
  const side = view.data.sides[number], holders = side.holders;
  const dense = holders.length > DENSE;
  const box = el("div", { class: dense ? "ranks dense" : "ranks", role: "group", "aria-label": `${side.title || "who"} holds what` });
  const columns = across(side);
  const least = dense ? 24 : side.ranks ? 132 : 190;
  if (columns && columns <= 64) box.style.gridTemplateColumns = `repeat(${columns}, minmax(${dense ? (columns > 32 ? 11 : 18) : 118}px, ${dense ? 3 : 17}rem))`;
  else box.style.gridTemplateColumns = `repeat(auto-fill, minmax(${least}px, 1fr))`;
  const most = Math.max(1, ...holders.map((holder) => sumOf(holder).bytes));
  const detail = el("div", { class: "detail", "aria-live": "polite" });
  const cells = holders.map((holder, at) => {
    const { tensors, bytes } = sumOf(holder);
    const cell = el("button", { class: "rank", type: "button", "aria-pressed": "false", title: holder.name },
      el("span", { class: "who" }, swatch(at), el("span", { text: side.ranks ? holder.name : shortFile(holder.name) })),
      el("span", { class: "how", text: size(bytes) }), el("span", { class: "off", text: plural(tensors, "tensor") }),
      statesBar(view, holder, most));
    cell.addEventListener("click", () => {
      const on = cell.getAttribute("aria-pressed") !== "true";
      for (const other of view.holderCells) other.setAttribute("aria-pressed", "false");
      cell.setAttribute("aria-pressed", String(on));
      detail.replaceChildren(...(on ? detailOf(holder, side) : [hintOf(side)]));
      view.table.heldBy(on ? { side: number, holder: at, title: `${side.title ? `${side.title}: ` : ""}${holder.name}` } : null);
    });
    return cell;
  });
  view.holderCells.push(...cells);
  box.append(...cells);
  roving(box, cells, () => columns || Math.max(1, getComputedStyle(box).gridTemplateColumns.split(" ").length));
  detail.append(hintOf(side));
  const mesh = Object.entries(side.mesh).map(([dim, degree]) => `${dim} ${degree}`).join(" x ") || "one rank";
  const what = side.ranks ? plural(holders.length, "rank") : plural(holders.length, "file");
  const axes = columns ? el("p", { class: "dim", text: axesOf(holders, columns) }) : null;
  const total = holders.reduce((sum, holder) => sum + sumOf(holder).bytes, 0);
  return el("div", {}, el("h3", { text: `${side.title ? `${side.title}: ` : ""}${side.ranks ? `${mesh}; ` : ""}${what}, ${size(total)}` }), axes, box, detail);
}

// What changes from cell to cell and from row to row.
function axesOf(holders, columns) {
  const changes = (cells) => Object.keys(cells[0].at).filter((dim) => cells.some((cell) => cell.at[dim] !== cells[0].at[dim]));
  const right = changes(holders.slice(0, columns)), down = changes(holders.filter((_, at) => at % columns === 0));
  return [right.length && `across: ${right.join(", ")}`, down.length && `down: ${down.join(", ")}`].filter(Boolean).join("; ");
}

function shortFile(path) {
  return path.slice(path.lastIndexOf("/") + 1);
}

function hintOf(side) {
  return el("p", { class: "dim", text: `Choose a ${side.ranks ? "rank" : "file"} to see what it holds, and its tensors in the table. Its colour and pattern are those of its boxes below.` });
}

function statesBar(view, holder, most) {
  const bar = svg("svg", { class: "states", viewBox: "0 0 100 7", preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  view.states.forEach((state, number) => {
    const nbytes = (holder.states[state] || [0, 0])[1], width = (100 * nbytes) / most;
    if (width) bar.append(svg("rect", { x: at, y: 0, width, height: 7, fill: fillOf(number) }));
    at += width;
  });
  return bar;
}

function detailOf(holder, side) {
  const rows = Object.entries(holder.states).map(([state, [tensors, nbytes]]) =>
    el("tr", {}, el("td", { text: state }), el("td", { class: "right", text: count(tensors) }), el("td", { class: "right", text: size(nbytes) })));
  const head = el("tr", {}, el("th", { scope: "col", text: "state" }), el("th", { scope: "col", class: "right", text: "tensors" }), el("th", { scope: "col", class: "right", text: "bytes" }));
  const files = holder.files.join(", ") + (holder.more ? ` and ${plural(holder.more, "more file")}` : "");
  return [el("p", { class: "strong", text: holder.name }), el("div", { class: "wide" }, el("table", {}, head, ...rows)), side.ranks ? el("p", { class: "dim", text: files }) : null].filter(Boolean);
}

function ranksSection(view) {
  const key = el("ul", { class: "key", "aria-label": "states" }, ...view.states.map((state, number) => el("li", {}, swatch(number), state)));
  const pair = el("div", { class: "pair" }, ...view.data.sides.map((_, number) => ranksOf(view, number)));
  const note = view.data.flow ? el("p", { class: "dim", text: "Before: what is moved. Copies that are read to be compared are not counted." }) : null;
  return section("ranks", "Who holds what", note, key, pair);
}
