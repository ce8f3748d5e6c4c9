// A request's way through all stages: bars beside each other in time, and the same as a table.

import { byId, h, put, s } from "./dom.js";
import { askJson } from "./server.js";
import { duration } from "./words.js";

const AGAIN = 1000; // milliseconds between two looks at a request that still runs
const ROW = 36, FOOT = 26, NARROW = 520; // pixels
const FEW = 6; // moments that a row of the table shows unasked

export class Timeline {
  #dialog = h("dialog", { class: "timeline", "aria-labelledby": "timeline-title" });
  #title = h("h2", { id: "timeline-title" });
  #drawing = h("div", { class: "drawing" });
  #table = h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "As a table" });
  #close = h("button", { class: "main", type: "button", onclick: () => this.#dialog.close() },
    "Close");
  #timer = 0;

  constructor() {
    this.#dialog.append(this.#title, this.#drawing, this.#table, h("div", { class: "row" },
      this.#close));
    this.#dialog.onclose = () => clearTimeout(this.#timer);
    byId("pipeline").append(this.#dialog);
  }

  async open(id) {
    put(this.#title, id);
    this.#drawing.replaceChildren(h("p", { class: "quiet" }, "Asking the server …"));
    this.#table.replaceChildren();
    if (!this.#dialog.open) this.#dialog.showModal();
    this.#close.focus();
    await this.#look(id);
  }

  async #look(id) {
    clearTimeout(this.#timer);
    try {
      const { spans } = await askJson(`monitor/requests/${encodeURIComponent(id)}`);
      if (!this.#dialog.open || this.#title.textContent !== id) return;
      this.#show(spans);
      if (!spans.some(({ ended }) => ended === null)) return;
    } catch (error) {
      this.#drawing.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
      return;
    }
    this.#timer = setTimeout(() => this.#look(id), AGAIN);
  }

  #show(spans) {
    if (!spans.length) {
      this.#drawing.replaceChildren(h("p", { class: "quiet" }, "No stage has seen it yet."));
      return;
    }
    const opened = [...this.#table.querySelectorAll("details")].map((one) => one.open);
    this.#drawing.replaceChildren(drawn(spans, this.#drawing.clientWidth));
    this.#table.replaceChildren(tabled(spans));
    for (const [index, one] of [...this.#table.querySelectorAll("details")].entries()) {
      one.open = opened[index] ?? false;
    }
  }
}

function span(spans) {
  const times = spans.flatMap(({ began, ended, moments }) =>
    [began, ended, ...moments.map(({ at }) => at)]).filter((at) => at !== null);
  const from = Math.min(...times);
  return { from, long: Math.max(Math.max(...times) - from, 1e-6) };
}

const kind = (stage) => stage.replace(/[-\d]+$/, "");

function drawn(spans, width) {
  const { from, long } = span(spans);
  const narrow = width < NARROW, left = narrow ? 0 : 120, row = narrow ? ROW + 12 : ROW;
  const height = spans.length * row + FOOT, right = width - 8;
  const x = (at) => left + (at - from) / long * (right - left);
  const ticks = [0, 0.25, 0.5, 0.75, 1].filter((_, index) => !narrow || index % 2 === 0);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `${spans.length} stages within ${duration(1000 * long)}; see the table` });
  for (const tick of ticks) {
    const at = left + tick * (right - left);
    svg.append(s("path", { class: "tick", d: `M${at} 0V${height - FOOT + 4}` }),
      s("text", { x: at, y: height - 6, class: "axis",
        "text-anchor": tick === 0 ? "start" : tick === 1 ? "end" : "middle" },
      tick ? duration(1000 * tick * long) : "0"));
  }
  for (const [index, { stage, began, ended, moments }] of spans.entries()) {
    const top = index * row + (narrow ? 18 : 8);
    const end = Math.max(x(ended ?? from + long), x(began) + 3);
    svg.append(
      s("text", { x: 0, y: narrow ? top - 5 : top + 14 }, stage),
      s("rect", { class: `passage ${kind(stage)}${ended === null ? " open" : ""}`, x: x(began),
        y: top, width: end - x(began), height: 20, rx: 4 }),
      ...moments.map((moment) => s("path", { class: "moment",
        d: `M${x(moment.at)} ${top + 3}v14` }, s("title", {}, told(moment, from)))));
  }
  return svg;
}

const told = ({ at, name, values }, from) => {
  const said = Object.entries(values ?? {}).map(([what, value]) =>
    (what === "seconds" ? duration(1000 * value) : `${what} ${value}`)).join(", ");
  return `${duration(1000 * (at - from))}: ${name.replaceAll("_", " ")}${said ? ` (${said})` : ""}`;
};

function tabled(spans) {
  const { from } = span(spans);
  const listed = (moments) => h("ul", {}, moments.map((one) => h("li", {}, told(one, from))));
  return h("table", {},
    h("thead", {}, h("tr", {}, ["Stage", "Began after", "Took", "Outcome", "Moments"]
      .map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, spans.map(({ stage, began, ended, outcome, moments }) => h("tr", {},
      h("th", { scope: "row" }, h("i", { class: kind(stage) }), stage),
      h("td", {}, began === from ? "0" : duration(1000 * (began - from))),
      h("td", {}, ended === null ? "still here" : duration(1000 * (ended - began))),
      h("td", {}, outcome || "–"),
      h("td", {}, moments.length > FEW
        ? [listed(moments.slice(0, FEW)), h("details", { class: "more" },
          h("summary", {}, `${moments.length - FEW} more`), listed(moments.slice(FEW)))]
        : listed(moments))))));
}
