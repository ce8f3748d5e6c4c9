// What each step of the last minute was made of, and how long it took: a chart on a canvas, with
// the same in a sentence.

import { h, put } from "./dom.js";
import { count, duration, mean } from "./words.js";

const WINDOW = 60, BIN = 0.5; // seconds
const LEFT = 54, GAP = 26, FOOT = 20; // pixels
const KINDS = [["decodes", "decodes a step"], ["prompts", "prompt tokens a step"],
  ["time", "longest step"], ["target", "target"]];

export class Steps {
  element;
  #canvas = h("canvas", { role: "img", "aria-label": "Steps of the last minute" });
  #words = h("p", { class: "quiet" });
  #swatches;
  #steps = [];
  #now = 0;

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
    const room = height - GAP - FOOT - 8, above = 8 + Math.round(room * 0.62);
    const bins = binned(this.#steps);
    const most = Math.max(1, ...bins.map(({ decodes, prompts }) => decodes + prompts));
    const longest = Math.max(0.001, ...bins.map(({ time, target }) => Math.max(time, target)));
    axis(pen, width, 8, above, count(Math.ceil(most)));
    axis(pen, width, above + GAP, height - FOOT, duration(1000 * longest));
    pen.textAlign = "left";
    pen.fillText("60 s ago", LEFT, height - 4);
    pen.textAlign = "right";
    pen.fillText("now", width, height - 4);
    const each = (width - LEFT) * BIN / WINDOW, right = width;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height);
    pen.clip();
    for (const { at, decodes, prompts, time, target } of bins) {
      const x = right - (this.#now - at) / BIN * each, wide = Math.max(1, each - 1);
      const high = (value) => value / most * (above - 8);
      pen.fillStyle = colours.decodes;
      pen.fillRect(x, above - high(decodes), wide, high(decodes));
      pen.fillStyle = colours.prompts;
      pen.fillRect(x, above - high(decodes + prompts), wide, high(prompts));
      const floor = height - FOOT, long = (value) => value / longest * (floor - above - GAP);
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
    bin.count += 1;
    bin.decodes += step.decodes;
    bin.prompts += step.prompt_tokens;
    bin.time = Math.max(bin.time, step.seconds);
    bin.target = Math.max(bin.target, step.target);
  }
  return [...bins.values()].map((bin) =>
    ({ ...bin, decodes: bin.decodes / bin.count, prompts: bin.prompts / bin.count }));
}

function axis(pen, width, top, floor, most) {
  pen.globalAlpha = 0.25;
  for (const y of [top, floor]) pen.fillRect(LEFT, Math.round(y), width - LEFT, 1);
  pen.globalAlpha = 1;
  pen.textAlign = "right";
  pen.fillText(most, LEFT - 8, top + 8);
  pen.fillText("0", LEFT - 8, floor);
}

function summary(steps) {
  if (!steps.length) return "No step in the last minute.";
  const sum = (of) => steps.reduce((total, step) => total + of(step), 0);
  const each = (of) => mean(sum(of) / steps.length);
  const late = steps.filter(({ seconds, target }) => target && seconds > target).length;
  const times = steps.map(({ seconds }) => 1000 * seconds).sort((a, b) => a - b);
  return `${count(steps.length)} steps, each on average of ${each((step) => step.decodes)} decodes `
    + `and ${each((step) => step.prompt_tokens)} prompt tokens; half of them within `
    + `${duration(times[Math.floor(times.length / 2)])}, the longest ${duration(times.at(-1))}`
    + (late ? `; ${count(late)} longer than their target.` : ".");
}
