// The list of conversations at the side: open, rename, delete, search.

import { byId, h, iconButton, put } from "./dom.js";

/** acts: {open(id), rename(id, title), remove(id)}. */
export class List {
  #list = byId("conversations");
  #find = byId("find");
  #acts;
  #all = [];
  #now = null;
  #busy = new Set();

  constructor(acts) {
    this.#acts = acts;
    this.#find.oninput = () => this.#filter();
  }

  /** Shows these, in this order. now: the id of the one that is open; busy: ids that answer. */
  show(all, now, busy) {
    [this.#all, this.#now, this.#busy] = [all, now, busy];
    const rows = new Map([...this.#list.children].map((row) => [row.dataset.id, row]));
    const wanted = all.map((one) => {
      const row = rows.get(one.id) ?? this.#made(one.id);
      put(row.open, one.title);
      row.open.title = one.title;
      row.classList.toggle("now", one.id === now);
      row.classList.toggle("busy", busy.has(one.id));
      if (one.id === now) row.open.setAttribute("aria-current", "true");
      else row.open.removeAttribute("aria-current");
      rows.delete(one.id);
      return row;
    });
    for (const row of rows.values()) row.remove();
    for (const [index, row] of wanted.entries()) {
      if (this.#list.children[index] !== row) {
        this.#list.insertBefore(row, this.#list.children[index] ?? null);
      }
    }
    this.#filter();
  }

  #made(id) {
    const title = () => this.#all.find((one) => one.id === id).title;
    const row = h("li", { "data-id": id });
    row.open = h("button", { class: "open", type: "button", onclick: () => this.#acts.open(id) });
    row.append(row.open,
      iconButton("pen", "Rename", () => this.#rename(row, id, title())),
      iconButton("bin", "Delete", () => this.#acts.remove(id)));
    return row;
  }

  #rename(row, id, title) {
    const field = h("input", { "aria-label": "Title of the conversation", maxlength: "300" });
    field.value = title;
    let open = true;
    const end = (keep) => {
      if (!open) return;
      open = false;
      field.replaceWith(row.open);
      if (keep && field.value.trim()) this.#acts.rename(id, field.value.trim());
      row.open.focus();
    };
    field.onkeydown = (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    };
    field.onblur = () => end(true);
    row.open.replaceWith(field);
    field.select();
  }

  #filter() {
    const words = this.#find.value.trim().toLowerCase();
    let found = 0;
    for (const [index, one] of this.#all.entries()) {
      const fits = one.title.toLowerCase().includes(words);
      this.#list.children[index].hidden = !fits;
      found += fits;
    }
    byId("none-found").hidden = found > 0 || !words;
  }
}
