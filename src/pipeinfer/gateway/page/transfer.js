// Conversations as a file: all of them out, and others in. A file is by anybody, so that of what it
// says only that is taken which a conversation has.

const FORM = "pipeinfer-conversations", VERSION = 1;
const ROLES = ["user", "assistant", "tool"];

/** Has the browser save a file. name: how it is called; whole: [{conversation, messages}]. */
export function saved(name, whole) {
  const conversations = whole.map(({ conversation, messages }) => ({ ...conversation,
    messages: messages.map(({ conversation: _, at: __, ...message }) => message) }));
  const text = JSON.stringify({ form: FORM, version: VERSION, conversations }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** What a file holds: [{conversation, messages}]; throws an Error that says what is wrong. */
export function read(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch {
    throw new Error("The file is no JSON.");
  }
  if (given?.form !== FORM || !Array.isArray(given.conversations))
    throw new Error("The file holds no conversations that were exported here.");
  if (given.version !== VERSION)
    throw new Error(`The file is of version ${given.version}; this page reads ${VERSION}.`);
  return given.conversations.map(taken);
}

function taken(given) {
  const id = string(given?.id), messages = Array.isArray(given?.messages) ? given.messages : [];
  if (!id) throw new Error("A conversation has no id.");
  const conversation = { id, title: string(given.title).slice(0, 200) || "Imported",
    touched: number(given.touched) ?? 0, options: options(given.options) };
  return { conversation, messages: messages.map((one, at) =>
    ({ conversation: id, at, ...message(one, at) })) };
}

function message(given, at) {
  if (!ROLES.includes(given?.role)) throw new Error(`Message ${at + 1} is by nobody known.`);
  const made = { role: given.role, content: string(given.content) };
  for (const name of ["reasoning", "model", "name", "call", "error"])
    if (typeof given[name] === "string") made[name] = given[name];
  if (given.answered === true) made.answered = true;
  if (Array.isArray(given.calls)) made.calls = given.calls.map((call) =>
    ({ id: string(call?.id), name: string(call?.name), text: string(call?.text) }));
  if (Array.isArray(given.tokens)) made.tokens = given.tokens.map((token) => [string(token?.[0]),
    number(token?.[1]) ?? 0, (Array.isArray(token?.[2]) ? token[2] : []).map((other) =>
      [string(other?.[0]), number(other?.[1]) ?? 0])]);
  const stats = {};
  for (const name of ["prompt", "cached", "output", "first", "seconds"]) {
    const value = number(given.stats?.[name]);
    if (value !== undefined) stats[name] = value;
  }
  if (typeof given.stats?.finish === "string") stats.finish = given.stats.finish;
  if (made.role === "assistant") made.stats = stats;
  return made;
}

const string = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : undefined);

function options(given) {
  const named = Object.entries(given && typeof given === "object" ? given : {});
  return Object.fromEntries(named.filter(([, value]) =>
    typeof value === "string" || typeof value === "boolean"));
}
