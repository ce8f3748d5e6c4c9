// The chat: which conversation is open, what is asked, and which answers are on their way.

import { answer, spoken } from "./answer.js";
import { List } from "./conversations.js";
import { sure } from "./dialogs.js";
import { alarm, announce, byId, glyph, iconButton, put } from "./dom.js";
import { Options, requested } from "./options.js";
import { askJson } from "./server.js";
import { MOST_CONVERSATIONS, openStore } from "./store.js";
import { Thread, welcome } from "./thread.js";
import { read, saved } from "./transfer.js";
import { count, plural } from "./words.js";

const DEMO = "pipeinfer-demo";
const EXAMPLES = {
  [DEMO]: ["What are the stages?", "Count from 3 to 12.", "What is 7 + 15?"],
  other: ["Explain what a KV cache is for.", "Write a haiku about pipelines.",
    "Which questions are you good at?"],
};
const NEW = "New conversation";
const SAVE = 1000; // milliseconds between two savings of an answer that grows
const SPOKEN = 1500; // letters of an answer that screen readers are told

export class Chat {
  #store;
  #all = []; // conversations, the newest first
  #now; // the one that is open; it is stored with its first message
  #messages = [];
  #runs = new Map(); // by id of a conversation: {message, messages, stop}
  #model = "";
  #context = 0; // tokens of prompt and answer at most; 0 until it is known
  #thread = new Thread({
    edit: (message, text) => this.#edit(message, text),
    again: (message) => this.#again(message),
    results: (message, texts) => this.#results(message, texts),
  });
  #list = new List({
    open: (id) => this.#open(id),
    rename: (id, title) => this.#rename(id, title),
    remove: (id) => this.#remove(id),
  });
  #options = new Options((options) => this.#chosen(options));
  #field = byId("prompt");
  #button = byId("send");
  #alarm = null; // what went wrong with a file
  #opening = null; // the id of the conversation that is to be opened when its messages are read
  #early = null; // options that were chosen before a conversation was open
  #isReady; // to be called when `#ready` is fulfilled
  #ready = new Promise((done) => { this.#isReady = done; }); // store and conversation are open

  async start() {
    this.#wire(); // of use while the browser still looks for its conversations: it is done then
    this.#store = await openStore();
    if (!this.#store.lasting) put(byId("kept"), "This browser keeps nothing after a reload.");
    this.#all = (await this.#store.conversations()).sort((a, b) => b.touched - a.touched);
    if (this.#all.length) await this.#open(this.#all[0].id);
    else this.#begin();
    if (this.#early) {
      this.#chosen({ ...this.#now.options, ...this.#early });
      this.#options.show(this.#now.options);
    }
    this.#isReady();
    await this.#askModel();
  }

  /** A new conversation, with the options of the one before. */
  async begin() {
    await this.#ready;
    this.#begin();
  }

  #begin() {
    this.#opening = null;
    const options = this.#now?.options ?? {};
    this.#show({ id: crypto.randomUUID?.() ?? String(Math.random()), title: NEW, touched: 0,
      options: { ...options } }, []);
    this.focus();
  }

  focus() {
    this.#field.focus();
  }

  toggleOptions() {
    this.#options.toggle();
  }

  /** Ends the answer that is on its way, or closes what is open; whether there was anything. */
  escape() {
    if (byId("side").classList.contains("shown")) return this.#side(false);
    const run = this.#runs.get(this.#now?.id);
    if (run) run.stop.abort();
    else if (this.#options.open) this.#options.toggle(false);
    else return false;
    return true;
  }

  // ------------------------------------------------------------------------------------- the page

  #wire() {
    byId("new").append(glyph("plus"), NEW);
    byId("new").onclick = () => this.begin();
    byId("toggle-options").append(glyph("sliders"));
    byId("to-end").append(glyph("down"));
    byId("open-side").append(glyph("list"));
    byId("close-side").append(glyph("close"));
    byId("open-side").onclick = () => this.#side(true);
    byId("close-side").onclick = byId("veil").onclick = () => this.#side(false);
    byId("export").append(glyph("out"));
    byId("import").append(glyph("into"));
    byId("export").onclick = () => this.#export();
    byId("import").onclick = () => byId("import-file").click();
    byId("import-file").onchange = ({ target }) => this.#import(target);
    byId("composer").onsubmit = (event) => {
      event.preventDefault();
      const run = this.#runs.get(this.#now?.id);
      if (run) run.stop.abort();
      else this.#sendWritten();
    };
    this.#field.onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#sendWritten();
    };
  }

  async #sendWritten() {
    await this.#ready;
    this.#send(this.#field.value);
  }

  #side(open) {
    byId("side").classList.toggle("shown", open);
    byId("veil").hidden = !open;
    byId("open-side").setAttribute("aria-expanded", String(open));
    if (open) byId("new").focus();
    else byId("open-side").focus();
    return true;
  }

  async #askModel() {
    try {
      const { data: [model] } = await askJson("v1/models");
      this.#model = model.id;
      const length = this.#context = this.#options.context = model.max_model_len ?? 0;
      put(byId("model"), length ? `${model.id} · ${count(length)} tokens` : model.id);
      byId("model").title = model.id;
      if (!this.#messages.length) this.#thread.show([], this.#welcome());
    } catch (error) {
      put(byId("model"), error.message);
      const again = error.status === 503 || error.status === 0;
      if (again) setTimeout(() => this.#askModel(), 1000 * (error.wait || 3));
    }
  }

  #welcome() {
    const examples = EXAMPLES[this.#model] ?? EXAMPLES.other;
    return welcome(this.#model, this.#model ? examples : [], (text) => this.#send(text));
  }

  #draw() {
    this.#list.show(this.#all, this.#now.id, new Set(this.#runs.keys()));
    put(byId("title"), this.#now.title);
    byId("title").title = this.#now.title;
    const running = this.#runs.has(this.#now.id);
    const label = running ? "Stop" : "Send";
    if (this.#button.title !== label || !this.#button.firstChild) {
      this.#button.replaceChildren(glyph(running ? "stop" : "send"));
      this.#button.setAttribute("aria-label", label);
      this.#button.title = label;
    }
  }

  #show(conversation, messages) {
    this.#now = conversation;
    this.#messages = messages;
    this.#options.show(conversation.options);
    this.#thread.show(messages, this.#welcome(), this.#runs.get(conversation.id)?.message);
    this.#draw();
    if (byId("side").classList.contains("shown")) this.#side(false);
  }

  async #open(id) {
    this.#opening = id;
    const messages = this.#runs.get(id)?.messages ?? await this.#store.messages(id);
    if (this.#opening !== id) return; // another one was chosen meanwhile
    const found = this.#all.find((one) => one.id === id);
    if (found) this.#show(found, messages);
  }

  // -------------------------------------------------------------------------------- conversations

  #chosen(options) {
    if (!this.#now) {
      this.#early = options;
      return;
    }
    this.#now.options = options;
    if (this.#stored(this.#now)) this.#store.saveConversation(this.#now);
  }

  #stored(conversation) {
    return this.#all.includes(conversation);
  }

  /** Stores the open conversation as the newest. */
  #touch() {
    const now = this.#now;
    now.touched = Date.now();
    this.#all = [now, ...this.#all.filter((one) => one !== now)];
    this.#store.saveConversation(now);
    for (const old of this.#all.splice(MOST_CONVERSATIONS)) this.#store.remove(old.id);
  }

  #rename(id, title) {
    const found = this.#all.find((one) => one.id === id);
    found.title = title;
    this.#store.saveConversation(found);
    this.#draw();
  }

  async #remove(id) {
    const found = this.#all.find((one) => one.id === id);
    const text = `“${found.title}” cannot be brought back.`;
    if (!await sure("Delete this conversation?", text)) return;
    this.#runs.get(id)?.stop.abort();
    this.#all = this.#all.filter((one) => one !== found);
    await this.#store.remove(id);
    if (this.#now === found) this.#begin();
    else this.#draw();
    announce("The conversation is deleted.");
  }

  async #export() {
    await this.#ready;
    const whole = await Promise.all(this.#all.map(async (conversation) => ({ conversation,
      messages: this.#runs.get(conversation.id)?.messages
        ?? await this.#store.messages(conversation.id) })));
    saved(`pipeinfer-conversations-${new Date().toISOString().slice(0, 10)}.json`, whole);
    this.#said(`${plural(whole.length, "conversation")} exported.`);
  }

  /** Adds those of a file that are not here yet. */
  async #import(field) {
    await this.#ready;
    let fresh = [], added = 0;
    try {
      const whole = read(await field.files[0].text());
      const ids = new Set(this.#all.map(({ id }) => id));
      fresh = whole.filter(({ conversation: { id } }) => !ids.has(id) && ids.add(id));
      for (const { conversation, messages } of fresh) {
        await this.#store.saveWhole(conversation, messages);
        this.#all.push(conversation);
        added++;
      }
      const known = whole.length - fresh.length;
      this.#said(`${plural(fresh.length, "conversation")} added`
        + (known ? `, ${count(known)} here already.` : "."));
    } catch (error) {
      this.#failed(`${added ? `${count(added)} of ${plural(fresh.length, "conversation")} imported`
        : "Nothing was imported"}: ${error.message}`);
    }
    this.#all.sort((a, b) => b.touched - a.touched);
    for (const old of this.#all.splice(MOST_CONVERSATIONS)) this.#store.remove(old.id);
    this.#draw();
    field.value = "";
  }

  /** Says something below the list of conversations. */
  #said(text) {
    this.#alarm?.remove();
    put(byId("kept"), text);
    announce(text);
  }

  /** Says what went wrong there, until it is closed or something else is said. */
  #failed(text) {
    this.#alarm?.remove();
    this.#alarm = alarm(text);
    this.#alarm.append(iconButton("close", "Close", () => this.#alarm.remove()));
    byId("kept").parentElement.before(this.#alarm);
  }

  // --------------------------------------------------------------------------------------- asking

  #send(text) {
    if (!text.trim() || this.#runs.has(this.#now.id) || !this.#fields()) return;
    this.#field.value = "";
    this.#add({ role: "user", content: text });
    if (this.#now.title === NEW) this.#now.title = text.trim().slice(0, 300).replace(/\s+/g, " ");
    this.#run();
  }

  #edit(message, text) {
    if (!this.#fields()) return;
    this.#cut(message.at);
    this.#add({ role: "user", content: text });
    this.#run();
    this.focus();
  }

  #again(message) {
    if (!this.#fields()) return;
    this.#cut(message.at);
    this.#run();
    this.focus();
  }

  #results(message, texts) {
    if (!this.#fields()) return;
    message.answered = true;
    this.#store.saveMessage(message);
    this.#thread.ended(message);
    for (const [index, { id, name }] of message.calls.entries()) {
      this.#add({ role: "tool", name, call: id, content: texts[index] });
    }
    this.#run();
  }

  /** The fields of the options, or null with the first wrong one pointed at. */
  #fields() {
    const { fields, wrong } = requested(this.#now.options, this.#context);
    const [first] = Object.keys(wrong);
    if (first) this.#options.point(first);
    return first ? null : fields;
  }

  /** Forgets the messages from number `at` on. */
  #cut(at) {
    this.#runs.get(this.#now.id)?.stop.abort();
    this.#thread.drop(this.#messages.splice(at));
    this.#store.cut(this.#now.id, at);
    const last = this.#messages.at(-1);
    if (last?.answered) last.answered = false;
  }

  #add(message, live = false) {
    Object.assign(message, { conversation: this.#now.id, at: this.#messages.length });
    this.#messages.push(message);
    this.#store.saveMessage(message);
    this.#thread.append(message, live);
    return message;
  }

  async #run() {
    const conversation = this.#now, messages = this.#messages;
    const body = {
      messages: spoken(conversation.options.system ?? "", messages),
      stream: true,
      stream_options: { include_usage: true },
      ...this.#fields(),
    };
    const message = this.#add({ role: "assistant", content: "", model: this.#model }, true);
    const run = { message, messages, stop: new AbortController() };
    this.#runs.set(conversation.id, run);
    this.#touch();
    this.#draw();
    let saved = performance.now();
    await answer(body, message, run.stop.signal, () => {
      if (messages[message.at] !== message || !this.#stored(conversation)) return; // it is gone
      this.#thread.grown(message);
      if (performance.now() - saved > SAVE) {
        saved = performance.now();
        this.#store.saveMessage(message);
      }
    });
    if (this.#runs.get(conversation.id) === run) this.#runs.delete(conversation.id);
    if (messages[message.at] !== message || !this.#stored(conversation)) return;
    try {
      await this.#store.saveMessage(message); // a reload after the end finds all of the answer
    } finally {
      if (messages[message.at] === message && this.#stored(conversation)) {
        this.#thread.ended(message);
        this.#draw();
        if (!message.error) announce(`Answer: ${message.content.slice(0, SPOKEN)}`);
      }
    }
  }
}
