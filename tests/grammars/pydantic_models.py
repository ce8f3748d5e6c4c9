"""JSON schemas of pydantic's models, drawn at random. Import it as `import pydantic_models`."""

# ruff: noqa: UP045
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Iterator
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, Optional, Required, Union

from pydantic import (
    AnyUrl,
    AwareDatetime,
    Base64Str,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveFloat,
    SecretStr,
    condecimal,
    conlist,
    create_model,
)
from typing_extensions import TypedDict


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool = True


class Tree(BaseModel):
    value: int
    children: "list[Tree]" = []


class Part(TypedDict, total=False):
    a: Required[int]
    b: str


class Point(NamedTuple):
    x: int
    y: str = "q"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


TYPES = [
    str, int, float, bool, type(None), bytes, decimal.Decimal, datetime.datetime, datetime.date,
    datetime.time, datetime.timedelta, uuid.UUID, ipaddress.IPv4Address, ipaddress.IPv6Network,
    pathlib.Path, AnyUrl, SecretStr, Color, Number, Cat, Dog, Tree, Part, Point, Strict, Loose,
    Literal["a", "b"], Literal[1, "x", None], set[str], set[Color], frozenset[int],
    set[Literal["a", "b", "c"]], dict[str, int], dict[Literal["a", "b"], int], dict[Color, str],
    dict[int, str], tuple[int, str], tuple[int, ...], Any, JsonValue, re.Pattern, list, dict,
    Annotated[int, Field(ge=0, le=100)], Annotated[str, Field(min_length=2, max_length=8)],
    Annotated[str, Field(pattern=r"^[a-z]+$")], Annotated[float, Field(gt=0, lt=1)],
    Annotated[int, Field(multiple_of=7)], condecimal(max_digits=5, decimal_places=2),
    condecimal(gt=0), conlist(int, min_length=1, max_length=3),
    Annotated[Union[Cat, Dog], Field(discriminator="kind")], Union[Cat, Dog], ByteSize,
    NonNegativeInt, PositiveFloat, AwareDatetime, Base64Str,
    Annotated[dict[str, int], Field(min_length=1)], Annotated[set[int], Field(max_length=3)],
    dict[Annotated[str, Field(pattern="^k")], int],
    Annotated[str, Field(json_schema_extra={"format": "password"})],
    Annotated[int, Field(ge=-(2**63), le=2**63 - 1)], Annotated[int, Field(ge=0, le=2**64 - 1)],
]  # fmt: skip
NAMES = ("id", "name", "kind", "tags", "value", "items", "owner", "at", "note")


def schemas(many: int) -> Iterator[dict[str, Any]]:
    """So many of models, some of which hold others."""
    random = Random(5)
    for i in range(many):
        mode: Any = random.choice(["validation", "serialization"])
        made = _model(random, f"M{i}", 3)
        yield json.loads(json.dumps(made.model_json_schema(mode=mode)))


def _model(random: Random, name: str, depth: int) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for each in random.sample(NAMES, random.randint(1, 4)):
        kind = _type(random, name, depth)
        fields[each] = (kind, ...) if random.random() < 0.6 else (Optional[kind], None)
    extra = random.choice([None, None, "forbid", "allow"])
    return create_model(name, __config__=ConfigDict(extra=extra), **fields)


def _type(random: Random, name: str, depth: int) -> Any:
    if not depth or random.random() < 0.3:
        return random.choice(TYPES)
    inner = [_type(random, f"{name}{i}", depth - 1) for i in range(2)]
    kinds = [list[inner[0]], Optional[inner[0]], Union[inner[0], inner[1]], dict[str, inner[0]],
             tuple[inner[0], inner[1]]]  # fmt: skip
    return random.choice([*kinds, _model(random, f"{name}_", depth - 1)])
