// The connection to /monitor/events: opened while somebody looks, and again when it was lost.

import { ask } from "./server.js";
import { events } from "./sse.js";

const FIRST = 500, LONGEST = 10_000; // milliseconds before it is tried again
const SILENCE = 5000; // an event comes four times a second; without any, the server is gone

/**
 * told: {event(event), lost(why, seconds until it is tried again)}; 0 if it is not: who would not
 * give a key is asked for one when the feed is opened again.
 */
export class Feed {
  #told;
  #stop = null;

  constructor(told) {
    this.#told = told;
  }

  open() {
    if (this.#stop) return;
    this.#stop = new AbortController();
    this.#run(this.#stop.signal);
  }

  close() {
    this.#stop?.abort();
    this.#stop = null;
  }

  async #run(closed) {
    let wait = FIRST;
    while (!closed.aborted) {
      let why = "The connection to the server has ended.", refused = false;
      try {
        await this.#listen(closed, () => { wait = FIRST; });
      } catch (error) {
        if (error.name !== "AbortError") why = error.message;
        refused = error.status === 401;
        if (error.status === 404) why = "This server does not tell how it works.";
      }
      if (closed.aborted) return;
      if (refused) {
        this.close();
        this.#told.lost(why, 0);
        return;
      }
      this.#told.lost(why, wait / 1000);
      await pause(wait, closed);
      wait = Math.min(2 * wait, LONGEST);
    }
  }

  /** Until the connection ends. */
  async #listen(closed, heard) {
    const gone = new AbortController();
    let silence = setTimeout(() => gone.abort(), SILENCE);
    try {
      const signal = AbortSignal.any([closed, gone.signal]);
      for await (const data of events(await ask("monitor/events", { signal }))) {
        clearTimeout(silence);
        silence = setTimeout(() => gone.abort(), SILENCE);
        heard();
        this.#told.event(JSON.parse(data));
      }
    } finally {
      clearTimeout(silence);
    }
  }
}

function pause(milliseconds, closed) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    closed.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    }, { once: true });
  });
}
