// Server-sent events out of a response's body. EventSource sends neither headers nor a body.

/** The data of each event, as it comes; place.event becomes the id of the latest event, if it has one. */
export async function* events(response, place = {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [], id = null;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = value.split(/\r\n|\n|\r/);
      lines[0] = rest + lines[0]; // a line that is long is not searched again with each piece
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) {
            place.event = id ?? place.event;
            yield data.join("\n");
          }
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line.startsWith("id:")) {
          id = line.slice(line[3] === " " ? 4 : 3);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have been aborted
  }
}
