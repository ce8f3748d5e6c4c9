"""Treats a real server badly and says whether its promises held: kills, hostile clients, overload.

Run it as `python tools/chaos COMMAND`; docs/testing.md says what each command promises. The exit
code is 1 if a promise was broken.
"""

from harness.command_line import Tool

TOOL = Tool(
    name="chaos",
    description="Treats a server badly.",
    commands={
        "kills": "stages are killed one after another under streams; no text may change",
        "storm": "harms of many kinds, drawn from a seed, under streams; no text may change",
        "power": "all processes are killed at once; what was stored must be there afterwards",
        "hostile": "one client sends the worst it may, again and again; eight streams must go on",
        "overload": "many more requests a second than can be served; the rest is refused at once",
    },
    schema="pipeinfer-chaos/1",
)
