// Findings, each with the tensor that it is about.

const AT_ONCE = 100;
const SIGNS = { error: ["\u2715 error", "bad"], warning: ["\u25b2 warning", "warn"], suspicion: ["? suspicion", "warn"], note: ["i note", "dim"] };

function findingItem(view, [code, severity, message, row, name, place, todo, title, seen]) {
  const [sign, style] = SIGNS[severity] || SIGNS.error;
  const item = el("li", {}, el("span", { class: `badge ${style}`, text: `${sign} ${code}`.trim() }));
  if (title) item.append(el("span", { class: "strong", text: `${title}: ` }));
  item.append(`${message} `);
  if (row >= 0) {
    const link = el("button", { class: "link", type: "button", text: name });
    link.addEventListener("click", () => {
      view.table.only([row], "of a finding");
      view.select(row);
      view.table.section.scrollIntoView({ block: "nearest" });
    });
    item.append(link);
  } else if (name && !message.includes(name)) {
    item.append(el("code", { text: name }));
  }
  if (place) item.append(el("span", { class: "dim", text: ` ${place}` }));
  if (todo) item.append(el("div", { class: "dim", text: `to do: ${todo}` }));
  for (const url of seen || []) item.append(el("div", { class: "dim", text: `see ${url}` }));
  return item;
}

function findingsSection(view) {
  const findings = view.data.findings;
  if (!findings || !findings.length) return null;
  const list = el("ul", { class: "findings" }), more = el("button", { type: "button" });
  let shown = 0;
  const next = () => {
    list.append(...findings.slice(shown, shown + AT_ONCE).map((finding) => findingItem(view, finding)));
    shown = Math.min(findings.length, shown + AT_ONCE);
    more.hidden = shown === findings.length;
    more.textContent = plural(findings.length - shown, "more finding");
  };
  more.addEventListener("click", next);
  next();
  return section("findings", "Findings", list, more);
}
