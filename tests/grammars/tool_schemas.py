# ruff: noqa
"""What made tool_schemas.json.gz: schemas as tools for Python, TypeScript, Go and Protocol Buffers
write them, of types that are drawn at random. Titles and descriptions are taken out.

    python tool_schemas.py proto > drawn.proto
    python -m grpc_tools.protoc -I. -I SITE_PACKAGES --python_out=. --swagger_out=. drawn.proto
    for tool in msgspec mashumaro apischema dataclasses marshmallow functions protobuf; do
        python tool_schemas.py $tool > $tool.jsonl
    done
    node tool_schemas.mjs > javascript.jsonl
    GO111MODULE=off GOPATH=/usr/share/gocode go run tool_schemas.go > go.jsonl
    python tool_schemas.py pack > tool_schemas.json.gz

From the Python Package Index: msgspec, attrs, mashumaro, apischema, dataclasses-jsonschema,
marshmallow-jsonschema, apispec, mcp, openai-agents, grpcio-tools, googleapis-common-protos, and
protobuf-to-pydantic with protobuf 4. From npm: zod@3, zod-to-json-schema, arktype, joi, joi-to-json,
yup, @sodaru/yup-to-json-schema, fluent-json-schema, effect, @asyncapi/protobuf-schema-parser. From
Debian: golang-go, golang-github-alecthomas-jsonschema-dev, golang-github-getkin-kin-openapi-dev,
golang-grpc-gateway (protoc-gen-swagger).
"""

import dataclasses
import datetime
import decimal
import enum
import gzip
import json
import os
import sys
import uuid
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

if sys.argv[1] not in ("proto", "pack", "protobuf"):
    import apischema, attrs, msgspec
    from mashumaro.jsonschema import build_json_schema, OPEN_API_3_1
    from dataclasses_jsonschema import JsonSchemaMixin
    from marshmallow import Schema, fields, validate
    from marshmallow_jsonschema import JSONSchema
    from apispec import APISpec
    from apispec.ext.marshmallow import MarshmallowPlugin
    from mcp.server.mcpserver.utilities.func_metadata import func_metadata
    from agents import function_tool

    class Color(enum.Enum):
        RED = "red"
        BLUE = "blue"

    class Number(enum.IntEnum):
        ONE = 1
        TWO = 2

    @dataclasses.dataclass
    class Point:
        x: int
        y: float = 0.5

    @dataclasses.dataclass
    class Tree:
        value: int
        children: list["Tree"] = dataclasses.field(default_factory=list)

    @attrs.define
    class Thing:
        name: str
        size: Optional[int] = None

    class Pair(NamedTuple):
        a: int
        b: str

    class Cat(msgspec.Struct, tag="cat"):
        lives: int

    class Dog(msgspec.Struct, tag="dog", forbid_unknown_fields=True):
        good: bool = True

    COMMON = [
        str,
        int,
        float,
        bool,
        bytes,
        datetime.datetime,
        datetime.date,
        uuid.UUID,
        decimal.Decimal,
        Color,
        Number,
        Point,
        Tree,
        Any,
        Literal["a", "b"],
        Literal[1, "x"],
        list[str],
        set[int],
        frozenset[str],
        dict[str, int],
        tuple[int, str],
        tuple[int, ...],
        Optional[str],
        Union[int, str],
    ]
    ONLY = {
        "msgspec": [
            Pair,
            Thing,
            Union[Cat, Dog],
            dict[int, str],
            datetime.time,
            datetime.timedelta,
            Annotated[int, msgspec.Meta(ge=0, le=100)],
            Annotated[str, msgspec.Meta(min_length=1, max_length=9)],
            Annotated[str, msgspec.Meta(pattern="^[a-z]+$")],
            Annotated[float, msgspec.Meta(gt=0, lt=1)],
            Annotated[int, msgspec.Meta(multiple_of=5)],
            set[Color],
            msgspec.Raw,
        ],
        "mashumaro": [
            Pair,
            dict[int, str],
            datetime.time,
            datetime.timedelta,
            datetime.timezone,
            set[Color],
        ],
        "apischema": [
            Annotated[int, apischema.schema(min=0, max=9)],
            Annotated[str, apischema.schema(pattern="^a")],
            Annotated[list[int], apischema.schema(max_items=3, unique=True)],
            dict[Literal["a", "b"], int],
        ],
        "dataclasses": [],
    }

NAMES = ("id", "name", "kind", "tags", "value", "items", "owner", "at", "note")


def kind(random, tool, depth):
    if not depth or random.random() < 0.5:
        return random.choice(COMMON + ONLY[tool] * 2)
    inner = [kind(random, tool, depth - 1) for _ in range(2)]
    return random.choice(
        [
            list[inner[0]],
            Optional[inner[0]],
            Union[inner[0], inner[1]],
            dict[str, inner[0]],
            tuple[inner[0], inner[1]],
            made(random, tool, depth - 1),
        ]
    )


many = 0


