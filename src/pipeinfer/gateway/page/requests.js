// The requests that were seen, the newest first; each opens its own timeline.

import { h, put } from "./dom.js";
import { clock, count, duration } from "./words.js";

const MOST = 200;
const COLUMNS = ["Request", "Began", "State", "Prompt", "Output", "First token", "Took"];

export class Requests {
  element;
  #body = h("tbody");
  #none = h("p", { class: "quiet" },
    "None yet. A request is listed here as soon as a client asks while you look, with what it has "
    + "put out so far; a click opens its way through all stages.");
  #table;
  #rows = new Map(); // by id, the oldest first
  #opened;

  /** opened(id) is called for the request whose timeline is wanted. */
  constructor(opened) {
    this.#opened = opened;
    this.#table = h("table", { hidden: true }, h("thead", {}, h("tr", {},
      COLUMNS.map((text) => h("th", { scope: "col" }, text)))), this.#body);
    this.element = h("section", { class: "card requests", "aria-labelledby": "requests-title" },
      h("h3", { id: "requests-title" }, "Requests"), this.#none,
      h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Recent requests" },
        this.#table));
  }

  show({ time, requests }) {
    for (const request of requests) {
      const row = this.#rows.get(request.id) ?? this.#made(request.id);
      row.request = request;
      this.#draw(row, time);
    }
    for (const row of this.#rows.values()) if (row.request.ended === null) this.#draw(row, time);
    while (this.#rows.size > MOST) {
      const [id, row] = this.#rows.entries().next().value;
      this.#rows.delete(id);
      row.element.remove();
    }
    this.#table.hidden = !this.#rows.size;
    this.#none.hidden = this.#rows.size > 0;
  }

  #made(id) {
    const open = h("button", { class: "link mono", type: "button" }, shortened(id));
    open.setAttribute("aria-label", `Timeline of ${id}`);
    open.title = id;
    const cells = COLUMNS.slice(1).map(() => h("td"));
    const row = { element: h("tr", {}, h("td", {}, open), cells), cells, request: null };
    row.element.onclick = () => this.#opened(id);
    this.#rows.set(id, row);
    this.#body.prepend(row.element);
    return row;
  }

  #draw({ cells, request }, time) {
    const { began, ended, first_token: first, finish } = request;
    const output = ended === null && !request.output_tokens ? "–" : count(request.output_tokens);
    const state = ended !== null ? finish ?? "ended" : first === null ? "waits" : "runs";
    const texts = [clock(began), state, count(request.prompt_tokens), output,
      first === null ? "–" : duration(1000 * (first - began)),
      duration(1000 * Math.max(0, (ended ?? time) - began))];
    for (const [index, text] of texts.entries()) put(cells[index], text);
    cells[1].className = { error: "bad", abort: "warn", waits: "warn" }[state] ?? "";
  }
}

/** An id without its kind, and of its letters the first ones. */
export function shortened(id) {
  const rest = id.replace(/^[a-z]+[-_]/, "");
  return rest.length > 12 ? `${rest.slice(0, 10)}…` : id;
}
