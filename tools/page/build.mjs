// Builds the libraries of the web page into src/pipeinfer/gateway/page/vendor: `npm ci` once, then
// `npm run build`. Versions are those of package-lock.json. Each file's name has a hash of what is
// in it, so that browsers may keep it for ever; page/libraries.js says which names these are now.

import { build } from "esbuild";
import { createHash } from "node:crypto";
import { copyFileSync, existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync }
  from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = dirname(fileURLToPath(import.meta.url));
const PAGE = join(HERE, "../../src/pipeinfer/gateway/page");
const VENDOR = join(PAGE, "vendor");
const MODULES = join(HERE, "node_modules");
const LICENCES = ["LICENSE", "LICENSE.md", "LICENSE.txt", "LICENSE-MIT.txt"];

rmSync(VENDOR, { recursive: true, force: true });
mkdirSync(VENDOR);
const made = await build({
  absWorkingDir: HERE, entryPoints: ["markdown.js", "math.js", "colours.js"],
  bundle: true, minify: true, format: "esm", target: "es2022", charset: "utf8",
  legalComments: "none", outdir: VENDOR, entryNames: "[name]-[hash]", metafile: true,
});
const names = Object.fromEntries(Object.entries(made.metafile.outputs)
  .map(([path, { entryPoint }]) => [entryPoint, path.split("/").at(-1)]));

// KaTeX's style sheet, with fonts of the one kind that all browsers read.
const fonts = join(MODULES, "katex/dist/fonts");
const named = (name, body) =>
  name.replace(/\.(\w+)$/, `-${createHash("sha256").update(body).digest("hex").slice(0, 8)}.$1`);
let style = readFileSync(join(MODULES, "katex/dist/katex.min.css"), "utf8")
  .replace(/,url\([^)]*\.(?:woff|ttf)\) format\("(?:woff|truetype)"\)/g, "");
for (const font of readdirSync(fonts).filter((name) => name.endsWith(".woff2"))) {
  const name = named(font, readFileSync(join(fonts, font)));
  copyFileSync(join(fonts, font), join(VENDOR, name));
  style = style.replaceAll(`fonts/${font}`, name);
}
const sheet = named("math.css", style);
writeFileSync(join(VENDOR, sheet), style);

writeFileSync(join(PAGE, "libraries.js"), `\
// Libraries by others; math and colours are loaded when they are needed first. Written by
// tools/page/build.mjs.

export { DOMPurify, MarkdownIt } from "./vendor/${names["markdown.js"]}";
export const colours = () => import("./vendor/${names["colours.js"]}");
export const math = () => import("./vendor/${names["math.js"]}");
export const mathStyle = new URL("vendor/${sheet}", import.meta.url).href;
`);

// Every package of which something is in a bundle, with its version and licence.
const packages = new Set(Object.keys(made.metafile.inputs)
  .map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1]).filter(Boolean));
const texts = [...packages].sort().map((name) => {
  const folder = join(MODULES, name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const files = [...LICENCES, "LICENSE-MPL"].filter((file) => existsSync(join(folder, file)));
  if (!files.length) throw new Error(`${name} comes without the text of its licence`);
  const text = files.map((file) => readFileSync(join(folder, file), "utf8").trim()).join("\n\n");
  return `${name} ${version} (${license})\n\n${text}\n`;
});
writeFileSync(join(VENDOR, "LICENSES.txt"), texts.join(`\n${"=".repeat(80)}\n\n`));
