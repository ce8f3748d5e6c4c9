// "Try it" of /docs: sends what a form says to this server, and shows what comes back as it comes.

const MOST = 40_000; // letters that are shown of an answer
const BASE = new URL("..", import.meta.url); // the server may stand below a proxy's path
const theme = localStorage.getItem("theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;

// On a phone the contents, longer than a screen, stand folded above the endpoints.
const phone = matchMedia("(max-width: 860px)"), contents = document.getElementById("contents");
const fold = () => { contents.open = !phone.matches; };
phone.onchange = fold;
fold();

for (const example of document.querySelectorAll(".example code")) {
  example.textContent = example.textContent.replace("$URL", BASE.href.replace(/\/$/, ""));
}

for (const form of document.querySelectorAll("form.try")) {
  const button = form.querySelector("button");
  let stop = null;
  form.onsubmit = async (event) => {
    event.preventDefault();
    if (stop) {
      stop.abort();
      return;
    }
    stop = new AbortController();
    button.textContent = "Stop";
    await tried(form, stop.signal);
    stop = null;
    button.textContent = "Try it";
  };
}

async function tried(form, signal) {
  const { method, path } = form.dataset, place = output(form), began = performance.now();
  const field = (name) => form.elements.namedItem(name)?.value ?? "";
  const to = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(field(name)));
  const headers = {}, key = document.getElementById("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (method === "post") headers["Content-Type"] = "application/json";
  const body = method === "post" ? field("body") || undefined : undefined;
  let text = "", status = "";
  const show = (more = "") => {
    text = (text + more).slice(0, MOST);
    place.textContent = `${status} · ${Math.round(performance.now() - began)} ms\n\n${text}`;
  };
  try {
    const response = await fetch(new URL(to.slice(1), BASE), { method: method.toUpperCase(), headers,
      body, signal, cache: "no-store", credentials: "omit" });
    status = `${response.status} ${response.statusText}`;
    show();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      show(value);
      if (text.length >= MOST) {
        await reader.cancel();
        show();
        return;
      }
    }
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      return; // it is no JSON
    }
    show();
  } catch (error) {
    status ||= error.name === "AbortError" ? "stopped" : "The server cannot be reached.";
    show();
  }
}

/** The place below a form where its answers are shown. */
function output(form) {
  let place = form.nextElementSibling;
  if (!place.classList.contains("answered")) {
    place = document.createElement("pre");
    place.className = "answered";
    place.tabIndex = 0;
    place.setAttribute("role", "status");
    form.after(place);
  }
  place.textContent = "…";
  return place;
}
