// The text of an answer as Markdown. It grows: blocks before the last stay as they are, the last is
// read again. The parser never gets more than a part of a text at once, and works in slices of
// frames, so that neither a long nor a hostile text holds up the page.

import { h } from "./dom.js";
import { slices } from "./frames.js";
import { blocksOf, codeBlock, elementsOf } from "./markdown.js";
import { dress } from "./typeset.js";

const PART = 4000; // letters that are parsed at once
const LINES = 60; // of them: each is laid out
const BLOCKS = 120; // of them that are shown at once
const PATIENCE = 3; // times as long as reading the end took, nothing of it is read again
const HEAD = 600; // letters of a table's head that is said again
const DEFINES = /(?:^|\n) {0,3}\[[^\]\n]*\]:[^\n]*$/; // where a link leads, in a line that may go on
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})[ \t]*(\S*)/;

/** An element whose text can be set again and again. */
export class Prose {
  element = h("div", { class: "prose" });
  #text = "";
  #live = true;
  #env = {};
  #known = 0; // links that were defined when the text was begun
  #from = 0; // where in the text the part begins that may still change
  #head = ""; // lines that belong to it: of a table that goes on
  #tail = []; // its elements
  #box = null; // in which they are
  #full = 0; // where in the text #box began
  #fence = null; // a code block longer than a part that goes on at #from
  #working = false;
  #again = 0; // a timer, and when it may be read again
  #notBefore = 0;

