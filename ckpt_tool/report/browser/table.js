// All tensors: filtered as one types, sorted by any column. Rows are made for what is seen alone.

const PRINTED = 400; // rows on paper
const RANKED = { missing_left: 4, missing_right: 4, shape: 3, dtype: 2, value: 1 };
const KINDS = { value: "values differ", shape: "shapes differ", dtype: "dtypes differ", missing_left: "only in the second", missing_right: "only in the first" };

// How much a difference weighs: what it is first, then how far the values are apart.
function weight(each) {
  if (!each) return -1;
  const far = each[2] ?? (typeof each[3] === "number" ? each[3] : each[3] ? Infinity : 0);
  return RANKED[each[1]] * 1e6 + Math.min(9e5, 1e4 * Math.log2(1 + Number(far)));
}

function differenceText(each) {
  if (!each) return "";
  const parts = [KINDS[each[1]] || each[1]];
  if (each[2] !== null && each[2] !== undefined) parts.push(`${count(each[2])} ulp`);
  else if (each[3] !== null && each[3] !== undefined) parts.push(`by ${typeof each[3] === "number" ? each[3].toPrecision(3) : each[3]}`);
  return parts.join(", ");
}

class Table {
  constructor(view) {
    this.view = view;
    const tensors = (this.tensors = view.tensors);
    this.order = [];
    this.sorting = view.data.differences ? { by: "difference", down: true } : { by: null, down: false };
    this.held = null; this.chosen = null; this.at = 0;
    this.columns = [
      ["tensor", (row) => tensors.name(row), (row) => tensors.name(row)],
      ["state", (row) => tensors.state(row), (row) => tensors.state(row)],
      ["dtype", (row) => tensors.dtype(row), (row) => tensors.dtype(row)],
      ["shape", (row) => `[${tensors.shape(row).join(", ")}]`, (row) => tensors.shape(row).reduce((a, b) => a * b, 1)],
      ["bytes", (row) => size(tensors.bytes(row)), (row) => tensors.bytes(row)],
      ["parts", (row) => this.parts(row), (row) => Math.max(...tensors.parts(row))],
    ];
    if (view.data.differences) this.columns.push(["difference", (row) => differenceText(tensors.differences.get(row)), (row) => weight(tensors.differences.get(row))]);
    this.made();
  }

  parts(row) {
    const marks = (this.tensors.fallbacks.has(row) ? " \u26a0" : "") + (this.tensors.findings.has(row) ? " \u2691" : "");
    return this.tensors.parts(row).map((number) => (number ? count(number) : "\u2013")).join(" \u2192 ") + marks;
  }

