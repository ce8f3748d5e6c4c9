"""The commands of the simulation. They start no server, so they take no settings of one: a flag
that is not theirs is a mistake.
"""

from __future__ import annotations

from bench.commands import Tool

COMMANDS = {
    "run": "throughput, latency, hits and balance of a cluster for each routing policy",
    "against": "a recorded run beside the same requests simulated",
    "targets": "how long steps beside streams may take, the more prompts wait",
    "fit": "a step-time model from recordings of a real engine",
}

TOOL = Tool(
    name="simulate",
    description="Clusters in virtual time: the real router and scheduler, modelled engines.",
    commands=COMMANDS,
    schema="pipeinfer-simulation/1",
    settings=False,
)
main, parser = TOOL.main, TOOL.parser
