// The view of the pipeline: what the feed says, given to each part of it. The feed is open only
// while the view is on the screen.

import { Diagram } from "./diagram.js";
import { byId, h, put } from "./dom.js";
import { Feed } from "./feed.js";
import { Figures, Latency } from "./figures.js";
import { Happenings } from "./happenings.js";
import { Pages, Prefixes } from "./memory.js";
import { Requests } from "./requests.js";
import { Steps } from "./steps.js";
import { Timeline } from "./timeline.js";
import { duration } from "./words.js";

export class Pipeline {
  #timeline = new Timeline();
  #happenings = new Happenings();
  #prefixes = new Prefixes();
  #parts = [new Figures(), new Diagram(), new Steps(), new Pages(), new Latency(),
    new Requests((id) => this.#timeline.open(id)), this.#happenings];
  #note = h("p", { class: "feed-note", role: "status" }, "Asking the server …");
  #board;
  #feed = new Feed({
    event: (event) => this.#event(event),
    lost: (why, wait) => this.#lost(why, wait),
  });
  #active = false;
  #gone = false;

  constructor() {
    const [figures, diagram, steps, pages, latency, requests, happenings] =
      this.#parts.map(({ element }) => element);
    this.#board = h("div", { class: "board", hidden: true }, figures,
      h("section", { class: "card wiring", "aria-labelledby": "wiring-title" },
        h("h3", { id: "wiring-title" }, "Stages"), diagram),
      steps, pages, latency, requests, happenings, this.#prefixes.element);
    byId("pipeline").prepend(h("h2", { class: "hidden" }, "Pipeline"), this.#note, this.#board);
    document.addEventListener("visibilitychange", () => this.#listen());
  }

  /** Whether the view is the one that is chosen. */
  shown(active) {
    this.#active = active;
    this.#listen();
  }

  #listen() {
    if (this.#active && !document.hidden) {
      this.#feed.open();
      this.#prefixes.look();
    } else {
      this.#feed.close();
    }
  }

  #event(event) {
    if (this.#gone) this.#happenings.say(event.time, "the server is back", "good");
    this.#gone = false;
    this.#note.hidden = true;
    this.#board.hidden = false;
    this.#board.classList.remove("stale");
    for (const part of this.#parts) part.show(event);
  }

  #lost(why, wait) {
    this.#note.hidden = false;
    put(this.#note, wait ? `${why} Trying again in ${duration(1000 * wait)}.`
      : `${why}: choose Pipeline again to give one`);
    if (!this.#gone && !this.#board.hidden) {
      this.#happenings.say(Date.now() / 1000, "no word from the server", "bad");
      this.#gone = true;
    }
    this.#board.classList.add("stale");
  }
}
