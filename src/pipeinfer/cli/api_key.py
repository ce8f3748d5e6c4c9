"""`pipeinfer api-key NAME`: makes an API key for one client, and the line for the file of keys.

Knows what to print; what a key is, is gateway/api_keys.py's business. Writes no file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipeinfer.command_line import CommandLine
from pipeinfer.gateway import api_keys


def run(arguments: Sequence[str]) -> int:
    """0; ConfigurationError for a name that cannot be. The line alone goes to stdout."""
    options = parser().parse_args(arguments)
    text, line = api_keys.new_key(options.name)
    limits = [
        f"{name}={n}" for name in api_keys.LIMIT_NAMES if (n := getattr(options, name)) is not None
    ]
    print(f"the key, shown only now: {text}", file=sys.stderr)
    print("the line for the file of --api-key-file:", file=sys.stderr, flush=True)
    print(" ".join([line, *([api_keys.ADMIN] if options.admin else []), *limits]))
    return 0


def parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer api-key",
        description="Makes a random API key. The key goes to stderr, once; the line for the file "
        "of --api-key-file, which has its hash only, goes to stdout. A running server reads the "
        "file again on SIGHUP.",
        epilog="Example: pipeinfer api-key alice --requests 60 >> api_keys.txt",
    )
    command_line.add_argument("name", metavar="NAME", help="whose it is; stands in metrics")
    command_line.add_argument(
        "--admin", action="store_true", help="an operator's: sees what others ask, at /monitor"
    )
    command_line.add_argument(
        "--concurrent", type=_count, metavar="N", help="requests at a time; 0: any"
    )
    command_line.add_argument("--requests", type=_count, metavar="N", help="a minute; 0: any")
    command_line.add_argument(
        "--tokens", type=_count, metavar="N", help="of prompt and output a minute; 0: any"
    )
    return command_line


def _count(text: str) -> int:
    if api_keys.LIMIT_VALUE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError("a whole number, 0 or more")
    return int(text)
