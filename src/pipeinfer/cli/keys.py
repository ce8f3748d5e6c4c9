"""`pipeinfer keys [NAME ...]`: makes CURVE key pairs for stages on several hosts.

Knows where the files go and what to say about them; what they are is bus/curve.py's business.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.bus import curve
from pipeinfer.command_line import CommandLine


def run(arguments: Sequence[str]) -> int:
    """0 when all pairs are written; ConfigurationError leaves those that were there alone."""
    options = parser().parse_args(arguments)
    folder = Path(options.out)
    names = options.names or [curve.DEFAULT_KEY]
    for name in names:
        secret, public = curve.create_key_pair(folder, name)
        print(f"{secret} (secret, mode 0600) and {public}")
    whose = "its own .key file" if len(names) > 1 else "the .key file"
    print(f"Every host needs {whose} and all .pub files in one folder; the topology names it:")
    print(f"  keys = {str(folder)!r}")
    return 0


def parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer keys",
        description="Makes CURVE key pairs: NAME.key and NAME.pub. One pair for all stages is "
        "enough; with one for each host, a host can be shut out by taking its .pub file away.",
        epilog="Example: pipeinfer keys front gpu-a gpu-b --out keys",
    )
    command_line.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: {curve.DEFAULT_KEY}"
    )
    command_line.add_argument(
        "--out", metavar="DIR", default=os.curdir + "/keys", help="folder, made if need be"
    )
    return command_line
