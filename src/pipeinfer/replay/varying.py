"""The one table of what may differ between a run and its replay, and is left out of comparisons.

Knows message types by name; everything that does not stand here must be equal to the last bit.
"""

from __future__ import annotations

FIELDS: dict[str, frozenset[str]] = {
    # Today's code; which graphs pay, and what steps take, as measured anew.
    "Hello": frozenset({"version", "graph_sizes", "step_cost"}),
    "Ready": frozenset({"steps"}),  # since the process started; a replay may begin later
    # Slow masks are counted earlier, and whoever first needs a state of a lexer pays for it.
    "StepDone": frozenset({"seconds", "mask_units"}),
}

# An engine of another kind than the recorded one describes itself otherwise, and is right to.
DEVICE_FIELDS: dict[str, frozenset[str]] = {
    "Hello": frozenset({"attention", "step_tokens"}),
}

# Made by the shell and not by the core: telemetry, all of it.
SHELL_MESSAGES = frozenset({"Heartbeat"})


def left_out(kind: str, other_device: bool = False) -> frozenset[str]:
    """The fields of message type `kind` that are not compared."""
    fields = FIELDS.get(kind, frozenset())
    return fields | DEVICE_FIELDS.get(kind, frozenset()) if other_device else fields
