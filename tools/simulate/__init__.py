"""Clusters in virtual time: the real router and scheduler, with a step-time model as the engine.

Run it as `python tools/simulate`; docs/simulate.md is its page. It starts no server, so it takes no
settings of one: a flag that is not its own is a mistake.
"""

from harness.command_line import Tool

TOOL = Tool(
    name="simulate",
    description="Clusters in virtual time: the real router and scheduler, modelled engines.",
    commands={
        "run": "throughput, latency, hits and balance of a cluster for each routing policy",
        "against": "a recorded run beside the same requests simulated",
        "targets": "how long steps beside streams may take, the more prompts wait",
        "fit": "a step-time model from recordings of a real engine",
    },
    schema="pipeinfer-simulation/1",
    settings=False,
)