  /** live: the text still grows. */
  set(text, live = false) {
    if (text === this.#text && live === this.#live) return;
    const grew = this.#live && this.#text && text.startsWith(this.#text);
    if (!grew) this.#restart();
    this.#text = text;
    this.#live = live;
    if (this.#working) return;
    this.element.setAttribute("aria-busy", "true");
    clearTimeout(this.#again);
    const wait = live ? this.#notBefore - performance.now() : 0;
    if (wait > 0) this.#again = setTimeout(() => this.#begin(), wait);
    else if (live || !grew || this.#work()) this.#begin(); // its end is shown at once
  }

  #begin() {
    this.#working = true;
    slices(() => this.#work());
  }

  #restart() {
    this.element.replaceChildren();
    [this.#from, this.#head, this.#tail, this.#box, this.#fence] = [0, "", [], null, null];
    this.#known = Object.keys(this.#env.references ?? {}).length;
  }

  /** Whether there is more to do. */
  #work() {
    const began = performance.now();
    if (this.#part()) {
      this.element.getBoundingClientRect(); // a frame's work is to count the layout, too
      return true;
    }
    this.#notBefore = performance.now() + PATIENCE * (performance.now() - began);
    if (!this.#live && Object.keys(this.#env.references ?? {}).length > this.#known) {
      this.#restart(); // links were defined behind their use
      return true;
    }
    this.#working = false;
    this.element.removeAttribute("aria-busy");
    return false;
  }

  /** Reads a part. Whether there is another. */
  #part() {
    const rest = this.#rest();
    const whole = this.#from + rest.length === this.#text.length;
    if (this.#fence) return this.#codeOn(rest, whole);
    const text = whole && !(this.#live && DEFINES.test(rest))
      ? rest : rest.slice(0, rest.lastIndexOf("\n") + 1);
    if (!text) return whole ? false : this.#long(rest);
    const blocks = this.#blocks(text);
    if (!whole && blocks.length <= 1) return this.#cut(text, blocks[0]);
    if (blocks.length > BLOCKS + 2) {
      this.#from += blocks[BLOCKS].start;
      this.#show(blocks.slice(0, BLOCKS));
      this.#head = "";
      return true;
    }
    if (whole && !this.#live) {
      this.#show(blocks);
      this.#from = this.#text.length;
    } else {
      // What begins with a line that is not whole may still belong to the block before.
      const half = blocks.at(-1)?.start > text.lastIndexOf("\n") ? 2 : 1;
      const tail = blocks.splice(Math.max(0, blocks.length - half));
      this.#show(blocks, whole ? tail : []);
      this.#from += Math.max(0, tail[0]?.start ?? 0);
      if (blocks.length) this.#head = "";
    }
    return !whole;
  }

  /** What comes next: at most so many letters, and so many lines. */
  #rest() {
    const most = Math.min(this.#from + PART, this.#text.length);
    let end = this.#from;
    for (let line = 0; line < LINES && end < most; line++) {
      end = this.#text.indexOf("\n", end) + 1 || most;
    }
    return this.#text.slice(this.#from, Math.min(end, most));
  }

  #blocks(text) {
    const blocks = blocksOf(this.#head + text, this.#env);
    for (const block of blocks) block.start -= this.#head.length;
    return blocks;
  }

  /** A block that is longer than a part. */
  #cut(text, block) {
    const fence = FENCE.exec(text.slice(0, text.indexOf("\n")));
    if (fence) {
      const box = codeBlock("", "");
      box.querySelector(".head span").textContent = fence[2];
      this.#replace([box], []);
      this.#fence = { end: new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`, "m"),
        code: box.querySelector("code") };
      this.#from += text.indexOf("\n") + 1;
    } else {
      // It goes on as another one of its kind, best with a line that is not within anything.
      let end = text.length;
      for (let at = end - 1; at > text.length / 2; at = text.lastIndexOf("\n", at - 1)) {
        if (/\S/.test(text[at + 1] ?? " ")) {
          end = at + 1;
          break;
        }
      }
      this.#show(this.#blocks(text.slice(0, end)));
      this.#from += end;
      const head = this.#head || text.slice(0, text.indexOf("\n", text.indexOf("\n") + 1) + 1);
      const on = block?.tokens[0].type === "table_open" && this.#text[this.#from] !== "\n";
      this.#head = on && head.length < HEAD ? head : "";
    }
    return true;
  }

  /** The next part of a code block. */
  #codeOn(rest, whole) {
    const lines = rest.slice(0, whole ? rest.length : rest.lastIndexOf("\n") + 1) || rest;
    const { code, end } = this.#fence, found = end.exec(lines);
    const after = found ? found.index + found[0].length : lines.length;
    const open = this.#live && whole && after === rest.length; // the last line may go on
    const text = found && !open ? lines.slice(0, found.index) : lines;
    for (const one of this.#tail) one.remove();
    this.#tail = [];
    if (text) {
      // Pieces, so that the browser lays out again the last one alone.
      const piece = h("span", { class: "piece" }, text);
      code.append(piece);
      if (open) this.#tail = [piece];
    }
    if (open) return false;
    this.#from += after;
    if (found) this.#fence = null;
    return this.#from < this.#text.length;
  }

  /** A line longer than a part: text, up to its end. */
  #long(rest) {
    this.#replace([h("p", { class: "plain piece" }, rest)], []);
    this.#from += rest.length;
    return true;
  }

  #show(blocks, tail = []) {
    this.#replace(elementsOf(blocks, this.#env), elementsOf(tail, this.#env));
  }

  /** Puts elements in the place of those of before that might have changed: some that stay, and
   *  some that may change again. Formulas that stood there are not typeset once more. */
  #replace(made, tail) {
    const typeset = new Map();
    for (const one of this.#tail.flatMap((one) => [...one.querySelectorAll(".typeset")])) {
      const name = `${one.className} ${one.source}`;
      if (!typeset.has(name)) typeset.set(name, []);
      typeset.get(name).push(one);
    }
    for (const one of this.#tail) one.remove();
    this.#tail = tail;
    if (!this.#box || this.#from - this.#full > PART) {
      this.#box?.classList.add("whole");
      this.#box = this.element.appendChild(h("div", { class: "part" }));
      this.#full = this.#from;
    }
    this.#box.append(...made, ...tail);
    if (typeset.size) {
      for (const one of this.#box.querySelectorAll(".math:not(.typeset)")) {
        const before = typeset.get(`${one.className} typeset ${one.textContent}`)?.pop();
        if (before) one.replaceWith(before);
      }
    }
    for (const one of made) dress(one, this.#box, false);
    for (const one of tail) dress(one, this.#box, this.#live);
  }
}
