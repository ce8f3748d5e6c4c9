export { default as MarkdownIt } from "markdown-it";
export { default as DOMPurify } from "dompurify";
