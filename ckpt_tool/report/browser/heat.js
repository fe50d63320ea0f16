// Differences over layers and modules: of each cell its worst, the worst tensors first in the table.

function heatSection(view) {
  const { data, tensors } = view;
  if (!data.differences) return null;
  if (!data.differences.length) return null;
  const cells = new Map(), layers = new Set(), modules = new Map();
  for (let row = 0; row < tensors.count; row += 1) {
    const name = tensors.template(row).join("*"), layer = tensors.numbers(row)[0] ?? "";
    if (!modules.has(name)) modules.set(name, { worst: -1, layers: new Set() });
    modules.get(name).layers.add(layer);
    layers.add(layer);
    const each = tensors.differences.get(row);
    if (!each) continue;
    const key = `${name}\n${layer}`, cell = cells.get(key) || { worst: null, rows: [] };
    cell.rows.push(row);
    if (!cell.worst || weight(each) > weight(cell.worst)) { cell.worst = each; cell.row = row; }
    cells.set(key, cell);
    modules.get(name).worst = Math.max(modules.get(name).worst, weight(each));
  }
  const columns = [...layers].sort((a, b) => (a === "") - (b === "") || a - b).reverse().sort((a, b) => (a === "" ? -1 : b === "" ? 1 : a - b));
  const rows = [...modules].filter(([, module]) => module.worst >= 0).sort((a, b) => b[1].worst - a[1].worst);
  const values = [...cells.values()].filter((cell) => cell.worst[1] === "value").map((cell) => weight(cell.worst));
  const low = Math.min(...values), high = Math.max(...values);
  const buttons = [];
  const body = rows.map(([name, module]) => el("tr", {}, el("th", { scope: "row", text: window.innerWidth < 640 ? middled(name, 22) : name, title: name }), ...columns.map((layer) => {
    const cell = cells.get(`${name}\n${layer}`);
    if (!cell) return el("td", { class: "dim", text: module.layers.has(layer) ? "\u00b7" : "" });
    const value = cell.worst[1] === "value";
    const step = value ? 1 + Math.min(4, Math.floor((5 * (weight(cell.worst) - low)) / (high - low || 1))) : 0;
    const glyph = value ? String(step) : cell.worst[1].startsWith("missing") ? "\u2715" : "\u25b2";
    const text = `${value ? `${step} of 5, ` : ""}${name}${layer === "" ? "" : `, layer ${layer}`}: ${differenceText(cell.worst)}${cell.rows.length > 1 ? `, the worst of ${plural(cell.rows.length, "tensor")}` : ""}`;
    const button = el("button", { type: "button", class: value ? `h${step}` : "hx", "aria-label": text, title: text, text: glyph });
    button.addEventListener("click", () => { view.table.only(cell.rows, `${name}${layer === "" ? "" : ` of layer ${layer}`}`); view.select(cell.row); });
    buttons.push(button);
    return el("td", {}, button);
  })));
  const head = el("tr", {}, el("td", {}), ...columns.map((layer) => el("th", { scope: "col", text: layer === "" ? "\u2013" : layer })));
  const box = el("div", { class: "heat", role: "group", "aria-label": "differences by module and layer" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  roving(box, buttons, () => 1);
  const key = el("p", { class: "dim", text: "Rows are modules, the worst first; columns are layers (\u2013: of no layer). 1 to 5: how far values are apart, from the least to the most of this pair, by ulp where there is one; \u25b2 another shape or dtype; \u2715 on one side alone; \u00b7 equal." });
  return section("heat", "Where they differ", key, box);
}
