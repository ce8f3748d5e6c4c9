"""Asks a real server for very much, very mixed, and says whether anything of it stays behind.

Run it as `python tools/soak run`; docs/testing.md says what it promises. The exit code is 1 if a
promise was broken.
"""

from harness.command_line import Tool

TOOL = Tool(
    name="soak",
    description="A long mixed load.",
    commands={
        "run": "starts a server, asks it for much, and looks for what grows, stays or is miscounted"
    },
    schema="pipeinfer-soak/1",
)
