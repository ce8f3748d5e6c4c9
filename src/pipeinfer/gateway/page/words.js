// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const NONE = "–";

/** 1,234 */
export const count = (value) =>
  (value === null || value === undefined ? NONE : whole.format(value));

/** A rate or another measure: 1,230 or 3.46 */
export function measure(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 1000 ? whole.format(value) : short.format(value);
}

/** A mean of whole numbers: 3.1 */
export const mean = (value) => tenths.format(value);

/** From milliseconds: "0.85 ms", "12 ms", "1.24 s" */
export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms >= 60_000) return age(ms / 1000);
  return ms >= 1000 ? `${short.format(ms / 1000)}\u00a0s` : `${short.format(ms)}\u00a0ms`;
}

/** From seconds: "12 s", "3 min", "5 h 12 min", "2 d 3 h" */
export function age(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (minutes < 60) return `${minutes} min`;
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** From Unix seconds: "14:03:12" */
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

/** "1 token", "2 tokens" */
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
