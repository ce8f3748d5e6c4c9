// Writes the schemas of javascript_schemas.json.gz, of zod, TypeBox and valibot:
//   npm install zod@4 @sinclair/typebox valibot @valibot/to-json-schema
//   node javascript_schemas.mjs | gzip -9n > javascript_schemas.json.gz
import { z } from "zod";
import { Type } from "@sinclair/typebox";
import * as v from "valibot";
import { toJsonSchema } from "@valibot/to-json-schema";
let seed = 1;
const rnd = () => { seed = (seed * 1103515245 + 12345) % 2147483648; return seed / 2147483648; };
const pick = (a) => a[Math.floor(rnd() * a.length)];
const int = (a, b) => a + Math.floor(rnd() * (b - a + 1));
const names = ["id","name","kind","tags","value","items","owner","at","note","größe"];
const leaf = () => pick([
 () => z.string(), () => z.string().min(1).max(20), () => z.email(), () => z.uuid(), () => z.url(), () => z.iso.datetime(), () => z.iso.date(), () => z.iso.time(), () => z.ipv4(), () => z.ipv6(), () => z.cuid2(), () => z.nanoid(), () => z.ulid(), () => z.base64(), () => z.e164(), () => z.emoji(), () => z.jwt(), () => z.cidrv4(),
 () => z.string().regex(/^[a-z]{2,5}$/), () => z.string().startsWith("ab"), () => z.string().endsWith("z"), () => z.string().includes("q"), () => z.string().regex(/^(?=.*\d)(?=.*[a-z]).{4,8}$/),
 () => z.number(), () => z.number().int().min(0).max(100), () => z.int(), () => z.int32(), () => z.uint32(), () => z.number().positive(), () => z.number().multipleOf(5), () => z.float32(), () => z.float64(), () => z.number().gt(3).lt(9), () => z.number().nonnegative(),
 () => z.boolean(), () => z.null(), () => z.literal("x"), () => z.literal([1, 2, 3]), () => z.enum(["red","green","blue"]), () => z.any(), () => z.unknown(), () => z.literal(true), () => z.stringbool ? z.string().default("d") : z.string(), () => z.templateLiteral(["v", z.number()]), () => z.never().optional()
])();
const make = (d) => { if (d <= 0) return leaf(); return pick([
 leaf, () => obj(d), () => obj(d), () => obj(d), () => z.array(make(d-1)), () => z.array(make(d-1)).min(1).max(3), () => z.tuple([make(d-1), make(d-1)]), () => z.tuple([make(d-1)], make(0)),
 () => z.union([make(d-1), make(d-1)]), () => z.record(z.string(), make(d-1)), () => z.record(z.enum(["a","b"]), obj(d-1)), () => z.partialRecord(z.enum(["a","b"]), make(d-1)), () => make(d-1).nullable(), () => z.intersection(obj(d-1), z.object({extra: make(d-1)})),
 () => z.discriminatedUnion("type", [z.object({type: z.literal("a"), x: make(d-1)}), z.object({type: z.literal("b"), y: make(d-1)})]), () => z.strictObject({a: make(d-1)}), () => z.looseObject({a: make(d-1)}), () => z.object({a: make(d-1)}).catchall(leaf()), () => z.object({a: make(d-1)}).partial(), () => make(d-1).describe("what it is"), () => make(d-1).readonly()
 ])(); };
const obj = (d) => { const o = {}; for (let i = int(1,4); i--;) { const m = make(d-1); o[pick(names)] = rnd() < 0.3 ? m.optional() : m; } return z.object(o); };
const Node = z.object({ value: z.number(), get children() { return z.array(Node).optional(); } });
const out = [];
const add = (s) => { const t = JSON.stringify(s); if (t.length < 4000) out.push(t); };
add(z.toJSONSchema(Node));
while (out.length < 400) { const s = obj(3); for (const io of ["input","output"]) for (const target of ["draft-2020-12","draft-7","draft-4"].slice(0, rnd()<0.2?3:1)) try { add(z.toJSONSchema(s, { io, target, unrepresentable: "any" })); } catch (e) { console.error(String(e).slice(0,80)); } }
const tleaf = () => pick([() => Type.String(), () => Type.String({format:"email"}), () => Type.Integer({minimum:0}), () => Type.Number(), () => Type.Boolean(), () => Type.Null(), () => Type.Literal("a"), () => Type.Union([Type.Literal("a"), Type.Literal("b")]), () => Type.Array(Type.Union([Type.Literal("a"), Type.Literal("b")]), {uniqueItems: true}), () => Type.Array(Type.String(), {uniqueItems: true, minItems: 1}), () => Type.Not(Type.Null()), () => Type.Array(Type.Integer(), {contains: Type.Literal(1)})])();
const tmake = (d) => d <= 0 ? tleaf() : pick([tleaf, () => tobj(d), () => Type.Array(tmake(d-1)), () => Type.Array(tmake(0)), () => Type.Union([tmake(d-1), tmake(d-1)]), () => Type.Record(Type.String(), tmake(d-1)), () => Type.Record(Type.Union([Type.Literal("a"), Type.Literal("b")]), tmake(d-1)), () => Type.Intersect([tobj(d-1), Type.Object({extra: tmake(d-1)})], {unevaluatedProperties: false}), () => Type.Composite([tobj(d-1), Type.Object({extra: tmake(d-1)})]), () => Type.Partial(tobj(d-1))])();
const tobj = (d) => { const o = {}; for (let i = int(1,4); i--;) { const m = tmake(d-1); o[pick(names)] = rnd()<0.3 ? Type.Optional(m) : m; } return Type.Object(o, pick([{}, {additionalProperties:false}, {minProperties: 1}])); };
for (let i = 0; i < 200; i++) add(tobj(3));
const vleaf = () => pick([() => v.string(), () => v.pipe(v.string(), v.email()), () => v.pipe(v.string(), v.minLength(2)), () => v.number(), () => v.pipe(v.number(), v.integer(), v.maxValue(9)), () => v.boolean(), () => v.null_(), () => v.picklist(["a","b"]), () => v.literal("q"), () => v.pipe(v.string(), v.isoDate()), () => v.pipe(v.string(), v.regex(/^\d+$/)), () => v.pipe(v.array(v.string()), v.maxLength(2))])();
const vobj = (d) => { const o = {}; for (let i = int(1,4); i--;) { const m = d > 1 && rnd()<0.4 ? vobj(d-1) : d > 1 && rnd()<0.3 ? v.array(vobj(d-1)) : d>1 && rnd()<0.3 ? v.record(v.picklist(["a","b"]), vleaf()) : d>1 && rnd()<0.2 ? v.variant("kind",[v.object({kind:v.literal("a"),x:vleaf()}),v.object({kind:v.literal("b"),y:vleaf()})]) : vleaf(); o[pick(names)] = rnd()<0.3 ? v.optional(m) : rnd()<0.2 ? v.nullable(m) : m; } return pick([v.object, v.strictObject, v.looseObject])(o); };
for (let i = 0; i < 150; i++) try { add(toJsonSchema(vobj(3), {errorMode:"ignore"})); } catch (e) { console.error(String(e).slice(0,80)); }
console.log("[\n" + [...new Set(out)].join(",\n") + "\n]");
