// The text of an answer with the few marks of Markdown that models use: fences, headings, lists,
// code, bold and italic letters. It grows: blocks before the last stay as they are.

import { copy } from "./copy.js";
import { h, iconButton } from "./dom.js";

/** An element whose text can be set again and again. */
export class Prose {
  element = h("div", { class: "prose" });
  #blocks = [];

  set(text) {
    const blocks = blocksOf(text);
    for (const [index, block] of blocks.entries()) {
      if (this.#blocks[index]?.source === block.source) continue;
      const made = { source: block.source, element: block.made() };
      if (this.#blocks[index]) this.#blocks[index].element.replaceWith(made.element);
      else this.element.append(made.element);
      this.#blocks[index] = made;
    }
    for (const { element } of this.#blocks.splice(blocks.length)) element.remove();
  }
}

function blocksOf(text) {
  const blocks = [];
  let lines = [], fence = null;
  const close = (made) => {
    if (lines.length) {
      const own = lines;
      blocks.push({ source: own.join("\n"), made: () => made(own) });
    }
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = line.match(/^ {0,3}(```+|~~~+)/);
    if (fence === null && mark) {
      close(block);
      fence = mark[1];
      lines.push(line);
    } else if (fence !== null) {
      lines.push(line);
      if (mark && mark[1].startsWith(fence) && line.trim() === mark[1]) {
        close(code);
        fence = null;
      }
    } else if (line.trim() === "") {
      close(block);
    } else {
      const kind = kindOf(line);
      if (lines.length && kind !== kindOf(lines[0]) && (kind || kindOf(lines[0])) &&
          !/^\s/.test(line)) close(block);
      lines.push(line);
    }
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

const MARKS = /(`+)(.+?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|(?<![\w*])\*(\S(?:.*?\S)?)\*(?![\w*])/s;

function letters(text) {
  const made = [];
  for (;;) {
    const found = MARKS.exec(text);
    if (!found) return [...made, text];
    made.push(text.slice(0, found.index));
    if (found[2] !== undefined) made.push(h("code", {}, found[2]));
    else if (found[3] !== undefined) made.push(h("strong", {}, ...letters(found[3])));
    else made.push(h("em", {}, ...letters(found[4])));
    text = text.slice(found.index + found[0].length);
  }
}
