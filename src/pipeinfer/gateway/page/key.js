// The API key: asked for when the server wants one, kept in this variable and nowhere else.

import { byId, put } from "./dom.js";

let key = "";
let asking = null;

/** The headers that a request needs. */
export const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

/** What of the key a request was sent with; to be handed to wanted() if it was refused. */
export const used = () => key;

/**
 * The server has refused a request that was sent with `before`. Asks for a key, once for all that
 * wait, and resolves to whether to try again.
 */
export function wanted(before) {
  if (before !== key) return Promise.resolve(true); // somebody else's question has been answered
  asking ??= ask().finally(() => { asking = null; });
  return asking;
}

function ask() {
  const dialog = byId("key-dialog"), field = byId("key"), form = byId("key-form");
  put(byId("key-reason"), key
    ? "The key that you gave is not one of this server's."
    : "Whoever runs this server has keys for those who may use it.");
  field.value = "";
  return new Promise((resolve) => {
    const end = (given) => {
      form.onsubmit = byId("key-later").onclick = dialog.onclose = null;
      field.value = "";
      dialog.close();
      if (given) key = given;
      resolve(Boolean(given));
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      end(field.value.trim());
    };
    byId("key-later").onclick = () => end("");
    dialog.onclose = () => end("");
    dialog.showModal();
    field.focus();
  });
}
