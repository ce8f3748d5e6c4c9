// Small questions and lists that stand before the page.

import { byId, h, put } from "./dom.js";

/** Whether somebody is sure to delete. */
export function sure(title, text) {
  const dialog = byId("sure-dialog");
  put(byId("sure-title"), title);
  put(byId("sure-text"), text);
  return new Promise((resolve) => {
    const end = (answer) => {
      dialog.onclose = null;
      dialog.close();
      resolve(answer);
    };
    byId("sure-form").onsubmit = (event) => {
      event.preventDefault();
      end(true);
    };
    byId("sure-no").onclick = () => end(false);
    dialog.onclose = () => end(false);
    dialog.showModal();
    byId("sure-no").focus();
  });
}

/** Shows the shortcuts: [keys, what they do]. */
export function showKeys(shortcuts) {
  byId("keys").replaceChildren(...shortcuts.flatMap(([keys, text]) =>
    [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, text)]));
  byId("keys-close").onclick = () => byId("keys-dialog").close();
  byId("keys-dialog").showModal();
}
