// All tensors: filtered as one types, sorted by any column. Rows are made for what is seen alone.

const PRINTED = 400; // rows on paper
const LETTER = 7.8; // pixels of a letter of the table's font, a little more than it takes
const LEAST_LETTERS = 18;
const RANKED = { missing_left: 5, missing_right: 5, shape: 4, dtype: 3 };
const KINDS = { value: "values", shape: "shape", dtype: "dtype", missing_left: "second only", missing_right: "first only" };

const ONE_SIDED = { missing_left: "only in the second", missing_right: "only in the first" };

// A difference as the data has it, by names.
function differenceOf(entry) {
  if (!entry) return null;
  const [row, kind, ulp, abs, elements, relative] = entry;
  return { row, kind, ulp, abs, elements, relative };
}

// Is there a number that says how much the values differ? There is none where one side is all zeros, NaN or infinite.
function hasNumber(difference) {
  return difference.kind === "value" && typeof difference.relative === "number" && typeof difference.abs === "number";
}

// How much a difference weighs: what it is first, then how far the values are apart.
function weight(difference) {
  if (!difference) return -1;
  if (difference.kind !== "value") return RANKED[difference.kind] * 1e6;
  if (!hasNumber(difference)) return 2e6;
  return 1e6 + Math.max(0, 1e5 + 1e4 * Math.log10(difference.relative || 1e-10));
}

function differenceText(difference) {
  if (!difference) return "";
  const parts = [difference.kind === "value" ? "values differ" : difference.kind.startsWith("missing") ? ONE_SIDED[difference.kind] : `another ${difference.kind}`];
  if (isNumber(difference.relative)) parts.push(`relative L2 ${scientific(difference.relative)}`);
  if (isNumber(difference.abs)) parts.push(`max abs ${scientific(difference.abs)}`);
  if (isNumber(difference.ulp)) parts.push(`max ${count(difference.ulp)} ulp`);
  if (isNumber(difference.elements)) parts.push(plural(difference.elements, "element"));
  return parts.join(", ");
}

// Distances in units in the last place, which reach thousands of millions.
function ulpText(ulp) {
  return ulp < 1e6 ? count(ulp) : scientific(ulp);
}

function isNumber(value) {
  return value !== null && value !== undefined;
}

// The columns: id, title, its text and what it is sorted by. right: numbers. down: the largest first at once.
function columnsOf(view) {
  const { tensors } = view;
  const plain = [
    { id: "tensor", title: "tensor", text: (row) => tensors.name(row), by: (row) => tensors.name(row) },
    { id: "state", title: "state", text: (row) => tensors.state(row), by: (row) => tensors.state(row) },
    { id: "dtype", title: "dtype", text: (row) => tensors.dtype(row), by: (row) => tensors.dtype(row) },
    { id: "shape", title: "shape", text: (row) => `[${tensors.shape(row).join(", ")}]`, by: (row) => tensors.shape(row).reduce((a, b) => a * b, 1) },
    { id: "bytes", title: "bytes", text: (row) => size(tensors.bytes(row)), by: (row) => tensors.bytes(row), right: true, down: true },
    { id: "parts", title: "parts", text: (row) => partsText(tensors, row), by: (row) => Math.max(...tensors.parts(row)), right: true, down: true },
  ];
  if (!view.data.differences) return plain;

  const number = (field, shown) => (row) => {
    const difference = tensors.difference(row);
    return difference && isNumber(difference[field]) ? shown(difference[field]) : "";
  };
  const order = (field) => (row) => {
    const value = tensors.difference(row)?.[field];
    return isNumber(value) ? (typeof value === "number" ? value : Infinity) : -1;
  };
  const numbers = [
    { id: "what", title: "differs", text: (row) => KINDS[tensors.difference(row)?.kind] || "", by: (row) => weight(tensors.difference(row)), down: true },
    { id: "relative", title: "relative L2", text: number("relative", scientific), by: order("relative"), right: true, down: true },
    { id: "abs", title: "max abs", text: number("abs", scientific), by: order("abs"), right: true, down: true },
    { id: "ulp", title: "max ulp", text: number("ulp", ulpText), by: order("ulp"), right: true, down: true },
  ];
  return [...plain.slice(0, 2), ...numbers, ...plain.slice(2)];
}

function partsText(tensors, row) {
  const numbers = tensors.parts(row).map((number) => (number ? count(number) : "\u2013")).join(" \u2192 ");
  const fallback = tensors.fallbacks.has(row) ? "\u26a0 " : "";
  const finding = tensors.findings.has(row) ? "\u2691 " : "";
  return fallback + finding + numbers;
}

