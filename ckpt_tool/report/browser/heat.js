// Differences over layers and modules: of each cell its worst, on a logarithmic scale that is the same on every page.

const ROWS_DRAWN = 200; // modules
const LAYERS_DRAWN = 256;
const STEPS = 8; // a colour for each power of ten, from 1e-7 and less up to 1 and more

// The step of a difference on the scale, 0 the least, and the exponent that its cell shows; null where there is no number.
function stepOf(difference) {
  if (!hasNumber(difference)) return null;
  if (!difference.relative) return { step: 0, glyph: "=" };
  const exponent = Math.floor(Math.log10(difference.relative) + 1e-9);
  const capped = Math.max(1 - STEPS, Math.min(0, exponent));
  return { step: capped + STEPS - 1, glyph: String(exponent).replace("-", "\u2212") };
}

function signOf(difference) {
  if (difference.kind === "value") return "!";
  return difference.kind.startsWith("missing") ? "\u2715" : "\u25b2";
}

// The tensors by module and state, and of each layer those that differ.
function heatRows(view) {
  const { tensors } = view, rows = new Map();
  for (let at = 0; at < tensors.count; at += 1) {
    const name = tensors.template(at).join("*"), state = tensors.state(at), layer = tensors.numbers(at)[0] ?? "";
    const key = `${state}\n${name}`;
    if (!rows.has(key)) rows.set(key, { name, state, layers: new Set(), cells: new Map(), worst: -1 });
    const row = rows.get(key);
    row.layers.add(layer);
    const difference = tensors.difference(at);
    if (!difference) continue;
    const cell = row.cells.get(layer) || { tensors: [], worst: null };
    cell.tensors.push(at);
    if (!cell.worst || weight(difference) > weight(cell.worst)) cell.worst = difference;
    row.cells.set(layer, cell);
    row.worst = Math.max(row.worst, weight(difference));
  }
  return [...rows.values()].filter((row) => row.worst >= 0).sort((a, b) => b.worst - a.worst);
}

// The layers in order; those of no layer first. Of very many, those in which something differs.
function layersOf(rows) {
  let layers = new Set(rows.flatMap((row) => [...row.layers]));
  if (layers.size > LAYERS_DRAWN) layers = new Set(rows.flatMap((row) => [...row.cells.keys()]));
  return [...layers].sort((a, b) => (a === "" ? -1 : b === "" ? 1 : a - b));
}

function heatCell(view, row, layer, buttons) {
  const cell = row.cells.get(layer);
  if (!cell) {
    const isEqual = row.layers.has(layer);
    return el("td", { class: "dim", text: isEqual ? "\u00b7" : "" });
  }
  const scale = stepOf(cell.worst);
  const place = `${row.name}${row.state === "model" ? "" : ` [${row.state}]`}${layer === "" ? "" : `, layer ${layer}`}`;
  const among = cell.tensors.length > 1 ? `, the worst of ${plural(cell.tensors.length, "tensor")}` : "";
  const text = `${place}: ${differenceText(cell.worst)}${among}`;
  const button = el("button", { type: "button", class: scale ? `change${scale.step}` : "no-number", "aria-label": text, title: text, text: scale ? scale.glyph : signOf(cell.worst) });
  button.addEventListener("click", () => {
    view.table.only(cell.tensors, place);
    view.select(cell.worst.row);
  });
  buttons.push(button);
  return el("td", {}, button);
}

// The colours with their numbers.
function heatScale() {
  const steps = Array.from({ length: STEPS }, (_, step) => {
    const exponent = step - STEPS + 1;
    const label = step === 0 ? "below 1e\u22126" : step === STEPS - 1 ? "1 and more" : `from 1e\u2212${-exponent}`;
    return el("li", {}, el("span", { class: `step change${step}`, text: step ? String(exponent).replace("-", "\u2212") : "\u22127" }), label);
  });
  const signs = [["\u25b2", "another shape or dtype"], ["\u2715", "on one side alone"], ["!", "NaN, Inf, or the first is all zeros"]];
  const others = signs.map(([sign, label]) => el("li", {}, el("span", { class: "step no-number", text: sign }), label));
  const bits = el("li", {}, el("span", { class: "step change0", text: "=" }), "equal values in other bits, as \u22120 and 0");
  const equal = el("li", {}, el("span", { class: "step dim", text: "\u00b7" }), "equal");
  return el("ul", { class: "key scale", "aria-label": "scale" }, ...steps, ...others, bits, equal);
}

function heatSection(view) {
  if (!view.data.differences || !view.data.differences.length) return null;
  const rows = heatRows(view);
  if (!rows.length) return null;
  const layers = layersOf(rows), drawnLayers = layers.slice(0, LAYERS_DRAWN), drawnRows = rows.slice(0, ROWS_DRAWN);
  const hasStates = rows.some((row) => row.state !== "model");

  const buttons = [];
  const body = drawnRows.map((row) => {
    const label = el("th", { scope: "row", title: row.name }, ...cutName(row.name, window.innerWidth < 640 ? 20 : 48));
    const state = hasStates ? [el("td", { class: "state" }, swatch(view.stateFill(row.state)), row.state)] : [];
    return el("tr", {}, label, ...state, ...drawnLayers.map((layer) => heatCell(view, row, layer, buttons)));
  });
  const heads = drawnLayers.map((layer) => el("th", { scope: "col", text: layer === "" ? "\u2013" : layer }));
  const head = el("tr", {}, el("th", { scope: "col", text: "module" }), ...(hasStates ? [el("th", { scope: "col", text: "state" })] : []), ...heads);
  const table = el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
  const box = el("div", { class: drawnLayers.length > 32 ? "heat many" : "heat", tabindex: "0", role: "group", "aria-label": "differences by module and layer" }, table);
  roving(box, buttons, () => 1);

  const key = el("p", { class: "dim", text: "Rows are modules, the worst first; columns are layers (\u2013: of no layer). A number is the power of ten of the relative L2 norm of the difference, of the worst tensor there: \u22123 is a change of about 0.1 to 1 %. The scale is logarithmic." });
  const left = [[rows.length - drawnRows.length, "row"], [layers.length - drawnLayers.length, "layer"]].filter(([number]) => number > 0).map(([number, noun]) => `${plural(number, "more " + noun)}`);
  const more = left.length ? el("p", { class: "dim", text: `Not drawn: ${left.join(", ")}. The table below has all.` }) : null;
  return section("heat", "Where they differ", key, heatScale(), box, ...(more ? [more] : []));
}
