// One answer of /v1/chat/completions as it comes: what the chunks say, put together.

import { ask, ServerError } from "./server.js";
import { events } from "./sse.js";

const WAIT = 30; // seconds for which the server keeps an answer whose connection is lost
const PAUSE = 300; // milliseconds between two attempts to go on with it

/**
 * The data of the events of an answer, each once, whatever becomes of connections: what is lost is
 * asked for again, for WAIT seconds, behind the last event that came. An answer that is stopped
 * ends on the server.
 */
async function* resumed(path, { body, signal }) {
  const place = { event: null };
  let stream = null, lost = 0;
  for (;;) {
    try {
      const response = stream
        ? await ask(`v1/streams/${stream}`, { signal, headers: behind(place) })
        : await ask(path, { body, signal, headers: { "x-pipeinfer-reattach": String(WAIT) } });
      stream ??= response.headers.get("x-pipeinfer-stream");
      for await (const data of events(response, place)) {
        lost = 0;
        yield data;
        if (data === "[DONE]") return;
      }
    } catch (error) {
      if (error.name === "AbortError" && stream) {
        ask(`v1/streams/${stream}`, { method: "DELETE" }).catch(() => {}); // it may have ended
      }
      const passes = !error.status || error.status === 503; // of HTTP; none: the way is cut
      if (error.name === "AbortError" || !stream || !passes) throw error;
    }
    lost ||= performance.now();
    if (!stream || performance.now() - lost > WAIT * 1000) return;
    await new Promise((done) => setTimeout(done, PAUSE));
  }
}

/** Where a stream is to go on: behind the last event that came, if one did. */
const behind = ({ event }) => (event ? { "Last-Event-ID": event } : {});

/** The messages of a request's body, from those that are kept. */
export function spoken(system, messages) {
  const said = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    const { role, content } = message;
    if (role === "tool") said.push({ role, content, tool_call_id: message.call });
    else if (role === "user") said.push({ role, content });
    else if (content || message.calls?.length) {
      const turn = { role, content };
      if (message.reasoning) turn.reasoning_content = message.reasoning;
      if (message.calls?.length) {
        turn.tool_calls = message.calls.map(({ id, name, text }) =>
          ({ id, type: "function", function: { name, arguments: text } }));
      }
      said.push(turn);
    }
  }
  return said;
}

/**
 * Asks, and fills `message` until the answer has ended; told() is called after each chunk. What is
 * wrong becomes message.error. The message also gets
 *   model: the name of the model that answered,
 *   tokens: [text, logprob, [[text, logprob], ...]] of each, where log-probs were asked for,
 *   stats: {prompt, cached, output, first, seconds, finish}, first and seconds in milliseconds.
 */
export async function answer(body, message, signal, told) {
  const began = performance.now();
  const stats = message.stats = {};
  let first = 0, last = 0, whole = false;
  try {
    for await (const data of resumed("v1/chat/completions", { body, signal })) {
      if (data === "[DONE]") {
        whole = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(500, chunk.error.message);
      if (chunk.model) message.model = chunk.model;
      if (chunk.usage) count(stats, chunk.usage);
      for (const choice of chunk.choices ?? []) {
        if (take(message, choice)) {
          last = performance.now();
          first ||= last;
          stats.first = first - began;
          stats.seconds = last - first;
        }
        if (choice.finish_reason) stats.finish = choice.finish_reason;
      }
      told();
    }
    if (!whole) throw new ServerError(0, "The connection ended before the answer did.");
  } catch (error) {
    if (error.name === "AbortError") stats.finish = "stopped";
    else message.error = error.message;
  }
  told();
}

function count(stats, usage) {
  stats.prompt = usage.prompt_tokens;
  stats.output = usage.completion_tokens;
  stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
}

/** Adds what a chunk says of the one choice; whether that was anything. */
function take(message, { delta, logprobs }) {
  for (const token of logprobs?.content ?? []) {
    const others = token.top_logprobs.map((other) => [other.token, other.logprob]);
    (message.tokens ??= []).push([token.token, token.logprob, others]);
  }
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "")
    + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    const calls = message.calls ??= [];
    const call = calls[piece.index] ??= { id: "", name: "", text: "" };
    call.id ||= piece.id ?? "";
    call.name += piece.function?.name ?? "";
    call.text += piece.function?.arguments ?? "";
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}