class Table {
  constructor(view) {
    this.view = view;
    this.tensors = view.tensors;
    this.columns = columnsOf(view);
    this.order = [];
    this.sorting = view.data.differences ? { id: "what", down: true } : { id: null, down: false };
    this.held = null;
    this.chosen = null;
    this.at = 0;
    this.build();
  }

  build() {
    const differs = Boolean(this.view.data.differences);
    const example = differs ? "words; is:different state:model" : "words; state:model dtype:BF16";
    this.input = el("input", { type: "search", id: "filter", autocomplete: "off", spellcheck: "false", size: 34, placeholder: example });
    this.input.addEventListener("input", () => this.filter());
    this.number = el("output", { id: "filter-count", for: "filter" });
    this.clear = el("button", { type: "button", text: "show all" });
    this.clear.addEventListener("click", () => this.showAll());

    this.heads = this.columns.map((column) => {
      const button = el("button", { type: "button", text: column.title });
      button.addEventListener("click", () => this.sort(column));
      return el("div", { role: "columnheader", class: this.classOf(column), "aria-sort": "none" }, button);
    });
    this.body = el("div", { class: "body", role: "rowgroup" });
    const head = el("div", { role: "rowgroup", class: "head" }, el("div", { role: "row", class: "line", "aria-rowindex": 1 }, ...this.heads));
    this.grid = el("div", { role: "grid", id: "grid", tabindex: "0", "aria-label": "Tensors", "aria-colcount": this.columns.length, class: differs ? "differs" : null }, head, this.body);
    this.grid.addEventListener("scroll", () => this.show());
    this.grid.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.show()).observe(this.grid);
    window.addEventListener("beforeprint", () => { this.printed = PRINTED; this.show(); });
    window.addEventListener("afterprint", () => { this.printed = 0; this.show(); });

