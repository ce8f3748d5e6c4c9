// The numbers at the top, and the times that clients see.

import { h, put } from "./dom.js";
import { count, duration, measure } from "./words.js";

const TILES = [["status", "Status"], ["speed", "Tokens a second"], ["running", "Running"],
  ["waiting", "Waiting"], ["first", "First token, median"], ["between", "Between tokens, median"]];
const TIMES = [["ttft_ms", "first token"], ["itl_ms", "between tokens"]];
const SHARES = ["p50", "p90", "p99"];

export class Figures {
  element;
  #values;

  constructor() {
    this.#values = Object.fromEntries(TILES.map(([name]) => [name, h("dd")]));
    this.element = h("dl", { class: "figures" }, TILES.map(([name, label]) =>
      h("div", {}, h("dt", {}, label), this.#values[name])));
  }

  show(event) {
    const values = this.#values;
    put(values.status, event.status);
    values.status.className = { ready: "good", degraded: "bad" }[event.status] ?? "warn";
    values.status.title = event.reason;
    put(values.speed, measure(event.tokens_per_s));
    put(values.running, count(event.requests_running));
    put(values.waiting, count(event.requests_waiting));
    put(values.first, duration(event.latency.ttft_ms.p50));
    put(values.between, duration(event.latency.itl_ms.p50));
  }
}

export class Latency {
  element;
  #cells = {};

  constructor() {
    const cell = (name, share) => this.#cells[`${name} ${share}`] = h("td");
    this.element = h("section", { class: "card latency", "aria-labelledby": "latency-title" },
      h("h3", { id: "latency-title" }, "Times of the last minute"),
      h("table", {}, h("thead", {}, h("tr", {}, h("td"),
        ["p50", "p90", "p99", "count"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, TIMES.map(([name, label]) => h("tr", {}, h("th", { scope: "row" }, label),
        [...SHARES, "count"].map((share) => cell(name, share)))))));
  }

  show({ latency }) {
    for (const [name] of TIMES) {
      for (const share of SHARES) {
        put(this.#cells[`${name} ${share}`], duration(latency[name][share]));
      }
      put(this.#cells[`${name} count`], count(latency[name].count));
    }
  }
}
