"use strict";
// Small tools of the figures. Text from a checkpoint becomes text nodes and attribute values alone, never markup.

const SVG = "http://www.w3.org/2000/svg";
// Okabe and Ito's colours, which all kinds of eyes tell apart, with a light grey in place of black; from the ninth on they repeat under a pattern.
const HUES = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#dcdcdc"];
const PATTERNS = ["", "M0 8L8 0M-2 2L2 -2M6 10L10 6", "M0 0L8 8M6 -2L10 2M-2 6L2 10", "M0 4H8", "M4 0V8", "M0 4H8M4 0V8"];

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === false || value === null) continue;
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function el(tag, attributes, ...children) {
  return put(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return put(document.createElementNS(SVG, tag), attributes, children);
}

function size(nbytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (nbytes >= 999.5 && at < units.length - 1) { nbytes /= 1000; at += 1; }
  if (at === 0) return `${Math.round(nbytes)} B`;
  return `${nbytes.toFixed(nbytes >= 99.95 ? 0 : nbytes >= 9.995 ? 1 : 2)} ${units[at]}`;
}

function count(number) {
  return number.toLocaleString("en-US");
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function hue(number) {
  return HUES[number % HUES.length];
}

// A fill of its own for every number: a colour, and a pattern over it from the ninth on.
function fillOf(number) {
  const pattern = Math.floor(number / HUES.length) % PATTERNS.length;
  if (!pattern) return hue(number);
  const id = `fill-${number % (HUES.length * PATTERNS.length)}`;
  if (!document.getElementById(id)) {
    let defs = document.getElementById("fills");
    if (!defs) {
      defs = svg("defs", { id: "fills" });
      document.body.append(svg("svg", { width: 0, height: 0, class: "off", "aria-hidden": "true" }, defs));
    }
    defs.append(svg("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 8, height: 8, fill: hue(number) }),
      svg("path", { d: PATTERNS[pattern], stroke: "#000", "stroke-opacity": 0.6, "stroke-width": 1.3, fill: "none" })));
  }
  return `url(#${id})`;
}

function swatch(number) {
  return svg("svg", { class: "swatch", viewBox: "0 0 14 14", "aria-hidden": "true" },
    svg("rect", { width: 14, height: 14, rx: 2, fill: fillOf(number), stroke: "#0007" }));
}

function section(id, title, ...children) {
  const heading = el("h2", { id: `${id}-title`, text: title });
  return el("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

// Text that fits so many pixels of the monospace font, or nothing.
function fitting(text, width) {
  const most = Math.floor((width - 6) / 6.7);
  return text.length > most && most < 4 ? "" : middled(text, most);
}

// A name in so many characters: its end says most, its beginning comes next.
function middled(text, most) {
  if (text.length <= most) return text;
  const tail = Math.ceil((most - 1) * 0.7);
  return `${text.slice(0, Math.max(0, most - 1 - tail))}\u2026${text.slice(text.length - tail)}`;
}

// One stop of the tab key for many items: the arrows go from one to the next.
function roving(box, items, across) {
  items.forEach((item, number) => item.setAttribute("tabindex", number ? "-1" : "0"));
  box.addEventListener("keydown", (event) => {
    const at = items.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across(), ArrowUp: -across(), Home: -at, End: items.length - 1 - at }[event.key];
    if (at < 0 || step === undefined) return;
    const next = items[Math.max(0, Math.min(items.length - 1, at + step))];
    event.preventDefault();
    items[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
}

function pressable(node, action) {
  node.addEventListener("click", action);
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); action(event); }
  });
}

// Draw anew when the width changes.
function drawn(box, render) {
  let width = 0;
  const again = () => {
    const now = Math.max(240, Math.floor(box.clientWidth));
    if (now !== width) { width = now; box.replaceChildren(render(width)); }
  };
  new ResizeObserver(again).observe(box);
  return () => { width = 0; again(); };
}
