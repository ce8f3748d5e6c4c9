// Work in slices: what takes longer than a part of a frame goes on in the next one, so that the page
// answers to keys and pointers meanwhile.

const SLICE = 5; // milliseconds of a frame; layout of what was made takes some more
const queue = []; // the newest last, which is done first: what is at the end of a chat is looked at
let began = 0, asked = false;

/** Calls work() now and in frames to come, until it returns false or throws. */
export function slices(work) {
  frame(); // what is asked for between two frames shares one slice
  while (performance.now() - began < SLICE) if (!work()) return;
  queue.push(work);
}

/** Whether work waits for frames to come. */
export const pending = () => queue.length > 0;

function frame() {
  if (asked) return;
  asked = true;
  began = performance.now();
  requestAnimationFrame(() => {
    asked = false;
    if (!queue.length) return;
    frame();
    while (queue.length && performance.now() - began < SLICE) {
      const work = queue.pop();
      if (work()) queue.push(work);
    }
  });
}
