// Starts the page: its two views, colours and shortcuts.

import { Chat } from "./chat.js";
import { showKeys } from "./dialogs.js";
import { byId, glyph } from "./dom.js";
import { Pipeline } from "./pipeline.js";

const MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const WITH = MAC ? "Ctrl Option" : "Alt"; // a Mac types letters with Option alone
const THEMES = { auto: ["half", "as the system"], light: ["sun", "light"], dark: ["moon", "dark"] };
const TABS = ["chat", "pipeline"];

const chat = new Chat();
const pipeline = new Pipeline();

// [key's code, how it is written, what it does, its function]
const SHORTCUTS = [
  ["KeyN", "N", "New conversation", () => { choose("chat"); chat.begin(); }],
  ["KeyI", "I", "To the message field", () => { choose("chat"); chat.focus(); }],
  ["KeyO", "O", "Options", () => { choose("chat"); chat.toggleOptions(); }],
  ["KeyC", "C", "Chat", () => choose("chat")],
  ["KeyP", "P", "Pipeline", () => choose("pipeline")],
  ["KeyK", "K", "This list", () => keys()],
];

function keys() {
  showKeys([
    ["Enter", "Send"], ["Shift Enter", "A new line"],
    ["Esc", "Stop the answer, or close what is open"],
    ...SHORTCUTS.map(([, key, text]) => [`${WITH} ${key}`, text]),
    ["← →", "Between views, and between tokens with log-probs"],
  ]);
}

function choose(name) {
  for (const one of TABS) {
    const tab = byId(`tab-${one}`), chosen = one === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(one).hidden = !chosen;
  }
  location.replace(`#${name}`);
  pipeline.shown(name === "pipeline");
}

function tabs() {
  for (const [index, name] of TABS.entries()) {
    const tab = byId(`tab-${name}`);
    tab.onclick = () => choose(name);
    tab.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = TABS[(index + step + TABS.length) % TABS.length];
      choose(next);
      byId(`tab-${next}`).focus();
    };
  }
}

function theme() {
  const button = byId("theme"), names = Object.keys(THEMES);
  let now = localStorage.getItem("theme");
  if (!THEMES[now]) now = "auto";
  const set = () => {
    const [drawing, words] = THEMES[now];
    document.documentElement.dataset.theme = now;
    button.replaceChildren(glyph(drawing));
    button.setAttribute("aria-label", `Colours: ${words}`);
    button.title = `Colours: ${words}`;
  };
  button.onclick = () => {
    now = names[(names.indexOf(now) + 1) % names.length];
    localStorage.setItem("theme", now);
    set();
  };
  set();
}

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && !byId("chat").hidden && chat.escape()) event.preventDefault();
  if (!event.altKey || event.ctrlKey !== MAC || event.metaKey || event.shiftKey) return;
  const found = SHORTCUTS.find(([code]) => code === event.code);
  if (!found) return;
  event.preventDefault();
  found[3]();
});

theme();
tabs();
byId("show-keys").append(glyph("keyboard"));
byId("show-keys").onclick = keys;
await chat.start();
function follow() {
  const name = location.hash === "#pipeline" ? "pipeline" : "chat";
  if (byId(name).hidden) choose(name);
}

addEventListener("hashchange", follow); // an address that was typed
follow();
