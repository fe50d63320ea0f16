// Findings, each with the tensor that it is about.

const AT_ONCE = 100;
const SIGNS = { error: ["\u2715 error", "bad"], warning: ["\u25b2 warning", "warn"], suspicion: ["? suspicion", "warn"], note: ["i note", "dim"] };

function findingsSection(view) {
  const findings = view.data.findings;
  if (!findings || !findings.length) return null;
  const list = el("ul", { class: "findings" }), more = el("button", { type: "button" });
  let shown = 0;
  const next = () => {
    for (const [code, severity, message, row, name, file, todo] of findings.slice(shown, shown + AT_ONCE)) {
      const [sign, style] = SIGNS[severity] || SIGNS.error;
      const link = row >= 0 ? el("button", { class: "link", type: "button", text: name }) : name && !message.includes(name) ? el("code", { text: name }) : "";
      if (row >= 0) link.addEventListener("click", () => { view.table.only([row], "of a finding"); view.select(row); view.table.section.scrollIntoView({ block: "nearest" }); });
      list.append(el("li", {}, el("span", { class: `badge ${style}`, text: `${sign} ${code}`.trim() }), `${message} `, link, file ? el("span", { class: "dim", text: ` ${file}` }) : "", todo ? el("div", { class: "dim", text: `to do: ${todo}` }) : ""));
    }
    shown = Math.min(findings.length, shown + AT_ONCE);
    more.hidden = shown === findings.length;
    more.textContent = `${plural(findings.length - shown, "more finding")}`;
  };
  more.addEventListener("click", next);
  next();
  return section("findings", "Findings", list, more);
}
