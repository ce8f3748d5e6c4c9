"""What is asked of the demo model, which knows nothing: all of it is bounded, so that it ends."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "pipeinfer-demo"
KEY = "none"
QUESTION = [{"role": "user", "content": "Count from 3 to 9."}]
TEXTS = ["Once upon a time", "There was a king", "Count from 3 to 9."]
COUNTED = "3 4 5 6 7 8 9"  # the demo model can count


class Person(BaseModel):
    """Somebody. Without `extra`, what is not strict could have any further keys, for ever."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)
    mood: Literal["glad", "sad"]


class Anything(BaseModel):
    """What every JSON object is."""

    model_config = ConfigDict(extra="allow")


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
TIME = {"name": "get_time", "description": "The time.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, TIME)]


def is_weather(arguments: dict) -> bool:
    return (
        set(arguments) == {"city", "days"}
        and len(arguments["city"]) <= 8
        and 1 <= arguments["days"] <= 7
    )
