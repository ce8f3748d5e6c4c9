"""Where a request is in the scheduler, and the only ways from one phase to the next.

Whoever keeps requests moves them: the queue, the suspects, the slots; the planner ends them. What
of a request is still in flight when it has left its slot is no phase: see Request.steps_in_flight.
"""

from __future__ import annotations

from typing import Literal

# Plain strings: they are part of a scheduler's snapshot as they are.
Phase = Literal["new", "waiting", "held", "preparing", "suspected", "running", "lost", "over"]

# new: nobody keeps it yet. waiting: in the queue. suspected: it may have crashed an engine, and
# waits apart. held: it waits for another's prompt, or its beginning. preparing: for its grammar.
# running: it holds a slot. lost: its slot went with the epoch. over: it ended.
NEXT: dict[Phase, tuple[Phase, ...]] = {
    "new": ("waiting", "held", "preparing", "suspected", "over"),
    "waiting": ("running", "held", "preparing", "over"),
    "held": ("waiting", "preparing", "over"),
    "preparing": ("waiting", "held", "over"),
    "suspected": ("running", "over"),
    "running": ("waiting", "held", "preparing", "lost", "over"),
    "lost": ("waiting", "held", "preparing", "suspected", "over"),
    "over": (),
}
