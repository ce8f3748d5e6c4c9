// Markdown as elements: tables, lists, quotes, links, task lists, code and math. Raw HTML is text,
// but for <br>; addresses are those of the web and of mail; pictures are links, since the page loads
// nothing from elsewhere. What the parser makes passes DOMPurify, which knows these few tags only.

import { copy } from "./copy.js";
import { h, iconButton } from "./dom.js";
import { DOMPurify, MarkdownIt } from "./libraries.js";

const DEPTH = 24; // of nested quotes, lists and marks; what is deeper is text
const LINES = 60; // of a formula
const ADDRESS = /^(?:https?|mailto):/i;
const SAFE = {
  ALLOWED_TAGS: ["p", "br", "hr", "strong", "em", "s", "code", "pre", "blockquote", "ul", "ol", "li",
    "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "a", "input"],
  ALLOWED_ATTR: ["href", "title", "start", "class", "type", "checked", "disabled", "aria-label"],
  ADD_URI_SAFE_ATTR: ["start", "type", "checked", "disabled", "aria-label"], // no addresses
  ALLOWED_URI_REGEXP: ADDRESS, ALLOW_ARIA_ATTR: false, ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const parser = new MarkdownIt({ breaks: true, linkify: true, maxNesting: DEPTH });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (address) => ADDRESS.test(address);
const { escapeHtml } = parser.utils;

// ------------------------------------------------------------------------------------------- math

/** $a$, $$a$$, \(a\), \[a\] within a line. A dollar before a digit closes nothing: $5 and $6. */
function inlineMath(state, silent) {
  const { src, pos, posMax } = state;
  const [open, close] = src.startsWith("$$", pos) ? ["$$", "$$"] : src[pos] === "$" ? ["$", "$"]
    : src.startsWith("\\(", pos) ? ["\\(", "\\)"] : src.startsWith("\\[", pos) ? ["\\[", "\\]"]
      : [];
  if (!open) return false;
  const from = pos + open.length, tight = open === "$";
  if (tight && /\s/.test(src[from] ?? " ")) return false;
  const none = state.unclosed ??= new Set(); // what nothing closes is not searched for again
  if (none.has(close)) return false;
  let end = src.indexOf(close, from);
  while (end > 0 && src[end - 1] === "\\" && tight) end = src.indexOf(close, end + 1);
  if (end < 0) none.add(close);
  if (end <= from || end + close.length > posMax) return false;
  if (tight && (/\s/.test(src[end - 1]) || /\d/.test(src[end + 1] ?? ""))) return false;
  if (!silent) {
    const token = state.push("math", "math", 0);
    token.content = src.slice(from, end);
    token.meta = open === "$$" || open === "\\[";
  }
  state.pos = end + close.length;
  return true;
}

/** $$ or \[ at the begin of a line, up to the line that ends with its like. */
function mathBlock(state, line, endLine, silent) {
  const start = state.bMarks[line] + state.tShift[line];
  const open = state.src.slice(start, start + 2);
  const close = { $$: "$$", "\\[": "\\]" }[open];
  if (!close || state.sCount[line] - state.blkIndent >= 4) return false;
  for (let last = line; last < Math.min(endLine, line + LINES); last++) {
    const from = last === line ? start + 2 : state.bMarks[last] + state.tShift[last];
    const text = state.src.slice(from, state.eMarks[last]).trimEnd();
    if (last > line && (!text || state.sCount[last] < state.blkIndent)) return false;
    const at = text.indexOf(close);
    if (at < 0) continue;
    if (at + 2 < text.length) return false; // more stands behind it: it is one within a paragraph
    if (silent) return true;
    const content = last === line ? text.slice(0, at) : [
      state.src.slice(start + 2, state.eMarks[line]),
      state.getLines(line + 1, last, state.blkIndent, false), text.slice(0, at)].join("\n");
    const token = state.push("math", "math", 0);
    Object.assign(token, { block: true, content, meta: true, map: [line, last + 1] });
    state.line = last + 1;
    return true;
  }
  return false;
}

parser.inline.ruler.before("escape", "math", inlineMath);
parser.block.ruler.before("fence", "math", mathBlock,
  { alt: ["paragraph", "reference", "blockquote", "list"] });
parser.renderer.rules.math = (tokens, index) => {
  const { content, meta, block } = tokens[index];
  const made = `<code class="math${meta ? " display" : ""}">${escapeHtml(content.trim())}</code>`;
  return block ? `<p>${made}</p>` : made;
};

// ------------------------------------------------------------------------ what else is of our own

parser.inline.ruler.before("html_inline", "br", (state, silent) => {
  const found = state.src[state.pos] === "<"
    && /^<br ?\/?>/i.exec(state.src.slice(state.pos, state.pos + 6));
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
});

/** "[x] " at the begin of a list's item becomes a box. */
parser.core.ruler.after("inline", "tasks", ({ tokens, Token }) => {
  for (const [index, token] of tokens.entries()) {
    const found = token.type === "inline" && tokens[index - 2]?.type === "list_item_open"
      && /^\[([ xX])\]\s/.exec(token.content);
    if (!found || token.children[0]?.type !== "text") continue;
    token.children[0].content = token.children[0].content.slice(4);
    const box = new Token("task", "input", 0);
    box.meta = found[1] !== " ";
    token.children.unshift(box);
    tokens[index - 2].attrSet("class", "task");
  }
});
parser.renderer.rules.task = (tokens, index) =>
  `<input type="checkbox" disabled ${tokens[index].meta ? 'checked aria-label="done"'
    : 'aria-label="to do"'}>`;

/** A cell's side is a class: styles within elements are none of this page. */
for (const name of ["th_open", "td_open"]) {
  parser.renderer.rules[name] = (tokens, index) => {
    const side = /center|right/.exec(tokens[index].attrGet("style") ?? "")?.[0];
    return `<${tokens[index].tag}${side ? ` class="${side}"` : ""}>`;
  };
}

/** Headings stand below those of the page. */
const level = ({ tag }) => Math.min(6, Number(tag[1]) + 3);
parser.renderer.rules.heading_open = (tokens, index) => `<h${level(tokens[index])}>`;
parser.renderer.rules.heading_close = (tokens, index) => `</h${level(tokens[index])}>`;

parser.renderer.rules.image = (tokens, index, options, env, self) => {
  const { children, content } = tokens[index], address = tokens[index].attrGet("src");
  const words = self.renderInlineAsText(children ?? [], options, env) || content || address;
  return `<a href="${escapeHtml(address)}">${escapeHtml(words)}</a>`;
};

// ---------------------------------------------------------------------------------------- elements

/**
 * The blocks of a text in order: [{start, end, tokens}], places in the text of each. env: what
 * earlier parts of the same text said (where links lead), to be handed over again.
 */
export function blocksOf(text, env) {
  const lines = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) lines.push(at + 1);
  const place = (line) => lines[line] ?? text.length;
  const blocks = [];
  let tokens = [], start = 0, end = 0;
  for (const token of parser.parse(text, env)) {
    if (!tokens.length) [start, end] = token.map.map(place);
    tokens.push(token);
    if (token.level === 0 && token.nesting <= 0) {
      blocks.push({ start, end, tokens });
      tokens = [];
    }
  }
  return blocks;
}

/** The elements of blocks. */
export function elementsOf(blocks, env) {
  if (!blocks.length) return [];
  const markup = blocks.map(({ tokens }) => parser.renderer.render(tokens, parser.options, env));
  const made = DOMPurify.sanitize(markup.join(""), SAFE);
  for (const link of made.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of made.querySelectorAll("table")) {
    const box = h("div", { class: "sheet", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const pre of made.querySelectorAll("pre")) {
    const language = /language-(\S+)/.exec(pre.firstChild.className)?.[1] ?? "";
    pre.replaceWith(codeBlock(pre.textContent.replace(/\n$/, ""), language));
  }
  return [...made.children];
}

/** Code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const code = h("code", { "data-language": language || null }, text);
  return h("div", { class: "code" },
    h("div", { class: "head" }, h("span", {}, language),
      iconButton("copy", "Copy this code", () => copy(code.textContent))),
    h("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, code));
}
