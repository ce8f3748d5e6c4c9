// Conversations and their messages, kept in this browser: IndexedDB, one record a message.
// Where a browser keeps nothing (some private windows), they live as long as the page.

const NAME = "pipeinfer", VERSION = 1;
export const MOST_CONVERSATIONS = 500; // beyond them the one that was untouched longest goes

/** An open store. `lasting`: whether what it keeps is there after a reload. */
export async function openStore() {
  try {
    return new Kept(await opened());
  } catch {
    return new Unkept();
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: ["conversation", "at"] });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  });
}

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const committed = (change) => new Promise((resolve, reject) => {
  change.oncomplete = resolve;
  change.onabort = change.onerror = () => reject(change.error);
});

const of = (id, from = 0) => IDBKeyRange.bound([id, from], [id, Infinity]);

class Kept {
  lasting = true;
  #database;

  constructor(database) {
    this.#database = database;
  }

  #in(name, mode = "readonly") {
    return this.#database.transaction(name, mode).objectStore(name);
  }

  conversations() {
    return result(this.#in("conversations").getAll());
  }

  messages(id) {
    return result(this.#in("messages").getAll(of(id)));
  }

  saveConversation(conversation) {
    return result(this.#in("conversations", "readwrite").put(conversation));
  }

  saveMessage(message) {
    const change = this.#database.transaction("messages", "readwrite");
    change.objectStore("messages").put(message);
    return committed(change);
  }

  /** Forgets the messages of a conversation from number `from` on. */
  cut(id, from) {
    return result(this.#in("messages", "readwrite").delete(of(id, from)));
  }

  /** Saves a conversation with all its messages at once, or none of it. */
  saveWhole(conversation, messages) {
    const names = ["conversations", "messages"];
    const change = this.#database.transaction(names, "readwrite");
    change.objectStore("conversations").put(conversation);
    for (const message of messages) change.objectStore("messages").put(message);
    return committed(change);
  }

  async remove(id) {
    await result(this.#in("conversations", "readwrite").delete(id));
    await this.cut(id, 0);
  }
}

class Unkept {
  lasting = false;
  #conversations = new Map();
  #messages = new Map();

  async conversations() {
    return [...this.#conversations.values()];
  }

  async messages(id) {
    return [...(this.#messages.get(id) ?? [])];
  }

  async saveConversation(conversation) {
    this.#conversations.set(conversation.id, conversation);
  }

  async saveMessage(message) {
    const all = this.#messages.get(message.conversation) ?? [];
    all[message.at] = message;
    this.#messages.set(message.conversation, all);
  }

  async saveWhole(conversation, messages) {
    await this.saveConversation(conversation);
    for (const message of messages) await this.saveMessage(message);
  }

  async cut(id, from) {
    this.#messages.get(id)?.splice(from);
  }

  async remove(id) {
    this.#conversations.delete(id);
    this.#messages.delete(id);
  }
}
