"""EngineArgs: LLM's keywords as flags of a script of the caller's, as vLLM's scripts have them.

Knows the settings' flags, and no model.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TypeVar

from pipeinfer import settings as config
from pipeinfer.offline.keywords import is_setting

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


class EngineArgs:
    """Keywords of LLM(...), as attributes: LLM(**vars(args)), or LLM.from_engine_args(args)."""

    def __init__(self, model: str = "", **settings: object) -> None:
        self.model = model
        vars(self).update(settings)

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Adds --model and a flag for every setting, under all names that `pipeinfer serve` knows.
        What is not given stays out of the namespace."""
        parser.add_argument("--model", default="", help="a folder or a hub id; nothing: the demo")
        config.add_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """What the flags say; other attributes of the namespace are left out."""
        return cls(**{name: value for name, value in vars(args).items() if is_setting(name)})


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes flags also with underscores: --max_model_len is --max-model-len."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(
            [_dashed(one) for one in given], namespace or argparse.Namespace()
        )


def _dashed(argument: str) -> str:
    """A flag's name with dashes; its value as it is."""
    found = re.match(r"--[a-z][a-z0-9_-]*", argument)
    return argument if found is None else found[0].replace("_", "-") + argument[found.end() :]
