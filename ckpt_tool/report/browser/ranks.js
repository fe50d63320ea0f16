// Who holds what: a cell for each rank, in the order of the mesh; for each file where no file is a rank's.

const DENSE = 96; // holders above which cells are small
const WIDE = 5; // cells side by side above which the two sides of a plan stand one above the other
const ROWS_OF = ["vpp", "pp", "mp", "dp", "shard"]; // dims that go down; the others go across

function sumOf(holder) {
  let tensors = 0, bytes = 0;
  for (const [number, nbytes] of Object.values(holder.states)) {
    tensors += number;
    bytes += nbytes;
  }
  return { tensors, bytes };
}

function fillOfHolder(holder) {
  return [holder.colour, 0];
}

// The coordinates that say in which row of the grid a rank stands.
function rowOf(holder) {
  return ROWS_OF.filter((dim) => dim in holder.at).map((dim) => `${dim} ${holder.at[dim]}`).join(", ");
}

// How many cells stand side by side: the ranks that differ only in dims that go across.
function across(side) {
  const holders = side.holders;
  if (!side.ranks) return 0;
  const first = rowOf(holders[0]);
  let length = 0;
  while (length < holders.length && rowOf(holders[length]) === first) length += 1;
  return holders.length % length === 0 && length < holders.length ? length : 0;
}

function columnsStyle(side, columns, dense) {
  if (!columns || columns > 64) return `repeat(auto-fill, minmax(${dense ? 24 : side.ranks ? 132 : 210}px, 1fr))`;
  const least = dense ? (columns > 32 ? 11 : 18) : 76;
  return `repeat(${columns}, minmax(${least}px, ${dense ? 3 : 17}rem))`;
}

// The grid with the coordinates of each row before it, where it has rows.
function withRows(box, side, columns) {
  if (columns < 2) return box;
  const names = side.holders.filter((_, at) => at % columns === 0).map(rowOf);
  const labels = el("div", { class: "rows dim", "aria-hidden": "true" }, ...names.map((text) => el("span", { text })));
  return el("div", { class: "with-rows" }, labels, box);
}

function rankCell(view, side, holder, most) {
  const { tensors, bytes } = sumOf(holder);
  const name = side.ranks ? holder.name : shortFile(holder.name);
  return el("button", { class: "rank", type: "button", "aria-pressed": "false", title: `${holder.name}: ${size(bytes)}` },
    el("span", { class: "who" }, swatch(fillOfHolder(holder)), el("span", { text: name })),
    el("span", { class: "how", text: size(bytes) }), el("span", { class: "off", text: plural(tensors, "tensor") }),
    statesBar(view, holder, most));
}

function ranksOf(view, number) {
  const side = view.data.sides[number], holders = side.holders;
  const dense = holders.length > DENSE, columns = across(side);
  const box = el("div", { class: dense ? "ranks dense" : "ranks", role: "group", "aria-label": `${side.title || "who"} holds what` });
  box.style.gridTemplateColumns = columnsStyle(side, columns, dense);

  const most = Math.max(1, ...holders.map((holder) => sumOf(holder).bytes));
  const detail = el("div", { class: "detail", "aria-live": "polite" }, hintOf(side));
  const cells = holders.map((holder, at) => {
    const cell = rankCell(view, side, holder, most);
    cell.addEventListener("click", () => {
      const on = cell.getAttribute("aria-pressed") !== "true";
      for (const other of view.holderCells) other.setAttribute("aria-pressed", "false");
      cell.setAttribute("aria-pressed", String(on));
      detail.replaceChildren(...(on ? detailOf(view, holder, side) : [hintOf(side)]));
      view.table.heldBy(on ? { side: number, holder: at, title: `${side.title ? `${side.title}: ` : ""}${holder.name}` } : null);
    });
    return cell;
  });
  view.holderCells.push(...cells);
  box.append(...cells);
  roving(box, cells, () => columns || Math.max(1, getComputedStyle(box).gridTemplateColumns.split(" ").length));

  const mesh = Object.entries(side.mesh).map(([dim, degree]) => `${dim} ${degree}`).join(" x ") || "one rank";
  const what = plural(holders.length, side.ranks ? "rank" : "file");
  const total = holders.reduce((sum, holder) => sum + sumOf(holder).bytes, 0);
  const heading = el("h3", { text: `${side.title ? `${side.title}: ` : ""}${side.ranks ? `${mesh}; ` : ""}${what}, ${size(total)}` });
  const axes = columns ? [el("p", { class: "dim", text: axesOf(holders, columns) })] : [];
  return el("div", { class: columns > WIDE ? "all-across" : null }, heading, ...axes, withRows(box, side, columns), detail);
}

// What changes from cell to cell and from row to row, the fastest first: `across: tp 0 to 3, ep 0 to 7; down: pp 0 to 3`.
function axesOf(holders, columns) {
  const changes = (cells) => {
    const dims = Object.keys(cells[0].at).filter((dim) => cells.some((cell) => cell.at[dim] !== cells[0].at[dim]));
    return dims.map((dim) => `${dim} ${cells[0].at[dim]} to ${cells[cells.length - 1].at[dim]}`).join(", ");
  };
  const right = changes(holders.slice(0, columns)), down = changes(holders.filter((_, at) => at % columns === 0));
  return [right && `across: ${right}`, down && `down: ${down}`].filter(Boolean).join("; ");
}

function shortFile(path) {
  return path.slice(path.lastIndexOf("/") + 1);
}

function hintOf(side) {
  const what = side.ranks ? "rank" : "file";
  return el("p", { class: "dim", text: `Choose a ${what} to see what it holds, and its tensors in the table. Its colour is that of its boxes below.` });
}

function statesBar(view, holder, most) {
  const bar = svg("svg", { class: "states", viewBox: "0 0 100 7", preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  for (const state of view.states) {
    const width = (100 * (holder.states[state] || [0, 0])[1]) / most;
    if (width) bar.append(svg("rect", { x: at, y: 0, width, height: 7, fill: paintOf(view.stateFill(state)) }));
    at += width;
  }
  return bar;
}

function detailOf(view, holder, side) {
  const rows = Object.entries(holder.states).map(([state, [tensors, nbytes]]) =>
    el("tr", {}, el("td", { class: "state" }, swatch(view.stateFill(state)), state), el("td", { class: "right", text: count(tensors) }), el("td", { class: "right", text: size(nbytes) })));
  const heads = [["state", null], ["tensors", "right"], ["bytes", "right"]].map(([text, style]) => el("th", { scope: "col", class: style, text }));
  const table = el("div", { class: "wide" }, el("table", {}, el("tr", {}, ...heads), ...rows));
  const files = holder.files.join(", ") + (holder.more ? ` and ${plural(holder.more, "more file")}` : "");
  return [el("p", { class: "strong", text: holder.name }), table, ...(side.ranks ? [el("p", { class: "dim", text: files })] : [])];
}

function ranksSection(view) {
  const states = view.states.map((state) => el("li", {}, swatch(view.stateFill(state)), state));
  const key = el("ul", { class: "key", "aria-label": "states" }, ...states);
  const pair = el("div", { class: "pair" }, ...view.data.sides.map((_, number) => ranksOf(view, number)));
  const note = view.data.flow ? [el("p", { class: "dim", text: "Before: what is moved. Copies that are read to be compared are not counted." })] : [];
  return section("ranks", "Who holds what", ...note, key, pair);
}
