// The data of the page as tensors. Names are put together when they are looked at.

class Tensors {
  constructor(data) {
    this.data = data;
    this.count = data.count;
    this.texts = data.count ? data.rows.split(" ") : [];
    this.kinds = Int32Array.from(this.texts, (text) => parseInt(text, 10));
    const known = data.shapes.map((shape) => shape.reduce((a, b) => a * b, 1));
    this.sizes = data.kinds.map((kind) => Math.floor((known[kind[3]] * data.dtypes[kind[2]][1]) / 8));
    this.fallbacks = new Map();
    for (const [text, rows] of data.fallbacks || []) for (const row of rows) this.fallbacks.set(row, text);
    this.differences = new Map();
    for (const each of data.differences || []) if (each[0] >= 0) this.differences.set(each[0], each);
    this.findings = new Map();
    for (const each of data.findings || []) if (each[3] >= 0) this.findings.set(each[3], (this.findings.get(each[3]) || 0) + 1);
  }
  numbers(row) { return this.texts[row].split(".").slice(1); }
  template(row) { return this.data.templates[this.data.kinds[this.kinds[row]][0]]; }
  name(row) {
    const parts = this.template(row), numbers = this.numbers(row);
    let text = parts[0];
    for (let i = 1; i < parts.length; i += 1) text += numbers[i - 1] + parts[i];
    return text;
  }
  difference(row) { return differenceOf(this.differences.get(row)); }
  kind(row) { return this.data.kinds[this.kinds[row]]; }
  state(row) { return this.data.states[this.kind(row)[1]]; }
  dtype(row) { return this.data.dtypes[this.kind(row)[2]][0]; }
  shape(row) { return this.data.shapes[this.kind(row)[3]]; }
  bytes(row) { return this.sizes[this.kinds[row]]; }
  cut(row, side) { // [[box, [holder, ...]], ...]; null where this side has no such tensor
    const number = this.kind(row)[4 + side];
    return number < 0 ? null : this.data.sides[side].cuts[number];
  }
  parts(row) {
    return this.data.sides.map((_, side) => { const cut = this.cut(row, side); return cut ? cut[0].length + cut[2] : 0; });
  }
  label(row) { return this.state(row) === "model" ? this.name(row) : `${this.name(row)} [${this.state(row)}]`; }
}

function holdersOf(spans) {
  const found = [];
  for (const span of spans) {
    if (typeof span === "number") found.push(span);
    else for (let at = span[0]; at <= span[1]; at += 1) found.push(at);
  }
  return found;
}

// What a template says without its last word, a star for each number: the module.
function moduleOf(parts) {
  const text = parts.join("*");
  const at = text.lastIndexOf(".");
  return at > 0 ? text.slice(0, at) : text;
}

async function readData() {
  const script = document.getElementById("data");
  if (!script) return null;
  const text = script.textContent;
  if (script.dataset.coding !== "deflate") return JSON.parse(text);
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old for the figures: it has no DecompressionStream");
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
