"""`pipeinfer top`: what the stages of a running server do at this moment, a line for each.

Listens to heartbeats, and asks nobody anything. Knows names of statistics (docs/telemetry.md) and
how to print them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from pipeinfer.bus.caller import Caller
from pipeinfer.messages import Heartbeat
from pipeinfer.runtime.find import running_topology

SILENCE = 5.0  # seconds without a heartbeat after which a stage counts as lost
FIRST = 3.0  # seconds in which two heartbeats of every stage should come
CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True)
class Beat:
    """A heartbeat; `sent` by its stage's own clock, `heard` by ours, in seconds."""

    sent: float
    heard: float
    beat: Heartbeat


class Seen:
    """The two heartbeats of a stage between which its rates are taken."""

    def __init__(self) -> None:
        self.then: Beat | None = None
        self.now: Beat | None = None

    def hear(self, new: Beat) -> None:
        self.now = new
        if self.then is None or self.then.beat.incarnation != new.beat.incarnation:
            self.then = new  # another process counts from 0

    @property
    def measured(self) -> bool:
        return self.now is not self.then

    def next(self) -> None:
        """What comes from now on is measured from here."""
        self.then = self.now

    def value(self, name: str) -> float:
        assert self.now is not None
        return self.now.beat.stats.get(name, 0.0)

    def grown(self, name: str) -> float:
        """By how much a statistic grew since `then`."""
        assert self.then is not None
        return self.value(name) - self.then.beat.stats.get(name, 0.0)

    def rate(self, name: str) -> float:
        """The same, a second."""
        assert self.then is not None and self.now is not None
        seconds = self.now.sent - self.then.sent
        return self.grown(name) / seconds if seconds > 0 else 0.0


def run(arguments: Sequence[str]) -> int:
    """0 when ended by Ctrl-C, or with --once when every stage was heard; else 1."""
    options = _parser().parse_args(arguments)
    topology = running_topology(options.topology)
    seen = {stage: Seen() for stage in topology.ids()}
    with Caller(topology, zmq.Context.instance()) as caller:
        for stage in seen:
            caller.listen(stage)
        try:
            listen(caller, seen, FIRST, lambda: all(one.measured for one in seen.values()))
            while True:
                print("\n".join(_lines(seen, options.once or not sys.stdout.isatty())), flush=True)
                if options.once:
                    return 0 if all(one.now is not None for one in seen.values()) else 1
                for one in seen.values():
                    one.next()
                listen(caller, seen, options.seconds)
        except KeyboardInterrupt:
            return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipeinfer top",
        description="Shows what the stages of a running server do, until Ctrl-C.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--topology", metavar="FILE", help="of the server; default: the only one that runs here")
    add("--seconds", type=float, default=1.0, metavar="N", help="between two looks (default: 1)")
    add("--once", action="store_true", help="one look, then end; 1 if a stage says nothing")
    return parser


def listen(
    caller: Caller, seen: dict[str, Seen], seconds: float, enough: Callable[[], bool] | None = None
) -> None:
    """Takes heartbeats for `seconds`, or until there are enough."""
    deadline = time.monotonic() + max(seconds, 0.1)
    while time.monotonic() < deadline and not (enough is not None and enough()):
        for header, message in caller.hear(max(min(0.2, deadline - time.monotonic()), 0.0)):
            if isinstance(message, Heartbeat) and message.stage in seen:
                seen[message.stage].hear(Beat(header.sent, time.monotonic(), message))


def _lines(seen: dict[str, Seen], plain: bool) -> list[str]:
    wide = max(map(len, seen))
    lines = [("" if plain else CLEAR) + f"{'stage':{wide}}  {'pid':>7}  state"]
    for stage, one in seen.items():
        if one.now is None:
            lines.append(f"{stage:{wide}}  {'':7}  silent")
            continue
        beat = one.now.beat
        state = "lost" if time.monotonic() - one.now.heard > SILENCE else beat.state
        text = beat.reason if state != "ready" and beat.reason else DOES[beat.name](one)
        lines.append(f"{stage:{wide}}  {beat.pid:7}  {state:8}  {text}")
    return lines


def _gateway(one: Seen) -> str:
    return f"{one.value('running'):.0f} streams, {one.value('waiting'):.0f} without output yet"


def _tokenizer(one: Seen) -> str:
    return (
        f"{one.rate('accepted_total'):,.1f} requests/s, "
        f"{one.rate('prompt_tokens_total'):,.0f} prompt tokens/s, "
        f"{one.value('groups_up'):.0f} groups up"
    )


def _scheduler(one: Seen) -> str:
    return (
        f"{one.value('running'):.0f} run, {one.value('waiting'):.0f} wait, "
        f"{one.rate('plans_total'):,.0f} steps/s, preempted {one.value('preemptions_total'):.0f}"
    )


def _engine(one: Seen) -> str:
    busy, idle = one.grown("busy_seconds"), one.grown("idle_seconds")
    pages, free = one.value("pages_total"), one.value("pages_free")
    prompts = one.value("prompt_tokens_total")
    share = busy / (busy + idle) if busy + idle > 0 else 0.0
    return (
        f"{one.rate('sampled_tokens_total'):,.0f} tokens/s, computes {share:.0%} of its time, "
        f"{one.value('slots_used'):.0f} of {one.value('slots_total'):.0f} slots, "
        f"pages: {one.value('pages_evictable') / max(pages, 1):.0%} cached, "
        f"{free / max(pages, 1):.0%} free, "
        f"hits {one.value('cached_tokens_total') / max(prompts, 1):.0%}"
    )


def _detokenizer(one: Seen) -> str:
    return f"{one.rate('tokens_total'):,.0f} tokens/s in {one.value('running'):.0f} streams"


DOES: dict[str, Callable[[Seen], str]] = {
    "gateway": _gateway,
    "tokenizer": _tokenizer,
    "scheduler": _scheduler,
    "engine": _engine,
    "detokenizer": _detokenizer,
}
