// One card of the diagram: a stage of a group, with each of its processes and how it does.

import { h, put } from "./dom.js";
import { age, clock, count, duration, measure, plural } from "./words.js";

// What a state looks like beside its name, so that colour is never alone.
const SIGNS = { ready: "●", starting: "◌", loading: "◔", waiting: "◷", draining: "◑", lost: "▲",
  failed: "✕" };
const KINDS = { ready: "good", lost: "bad", failed: "bad" };
const UNITS = { "tokens/s": "tok/s", "requests/s": "req/s" };
// What a card's latency is of.
const LATENCIES = {
  gateway: ["first token", "Median time from a client's request to its first text, of the last minute"],
  tokenizer: ["per request", "Median time to render and encode a prompt, of the last minute"],
  scheduler: ["to admission", "Median time until a request is admitted to the engine, of the last minute"],
  engine: ["per step", "Mean time of a step, of the last seconds in which it had any"],
  detokenizer: ["tokens to text", "Median time from tokens to their text, of the last minute"],
};
const SILENT = 1.5; // seconds after which it is said when a process was heard last

/** Which card a process stands on. */
export const cardOf = ({ name, group }) =>
  (name === "scheduler" || name === "engine" ? `${name}-${group}` : name);

export class Card {
  element;
  #processes = new Map();
  #list = h("div", { class: "processes" });

  /** groups: whether there are several, so that the card says which it is of. */
  constructor({ name, group }, groups) {
    const several = groups && (name === "scheduler" || name === "engine");
    const label = several ? `${name} of group ${group}` : name;
    this.element = h("section", { class: `stage ${name}`, "aria-label": label },
      h("h3", {}, name, several ? h("span", {}, ` ${group}`) : null), this.#list);
  }

  /** processes: those of the card, as the feed has them. */
  show(processes) {
    this.element.classList.toggle("many", processes.length > 1);
    const bad = processes.some(({ state }) => KINDS[state] === "bad");
    this.element.classList.toggle("hurt", bad);
    for (const process of processes) {
      let made = this.#processes.get(process.stage);
      if (!made) {
        made = new Process(process.stage, LATENCIES[process.name] ?? ["latency", ""]);
        this.#processes.set(process.stage, made);
        this.#list.append(made.element);
      }
      made.show(process);
    }
  }
}

class Process {
  element;
  #parts = {};

  constructor(stage, [latency, meaning]) {
    const part = (name, tag, attributes = {}) => {
      this.#parts[name] = h(tag, attributes);
      return this.#parts[name];
    };
    const fact = (name, label, title = null) =>
      h("div", { title }, h("dt", {}, label), part(name, "dd"));
    this.element = h("div", { class: "process" },
      h("p", { class: "who" }, h("span", { class: "id" }, stage),
        part("state", "span", { class: "state" })),
      part("reason", "p", { class: "reason" }),
      h("dl", {}, fact("rate", "rate, over 5 s"), fact("latency", latency, meaning), fact("waiting", "queue"),
        fact("running", "in hand")),
      part("life", "p", { class: "life" }));
  }

  show(process) {
    const { state, reason, rate, unit, heard, restarts } = process;
    const parts = this.#parts;
    put(parts.state, `${SIGNS[state] ?? "?"} ${state}`);
    parts.state.className = `state ${KINDS[state] ?? "warn"}`;
    put(parts.reason, reason);
    parts.reason.className = `reason ${KINDS[state] ?? "warn"}`;
    put(parts.rate, rate === null ? "–" : `${measure(rate)} ${UNITS[unit] ?? unit}`);
    put(parts.latency, duration(process.latency_ms));
    put(parts.waiting, count(process.waiting));
    put(parts.running, count(process.running));
    const life = [process.pid ? `pid ${process.pid}` : "no process yet"];
    if (process.up !== null) life.push(`up ${age(process.up)}`);
    if (restarts) {
      const last = process.last_restart ? `, the last at ${clock(process.last_restart)}` : "";
      life.push(`${plural(restarts, "restart")}${last}`);
    }
    if (process.takeover) life.push(process.takeover);
    if (heard !== null && heard > SILENT) life.push(`silent for ${age(heard)}`);
    put(parts.life, life.join(" · "));
  }
}
