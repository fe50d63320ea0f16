"use strict";
// Small tools of the figures. Text from a checkpoint becomes text nodes and attribute values alone, never markup.

const SVG = "http://www.w3.org/2000/svg";
// Patterns that tell fills of one colour apart; colours come with the data (report/palette.py).
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

// A difference, always in one notation: 3.81e-06.
function scientific(value) {
  if (typeof value !== "number") return String(value);
  const [digits, exponent] = value.toExponential(2).split("e");
  const sign = exponent[0];
  return `${digits}e${sign}${exponent.slice(1).padStart(2, "0")}`;
}

// What a rect is filled with. fill: [colour, number of a pattern over it].
function paintOf([colour, pattern]) {
  const kind = pattern % PATTERNS.length;
  if (!kind) return colour;
  const id = `fill-${colour.slice(1)}-${kind}`;
  if (!document.getElementById(id)) {
    let defs = document.getElementById("fills");
    if (!defs) {
      defs = svg("defs", { id: "fills" });
      document.body.append(svg("svg", { width: 0, height: 0, class: "off", "aria-hidden": "true" }, defs));
    }
    const ground = svg("rect", { width: 8, height: 8, fill: colour });
    const lines = svg("path", { d: PATTERNS[kind], stroke: "#000", "stroke-opacity": 0.6, "stroke-width": 1.3, fill: "none" });
    defs.append(svg("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" }, ground, lines));
  }
  return `url(#${id})`;
}

// The fill of so many things of one palette: its colours, from the last on again under a pattern.
function fillAmong(colours, number) {
  return [colours[number % colours.length], Math.floor(number / colours.length)];
}

function swatch(fill) {
  return svg("svg", { class: "swatch", viewBox: "0 0 14 14", "aria-hidden": "true" },
    svg("rect", { x: 0.5, y: 0.5, width: 13, height: 13, rx: 2, fill: paintOf(fill), stroke: "var(--dim)" }));
}

function section(id, title, ...children) {
  const heading = el("h2", { id: `${id}-title`, text: title });
  return el("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

// Text that fits so many pixels of the monospace font, or nothing.
function fitting(text, width) {
  const most = Math.floor((width - 6) / 6.7);
  return text.length > most && most < 4 ? "" : cutText(text, most);
}

// The parts of a name, alternately shown and left out, so that at most so many characters are shown. A mark stands for
// each part that is left out. What stays longest: numbers (of layers, of experts), the last component, and of the others
// those nearest to it.
//   nameParts("model.layers.11.mlp.experts.5.down_proj.weight", 26)
//     ["", "model.layers.", "11", ".mlp.experts.", "5.down_proj.weight"]
function nameParts(name, most) {
  if (name.length <= most) return [name];
  const components = name.match(/[^.]*\.?/g).slice(0, -1);
  const kept = components.map((component, at) => /^[0-9]+\.?$/.test(component) || at === components.length - 1);
  if (lengthOf(partsOf(components, kept)) > most) return middleParts(name, most);
  for (let at = components.length - 2; at >= 0; at -= 1) {
    if (kept[at]) continue;
    kept[at] = true;
    if (lengthOf(partsOf(components, kept)) <= most) continue;
    kept[at] = false;
    const room = most - lengthOf(partsOf(components, kept));
    return partsOf(splitAt(components, at, room), splitKept(kept, at));
  }
  return partsOf(components, kept);
}

// The component at a place in two, of which the second has at most so many characters.
function splitAt(components, at, room) {
  const text = components[at], end = Math.max(0, text.length - Math.max(0, room));
  return [...components.slice(0, at), text.slice(0, end), text.slice(end), ...components.slice(at + 1)];
}

function splitKept(kept, at) {
  return [...kept.slice(0, at), false, true, ...kept.slice(at + 1)];
}

// Neighbours that are kept, and neighbours that are not, as one part each; the first is shown, if with nothing.
function partsOf(components, kept) {
  const parts = [""];
  components.forEach((component, at) => {
    const shows = parts.length % 2 === 1;
    if (kept[at] === shows) parts[parts.length - 1] += component;
    else parts.push(component);
  });
  return parts;
}

function lengthOf(parts) {
  return parts.reduce((sum, part, at) => sum + (at % 2 ? 1 : part.length), 0);
}

// A text without components that help: its beginning and its end.
function middleParts(text, most) {
  const tail = Math.ceil((most - 1) * 0.7), head = Math.max(0, most - 1 - tail);
  return [text.slice(0, head), text.slice(head, text.length - tail), text.slice(text.length - tail)];
}

// A name in so many characters, where nothing but text can be drawn.
function cutText(name, most) {
  return nameParts(name, most).map((part, at) => (at % 2 ? "\u2026" : part)).join("");
}

// A name in so many characters, which is whole for those who select, copy, search or hear it.
function cutName(name, most) {
  return nameParts(name, most).map((part, at) => (at % 2 ? el("span", { class: "left-out", text: part }) : part));
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
