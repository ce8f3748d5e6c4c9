// How one message looks, and what can be done with it. What then happens is for others to say.

import { copy } from "./copy.js";
import { alarm, h, iconButton, put } from "./dom.js";
import { Prose } from "./prose.js";
import { Tokens } from "./tokens.js";
import { count, duration, measure, plural } from "./words.js";

const FINISH = {
  length: "cut at its most tokens", stopped: "stopped", content_filter: "filtered",
  tool_calls: "calls tools",
};

/**
 * The view of a message. acts: {edit(message, text), again(message), results(message, texts)}.
 * live: the message still grows.
 */
export class MessageView {
  element;
  #message;
  #acts;
  #parts = {};

  constructor(message, acts, live = false) {
    this.#message = message;
    this.#acts = acts;
    const user = message.role === "user", tool = message.role === "tool";
    this.element = h("article", { class: `message ${user ? "user" : "answer"}` },
      h("h3", {}, user ? "You" : tool ? `Result of ${message.name}` : ""));
    this.update(live);
  }

  /** Shows the message as it is now. live: it still grows. */
  update(live) {
    this.element.classList.toggle("live", live);
    if (live) this.element.setAttribute("aria-busy", "true");
    else this.element.removeAttribute("aria-busy");
    if (this.#message.role === "assistant") this.#answer(live);
    else this.#words();
  }

  #part(name, make) {
    if (!this.#parts[name]) {
      this.#parts[name] = make();
      this.element.append(this.#parts[name]);
    }
    return this.#parts[name];
  }

  #drop(...names) {
    for (const name of names) {
      this.#parts[name]?.remove();
      delete this.#parts[name];
    }
  }

  #words() {
    const { role, content } = this.#message;
    put(this.#part("said", () => h("div", { class: "said plain" })), content);
    if (role === "user") this.#part("foot", () => h("div", { class: "acts" },
      iconButton("copy", "Copy", () => copy(content)),
      iconButton("pen", "Edit and ask again", () => this.#edit())));
  }

  #edit() {
    const field = h("textarea", { "aria-label": "Your message, edited" });
    field.value = this.#message.content;
    const close = () => {
      form.remove();
      for (const part of Object.values(this.#parts)) part.hidden = false;
      this.#parts.foot.querySelector("button:last-child").focus();
    };
    const form = h("form", {
      class: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        if (field.value.trim()) this.#acts.edit(this.#message, field.value);
      },
      onkeydown: (event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          close();
        } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          form.requestSubmit();
        }
      },
    }, field, h("div", { class: "row" },
      h("p", { class: "quiet" }, "What comes after it is asked anew."),
      h("button", { type: "button", onclick: close }, "Cancel"),
      h("button", { class: "main" }, "Ask again")));
    for (const part of Object.values(this.#parts)) part.hidden = true;
    this.element.append(form);
    field.focus();
  }

  #answer(live) {
    const message = this.#message;
    put(this.element.firstChild, message.model || "Model");
    const begun = message.content || message.reasoning || message.calls?.length;
    if (live && !begun) {
      this.#part("wait", () => h("p", { class: "wait", role: "img", "aria-label": "Waiting" },
        h("i"), h("i"), h("i")));
      return;
    }
    this.#drop("wait");
    if (message.reasoning) this.#thoughts(live && !message.content);
    if (message.content) this.#said(live);
    if (message.calls?.length) this.#calls(live);
    if (live) return;
    if (message.error) this.#part("error", () => alarm(message.error));
    this.#foot();
  }

  #thoughts(open) {
    const part = this.#part("thoughts", () => h("details", { class: "thoughts" },
      h("summary", {}, "Thoughts"), h("div", { class: "plain" })));
    put(part.firstChild, open ? "Thinking …" : "Thoughts");
    put(part.lastChild, this.#message.reasoning);
  }

  #said(live) {
    const { content, tokens } = this.#message;
    const part = this.#part("said", () => {
      const made = h("div", { class: "said" });
      made.view = tokens ? new Tokens() : new Prose();
      made.append(made.view.element);
      return made;
    });
    part.view.set(tokens ?? content, live);
  }

  #calls(live) {
    const calls = this.#message.calls;
    const part = this.#part("calls", () => h("div"));
    for (const [index, call] of calls.entries()) {
      const card = part.children[index] ?? part.appendChild(
        h("div", { class: "call" }, h("h4"), h("pre", { class: "mono" })));
      put(card.children[0], call.name);
      put(card.children[1], pretty(call.text));
    }
    if (!live && !this.#message.answered) this.#ask(part);
    else part.querySelector("form")?.replaceWith(...part.querySelectorAll(".call"));
  }

  /** Fields for what the tools would have given. */
  #ask(part) {
    if (part.querySelector("form")) return;
    const fields = this.#message.calls.map((call, index) => {
      const field = h("textarea", { class: "mono", "aria-label": `Result of ${call.name}` });
      part.children[index].append(h("label", {}, "Result"), field);
      return field;
    });
    part.append(h("form", {
      onsubmit: (event) => {
        event.preventDefault();
        this.#acts.results(this.#message, fields.map((field) => field.value));
      },
    }, ...part.children, h("div", { class: "row" },
      h("button", { class: "main" }, fields.length > 1 ? "Send results" : "Send result"))));
  }

  #foot() {
    const message = this.#message;
    this.#drop("foot");
    this.#part("foot", () => h("div", { class: "foot" },
      h("div", { class: "acts" },
        message.content
          ? iconButton("copy", "Copy", () => copy(message.content)) : null,
        iconButton("again", "Answer again", () => this.#acts.again(message))),
      h("p", { class: "facts" },
        facts(message.stats ?? {}).flatMap((fact) => [h("span", {}, fact), " "]))));
  }
}

function facts({ prompt, cached, output, first, seconds, finish }) {
  const said = [];
  if (output !== undefined) said.push(plural(output, "token"));
  if (output > 1 && seconds > 0) said.push(`${measure(1000 * (output - 1) / seconds)} tokens/s`);
  if (first !== undefined) said.push(`first after ${duration(first)}`);
  if (prompt !== undefined) said.push(
    `prompt ${count(prompt)}${cached ? `, ${count(cached)} cached` : ""}`);
  if (FINISH[finish]) said.push(FINISH[finish]);
  return said;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is not whole yet
  }
}
