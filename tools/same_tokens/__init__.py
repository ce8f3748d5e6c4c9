"""Token ids of fixed requests, of this checkout or of another one, and a comparison of two runs.

Run it as `python tools/same_tokens COMMAND`; docs/testing.md says what the runs hold.
"""

from harness.command_line import Tool

TOOL = Tool(
    name="same_tokens",
    description="Whether two checkouts give the same token ids.",
    commands={
        "run": "the ids that a checkout gives",
        "compare": "which requests differ in two results",
    },
    schema="pipeinfer-same-tokens/1",
    settings=False,
    long=("requests", "differences"),
)
