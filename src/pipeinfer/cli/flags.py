"""Flags of the commands that ask a model on the terminal: settings, and how to sample.

Knows no command and no model.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeinfer import settings as config
from pipeinfer.params import InvalidParameter, SamplingParams, normalized


@dataclass(frozen=True)
class Asked:
    """What the flags say. `settings`: for LLM(...). `sampling`: only what was given."""

    options: argparse.Namespace
    settings: dict[str, Any]
    sampling: dict[str, Any]

    def params(self, defaults: SamplingParams, max_tokens: int | None) -> SamplingParams:
        """`defaults` with what was given; without --max-tokens that is `max_tokens`."""
        chosen = {"max_tokens": max_tokens, **self.sampling}
        return normalized(msgspec.structs.replace(defaults, **chosen))


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser with --model, the sampling flags and all settings."""
    made = argparse.ArgumentParser(
        prog=f"pipeinfer {command}",
        description=description,
        epilog="What is not given comes from the model's generation_config.json.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    made.add_argument("--model", metavar="MODEL", help="a folder or hub id; default: the demo")
    sampling = made.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="of the answer, at most")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end")
    config.add_flags(made)
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str]) -> Asked:
    """Ends the process with code 2 for flags that cannot be."""
    options = made.parse_args(arguments)
    given = vars(options)
    settings = {k: v for k, v in given.items() if k in config.Settings.__struct_fields__}
    if "log_level" not in config.from_environment(os.environ):
        settings.setdefault("log_level", "warning")  # a terminal is for the answers
    sampling = {k: v for k, v in given.items() if k in SamplingParams.__struct_fields__}
    sampling.pop("seed", None)  # the setting of that name: it seeds all requests
    try:
        normalized(SamplingParams(**sampling))
    except InvalidParameter as error:
        made.error(str(error))
    return Asked(options, settings, sampling)