  made() {
    this.input = el("input", { type: "search", id: "filter", autocomplete: "off", spellcheck: "false", size: 34, placeholder: "words; state:model dtype:BF16" });
    this.input.addEventListener("input", () => this.filter());
    this.number = el("output", { id: "filter-count", for: "filter" });
    this.clear = el("button", { type: "button", text: "show all" });
    this.clear.addEventListener("click", () => { this.input.value = ""; this.chosen = null; this.heldBy(null); for (const cell of this.view.holderCells) cell.setAttribute("aria-pressed", "false"); });
    const heads = this.columns.map(([title]) => {
      const button = el("button", { type: "button", text: title });
      button.addEventListener("click", () => this.sort(title));
      return el("div", { role: "columnheader", class: title === "bytes" ? "right" : null, "aria-sort": "none" }, button);
    });
    this.heads = heads;
    this.body = el("div", { class: "body", role: "rowgroup" });
    this.grid = el("div", { role: "grid", id: "grid", tabindex: "0", "aria-label": "Tensors", "aria-colcount": this.columns.length, class: this.view.data.differences ? "differs" : null },
      el("div", { role: "rowgroup", class: "head" }, el("div", { role: "row", class: "line", "aria-rowindex": 1 }, ...heads)), this.body);
    this.grid.addEventListener("scroll", () => this.show());
    this.grid.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.show()).observe(this.grid);
    window.addEventListener("beforeprint", () => { this.printed = PRINTED; this.show(); });
    window.addEventListener("afterprint", () => { this.printed = 0; this.show(); });
    this.section = section("tensors", "Tensors", el("div", { class: "bar" }, el("label", { for: "filter" }, "filter"), this.input, this.clear, this.number), this.grid);
  }

  // Words that all must be in the name; `state:`, `dtype:`, `module:` and `is:` narrow by these.
  test() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean), tests = [];
    const { tensors } = this, data = this.view.data;
    for (const word of words) {
      const [, key, value] = /^(state|dtype|module|is):(.*)$/.exec(word) || [];
      if (key === "state") tests.push((row) => tensors.state(row).toLowerCase() === value);
      else if (key === "dtype") tests.push((row) => tensors.dtype(row).toLowerCase() === value);
      else if (key === "module") { const fits = data.templates.map((parts) => moduleOf(parts).toLowerCase() === value); tests.push((row) => fits[tensors.kind(row)[0]]); }
      else if (key === "is") tests.push((row) => (value === "different" ? tensors.differences.has(row) : value === "fallback" ? tensors.fallbacks.has(row) : tensors.findings.has(row)));
      else tests.push((row) => tensors.name(row).toLowerCase().includes(word));
    }
    if (this.held) {
      const { side, holder } = this.held;
      const cuts = data.sides[side].cuts.map((cut) => cut[1].some((spans) => spans.some((each) => (typeof each === "number" ? each === holder : each[0] <= holder && holder <= each[1]))));
      tests.push((row) => { const cut = tensors.kind(row)[4 + side]; return cut >= 0 && cuts[cut]; });
    }
    if (this.chosen) { const rows = new Set(this.chosen.rows); tests.push((row) => rows.has(row)); }
    return (row) => tests.every((test) => test(row));
  }

  filter() {
    const test = this.test(), found = [];
    for (let row = 0; row < this.tensors.count; row += 1) if (test(row)) found.push(row);
    this.order = found;
    this.sorted();
    const why = [this.held && `held by ${this.held.title}`, this.chosen && this.chosen.title].filter(Boolean).join("; ");
    this.number.textContent = `${count(found.length)} of ${plural(this.tensors.count, "tensor")}${why ? ` (${why})` : ""}`;
    this.at = 0;
    this.grid.scrollTop = 0;
    this.grid.setAttribute("aria-rowcount", found.length + 1);
    this.show();
  }

  sorted() {
    const column = this.columns.find(([title]) => title === this.sorting.by);
    this.heads.forEach((head, at) => head.setAttribute("aria-sort", this.columns[at] === column ? (this.sorting.down ? "descending" : "ascending") : "none"));
    if (!column) { this.order.sort((a, b) => a - b); return; }
    const keys = new Map(this.order.map((row) => [row, column[2](row)])), sign = this.sorting.down ? -1 : 1;
    this.order.sort((a, b) => { const x = keys.get(a), y = keys.get(b); return x < y ? -sign : x > y ? sign : a - b; });
  }

  sort(title) {
    this.sorting = { by: title, down: this.sorting.by === title ? !this.sorting.down : title === "bytes" || title === "difference" || title === "parts" };
    this.sorted();
    this.show();
  }

  search(text) { this.input.value = text; this.chosen = null; this.filter(); this.section.scrollIntoView({ block: "nearest" }); }
  heldBy(held) { this.held = held; this.filter(); }
  only(rows, title) { this.input.value = ""; this.chosen = { rows, title }; this.filter(); }

  row() { return parseFloat(getComputedStyle(this.grid).getPropertyValue("--row")) * parseFloat(getComputedStyle(document.documentElement).fontSize); }

  show() {
    const printed = this.printed || 0;
    const high = this.row(), first = printed ? 0 : Math.max(0, Math.floor(this.grid.scrollTop / high) - 6);
    const many = printed || Math.ceil(this.grid.clientHeight / high) + 12;
    this.body.style.height = printed ? "auto" : `${this.order.length * high}px`;
    const name = high > 40 ? this.grid.clientWidth - 24 : this.heads[0].clientWidth; // in two lines the name has all of one
    const letters = Math.max(12, Math.floor(name / 7.8));
    const lines = this.order.slice(first, first + many).map((row, at) => {
      const number = first + at, on = row === this.view.selected;
      const line = el("div", { role: "row", class: "line", id: `row-${number}`, "aria-rowindex": number + 2, "aria-selected": String(on) },
        ...this.columns.map(([title, text], column) => el("div", { role: "gridcell", class: title === "bytes" ? "right" : null, text: column || printed ? text(row) : middled(text(row), letters) })));
      line.firstChild.title = this.tensors.name(row);
      if (!printed) line.style.top = `${number * high}px`;
      line.addEventListener("click", () => { this.at = number; this.view.select(row); });
      return line;
    });
    if (!lines.length) lines.push(el("div", { role: "row", class: "line" }, el("div", { role: "gridcell", text: "no tensor fits" })));
    this.body.replaceChildren(...lines);
    const at = this.order.indexOf(this.view.selected, Math.max(0, first));
    if (at >= first && at < first + many) this.grid.setAttribute("aria-activedescendant", `row-${at}`);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  // Scroll to a tensor, where the table has it.
  reveal(row) {
    const at = this.order.indexOf(row);
    if (at < 0) return;
    this.at = at;
    this.grid.scrollTop = Math.max(0, (at - 4) * this.row());
    this.show();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.grid.clientHeight / this.row()) - 2);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.at, End: this.order.length }[event.key];
    if (step === undefined || !this.order.length) return;
    event.preventDefault();
    const now = this.order[this.at] === this.view.selected ? this.at + step : this.at;
    this.at = Math.max(0, Math.min(this.order.length - 1, now));
    const high = this.row(), top = this.at * high, room = this.grid.clientHeight - 2 * high;
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    else if (top > this.grid.scrollTop + room) this.grid.scrollTop = top - room;
    this.view.select(this.order[this.at]);
  }
}
