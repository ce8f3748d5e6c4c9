// Requests to the server that this page is from: with the key, and with errors in its own words.

import * as key from "./key.js";

const BASE = new URL("..", import.meta.url); // the page may stand below a proxy's path

/** What the server, or the way to it, says is wrong. status: of HTTP, 0 where there was none. */
export class ServerError extends Error {
  constructor(status, message, wait = 0) {
    super(message);
    this.status = status;
    this.wait = wait; // seconds after which the server wants to be asked again
  }
}

/** The response, if it is a good one; else throws ServerError, or AbortError. */
export async function ask(path, { body, signal, method, headers } = {}) {
  for (;;) {
    const before = key.used();
    let response;
    try {
      response = await fetch(new URL(path, BASE), {
        method: method ?? (body === undefined ? "GET" : "POST"),
        headers: {
          ...key.headers(),
          ...headers,
          ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        },
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(0, "The server cannot be reached.");
    }
    if (response.ok) return response;
    const message = await said(response);
    if (response.status === 401 && await key.wanted(before)) continue;
    throw new ServerError(response.status, message, Number(response.headers.get("Retry-After")));
  }
}

export const askJson = async (path, options) => (await ask(path, options)).json();

async function said(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server says ${response.status}${text ? `: ${text.slice(0, 300)}` : ""}`;
  }
}
