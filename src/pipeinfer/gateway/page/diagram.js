// The pipeline as it is wired: a card for each stage, and lines on which messages flow. Cards are
// laid out by the style sheet; the lines are drawn from where the cards came to lie.

import { h, put, s } from "./dom.js";
import { Card, cardOf } from "./stages.js";
import { measure } from "./words.js";

const NARROW = 900; // pixels of width below which stages stand below each other
const PACES = [0, 1, 30, 1000]; // messages a second from which a line is of the next pace

export class Diagram {
  element = h("div", { class: "diagram" });
  #lines = s("svg", { class: "lines", "aria-hidden": "true" });
  #rates = h("ul", { class: "hidden" });
  #cards = new Map();
  #edges = new Map(); // by "from>to": {paths, label, rate, unit}
  #wiring = "";

  constructor() {
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  show({ stages, edges }) {
    const wiring = stages.map(({ stage }) => stage).join();
    if (wiring !== this.#wiring) {
      this.#wiring = wiring;
      this.#build(stages, edges);
    }
    for (const [name, card] of this.#cards) {
      card.show(stages.filter((process) => cardOf(process) === name));
    }
    for (const { from, to, rate, unit } of edges) {
      const edge = this.#edges.get(`${from}>${to}`);
      Object.assign(edge, { rate, unit });
      put(edge.said, `${from} to ${to}: ${measure(rate)} ${unit}`);
      const [number, what] = edge.label.children;
      put(number, rate ? `${measure(rate)} ` : "");
      put(what, rate ? unit : "");
      const pace = rate ? PACES.filter((least) => rate > least).length : 0;
      for (const path of edge.paths) path.setAttribute("class", `flow pace${pace}`);
    }
  }

  #build(stages, edges) {
    const groups = [...new Set(stages.filter(({ name }) => name === "scheduler")
      .map(({ group }) => group))];
    this.#cards.clear();
    for (const process of stages) {
      const name = cardOf(process);
      if (!this.#cards.has(name)) this.#cards.set(name, new Card(process, groups.length > 1));
    }
    const element = (name) => this.#cards.get(name)?.element ?? "";
    this.element.replaceChildren(this.#lines, element("gateway"), element("tokenizer"),
      h("div", { class: "groups" }, groups.map((group) => h("div", { class: "group" },
        element(`scheduler-${group}`), element(`engine-${group}`)))),
      element("detokenizer"), this.#rates);
    this.#edges.clear();
    this.#rates.replaceChildren();
    for (const { from, to } of edges) {
      const said = this.#rates.appendChild(h("li"));
      this.#edges.set(`${from}>${to}`, { from, to, said, paths: [],
        label: s("text", {}, s("tspan"), s("tspan")) });
    }
    this.#draw();
  }

  /** The lines anew: after the cards have moved. */
  #draw() {
    const { width, height, left, top } = this.element.getBoundingClientRect();
    if (!width || !this.#edges.size) return;
    const box = (card) => {
      const at = card.element.getBoundingClientRect();
      return { left: at.left - left, right: at.right - left, top: at.top - top,
        bottom: at.bottom - top };
    };
    const boxes = new Map([...this.#cards].map(([name, card]) => [name, box(card)]));
    const of = (name) => [...boxes].filter(([card]) => card.replace(/-\d+$/, "") === name)
      .map(([, at]) => at);
    this.#lines.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#lines.replaceChildren(s("defs", {}, s("marker", { id: "tip-of-line", viewBox: "0 0 8 8",
      refX: "7", refY: "4", markerWidth: "7", markerHeight: "7", orient: "auto-start-reverse" },
    s("path", { d: "M1 1l6 3-6 3" }))));
    for (const edge of this.#edges.values()) {
      const pace = edge.paths[0]?.getAttribute("class") ?? "flow pace0";
      const lines = (width < NARROW ? below : beside)(edge, of, height);
      edge.paths = lines.map(({ d }) => s("path", { class: pace, d }));
      for (const [index, { d }] of lines.entries()) {
        const ends = { "marker-end": "url(#tip-of-line)" };
        if (edge.to === "engine") ends["marker-start"] = ends["marker-end"]; // results come back
        this.#lines.append(s("path", { class: "line", d, ...ends }), edge.paths[index]);
      }
      const { x, y, anchor, stacked } = lines[0];
      for (const [name, value] of [["x", x], ["y", y], ["text-anchor", anchor]]) {
        edge.label.setAttribute(name, value);
      }
      const unit = edge.label.lastElementChild; // below its number where a line is short
      for (const [name, value] of [["x", x], ["dy", "1.15em"]]) {
        if (stacked) unit.setAttribute(name, value);
        else unit.removeAttribute(name);
      }
      this.#lines.append(edge.label);
    }
  }
}

/** Where stages stand beside each other: curves from side to side. {d, x, y, anchor, stacked} of
    each. */
function beside({ from, to }, of) {
  const made = [];
  for (const [index, a] of of(from).entries()) {
    const ends = from === "scheduler" && to === "engine" ? [of(to)[index]] : of(to);
    for (const b of ends) {
      const back = to === "gateway" || to === "detokenizer";
      const x1 = back ? a.left : a.right, x2 = back ? b.right - 1 : b.left - 1;
      const y1 = side(a, from, to), y2 = side(b, to, from), half = (x1 + x2) / 2;
      const begin = x1 + (to === "engine" ? 4 : 0), end = x2 + (back ? 4 : -4);
      const d = `M${begin} ${y1}C${half} ${y1} ${half} ${y2} ${end} ${y2}`;
      const flat = Math.abs(y1 - y2) < 12; // then the text stands above the line, else in it
      made.push({ d, x: half, y: (y1 + y2) / 2 + (flat ? -22 : -3), anchor: "middle",
        stacked: true });
    }
  }
  return made;
}

/** The height at which a line to `other` leaves a card: rings go in above and come out below. */
function side({ top, bottom }, name, other) {
  const part = name === "gateway" ? { tokenizer: 0.3, detokenizer: 0.7 }[other]
    : name === "scheduler" ? { tokenizer: 0.3, engine: 0.5, detokenizer: 0.7 }[other] : 0.5;
  return top + part * (bottom - top);
}

/** Where they stand below each other: straight lines down. */
function below({ from, to }, of, height) {
  const made = [];
  const down = (a, end) => made.push({ d: `M${a.left + 28} ${a.bottom}V${end - 3}`,
    x: a.left + 42, y: (a.bottom + end) / 2 + 4, anchor: "start" });
  if (to === "gateway") down(of(from)[0], height);
  else if (to === "detokenizer") down(of("engine").at(-1), of(to)[0].top);
  else if (to === "scheduler") down(of(from)[0], of(to)[0].top);
  else for (const [index, a] of of(from).entries()) down(a, of(to)[index].top);
  return made;
}
