// An answer token by token: how likely each was, and what else could have stood there. One token
// has the focus; arrows move it; pointer, focus and touch show its alternatives.

import { h } from "./dom.js";

const LIMITS = [0.9, 0.5, 0.2, 0.05]; // below each of them the line under a token is of a new kind

let tip = null;

/** An element with all tokens; grows with set(). */
export class Tokens {
  element = h("div", {
    class: "tokens", role: "group",
    "aria-label": "Answer by tokens; arrow keys go from one to the next",
    onkeydown: (event) => this.#key(event),
    onfocusin: (event) => this.#show(event.target),
    onfocusout: hide,
    onpointerover: (event) => this.#show(event.target),
    onpointerout: hide,
  });
  #tokens = [];

  set(tokens) {
    this.#tokens = tokens;
    for (const [text, logprob] of tokens.slice(this.element.childElementCount)) {
      const kind = LIMITS.filter((limit) => Math.exp(logprob) < limit).length;
      this.element.append(h("span", {
        class: `p${kind}`, role: "button", "aria-label": text.trim() ? null : blank(text),
        tabindex: this.element.childElementCount ? "-1" : "0",
      }, text || "∅"));
    }
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    const all = [...this.element.children];
    const at = all.indexOf(document.activeElement) + step;
    const next = all[Math.min(Math.max(at, 0), all.length - 1)];
    for (const one of all) one.tabIndex = one === next ? 0 : -1;
    next.focus();
  }

  #show(target) {
    const index = [...this.element.children].indexOf(target);
    if (index < 0) return;
    hide();
    const [text, logprob, others] = this.#tokens[index];
    const rows = others.some(([other]) => other === text) ? others : [[text, logprob], ...others];
    tip = h("div", { class: "tip", role: "tooltip", id: "tip" },
      h("table", {}, h("tbody", {}, rows.map(([other, value]) =>
        h("tr", { class: other === text ? "taken" : null },
          h("td", { class: "mono" }, shown(other)),
          h("td", {}, `${(100 * Math.exp(value)).toFixed(1)} %`),
          h("td", {}, value > -0.005 ? "0.00" : value.toFixed(2)))))));
    document.body.append(tip);
    target.setAttribute("aria-describedby", "tip");
    const at = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const above = at.top - size.height - 8;
    tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
    tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
  }
}

function hide() {
  tip?.remove();
  tip = null;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
}

/** How screen readers call a token that cannot be seen. */
function blank(text) {
  if (text === "") return "nothing";
  return text.includes("\n") ? "line end" : "space";
}

function shown(text) {
  if (text === "") return "(nothing)";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
}
