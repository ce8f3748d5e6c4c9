// Formulas and colours of code, after the text stands: each is a piece of work of its own, and its
// library is loaded when it is needed first. What is too long stays as it is written.

import { h } from "./dom.js";
import { slices } from "./frames.js";
import { colours, DOMPurify, math, mathStyle } from "./libraries.js";

const FORMULAS = 80; // of a part of a text
const FORMULA = 1500, CODE = 12_000, CODE_THAT_GROWS = 4000; // letters
const SAFE = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };
const RULES = {
  throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 200,
  // These two would set styles within MathML, which the page's policy forbids.
  macros: { "\\pmb": "\\boldsymbol{#1}", "\\fcolorbox": "\\@secondoftwo{#1}{\\colorbox{#2}{#3}}" },
};
const formulas = lazily(async () => {
  document.head.append(h("link", { rel: "stylesheet", href: mathStyle }));
  return math();
});
const languages = lazily(colours);

/**
 * Typesets the formulas and colours the code within an element of the page. part: what it is in.
 * growing: its text is not whole yet, and the same is asked for again soon.
 */
export function dress(element, part, growing) {
  const formulas = [...element.querySelectorAll(".math:not(.typeset)")];
  if (formulas.length) {
    const left = FORMULAS - part.querySelectorAll(":is(.asked, .typeset)").length;
    for (const one of formulas.slice(0, Math.max(0, left))) typeset(one);
  }
  for (const one of element.querySelectorAll("code[data-language]")) {
    if (one.textContent.length <= (growing ? CODE_THAT_GROWS : CODE)) colour(one);
  }
}

/** Puts a formula in the place of its source, which is kept in `source`. */
function typeset(element) {
  const source = element.source = element.textContent;
  if (source.length > FORMULA) return;
  element.classList.add("asked");
  formulas((library) => {
    const made = h("span");
    try {
      library.render(source, made,
        { ...RULES, displayMode: element.classList.contains("display") });
    } catch {
      return; // it is no formula, or not whole yet: its source stays
    }
    element.replaceChildren(...made.childNodes);
    element.classList.replace("asked", "typeset");
  }, element);
}

function colour(element) {
  const { language } = element.dataset;
  languages((library) => {
    if (!library.known(language)) return;
    const made = library.coloured(element.textContent, language);
    element.replaceChildren(DOMPurify.sanitize(made, SAFE));
  }, element);
}

/** (work, element) => calls work(library) in a slice of a frame; not if the element is gone then. */
function lazily(load) {
  let library, loading;
  return (work, element) => {
    const once = () => {
      if (element.isConnected) work(library);
    };
    if (library) slices(once);
    else (loading ??= load().then((made) => { library = made; })).then(() => slices(once));
  };
}
