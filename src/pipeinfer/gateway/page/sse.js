// Server-sent events out of a response's body. EventSource sends neither headers nor a body.

/** The data of each event, as it comes. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = value.split(/\r\n|\n|\r/);
      lines[0] = rest + lines[0]; // a line that is long is not searched again with each piece
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have been aborted
  }
}
