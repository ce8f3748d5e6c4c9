// Copies text, also where the page came over plain HTTP from another host: there browsers have no
// clipboard but that of the old command.

import { announce, h } from "./dom.js";

export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const focused = document.activeElement, field = h("textarea", { class: "hidden" });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    focused?.focus();
  }
  announce("Copied.");
}
