// The figures of the page, from its data. Without data, or where they can't be drawn, the text stays.

function draw(data) {
  const view = { data, tensors: new Tensors(data), states: data.states, holderCells: [], selected: -1 };
  const stateFills = new Map(data.states.map((state, number) => [state, data.palette.states[number]]));
  view.stateFill = (state) => stateFills.get(state);
  view.table = new Table(view);
  const cut = cutSection(view);
  view.select = (row) => {
    view.selected = row;
    view.table.show();
    view.showCut(row);
  };
  const figures = document.getElementById("figures");
  const parts = [findingsSection(view), heatSection(view), ranksSection(view), el("div", { class: "lay" }, view.table.section, cut), flowSection(view), treemapSection(view)];
  figures.append(...parts.filter(Boolean));
  view.table.filter();
  let first = 0;
  const telling = (row) => (view.tensors.fallbacks.has(row) ? 1e9 : 0) + Math.max(...view.tensors.parts(row));
  const found = view.tensors.findings.keys().next();
  if (data.differences && data.differences.length) first = view.table.order[0];
  else if (!found.done) first = found.value;
  else for (let row = 1; row < view.tensors.count; row += 1) if (telling(row) > telling(first)) first = row;
  if (view.tensors.count) { view.select(first); view.table.reveal(first); }
  const text = document.getElementById("text"); // what the figures show, as text
  if (text) {
    text.open = text.querySelectorAll("tr, li").length <= 100;
    window.addEventListener("beforeprint", () => { text.open = true; });
  }
  // Figures that hang on a width are drawn in the frame to come.
  requestAnimationFrame(() => requestAnimationFrame(() => { document.body.dataset.drawn = "yes"; }));
}

readData().then((data) => { if (data) draw(data); }).catch((fault) => {
  document.getElementById("figures").replaceChildren(el("p", { class: "warn", text: `The figures could not be drawn: ${fault.message}. The text below says the same.` }));
  document.body.dataset.drawn = "no";
});
