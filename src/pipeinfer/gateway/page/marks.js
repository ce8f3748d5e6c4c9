// Where code, bold and italic letters stand in a text. Each letter is looked at a few times, however
// many marks open nothing: the next end of each kind is searched for once, and never backwards.

/**
 * The pieces of a text in order: strings, and [tag, pieces] with the tag "code", "strong" or "em".
 * text: anything with length, charAt and slice.
 */
export function marked(text) {
  const ends = {
    strong: search(text, (at) => text.charAt(at) === "*" && text.charAt(at + 1) === "*" &&
      !blank(text.charAt(at - 1))),
    em: search(text, (at) => text.charAt(at) === "*" && !/[\w*]/.test(text.charAt(at + 1)) &&
      !blank(text.charAt(at - 1)) && stars(text, at) % 2), // two end bold letters alone
  };
  const run = runs(text);
  // An end belongs to the first that it can end. So no tag is within one of its own kind, and what
  // is within is looked at once more: `from` and `to` are nested three deep at most.
  const within = (from, to) => {
    const made = [];
    let plain = from, at = from;
    const take = (tag, inner, after) => {
      if (plain < at) made.push(text.slice(plain, at));
      made.push([tag, inner]);
      plain = at = after;
    };
    const opens = (tag, width) => {
      if (at + width >= to || blank(text.charAt(at + width))) return false;
      const end = ends[tag](at + width + 1);
      if (end + width > to) return false;
      take(tag, within(at + width, end), end + width);
      return true;
    };
    while (at < to) {
      const char = text.charAt(at);
      if (char === "`") {
        const { width, next } = run(at);
        if (next + width <= to) take("code", [text.slice(at + width, next)], next + width);
        else at += width;
      } else if (char !== "*" ||
          !(text.charAt(at + 1) === "*" && opens("strong", 2) ||
            (at === from || !/[\w*]/.test(text.charAt(at - 1))) && opens("em", 1))) at++;
    }
    if (plain < to) made.push(text.slice(plain, to));
    return made;
  };
  return within(0, text.length);
}

const blank = (char) => /\s/.test(char);

/** How many asterisks end at a place. */
function stars(text, at) {
  let from = at;
  while (text.charAt(from) === "*") from--;
  return at - from;
}

/** (from) => the first place from there on that is an end; the text's length where none is. Places
 *  asked for never get smaller. */
function search(text, is) {
  let at = 0, looked = 0; // what is before `looked` was looked at
  return (from) => {
    if (at >= from && at < looked) return at;
    for (at = Math.max(from, looked); at < text.length; at++) if (is(at)) break;
    looked = at + 1;
    return at;
  };
}

/** (at) => of the run of backticks that begins there: its width, and where the next one of that
 *  width begins, Infinity where none does. */
function runs(text) {
  const found = new Map(), last = new Map();
  for (let at = 0; at < text.length; at++) {
    if (text.charAt(at) !== "`") continue;
    let end = at + 1;
    while (text.charAt(end) === "`") end++;
    const width = end - at, made = { width, next: Infinity };
    if (last.has(width)) last.get(width).next = at;
    last.set(width, made);
    found.set(at, made);
    at = end;
  }
  return (at) => found.get(at);
}
