// Libraries by others; math and colours are loaded when they are needed first. Written by
// tools/page/build.mjs.

export { DOMPurify, MarkdownIt } from "./vendor/markdown-F4H4UQM2.js";
export const colours = () => import("./vendor/colours-XYWDIOFO.js");
export const math = () => import("./vendor/math-7MKPIT4M.js");
export const mathStyle = new URL("vendor/math-4a113fc1.css", import.meta.url).href;
