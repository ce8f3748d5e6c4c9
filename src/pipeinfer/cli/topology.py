"""`pipeinfer topology check [FILE]`: says whether a topology can work, and draws it.

Knows how to print; what must hold is said in topology.py and bus/curve.py. Connects to
nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pipeinfer import settings as config
from pipeinfer.bus.curve import keyring
from pipeinfer.command_line import CommandLine
from pipeinfer.topology import StageEntry, Topology, deployed_topology, is_tcp

ANYWHERE = "this host"  # of stages without `host`


def run(arguments: Sequence[str]) -> int:
    """0 for a topology that holds; ConfigurationError, one line, for one that does not."""
    options = parser().parse_args(arguments)
    topology = deployed_topology(options.file, os.environ)
    config.build(topology.defaults())  # its [settings] are read by the stages only when they start
    own = keyring(topology)
    print("\n".join(drawing(topology)))
    if own is not None:
        public = {key: stage for stage, key in own.stages.items()}
        print(f"keys: {len(public)} public, the secret of {own.own.name!r} is here")
    print("the topology holds")
    return 0


def drawing(topology: Topology) -> Iterator[str]:
    """Lines: every host with its stages, then who talks to whom across hosts."""
    for host in dict.fromkeys(entry.host or ANYWHERE for entry in topology.entries):
        here = [entry for entry in topology.entries if (entry.host or ANYWHERE) == host]
        wide = max(len(entry.identity.id) for entry in here)
        yield f"{host}"
        for entry in here:
            mark = "└─" if entry is here[-1] else "├─"
            yield f"  {mark} {entry.identity.id:{wide}}  {_details(entry, topology)}".rstrip()
    yield ""
    yield from _pipeline(topology)


def _pipeline(topology: Topology) -> Iterator[str]:
    """A line for each group, between what all groups share."""
    [gateway], [tokenizer] = topology.ids("gateway"), topology.ids("tokenizer")
    [detokenizer] = topology.ids("detokenizer")
    last = topology.groups() - 1
    lines = []
    for group in range(last + 1):
        engines = [e for e in topology.ids("engine") if e.startswith(f"engine-{group}-")]
        lines.append(f"scheduler-{group} ═► {', '.join(engines)}")
    wide = max(map(len, lines))
    start = f"{gateway} ─► {tokenizer} ─"
    for group, line in enumerate(lines):
        corner = 0 if last == 0 else 1 if group == 0 else 3 if group == last else 2
        left, right = "─┬├└"[corner] + "► ", " ─" + "─┐┤┘"[corner]
        ends = f"► {detokenizer} ─► {gateway}" if group == 0 else ""
        yield f"{start if group == 0 else '':{len(start)}}{left}{line:{wide}}{right}{ends}"


def _details(entry: StageEntry, topology: Topology) -> str:
    words = [entry.address]
    if entry.bind:
        words.append(f"listens on {entry.bind}")
    if entry.device:
        words.append(f"device {entry.device}")
    if is_tcp(entry.address):
        words.append(f"key {entry.key or 'pipeinfer'}" if topology.keyed else "loopback, no key")
    return "  ".join(words)


def parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer topology",
        description="Checks a topology, and the keys that lie on this host, and draws it.",
        epilog="Environment variables are heeded as the stages do: see docs/topology.md.",
    )
    command_line.add_argument("action", choices=("check",))
    command_line.add_argument(
        "file", nargs="?", metavar="FILE", help="default: PIPEINFER_STAGES alone"
    )
    return command_line
