// What happened to stages while somebody looked: lost, started again, ready again.

import { h } from "./dom.js";
import { clock, duration } from "./words.js";

const MOST = 200;

export class Happenings {
  element;
  #list = h("ol", { role: "log", "aria-label": "Events", tabindex: "0" });
  #none = h("p", { class: "quiet" }, "Nothing has happened to a stage while you looked. "
    + "A stage that is lost, starts or is ready again is told here.");
  #known = new Map();

  constructor() {
    this.element = h("section", { class: "card happenings", "aria-labelledby": "events-title" },
      h("h3", { id: "events-title" }, "Events"), this.#none, this.#list);
  }

  show({ time, stages }) {
    for (const { stage, state, reason, pid, restarts, takeover } of stages) {
      const before = this.#known.get(stage);
      const now = { state, pid, takeover, since: before?.since ?? null };
      this.#known.set(stage, now);
      if (!before) continue;
      if (pid && before.pid && pid !== before.pid) {
        const number = restarts ? ` (restart ${restarts})` : "";
        this.say(time, `${stage}: a new process, ${pid}${number}`);
      }
      if (takeover && takeover !== before.takeover) this.say(time, `${stage}: ${takeover}`, "good");
      if (state === before.state) continue;
      if (state === "ready") {
        const took = before.since === null ? null : duration(1000 * (time - before.since));
        this.say(time, `${stage}: ready again${took ? ` after ${took}` : ""}`, "good");
        now.since = null;
      } else {
        now.since ??= time;
        const bad = state === "lost" || state === "failed";
        this.say(time, `${stage}: ${state}${reason ? `, ${reason}` : ""}`, bad ? "bad" : "warn");
      }
    }
  }

  /** One line. time: Unix seconds. */
  say(time, text, kind = "") {
    this.#none.hidden = true;
    this.#list.append(h("li", { class: kind }, h("time", {}, clock(time)), " ", text));
    while (this.#list.childElementCount > MOST) this.#list.firstChild.remove();
    this.#list.scrollTop = this.#list.scrollHeight;
  }
}