def made(random, tool, depth):
    global many
    many += 1
    need, may = [], []
    for name in random.sample(NAMES, random.randint(1, 4)):
        each = kind(random, tool, depth)
        if random.random() < 0.6:
            need.append((name, each))
        else:
            may.append((name, Optional[each], None))
    title = f"M{many}"
    if tool == "msgspec":
        return msgspec.defstruct(title, need + may, forbid_unknown_fields=random.random() < 0.3)
    may = [(n, t, dataclasses.field(default=None)) for n, t, _ in may]
    bases = (JsonSchemaMixin,) if tool == "dataclasses" else ()
    return dataclasses.make_dataclass(title, need + may, bases=bases)


def schemas(tool, seed):
    random = Random(seed)
    for _ in range((tool == "msgspec") * 70):
        yield lambda: msgspec.json.schema(made(random, "msgspec", 2))
    for i in range((tool == "mashumaro") * 60):
        yield lambda: build_json_schema(
            made(random, "mashumaro", 2),
            **({"dialect": OPEN_API_3_1, "all_refs": False} if i % 2 else {}),
        ).to_dict()
    for i in range((tool == "apischema") * 60):
        version = random.choice(
            [
                apischema.json_schema.JsonSchemaVersion.DRAFT_2020_12,
                apischema.json_schema.JsonSchemaVersion.DRAFT_7,
            ]
        )
        yield lambda: apischema.json_schema.deserialization_schema(
            made(random, "apischema", 2), version=version
        )
    for i in range((tool == "dataclasses") * 40):
        yield lambda: made(random, "dataclasses", 1).json_schema()
    for i in range((tool == "marshmallow") * 50):
        schema = marshmallow(random, 2)
        yield lambda: JSONSchema().dump(schema())
        yield lambda: described(schema, random.choice(["3.0.2", "2.0", "3.1.0"]))
    for i in range((tool == "functions") * 60):
        yield lambda: func_metadata(function(random)).arg_model.model_json_schema(by_alias=True)
        yield (
            lambda: (
                function_tool(
                    function(random), strict_mode=random.random() < 0.5
                ).params_json_schema
            )
        )


def marshmallow(random, depth):
    def one(d):
        simple = [
            lambda: fields.Str(),
            lambda: fields.Int(),
            lambda: fields.Int(strict=True),
            lambda: fields.Float(),
            lambda: fields.Bool(),
            lambda: fields.Date(),
            lambda: fields.DateTime(),
            lambda: fields.UUID(),
            lambda: fields.Email(),
            lambda: fields.Url(),
            lambda: fields.Decimal(),
            lambda: fields.Str(validate=validate.OneOf(["a", "b"])),
            lambda: fields.Str(validate=validate.Length(min=1, max=5)),
            lambda: fields.Int(validate=validate.Range(min=0, max=9)),
            lambda: fields.Str(allow_none=True),
            lambda: fields.Str(required=True),
            lambda: fields.Int(required=True),
            lambda: fields.Dict(),
            lambda: fields.Raw(),
            lambda: fields.Time(),
            lambda: fields.TimeDelta(),
            lambda: fields.Str(load_default="x"),
            lambda: fields.Enum(Color, by_value=True),
        ]
        if d and random.random() < 0.4:
            return random.choice(
                [
                    lambda: fields.List(one(d - 1)),
                    lambda: fields.Nested(marshmallow(random, d - 1)),
                    lambda: fields.Dict(keys=fields.Str(), values=one(d - 1)),
                    lambda: fields.List(fields.Nested(marshmallow(random, d - 1))),
                ]
            )()
        return random.choice(simple)()

    global many
    many += 1
    return type(
        f"S{many}",
        (Schema,),
        {name: one(depth) for name in random.sample(NAMES, random.randint(1, 4))},
    )


def function(random):
    def tool(**arguments): ...

    import inspect
    from pydantic import BaseModel, Field, create_model
    from typing_extensions import TypedDict

    kinds = [
        str,
        int,
        float,
        bool,
        list[str],
        dict[str, int],
        Optional[str],
        Literal["a", "b"],
        datetime.datetime,
        Color,
        Annotated[int, Field(ge=1, le=9, description="n")],
        Annotated[str, Field(max_length=9)],
        create_model("Inner", a=(int, ...), b=(Optional[str], None)),
        list[create_model("Row", x=(float, ...))],
        Union[int, str],
        tuple[int, str],
        set[str],
    ]
    names = random.sample(NAMES, random.randint(1, 5))
    parameters = [
        inspect.Parameter(
            n,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=random.choice(kinds),
            default=random.choice([inspect.Parameter.empty, inspect.Parameter.empty, None]),
        )
        for n in names
    ]
    tool.__signature__ = inspect.Signature(parameters)
    tool.__annotations__ = {p.name: p.annotation for p in parameters}
    tool.__name__ = "tool"
    return tool


def described(schema, version):
    spec = APISpec("t", "1", version, plugins=[MarshmallowPlugin()])
    spec.components.schema("Top", schema=schema)
    said = spec.to_dict()
    if "definitions" in said:
        return {"$ref": "#/definitions/Top", "definitions": said["definitions"]}
    return {"$ref": "#/components/schemas/Top", "components": said["components"]}


