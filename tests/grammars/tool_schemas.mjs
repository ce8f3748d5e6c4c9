// Writes schemas, one a line, as zod 3, ArkType, Joi, Yup, fluent-json-schema and Effect write them, and
// AsyncAPI for the messages of Protocol Buffers in drawn.proto. See tool_schemas.py.
import fs from "fs";
import { z } from "zod";
import { zodToJsonSchema } from "zod-to-json-schema";
import { type } from "arktype";
import Joi from "joi";
import joiToJson from "joi-to-json";
import * as yup from "yup";
import { convertSchema } from "@sodaru/yup-to-json-schema";
import { S } from "fluent-json-schema";
import { Schema } from "effect";
import { ProtoBuffSchemaParser } from "@asyncapi/protobuf-schema-parser";
let seed = 9;
const rnd = () => { seed = (seed + 0x6d2b79f5) | 0; let t = Math.imul(seed ^ (seed >>> 15), 1 | seed); t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t; return ((t ^ (t >>> 14)) >>> 0) / 4294967296; };
const pick = (a) => a[Math.floor(rnd() * a.length)];
const int = (a, b) => a + Math.floor(rnd() * (b - a + 1));
const names = ["id", "name", "kind", "tags", "value", "items", "owner", "at", "note"];
const out = [];
const add = (make) => { try { const t = JSON.stringify(make()); if (t.length < 4000) out.push(t); } catch (e) { console.error(String(e).slice(0, 90)); } };
const fields = (d, make, optional) => { const o = {}; for (let i = int(1, 4); i--;) { const m = make(d - 1); o[pick(names)] = rnd() < 0.3 ? optional(m) : m; } return o; };
const zleaf = () => pick([() => z.string(), () => z.string().min(1).max(9), () => z.string().email(), () => z.string().uuid(), () => z.string().url(), () => z.string().datetime(), () => z.string().date(), () => z.string().ip(), () => z.string().cuid(), () => z.string().base64(), () => z.string().startsWith("a"), () => z.string().endsWith("z"), () => z.string().includes("q"), () => z.string().regex(/^[a-z]{2,5}$/i), () => z.string().emoji(), () => z.string().nanoid(), () => z.number(), () => z.number().int().min(0).max(99), () => z.number().positive(), () => z.number().multipleOf(5), () => z.number().finite(), () => z.bigint(), () => z.boolean(), () => z.null(), () => z.literal("x"), () => z.literal(3), () => z.enum(["a", "b"]), () => z.nativeEnum({ A: 1, B: "b" }), () => z.any(), () => z.unknown(), () => z.date(), () => z.never(), () => z.undefined(), () => z.coerce.number(), () => z.string().default("d"), () => z.string().trim().nonempty(), () => z.set(z.string()), () => z.map(z.string(), z.number()), () => z.string().brand("B"), () => z.string().transform((s) => s.length)])();
const zmake = (d) => d <= 0 ? zleaf() : pick([zleaf, () => zobj(d), () => zobj(d), () => z.array(zmake(d - 1)), () => z.array(zmake(d - 1)).nonempty().max(3), () => z.tuple([zmake(d - 1), zmake(d - 1)]), () => z.tuple([zmake(0)]).rest(zmake(0)), () => z.union([zmake(d - 1), zmake(d - 1)]), () => z.record(zmake(d - 1)), () => z.record(z.enum(["a", "b"]), zmake(d - 1)), () => z.record(z.string().regex(/^x/), zmake(0)), () => zmake(d - 1).nullable(), () => z.intersection(zobj(d - 1), z.object({ extra: zmake(d - 1) })), () => z.discriminatedUnion("type", [z.object({ type: z.literal("a"), x: zmake(d - 1) }), z.object({ type: z.literal("b"), y: zmake(d - 1) })]), () => zmake(d - 1).catch(null), () => zmake(d - 1).readonly(), () => zmake(d - 1).describe("what it is"), () => z.lazy(() => zobj(0))])();
const zobj = (d) => pick([(o) => z.object(o), (o) => z.object(o).strict(), (o) => z.object(o).passthrough(), (o) => z.object(o).partial(), (o) => z.object(o).catchall(z.number())])(fields(d, zmake, (m) => m.optional()));
for (let i = 0; i < 160; i++) { const s = zobj(3); const target = pick(["jsonSchema7", "jsonSchema7", "jsonSchema2019-09", "openApi3", "openAi"]); add(() => zodToJsonSchema(s, { target, name: rnd() < 0.2 ? "Named" : undefined, $refStrategy: pick(["root", "relative", "none"]), pipeStrategy: "input" })); }
const aleaf = () => pick(["string", "number", "boolean", "string.email", "string.uuid", "number.integer", "'a' | 'b'", "1 | 2", "string | number", "string[]", "1 <= number <= 5", "string <= 5", "string.numeric", "string.date.iso", "string.url", "/^a+$/", "number % 2", "unknown", "null", "string >= 1", "(string | number)[]", "string.digits", "string.alpha", "object", "number > 3"]);
const aobj = (d) => { const o = {}; for (let i = int(1, 4); i--;) o[pick(names) + (rnd() < 0.3 ? "?" : "")] = d > 0 && rnd() < 0.4 ? aobj(d - 1) : aleaf(); if (rnd() < 0.3) o["+"] = "reject"; return o; };
for (let i = 0; i < 70; i++) { const o = aobj(2); add(() => type(o).toJsonSchema()); }
const jleaf = () => pick([() => Joi.string(), () => Joi.string().min(2).max(8), () => Joi.string().email(), () => Joi.string().valid("a", "b"), () => Joi.string().pattern(/^[a-z]+$/), () => Joi.string().guid(), () => Joi.string().isoDate(), () => Joi.string().allow(""), () => Joi.string().allow(null), () => Joi.number(), () => Joi.number().integer().min(0).max(9), () => Joi.number().greater(3), () => Joi.number().multiple(5), () => Joi.boolean(), () => Joi.date(), () => Joi.any(), () => Joi.valid("x", 1, null), () => Joi.binary(), () => Joi.string().hostname(), () => Joi.string().invalid("q"), () => Joi.number().port(), () => Joi.string().length(4), () => Joi.string().alphanum()])();
const jmake = (d) => d <= 0 ? jleaf() : pick([jleaf, jleaf, () => jobj(d), () => Joi.array().items(jmake(d - 1)).min(1).max(3), () => Joi.array().items(jmake(d - 1)).unique(), () => Joi.array().ordered(jmake(0), jmake(0)), () => Joi.alternatives().try(jmake(d - 1), jmake(d - 1)), () => Joi.object().pattern(/^a/, jmake(d - 1)), () => Joi.object().pattern(Joi.string(), jmake(0)), () => Joi.array().has(jleaf()), () => Joi.alternatives().conditional("kind", { is: "a", then: jmake(0), otherwise: jmake(0) })])();
const jobj = (d) => pick([(o) => o, (o) => o, (o) => o.unknown(), (o) => o.min(1), (o) => o.or(...Object.keys(o.describe().keys).slice(0, 2)), (o) => o.with(Object.keys(o.describe().keys)[0], Object.keys(o.describe().keys).slice(-1))])(Joi.object(fields(d, jmake, (m) => m.required())));
for (let i = 0; i < 80; i++) { const s = jobj(2); add(() => joiToJson(s, pick(["json", "json-draft-2019-09", "open-api", "open-api-3.1", "json-draft-04"]))); }
const yleaf = () => pick([() => yup.string(), () => yup.string().required(), () => yup.string().email(), () => yup.string().oneOf(["a", "b"]), () => yup.string().matches(/^\d+$/), () => yup.number().integer().min(0).max(9), () => yup.number().required(), () => yup.boolean(), () => yup.date(), () => yup.string().nullable(), () => yup.string().min(1).max(5), () => yup.array(yup.string()), () => yup.array().of(yup.number()).min(1), () => yup.mixed(), () => yup.string().uuid(), () => yup.string().notOneOf(["q"])])();
const yobj = (d) => { const o = {}; for (let i = int(1, 4); i--;) o[pick(names)] = d > 0 && rnd() < 0.35 ? yobj(d - 1) : yleaf(); const s = yup.object(o); return rnd() < 0.3 ? s.noUnknown() : s; };
for (let i = 0; i < 50; i++) { const s = yobj(2); add(() => convertSchema(s)); }
const fleaf = () => pick([() => S.string(), () => S.string().format(S.FORMATS.DATE_TIME), () => S.string().minLength(2), () => S.string().pattern(/^a$/), () => S.enum(["a", "b"]), () => S.const(3), () => S.integer().minimum(0), () => S.number().exclusiveMaximum(9), () => S.boolean(), () => S.null(), () => S.array().items(S.string()).uniqueItems(true), () => S.array().contains(S.const("a")), () => S.anyOf([S.string(), S.number()]), () => S.oneOf([S.string(), S.boolean()]), () => S.not(S.null()), () => S.mixed(["string", "integer"]), () => S.array().items([S.string(), S.integer()]).additionalItems(false)])();
const fobj = (d) => { let o = S.object(); for (let i = int(1, 4); i--;) { const m = d > 0 && rnd() < 0.4 ? fobj(d - 1) : fleaf(); o = o.prop(pick(names), rnd() < 0.4 ? m.required() : m); } return pick([(x) => x, (x) => x.additionalProperties(false), (x) => x.minProperties(1), (x) => x.propertyNames(S.string().maxLength(9)), (x) => x.dependencies({ id: ["name"] }), (x) => x.patternProperties({ "^x": S.string() })])(o); };
for (let i = 0; i < 60; i++) add(() => fobj(2).valueOf());
const eleaf = () => pick([() => Schema.String, () => Schema.Number, () => Schema.Boolean, () => Schema.Literals(["a", "b"]), () => Schema.Null, () => Schema.NullOr(Schema.String), () => Schema.Array(Schema.String), () => Schema.Record(Schema.String, Schema.Number), () => Schema.Tuple([Schema.String, Schema.Number]), () => Schema.Int, () => Schema.NonEmptyString, () => Schema.Finite, () => Schema.Unknown, () => Schema.Any, () => Schema.Union([Schema.String, Schema.Number]), () => Schema.NonEmptyArray(Schema.Number), () => Schema.Date, () => Schema.BigInt, () => Schema.URL])();
const eobj = (d) => { const o = {}; for (let i = int(1, 4); i--;) { const m = d > 0 && rnd() < 0.4 ? eobj(d - 1) : eleaf(); o[pick(names)] = rnd() < 0.3 ? Schema.optional(m) : m; } return Schema.Struct(o); };
for (let i = 0; i < 40; i++) { const s = eobj(2); add(() => { const d = Schema.toJsonSchemaDocument(s); return Object.keys(d.definitions ?? {}).length ? { ...d.schema, $defs: d.definitions } : d.schema; }); }
const proto = fs.readFileSync("drawn.proto", "utf8").split("\n");
const messages = proto.filter((l) => l.startsWith("message "));
const parser = ProtoBuffSchemaParser();
for (let i = 0; i < messages.length; i += 1) {
  const need = new Set([i]);
  for (let more = true; more;) { more = false; for (const j of [...need]) for (const k of messages[j].matchAll(/\bM(\d+)\b/g)) if (!need.has(+k[1])) { need.add(+k[1]); more = true; } }
  if (need.size > 6) continue;
  const data = [...proto.filter((l) => !l.startsWith("message ") && !l.startsWith("service ") && !l.includes("annotations")), ...[...need].map((j) => messages[j]), `message Root { M${i} root = 1; int64 number = 2; }`].join("\n");
  try { const s = await parser.parse({ asyncapi: {}, data, meta: {}, path: [], defaultSchemaFormat: "", schemaFormat: "application/vnd.google.protobuf;version=3", input: {} }); add(() => s); } catch (e) { console.error(String(e).slice(0, 90)); }
}
console.log([...new Set(out)].join("\n"));
