// Elements from names, attributes and children. Text only ever becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** h("button", {class: "main", onclick: f}, "text", child): an HTML element. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Puts text into an element, and touches nothing where it is there already. */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const GLYPHS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  pen: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  again: "M20 12a8 8 0 1 1-2.5-5.8M20 4v4.5h-4.5",
  copy: "M9 9h10v10H9zM5 15V5h10",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  close: "M6 6l12 12M18 6L6 18",
  list: "M4 7h16M4 12h16M4 17h10",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6" +
    "L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5",
  half: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  keyboard: "M3 6h18v12H3zM7 10h.01M11 10h.01M15 10h.01M17 14h.01M7 14h.01M10 14h4",
  down: "M12 5v14M6 13l6 6 6-6",
  out: "M12 15V4M7 9l5-5 5 5M5 15v5h14v-5",
  into: "M12 4v11M7 10l5 5 5-5M5 15v5h14v-5",
  warn: "M12 4l9 16H3zM12 10v4M12 17h.01",
  tokens: "M4 7h6v10H4zM14 7h6v10h-6z",
};

/** A small drawing for a button, which says nothing to screen readers. */
export function glyph(name) {
  return s("svg", { class: "glyph", viewBox: "0 0 24 24", "aria-hidden": "true" },
    s("path", { d: GLYPHS[name] }));
}

/** A button that shows a glyph and is called `label`. */
export function iconButton(name, label, onclick) {
  return h("button", { class: "icon", type: "button", "aria-label": label, title: label, onclick },
    glyph(name));
}

/** What went wrong, which screen readers say at once. */
export function alarm(text) {
  return h("p", { class: "error", role: "alert" }, glyph("warn"), h("span", {}, text));
}

/** Says something to screen readers, once and after what they say now. */
export function announce(text) {
  byId("announcer").textContent = text;
}
