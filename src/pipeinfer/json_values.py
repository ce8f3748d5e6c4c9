"""What JSON holds, as types: for bodies, templates' arguments and files that others wrote.

A value from outside is looked at with isinstance where it comes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
    )
else:
    JsonValue = Any  # msgspec decodes into no type that names itself

JsonObject: TypeAlias = dict[str, JsonValue]
