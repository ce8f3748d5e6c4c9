"""generation_config.json: the checkpoint's own sampling defaults and end-of-sequence ids.

Knows no torch and no sampler. A checkpoint need not have the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeinfer.checkpoint.fields import Fields, read_json


@dataclass(frozen=True)
class GenerationDefaults:
    """None where the checkpoint says nothing. eos_ids: config.json's and generation_config's."""

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def sampling(self) -> dict[str, float]:
        """The sampling defaults that are given, under the names of SamplingParams' fields."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        values = {name: getattr(self, name) for name in names} | {"max_tokens": self.max_new_tokens}
        return {name: value for name, value in values.items() if value is not None}


def read_generation(folder: Path) -> GenerationDefaults:
    """Reads config.json and, if it is there, generation_config.json; raises ConfigurationError."""
    eos = read_json(folder, "config.json").ids("eos_token_id")
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(eos_ids=eos)
    fields = read_json(folder, path.name)
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(eos + fields.ids("eos_token_id"))),
        temperature=_number(fields, "temperature"),
        top_k=fields.optional_integer("top_k", least=0),
        top_p=_number(fields, "top_p"),
        min_p=_number(fields, "min_p"),
        repetition_penalty=_number(fields, "repetition_penalty"),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
    )


def _number(fields: Fields, name: str) -> float | None:
    value = fields.raw.get(name)
    if value is None or value == 0:  # a temperature or min_p of zero is a proper default
        return None if value is None else 0.0
    return fields.number(name)
