// The messages of one conversation on the screen. Of a long one the newest are built at once, the
// others while the browser has nothing else to do; what is out of sight costs no layout.

import { byId, h } from "./dom.js";
import { pending } from "./frames.js";
import { MessageView } from "./message.js";

const AT_ONCE = 30;
const FEW = 5, SPARE = 5; // messages built in a pause at least; milliseconds of it left unused
const NEAR = 80; // pixels from the end within which the view follows what grows

const ANCHORS = CSS.supports("overflow-anchor", "auto"); // the browser itself keeps the place
const later = globalThis.requestIdleCallback
  ?? ((work) => setTimeout(() => work({ timeRemaining: () => 0 }), 20));

export class Thread {
  #list = byId("thread");
  #scroll = byId("scroll");
  #views = new Map();
  #acts;
  #shown = 0; // number of the conversation that is shown, so that work for others is dropped
  #growing = new Set();
  #follows = true;

  /** acts: what a message's buttons do, see message.js. */
  constructor(acts) {
    this.#acts = acts;
    this.#scroll.addEventListener("scroll", () => this.#look(), { passive: true });
    new ResizeObserver(() => this.#follow()).observe(this.#list);
    byId("to-end").onclick = () => this.toEnd();
  }

  /** Shows these messages and no others, `welcome` where there are none; `live` still grows. */
  show(messages, welcome, live) {
    const mine = ++this.#shown;
    this.#views.clear();
    this.#growing.clear();
    this.#list.replaceChildren(...(messages.length ? [] : [welcome]));
    let from = Math.max(0, messages.length - AT_ONCE);
    // The newest first: they are what is looked at.
    this.#list.append(...messages.slice(from).reverse()
      .map((message) => this.#made(message, message === live)).reverse());
    this.toEnd();
    this.#list.setAttribute("aria-busy", String(from > 0));
    const more = (idle) => {
      if (mine !== this.#shown) return;
      const made = [];
      while (from > 0 && !pending() && (made.length < FEW || idle.timeRemaining() > SPARE)) {
        made.unshift(this.#made(messages[--from]));
      }
      this.#prepend(made);
      if (from > 0 || pending()) later(more); // those that are built are to be read first
      else this.#list.setAttribute("aria-busy", "false");
    };
    if (from > 0) later(more);
  }

  /** Puts elements before all others, and what is on the screen stays where it is. */
  #prepend(made) {
    if (ANCHORS) {
      this.#list.prepend(...made);
      return;
    }
    const height = this.#scroll.scrollHeight, top = this.#scroll.scrollTop;
    this.#list.prepend(...made);
    this.#scroll.scrollTop = top + this.#scroll.scrollHeight - height;
  }

  /** One more message at the end. live: it grows. */
  append(message, live) {
    if (!this.#views.size) this.#list.replaceChildren();
    this.#list.append(this.#made(message, live));
    this.toEnd();
  }

  /** Takes messages away. */
  drop(messages) {
    for (const message of messages) {
      this.#views.get(message)?.element.remove();
      this.#views.delete(message);
    }
  }

  /** A message has grown: it is shown with the next frame, however often that is said. */
  grown(message) {
    if (!this.#growing.size) requestAnimationFrame(() => this.#draw());
    this.#growing.add(message);
  }

  /** A message is as it will stay. */
  ended(message) {
    this.#growing.delete(message);
    this.#views.get(message)?.update(false);
  }

  toEnd() {
    this.#scroll.scrollTop = this.#scroll.scrollHeight;
    this.#follows = true;
    this.#look();
  }

  #made(message, live) {
    const view = new MessageView(message, this.#acts, live);
    this.#views.set(message, view);
    return view.element;
  }

  #draw() {
    for (const message of this.#growing) this.#views.get(message)?.update(true);
    this.#growing.clear();
  }

  #follow() {
    if (this.#follows) this.#scroll.scrollTop = this.#scroll.scrollHeight;
  }

  #look() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroll;
    const left = scrollHeight - scrollTop - clientHeight;
    this.#follows = left < NEAR;
    byId("to-end").hidden = left < 3 * NEAR;
  }
}

/** What an empty conversation shows. examples: prompts that tried() is called with. */
export function welcome(model, examples, tried) {
  return h("div", { class: "welcome" }, h("h3", {}, "What shall we talk about?"),
    h("p", {}, model ? `${model} answers, on this server.` : "The model answers here."),
    h("div", { class: "examples" }, examples.map((example) =>
      h("button", { type: "button", onclick: () => tried(example) }, example))));
}
