// The pages of keys and values of each group, as a bar and in numbers; and, for whoever opens
// them, the largest prefixes that are cached in them.

import { h, put } from "./dom.js";
import { askJson } from "./server.js";
import { count, plural } from "./words.js";

const PARTS = [["used", "in use"], ["cached", "cached"], ["free", "free"]];
const AGAIN = 5000; // milliseconds between two looks at the prefixes

export class Pages {
  element;
  #rows = h("div", { class: "groups-of-pages" });
  #groups = new Map();

  constructor() {
    this.element = h("section", { class: "card pages", "aria-labelledby": "pages-title" },
      h("h3", { id: "pages-title" }, "Memory for keys and values"), this.#rows);
  }

  show({ pages }) {
    for (const row of pages) {
      let made = this.#groups.get(row.group);
      if (!made) {
        made = new Bar();
        this.#groups.set(row.group, made);
        this.#rows.append(made.element);
      }
      made.show(row, pages.length > 1);
    }
  }
}

class Bar {
  element;
  #bar;
  #numbers;
  #group = h("span");
  #total = h("span", { class: "quiet" });

  constructor() {
    this.#bar = Object.fromEntries(PARTS.map(([part]) => [part, h("i", { class: part })]));
    this.#numbers = Object.fromEntries(PARTS.map(([part]) => [part, h("dd")]));
    this.element = h("div", { class: "pool" },
      h("p", {}, this.#group, this.#total),
      h("div", { class: "bar-of-pages", "aria-hidden": "true" }, Object.values(this.#bar)),
      h("dl", { class: "legend" }, PARTS.map(([part, text]) => h("div", {},
        h("dt", {}, h("i", { class: part }), text), this.#numbers[part]))));
  }

  show(row, several) {
    put(this.#group, several ? `Group ${row.group} ` : "");
    put(this.#total, `${count(row.total)} pages of ${plural(row.page_tokens, "token")}`);
    for (const [part] of PARTS) {
      this.#bar[part].style.flexGrow = String(row[part]);
      const share = row.total ? ` · ${Math.round(100 * row[part] / row.total)} %` : "";
      put(this.#numbers[part], `${count(row[part])}${share}`);
    }
  }
}

export class Prefixes {
  element;
  #list = h("div", {});
  #timer = 0;

  constructor() {
    this.element = h("details", { class: "card prefixes", ontoggle: () => this.look() },
      h("summary", {}, h("h3", {}, "Largest cached prefixes")), this.#list);
  }

  /** Asks now and every few seconds, for as long as it is open and on the screen. */
  async look() {
    clearTimeout(this.#timer);
    if (!this.element.open || !this.element.checkVisibility() || document.hidden) return;
    try {
      this.#show((await askJson("monitor/prefixes")).groups);
    } catch (error) {
      this.#list.replaceChildren(h("p", { class: "quiet" }, error.message));
      if (error.status === 401) return;
    }
    this.#timer = setTimeout(() => this.look(), AGAIN);
  }

  #show(groups) {
    const lines = groups.flatMap(({ group, prefixes }) => [
      groups.length > 1 ? h("h4", {}, `Group ${group}`) : null,
      prefixes.length ? h("ol", {}, prefixes.map(prefixed))
        : h("p", { class: "quiet" }, "Nothing is cached yet: prompts that begin like one before "
          + "find their beginning here."),
    ]);
    this.#list.replaceChildren(...lines.filter(Boolean));
  }
}

function prefixed({ tokens, locks, text, ids }) {
  const facts = [plural(tokens, "token"), locks ? `${plural(locks, "request")} on it` : "not in use"];
  return h("li", {}, h("p", {}, facts.join(" · ")),
    ids ? h("p", { class: "mono text" }, text || ids.join(" ")) : null);
}
