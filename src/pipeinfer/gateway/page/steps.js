// What each step of the last minute was made of, and how long it took: a chart on a canvas, with
// the same in a sentence.

import { h, put } from "./dom.js";
import { count, duration, mean } from "./words.js";

const WINDOW = 60, BIN = 0.5; // seconds
const LEFT = 54, GAP = 30, FOOT = 20; // pixels
const KINDS = [["decodes", "decodes a step"], ["prompts", "prompt tokens a step"],
  ["time", "longest step"], ["target", "target"]];

export class Steps {
  element;
  #canvas = h("canvas", { role: "img", "aria-label": "Steps of the last minute" });
  #words = h("p", { class: "quiet" });
  #swatches;
  #steps = [];
  #now = 0;
  #last = 0; // when the newest step began

  constructor() {
    this.#swatches = Object.fromEntries(KINDS.map(([kind]) => [kind, h("i", { class: kind })]));
    this.element = h("section", { class: "card steps", "aria-labelledby": "steps-title" },
      h("h3", { id: "steps-title" }, "Steps of the last minute"),
      h("p", { class: "legend" }, KINDS.map(([kind, text]) =>
        h("span", {}, this.#swatches[kind], text))),
      this.#canvas, this.#words);
    new ResizeObserver(() => this.#draw()).observe(this.#canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  show({ time, steps }) {
    this.#now = time;
    this.#steps.push(...steps);
    if (steps.length && steps[0].at < this.#last) this.#steps.sort((a, b) => a.at - b.at);
    this.#last = this.#steps.at(-1)?.at ?? 0;
    const first = this.#steps.findIndex(({ at }) => at > time - WINDOW - BIN);
    this.#steps.splice(0, first < 0 ? this.#steps.length : first);
    put(this.#words, summary(this.#steps.filter(({ at }) => at > time - WINDOW)));
    this.#canvas.setAttribute("aria-label", this.#words.textContent);
    this.#draw();
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const scale = devicePixelRatio;
    if (!width) return;
    this.#canvas.width = width * scale;
    this.#canvas.height = height * scale;
    const pen = this.#canvas.getContext("2d");
    pen.scale(scale, scale);
    const ink = getComputedStyle(this.#words);
    const colours = Object.fromEntries(KINDS.map(([kind]) =>
      [kind, getComputedStyle(this.#swatches[kind]).backgroundColor]));
    pen.font = `11px ${ink.fontFamily}`;
    pen.fillStyle = pen.strokeStyle = ink.color;
    const room = height - GAP - FOOT - 24, above = 24 + Math.round(room * 0.62);
    const floor = height - FOOT, below = above + GAP;
    const bins = binned(this.#steps);
    const most = nice(Math.max(4, ...bins.map(({ decodes, prompts }) => decodes + prompts)));
    const longest = nice(1000 * Math.max(0.001,
      ...bins.map(({ time, target }) => Math.max(time, target)))) / 1000;
    axis(pen, width, 24, above, "tokens a step",
      [0, most / 2, most].map((value) => (value % 1 ? value.toFixed(1) : count(value))));
    axis(pen, width, below, floor, "time of a step",
      [0, longest / 2, longest].map((value) => (value ? duration(1000 * value) : "0")));
    pen.textAlign = "center";
    for (const ago of [60, 45, 30, 15, 0]) {
      const x = width - (width - LEFT) * ago / WINDOW;
      pen.globalAlpha = 0.25;
      pen.fillRect(Math.round(x) - (ago ? 0 : 1), floor, 1, 4);
      pen.globalAlpha = 1;
      pen.textAlign = ago === 0 ? "right" : ago === WINDOW ? "left" : "center";
      pen.fillText(ago ? `${ago} s ago` : "now", x, height - 3);
    }
    const each = (width - LEFT) * BIN / WINDOW, right = width;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height);
    pen.clip();
    for (const { at, decodes, prompts, time, target } of bins) {
      const x = right - (this.#now - at) / BIN * each, wide = Math.max(1, each - 1);
      const high = (value) => value / most * (above - 24);
      pen.fillStyle = colours.decodes;
      pen.fillRect(x, above - high(decodes), wide, high(decodes));
      pen.fillStyle = colours.prompts;
      pen.fillRect(x, above - high(decodes + prompts), wide, high(prompts));
      const long = (value) => value / longest * (floor - below);
      pen.fillStyle = colours.time;
      pen.fillRect(x, floor - long(time), wide, long(time));
      pen.fillStyle = colours.target;
      if (target) pen.fillRect(x, floor - long(target) - 1, each, 2);
    }
    pen.restore();
  }
}

/** Steps by half seconds: means of what they were made of, the longest, and its target. */
function binned(steps) {
  const bins = new Map();
  for (const step of steps) {
    const at = Math.floor(step.at / BIN) * BIN;
    const bin = bins.get(at) ?? { at, count: 0, decodes: 0, prompts: 0, time: 0, target: 0 };
    bins.set(at, bin);
    bin.count += step.count ?? 1; // of a sum, before the page looked
    bin.decodes += step.decodes;
    bin.prompts += step.prompt_tokens;
    bin.time = Math.max(bin.time, step.seconds);
    bin.target = Math.max(bin.target, step.target);
  }
  return [...bins.values()].map((bin) =>
    ({ ...bin, decodes: bin.decodes / bin.count, prompts: bin.prompts / bin.count }));
}

/** An axis' end: 1, 2, 2.5 or 5 times a power of ten that is not below a value. */
function nice(value) {
  const ten = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((times) => times * ten).find((end) => end >= value * (1 - 1e-9));
}

/** Lines at a scale's begin, middle and end, with what they stand for; and what it measures. */
function axis(pen, width, top, floor, title, texts) {
  for (const [index, text] of texts.entries()) {
    const y = Math.round(floor + (top - floor) * index / (texts.length - 1));
    pen.globalAlpha = 0.25;
    pen.fillRect(LEFT, y, width - LEFT, 1);
    pen.globalAlpha = 1;
    pen.textAlign = "right";
    pen.fillText(text, LEFT - 8, y + 4);
  }
  pen.textAlign = "left";
  pen.fillText(title, LEFT, top - 8);
}

function summary(steps) {
  if (!steps.length) return "No step in the last minute. "
    + "A step computes the next token of each running request and a part of waiting prompts.";
  const sum = (of) => steps.reduce((total, step) => total + of(step), 0);
  const made = sum((step) => step.count ?? 1);
  const each = (of) => mean(sum(of) / made);
  const single = steps.filter(({ count: several }) => (several ?? 1) === 1);
  const late = single.filter(({ seconds, target }) => target && seconds > target).length;
  const times = single.map(({ seconds }) => 1000 * seconds).sort((a, b) => a - b);
  const half = times.length > made / 2
    ? ` half of them within ${duration(times[Math.floor(times.length / 2)])},` : "";
  const longest = Math.max(...steps.map(({ seconds }) => 1000 * seconds));
  return `${count(made)} steps; decodes of each on average: ${each((step) => step.decodes)}, `
    + `prompt tokens: ${each((step) => step.prompt_tokens)};${half} the longest `
    + `${duration(longest)}${late ? `; ${count(late)} longer than their target.` : "."}`;
}
