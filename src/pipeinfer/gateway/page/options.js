// The options of a conversation: a form beside it, and the fields of a request that they become.

import { byId, h, iconButton, put } from "./dom.js";
import { count } from "./words.js";

const WHOLE = Number.MAX_SAFE_INTEGER;
// [field of the API, label, least, most, whether it is a whole number], as the server has them; an
// empty field is the server's own default.
const NUMBERS = [
  ["temperature", "Temperature", 0, 100], ["top_p", "Top p", 0, 1],
  ["top_k", "Top k", -1, 2 ** 31 - 1, true], ["min_p", "Min p", 0, 1],
  ["max_tokens", "Most tokens", 1, 2 ** 31 - 1, true], ["seed", "Seed", -WHOLE, WHOLE, true],
  ["presence_penalty", "Presence penalty", -2, 2],
  ["frequency_penalty", "Frequency penalty", -2, 2],
  ["repetition_penalty", "Repetition penalty", 0.01, 100],
];
const STOPS = 16, STOP_LETTERS = 1024;
const TOOL_HINT = '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]';

/**
 * What a request gets of the options: {fields, wrong}, with wrong = {field: why}; with any of these
 * nothing is to be sent. context: the most tokens of prompt and answer, 0 if it is not known.
 */
export function requested(options, context) {
  const fields = {}, wrong = {};
  for (const [name, label, least, own, whole] of NUMBERS) {
    const shared = name === "max_tokens" && context > 1; // with a prompt of a token at least
    const most = shared ? context - 1 : own;
    if (!options[name]?.trim()) continue;
    const value = Number(options[name]);
    if (Number.isNaN(value)) wrong[name] = `${label} is no number.`;
    else if (whole && !Number.isInteger(value)) wrong[name] = `${label} is a whole number.`;
    else if (value < least || value > most) wrong[name] = said(label, least, most)
      + (shared ? ` The context, of prompt and answer, has ${count(context)}.` : "");
    else fields[name] = value;
  }
  const stops = (options.stop ?? "").split("\n").filter((line) => line !== "");
  if (stops.length > STOPS) wrong.stop = `At most ${STOPS} lines.`;
  else if (stops.some((line) => line.length > STOP_LETTERS))
    wrong.stop = `At most ${STOP_LETTERS} letters a line.`;
  else if (stops.length) fields.stop = stops;
  const parsed = (name, label, take) => {
    if (!options[name]?.trim()) return;
    try {
      take(JSON.parse(options[name]));
    } catch (error) {
      wrong[name] = error instanceof SyntaxError ? `${label}: ${error.message}` : error.message;
    }
  };
  parsed("schema", "The schema", (form) => { fields.response_format = formed(form); });
  parsed("tools", "Tools", (tools) => {
    if (!Array.isArray(tools)) throw new Error("Tools are a list in square brackets.");
    if (tools.length) fields.tools = tools;
    if (tools.length && options.tool_choice) fields.tool_choice = options.tool_choice;
  });
  if (options.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  parsed("more", "Further fields", (more) => {
    if (Array.isArray(more) || typeof more !== "object" || more === null)
      throw new Error("Further fields are an object in braces.");
    Object.assign(fields, more);
  });
  return { fields, wrong };
}

const said = (label, least, most) => (most < 1e9 ? `${label} is between ${least} and ${most}.`
  : Math.abs(least) < 1e6 ? `${label} is at least ${least}.` : `${label} has at most 15 digits.`);

/** A schema becomes a form of an answer; a whole form stays what it is. */
function formed(given) {
  if (["json_schema", "json_object", "text"].includes(given?.type)) return given;
  return { type: "json_schema", json_schema: { name: "answer", schema: given } };
}

/** The form. changed(options) is called with every change. */
export class Options {
  #panel = byId("options");
  #button = byId("toggle-options");
  #fields = {};
  #errors = {};
  #options = {};
  #context = 0;
  #changed;

  constructor(changed) {
    this.#changed = changed;
    this.#panel.append(
      h("div", { class: "head" }, h("h2", {}, "Options"),
        iconButton("close", "Close the options", () => this.toggle(false))),
      h("fieldset", {}, h("legend", {}, "System prompt"),
        this.#field("system", null, h("textarea", { rows: "4", "aria-label": "System prompt" }))),
      h("fieldset", {}, h("legend", {}, "Sampling"), h("div", { class: "pairs" },
        NUMBERS.map(([name, label, least, most]) => this.#field(name, label,
          h("input", { type: "number", step: "any", min: least, max: most,
            inputmode: "decimal", placeholder: "default" }))))),
      this.#field("stop", "Stop at, one a line", h("textarea", { rows: "2" })),
      h("fieldset", {}, h("legend", {}, "Form of the answer"),
        this.#field("schema", "JSON schema",
          h("textarea", { class: "mono", rows: "4", spellcheck: "false",
            placeholder: '{"type": "object", "properties": {…}}' }))),
      h("fieldset", {}, h("legend", {}, "Tools"),
        this.#field("tools", "Functions, as JSON", h("textarea", { class: "mono", rows: "5",
          spellcheck: "false", placeholder: TOOL_HINT })),
        this.#field("tool_choice", "May they be called?", h("select", {},
          [["", "as the model likes"], ["required", "one must be"], ["none", "no"]]
            .map(([value, text]) => h("option", { value }, text))))),
      h("fieldset", {}, h("legend", {}, "Log-probs"), this.#switch()),
      h("fieldset", {}, h("legend", {}, "Further fields"),
        this.#field("more", "Of the request's body, as JSON",
          h("textarea", { class: "mono", rows: "2", spellcheck: "false",
            placeholder: '{"ignore_eos": true}' }))),
      h("button", { type: "button", onclick: () => this.#reset() }, "All as the server likes"));
    this.#button.onclick = () => this.toggle();
  }

  /** Opens or closes the panel. */
  toggle(open = this.#panel.hidden) {
    this.#panel.hidden = !open;
    this.#button.setAttribute("aria-expanded", String(open));
    if (open) this.#panel.querySelector("button").focus();
    else this.#button.focus();
  }

  get open() {
    return !this.#panel.hidden;
  }

  /** The most tokens of prompt and answer. */
  set context(length) {
    this.#context = length;
    if (length > 1) this.#fields.max_tokens.max = length - 1;
    this.#checkAll();
  }

  /** Shows the options of another conversation. */
  show(options) {
    this.#options = { ...options };
    for (const [name, field] of Object.entries(this.#fields)) {
      if (field.type === "checkbox") field.checked = Boolean(options[name]);
      else field.value = options[name] ?? "";
    }
    this.#checkAll();
  }

  /** Opens at the field that is wrong. */
  point(name) {
    this.toggle(true);
    this.#fields[name].focus();
  }

  #field(name, label, input) {
    const id = `option-${name}`;
    input.id = id;
    input.setAttribute("aria-describedby", `${id}-wrong`);
    // What is no number, a number's field hands over as nothing.
    input.addEventListener("input", () =>
      this.#set(name, input.validity.badInput ? "?" : input.value));
    this.#fields[name] = input;
    this.#errors[name] = h("p", { class: "wrong", id: `${id}-wrong` });
    return h("div", { class: "field" },
      label ? h("label", { for: id }, label) : null, input, this.#errors[name]);
  }

  #switch() {
    const input = h("input", { type: "checkbox", id: "option-logprobs",
      onchange: () => this.#set("logprobs", input.checked) });
    this.#fields.logprobs = input;
    return h("div", { class: "check" }, input,
      h("label", { for: "option-logprobs" }, "Show how likely each token was"));
  }

  #set(name, value) {
    this.#options[name] = value;
    this.#checkAll();
    this.#changed({ ...this.#options });
  }

  #checkAll() {
    const { wrong } = requested(this.#options, this.#context);
    for (const [name, error] of Object.entries(this.#errors)) {
      put(error, wrong[name] ?? "");
      if (wrong[name]) this.#fields[name].setAttribute("aria-invalid", "true");
      else this.#fields[name].removeAttribute("aria-invalid");
    }
  }

  #reset() {
    this.show({});
    this.#changed({});
  }
}
