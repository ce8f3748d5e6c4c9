"""`pipeinfer top`: what the stages of a running server do at this moment, a line for each.

Listens to heartbeats. Unless it looks once only, stages are asked for latencies, which they say
while somebody looks. The web page shows the same figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import zmq

from pipeinfer.bus.caller import Caller
from pipeinfer.command_line import CommandLine
from pipeinfer.control import Observed, Watch
from pipeinfer.gateway.health import Health, Row, expected_stages
from pipeinfer.gateway.monitor.picture import Figures, Latency, Pictures, StageShown
from pipeinfer.messages import Heartbeat
from pipeinfer.passages.durations import PARTS, Durations
from pipeinfer.runtime.find import running_topology

FIRST = 3.0  # seconds in which two heartbeats of every stage should come
LASTS = 2.5  # seconds beyond the next look for which stages say what they see
CLEAR = "\x1b[H\x1b[2J"


def run(arguments: Sequence[str]) -> int:
    """0 when ended by Ctrl-C, or with --once when every stage was heard; else 1."""
    options = parser().parse_args(arguments)
    topology = running_topology(options.topology)
    health = Health(expected_stages(topology))
    pictures, latencies = Pictures(health), Durations()
    plain = options.once or not sys.stdout.isatty()
    with Caller(topology, zmq.Context.instance()) as caller:
        for stage in health.rows:
            caller.listen(stage)
        try:
            heard = dict.fromkeys(health.rows, 0)
            listen(caller, health, FIRST, lambda beat: _twice(heard, beat, pictures))
            while True:
                now = time.monotonic()
                health.check(now)
                pictures.look()
                figures = pictures.figures("", now, time.time(), latencies.median)
                print("\n".join(_lines(health, pictures, figures, plain)), flush=True)
                if options.once:
                    return 0 if all(row.seen is not None for row in health.rows.values()) else 1
                _ask(caller, health, options.seconds + LASTS)
                listen(caller, health, options.seconds, observed=latencies)
        except KeyboardInterrupt:
            return 0


def parser() -> CommandLine:
    """The words of the command line."""
    made = CommandLine(
        prog="pipeinfer top",
        description="Shows what the stages of a running server do, until Ctrl-C.",
    )
    add = made.add_argument
    add("--topology", metavar="FILE", help="of the server; default: the only one that runs here")
    add("--seconds", type=float, default=1.0, metavar="N", help="between two looks (default: 1)")
    add("--once", action="store_true", help="one look, then end; 1 if a stage says nothing")
    return made


def listen(
    caller: Caller,
    health: Health,
    seconds: float,
    enough: Callable[[Heartbeat], bool] = lambda beat: False,
    observed: Durations | None = None,
) -> None:
    """Tells `health` of heartbeats for `seconds`, or until `enough(heartbeat)`; and `observed` of
    what stages see."""
    deadline = time.monotonic() + max(seconds, 0.1)
    while (left := deadline - time.monotonic()) > 0:
        for _, message in caller.hear(min(0.2, left)):
            if isinstance(message, Heartbeat) and message.stage in health.rows:
                health.beat(message, time.monotonic())
                if enough(message):
                    return
            elif isinstance(message, Observed) and observed is not None:
                for passage in message.passages:
                    observed.note(passage)


def _ask(caller: Caller, health: Health, seconds: float) -> None:
    """Those that have a latency to tell, and are there, go on telling it for `seconds`."""
    for row in health.rows.values():
        if row.name in PARTS and row.seen is not None and row.state != "lost":
            caller.ask(row.stage, Watch(seconds))


def _twice(heard: dict[str, int], beat: Heartbeat, pictures: Pictures) -> bool:
    """Whether every stage was heard twice, so that there are rates."""
    heard[beat.stage] += 1
    if heard[beat.stage] == 1:
        pictures.look()
    return min(heard.values()) >= 2


def _lines(health: Health, pictures: Pictures, figures: Figures, plain: bool) -> list[str]:
    wide = max(map(len, health.rows))
    lines = [("" if plain else CLEAR) + f"{'stage':{wide}}  {'pid':>7}  state"]
    for shown in figures.stages:
        row = health.rows[shown.stage]
        if row.seen is None:
            lines.append(f"{shown.stage:{wide}}  {'':7}  silent")
            continue
        text = row.reason if row.state != "ready" and row.reason else _does(row, shown, pictures)
        if row.restarts:
            text += f", started again {row.restarts} times"
        lines.append(f"{shown.stage:{wide}}  {row.pid:7}  {row.state:8}  {text}")
    for what, name in (("first token", "ttft_ms"), ("between tokens", "itl_ms")):
        latency = figures.latency[name]
        if latency.count:
            lines.append(f"{what + ':':15} {_milliseconds(latency)}")
    return lines


def _milliseconds(latency: Latency) -> str:
    """Of the last minute."""
    quantiles = (("p50", latency.p50), ("p90", latency.p90), ("p99", latency.p99))
    told = ", ".join(f"{name} {value:,.1f}" for name, value in quantiles if value is not None)
    return f"{told} ms ({latency.count:,} in the last minute)"


def _does(row: Row, shown: StageShown, pictures: Pictures) -> str:
    text = DOES[row.name](row, shown, pictures)
    if shown.latency_ms is not None and row.name != "gateway":  # whose has a line of its own
        text += f", latency {shown.latency_ms:,.2f} ms"
    return text


def _gateway(row: Row, shown: StageShown, pictures: Pictures) -> str:
    return f"{shown.running} streams, {shown.waiting} without output yet"


def _tokenizer(row: Row, shown: StageShown, pictures: Pictures) -> str:
    return (
        f"{shown.rate:,.1f} requests/s, "
        f"{pictures.rate(row.stage, 'prompt_tokens_total'):,.0f} prompt tokens/s, "
        f"{row.stats.get('groups_up', 0.0):.0f} groups up"
    )


def _scheduler(row: Row, shown: StageShown, pictures: Pictures) -> str:
    return (
        f"{shown.running} run, {shown.waiting} wait, {shown.rate:,.0f} steps/s, "
        f"preempted {row.stats.get('preemptions_total', 0.0):.0f}"
    )


def _engine(row: Row, shown: StageShown, pictures: Pictures) -> str:
    stats = row.stats
    busy, idle = (pictures.grown(row.stage, name) for name in ("busy_seconds", "idle_seconds"))
    pages = max(stats.get("pages_total", 0.0), 1.0)
    cached, prompts = (stats.get(f"{name}_tokens_total", 0.0) for name in ("cached", "prompt"))
    share = busy / (busy + idle) if busy + idle > 0 else 0.0
    return (
        f"{shown.rate:,.0f} tokens/s, computes {share:.0%} of its time, "
        f"{shown.running} of {stats.get('slots_total', 0.0):.0f} slots, "
        f"pages: {stats.get('pages_evictable', 0.0) / pages:.0%} cached, "
        f"{stats.get('pages_free', 0.0) / pages:.0%} free, "
        f"hits {cached / max(prompts, 1.0):.0%}"
    )


def _detokenizer(row: Row, shown: StageShown, pictures: Pictures) -> str:
    return f"{shown.rate:,.0f} tokens/s in {shown.running} streams"


DOES: dict[str, Callable[[Row, StageShown, Pictures], str]] = {
    "gateway": _gateway,
    "tokenizer": _tokenizer,
    "scheduler": _scheduler,
    "engine": _engine,
    "detokenizer": _detokenizer,
}
