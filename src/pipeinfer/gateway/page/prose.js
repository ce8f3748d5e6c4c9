// The text of an answer with the few marks of Markdown that models use: fences, headings, lists,
// code, bold and italic letters. It grows: blocks before the last stay as they are.

import { copy } from "./copy.js";
import { h, iconButton } from "./dom.js";
import { marked } from "./marks.js";

/** An element whose text can be set again and again. */
export class Prose {
  element = h("div", { class: "prose" });
  #blocks = [];
  #text = "";

  set(text) {
    // What is added changes the last block or comes behind it: where others end is certain.
    const kept = text.startsWith(this.#text) ? Math.max(this.#blocks.length - 1, 0) : 0;
    const from = kept ? this.#blocks[kept].start : 0;
    const blocks = blocksOf(text.slice(from));
    this.#text = text;
    for (const [behind, block] of blocks.entries()) {
      const index = kept + behind, old = this.#blocks[index];
      block.start += from;
      if (old?.source === block.source) block.element = old.element;
      else {
        block.element = block.made();
        if (old) old.element.replaceWith(block.element);
        else this.element.append(block.element);
      }
      this.#blocks[index] = block;
    }
    for (const { element } of this.#blocks.splice(kept + blocks.length)) element.remove();
  }
}

/** [{start: its place in the text, source, made() its element}]. */
function blocksOf(text) {
  const blocks = [];
  let lines = [], kind = "", start = 0, at = 0, fence = null;
  const close = (made) => {
    if (lines.length) {
      const own = lines;
      blocks.push({ start, source: own.join("\n"), made: () => made(own) });
    }
    lines = [];
  };
  const take = (line) => {
    if (!lines.length) {
      start = at;
      kind = kindOf(line);
    }
    lines.push(line);
  };
  for (const line of text.split("\n")) {
    const mark = line.match(/^ {0,3}(```+|~~~+)/);
    if (fence === null && mark) {
      close(block);
      fence = mark[1];
      take(line);
    } else if (fence !== null) {
      take(line);
      if (mark && mark[1].startsWith(fence) && line.trim() === mark[1]) {
        close(code);
        fence = null;
      }
    } else if (line.trim() === "") {
      close(block);
    } else {
      if (lines.length && kindOf(line) !== kind && !/^\s/.test(line)) close(block);
      take(line);
    }
    at += line.length + 1;
  }
  close(fence === null ? block : code);
  return blocks;
}

function kindOf(line) {
  if (/^#{1,6} /.test(line)) return "heading";
  if (/^\s*[-*+] /.test(line)) return "ul";
  return /^\s*\d{1,4}[.)] /.test(line) ? "ol" : "";
}

function block(lines) {
  const kind = kindOf(lines[0]);
  if (kind === "heading") return h("h4", {}, ...letters(lines.join(" ").replace(/^#+ /, "")));
  if (!kind) return h("p", {}, ...letters(lines.join("\n")));
  const items = [];
  for (const line of lines) {
    if (kindOf(line)) items.push(line.replace(/^\s*([-*+]|\d+[.)]) /, ""));
    else items[items.length - 1] += `\n${line.trim()}`;
  }
  const start = kind === "ol" ? parseInt(lines[0], 10) : 1;
  return h(kind, { start: start === 1 ? null : start },
    ...items.map((item) => h("li", {}, ...letters(item))));
}

function code([opening, ...lines]) {
  const language = opening.replace(/^[\s`~]+/, "").trim();
  if (lines.length && /^\s*(```+|~~~+)\s*$/.test(lines[lines.length - 1])) lines.pop();
  const text = lines.join("\n");
  return h("div", { class: "code" },
    h("div", { class: "head" }, h("span", {}, language),
      iconButton("copy", "Copy this code", () => copy(text))),
    h("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, h("code", {}, text)));
}

function letters(text) {
  return elements(marked(text));
}

function elements(pieces) {
  return pieces.map((piece) =>
    typeof piece === "string" ? piece : h(piece[0], {}, ...elements(piece[1])));
}