    const bar = el("div", { class: "bar" }, el("label", { for: "filter" }, "filter"), this.input, this.clear, this.number);
    this.section = section("tensors", "Tensors", bar, this.grid);
  }

  classOf(column) {
    return column.right ? `c-${column.id} right` : `c-${column.id}`;
  }

  showAll() {
    this.input.value = "";
    this.chosen = null;
    for (const cell of this.view.holderCells) cell.setAttribute("aria-pressed", "false");
    this.heldBy(null);
  }

  // Words that all must be in the name; `state:`, `dtype:`, `module:` and `is:` narrow by these.
  test() {
    const tests = this.input.value.toLowerCase().split(/\s+/).filter(Boolean).map((word) => this.testOf(word));
    if (this.held) tests.push(this.testOfHolder(this.held));
    if (this.chosen) {
      const rows = new Set(this.chosen.rows);
      tests.push((row) => rows.has(row));
    }
    return (row) => tests.every((test) => test(row));
  }

  testOf(word) {
    const { tensors } = this;
    const [, key, value] = /^(state|dtype|module|is):(.*)$/.exec(word) || [];
    if (key === "state") return (row) => tensors.state(row).toLowerCase() === value;
    if (key === "dtype") return (row) => tensors.dtype(row).toLowerCase() === value;
    if (key === "module") {
      const fits = this.view.data.templates.map((parts) => moduleOf(parts).toLowerCase() === value);
      return (row) => fits[tensors.kind(row)[0]];
    }
    if (key === "is") {
      const marked = { different: tensors.differences, fallback: tensors.fallbacks }[value] || tensors.findings;
      return (row) => marked.has(row);
    }
    return (row) => tensors.name(row).toLowerCase().includes(word);
  }

  testOfHolder({ side, holder }) {
    const isHeld = (spans) => spans.some((span) => (typeof span === "number" ? span === holder : span[0] <= holder && holder <= span[1]));
    const cuts = this.view.data.sides[side].cuts.map((cut) => cut[1].some(isHeld));
    return (row) => {
      const cut = this.tensors.kind(row)[4 + side];
      return cut >= 0 && cuts[cut];
    };
  }

  filter() {
    const test = this.test();
    this.order = [];
    for (let row = 0; row < this.tensors.count; row += 1) if (test(row)) this.order.push(row);
    this.sorted();
    const why = [this.held && `held by ${this.held.title}`, this.chosen && this.chosen.title].filter(Boolean).join("; ");
    this.number.textContent = `${count(this.order.length)} of ${plural(this.tensors.count, "tensor")}${why ? ` (${why})` : ""}`;
    this.at = 0;
    this.grid.scrollTop = 0;
    this.grid.setAttribute("aria-rowcount", this.order.length + 1);
    this.show();
  }

  sorted() {
    const { id, down } = this.sorting;
    this.heads.forEach((head, at) => {
      head.setAttribute("aria-sort", this.columns[at].id !== id ? "none" : down ? "descending" : "ascending");
    });
    const column = this.columns.find((each) => each.id === id);
    if (!column) {
      this.order.sort((a, b) => a - b);
      return;
    }
    const keys = new Map(this.order.map((row) => [row, column.by(row)]));
    const sign = down ? -1 : 1;
    this.order.sort((a, b) => {
      const x = keys.get(a), y = keys.get(b);
      return x < y ? -sign : x > y ? sign : a - b;
    });
  }

  sort(column) {
    const down = this.sorting.id === column.id ? !this.sorting.down : Boolean(column.down);
    this.sorting = { id: column.id, down };
    this.sorted();
    this.show();
  }

  search(text) { this.input.value = text; this.chosen = null; this.filter(); this.section.scrollIntoView({ block: "nearest" }); }
  heldBy(held) { this.held = held; this.filter(); }
  only(rows, title) { this.input.value = ""; this.chosen = { rows, title }; this.filter(); }

  rowHeight() {
    const rems = parseFloat(getComputedStyle(this.grid).getPropertyValue("--row"));
    return rems * parseFloat(getComputedStyle(document.documentElement).fontSize);
  }

  show() {
    const printed = this.printed || 0, high = this.rowHeight();
    const first = printed ? 0 : Math.max(0, Math.floor(this.grid.scrollTop / high) - 6);
    const many = printed || Math.ceil(this.grid.clientHeight / high) + 12;
    this.body.style.height = printed ? "auto" : `${this.order.length * high}px`;
    const letters = printed ? Infinity : Math.max(LEAST_LETTERS, Math.floor(this.heads[0].clientWidth / LETTER));

    const rows = printed ? this.printedRows() : this.order;
    const lines = rows.slice(first, first + many).map((row, at) => this.line(row, first + at, letters, printed ? null : high));
    if (!lines.length) lines.push(el("div", { role: "row", class: "line" }, el("div", { role: "gridcell", text: "no tensor fits" })));
    this.body.replaceChildren(...lines);

    const at = this.order.indexOf(this.view.selected, Math.max(0, first));
    if (at >= first && at < first + many) this.grid.setAttribute("aria-activedescendant", `row-${at}`);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  // Of two checkpoints what differs; pages of what is equal help nobody.
  printedRows() {
    return this.view.data.differences ? this.order.filter((row) => this.tensors.differences.has(row)) : this.order;
  }

  line(row, number, letters, high) {
    const name = this.tensors.name(row);
    const cells = this.columns.map((column) => {
      const cell = el("div", { role: "gridcell", class: this.classOf(column) });
      if (column.id === "tensor") cell.append(...cutName(name, letters));
      else if (column.id === "state") cell.append(swatch(this.view.stateFill(this.tensors.state(row))), this.tensors.state(row));
      else cell.textContent = column.text(row);
      return cell;
    });
    cells[0].title = name;
    const isSelected = row === this.view.selected;
    const line = el("div", { role: "row", class: "line", id: `row-${number}`, "aria-rowindex": number + 2, "aria-selected": String(isSelected) }, ...cells);
    if (high !== null) line.style.top = `${number * high}px`;
    line.addEventListener("click", () => {
      if (!getSelection().isCollapsed) return; // a name is being copied
      this.at = number;
      this.view.select(row);
    });
    return line;
  }

  // Scroll to a tensor, where the table has it.
  reveal(row) {
    const at = this.order.indexOf(row);
    if (at < 0) return;
    this.at = at;
    this.grid.scrollTop = Math.max(0, (at - 4) * this.rowHeight());
    this.show();
  }

  key(event) {
    const high = this.rowHeight();
    const page = Math.max(1, Math.floor(this.grid.clientHeight / high) - 2);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.at, End: this.order.length }[event.key];
    if (step === undefined || !this.order.length) return;
    event.preventDefault();
    const now = this.order[this.at] === this.view.selected ? this.at + step : this.at;
    this.at = Math.max(0, Math.min(this.order.length - 1, now));

    const top = this.at * high, room = this.grid.clientHeight - 2 * high;
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    else if (top > this.grid.scrollTop + room) this.grid.scrollTop = top - room;
    this.view.select(this.order[this.at]);
  }
}