def protobuf():
    import drawn_pb2
    from protobuf_to_pydantic import msg_to_pydantic_model

    for name in drawn_pb2.DESCRIPTOR.message_types_by_name:
        yield lambda: msg_to_pydantic_model(getattr(drawn_pb2, name)).model_json_schema()


# ---- Protocol Buffers

SCALARS = [
    "string",
    "int32",
    "int64",
    "uint32",
    "uint64",
    "sint64",
    "fixed64",
    "double",
    "float",
    "bool",
    "bytes",
]
KNOWN = [
    "Timestamp",
    "Duration",
    "Struct",
    "Value",
    "ListValue",
    "Any",
    "FieldMask",
    "Empty",
    "Int64Value",
    "UInt32Value",
    "StringValue",
    "BoolValue",
    "DoubleValue",
]
FIELD_NAMES = [
    "id",
    "name",
    "kind",
    "tags",
    "value",
    "items",
    "owner",
    "created_at",
    "note",
    "page_size",
]
HEAD = """syntax = "proto3";
package drawn.v1;
option go_package = "drawn/v1;drawn";
import "google/api/annotations.proto";
import "google/protobuf/any.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/empty.proto";
import "google/protobuf/field_mask.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
enum Color { COLOR_UNSPECIFIED = 0; COLOR_RED = 1; COLOR_BLUE = 2; }
"""


def messages(many=90, seed=7):
    random, made = Random(seed), []

    def kind(i):
        chance = random.random()
        if chance < 0.45:
            return random.choice(SCALARS)
        if chance < 0.6:
            return f"google.protobuf.{random.choice(KNOWN)}"
        if chance < 0.7:
            return "Color"
        return f"M{random.randint(max(0, i - 12), i)}"

    for i in range(many):
        lines, n = [], 0
        for name in random.sample(FIELD_NAMES, random.randint(1, 6)):
            n += 1
            chance = random.random()
            if chance < 0.2:
                lines.append(f"repeated {kind(i)} {name} = {n};")
            elif chance < 0.32:
                lines.append(
                    f"map<{random.choice(['string', 'int32', 'bool'])}, {kind(i)}> {name} = {n};"
                )
            elif chance < 0.42:
                lines.append(
                    f"oneof of_{name} {{ {kind(i)} {name} = {n}; {kind(i)} other_{name} = {n + 1}; }}"
                )
                n += 1
            else:
                lines.append(f"{kind(i)} {name} = {n};")
        made.append(f"message M{i} {{ {' '.join(lines)} }}")
    calls = [
        f'rpc C{i}(M{i}) returns (M{(i + 1) % many}) {{ option (google.api.http) = {{ post: "/c{i}" body: "*" }}; }}'
        for i in range(many)
    ]
    return HEAD + "\n".join(made) + "\nservice All { " + " ".join(calls) + " }\n"


def refs(part):
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        part = list(part.values())
    for each in part if isinstance(part, list) else ():
        yield from refs(each)


def closures(definitions):
    """Each definition of a document as a schema of its own."""
    for name in definitions:
        need, todo = {}, [name]
        while todo:
            one = todo.pop()
            if one not in need and one in definitions:
                need[one] = definitions[one]
                todo += [to.rsplit("/", 1)[1] for to in refs(definitions[one])]
        yield {"$ref": f"#/definitions/{name}", "definitions": need}


def bare(part, inside=False):
    """Without what says nothing about values."""
    if isinstance(part, list):
        return [bare(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: bare(
            value, key in ("properties", "$defs", "definitions", "schemas", "patternProperties")
        )
        for key, value in part.items()
        if inside or key not in ("description", "title", "examples")
    }


def is_whole(schema):
    """Whether it has what it refers to, by a name that Go's structs at random do not all share."""

    def there(to):
        found = schema
        for step in to.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = (
                found[int(step)]
                if isinstance(found, list)
                else found.get(step)
                if isinstance(found, dict)
                else None
            )
        return found is not None

    local = [to for to in refs(schema) if to.startswith("#/")]
    return all(map(there, local)) and "#/definitions/" not in local


def packed():
    made = list(closures(json.loads(Path("drawn.swagger.json").read_text())["definitions"]))
    for name in (*TOOLS, "protobuf", "javascript", "go"):
        made += [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
    texts = (
        json.dumps(bare(schema), ensure_ascii=False, separators=(",", ":"))
        for schema in made
        if is_whole(schema)
    )
    lines = dict.fromkeys(text for text in texts if len(text) < 6000)
    return gzip.compress(("[\n" + ",\n".join(lines) + "\n]\n").encode(), 9, mtime=0)


TOOLS = ("msgspec", "mashumaro", "apischema", "dataclasses", "marshmallow", "functions")

if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "proto":
        print(messages())
    elif mode == "pack":
        sys.stdout.buffer.write(packed())
    else:
        for seed in (1, 2, 3, 4) if mode == "msgspec" else (1,):  # which now and then dies of one
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
                continue
            for make in protobuf() if mode == "protobuf" else schemas(mode, seed):
                try:
                    print(json.dumps(make()), flush=True)
                except Exception as error:  # the tool cannot say it
                    print(repr(error)[:100], file=sys.stderr)
            os._exit(0)
