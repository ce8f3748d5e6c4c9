"""The commands of the soak. Their modules have the flags and the work; the exit code is 1 if a
promise was broken.
"""

from __future__ import annotations

from bench.commands import Tool

COMMANDS = {
    "run": "starts a server, asks it for much, and looks for what grows, stays or is miscounted",
    "clients": "what `run` runs beside itself: clients that send their share of the requests",
}

TOOL = Tool(
    name="soak",
    description="A long mixed load.",
    commands=COMMANDS,
    schema="pipeinfer-soak/1",
    silent=("clients",),
)
main, parser = TOOL.main, TOOL.parser
