"""The commands that treat a server badly, and the parts that they run beside themselves. The exit
code is 1 if a promise was broken.
"""

from __future__ import annotations

from bench.commands import Tool

COMMANDS = {
    "kills": "stages are killed one after another under streams; no text may change",
    "storm": "harms of many kinds, drawn from a seed, under streams; no text may change",
    "hostile": "one client sends the worst it may, again and again; eight streams must go on",
    "overload": "many more requests a second than can be served; the rest is refused at once",
    "watch": "what `hostile` runs beside itself: eight clients that say when their pieces come",
    "attack": "what `hostile` runs beside itself: one client that sends one case again and again",
    "offer": "what `overload` runs beside itself: sends requests at their time, whatever happens",
    "links": "what `storm` runs beside itself: a proxy between stages, which is cut and slowed",
    "pester": "what `storm` runs beside itself: a few hostile requests a second",
}

TOOL = Tool(
    name="chaos",
    description="Treats a server badly.",
    commands=COMMANDS,
    schema="pipeinfer-chaos/1",
    silent=("watch", "attack", "offer", "links", "pester"),
)
main, parser = TOOL.main, TOOL.parser
