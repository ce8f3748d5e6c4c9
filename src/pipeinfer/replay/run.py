"""`run STAGE FILE`: a fresh stage gets the recorded inputs, and must give the recorded outputs.

Builds the stage, plays the exchanges, and prints the first difference or what the whole replay
counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from itertools import dropwhile
from pathlib import Path

from pipeinfer.core import Core
from pipeinfer.replay.codes import CRASHED, DIFFERENT, EQUAL, USAGE, CannotReplay
from pipeinfer.replay.compare import Difference, explain, ignored_fields
from pipeinfer.replay.playing import CorePlayer, DevicePlayback, ReplayCounts, ReplayPace, play_core
from pipeinfer.replay.rebuild import Rebuilt, rebuild
from pipeinfer.replay.recording import (
    LoadedTrace,
    TraceEntry,
    TraceExchange,
    load_stage,
    warn_of_tail,
)
from pipeinfer.topology import NAMES
from pipeinfer.trace.snapshot import restore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("stage", choices=NAMES)
    add("file", type=Path, metavar="FILE")
    add("--model", default="", metavar="FOLDER", help="the checkpoint, if it lies elsewhere here")
    add("--core-only", action="store_true", help="an engine without device and weights")
    add("--realtime", action="store_true", help="at the recorded pace")
    add("--until", type=int, metavar="SEQ", help="stop after this message")
    add("--break", dest="halt", action="store_true", help="a debugger just before it is handled")
    add("--all", action="store_true", help="go on after the first difference, and count them")
    add("--json", action="store_true", help="the difference as JSON; the rest on stderr")


def run(options: argparse.Namespace, overrides: Mapping[str, object]) -> int:
    """The exit code. CannotReplay before anything is played."""
    if options.halt and options.until is None:
        raise CannotReplay(USAGE, "--break needs --until SEQ")
    if options.core_only and options.stage != "engine":
        raise CannotReplay(USAGE, "--core-only is for engines; other stages have no device")
    if "model" in overrides:
        raise CannotReplay(USAGE, f"one FILE, not also {overrides['model']!r}")
    recording = load_stage(options.file, options.stage)
    if recording.header.redacted and options.stage != "scheduler":
        raise CannotReplay(
            USAGE,
            f"{options.file} is redacted: its token ids are not the model's and its text is gone, "
            "so that only a scheduler's can be replayed",
        )
    say = partial(print, file=sys.stderr) if options.json else print
    say(recording.title)
    warn_of_tail(recording)
    rebuilt = rebuild(recording, options.model, overrides, options.core_only)
    for warning in rebuilt.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return ReplayRun(recording, rebuilt, options, say).run()


class ReplayRun:
    """One replay, from the first exchange to the verdict.

    `counts` and `seconds` are its numbers.
    """

    def __init__(
        self,
        recording: LoadedTrace,
        rebuilt: Rebuilt,
        options: argparse.Namespace,
        say: Callable[[str], object],
    ) -> None:
        self._recording, self._rebuilt, self._options, self._say = recording, rebuilt, options, say
        driver = rebuilt.stage.driver
        self.counts, self.seconds = ReplayCounts(keep_going=options.all), 0.0
        self._device = None
        if recording.header.name == "engine" and driver is not None:
            self._device = DevicePlayback(driver, self.counts)
        self._player = CorePlayer(
            rebuilt.stage.core,
            partial(ignored_fields, other_device=rebuilt.other_device),
            self._device.deliver if self._device is not None else None,
            options.until,
            debugger if options.halt else None,
        )

    def run(self) -> int:
        """Plays and prints; the exit code."""
        exchanges = self._exchanges()
        pace = ReplayPace(self._options.realtime, exchanges[0].input.time if exchanges else 0.0)
        begun = time.perf_counter()
        try:
            if self._device is not None:
                asyncio.run(self._device.play(self._player, exchanges, pace))
            else:
                play_core(self._player, exchanges, pace, self.counts)
        except Exception as error:  # whatever a stage under test raises is the result
            return self._crashed(error)
        self.seconds = time.perf_counter() - begun
        return self._verdict(exchanges)

    def _exchanges(self) -> list[TraceExchange]:
        """What to play: all of it, or for a device from where its memory is known to be empty."""
        exchanges, header = list(self._recording.exchanges()), self._recording.header
        if self._device is None and header.snapshot is not None:
            restore(self._rebuilt.stage.core, header.snapshot)
            return exchanges
        if header.snapshot is None and not header.broken:
            return exchanges
        mine = header.incarnation
        fresh = list(dropwhile(lambda exchange: not _begins(exchange, mine), exchanges))
        if not fresh and header.broken:
            raise CannotReplay(
                USAGE, "the recording's beginning did not fit into the flight recorder's memory, "
                "and it has no Begin: it can be read, but not replayed",
            )  # fmt: skip
        if not fresh:
            raise CannotReplay(
                USAGE, "the recording begins in mid-life and has no Begin, so that the device's "
                "keys and values are not known; --core-only replays it without a device",
            )  # fmt: skip
        self._say(f"mid-life: begins with the Begin at message {fresh[0].input.seq}")
        return fresh

    def _verdict(self, exchanges: list[TraceExchange]) -> int:
        player, header, found = self._player, self._recording.header, self.counts.first
        stopped = self._options.until is not None
        if found is None and header.error and not stopped:
            found = Difference(
                exchanges[-1].input.seq,
                "local",
                "",
                header.error,
                "no exception",
                exchanges[-1].input,
            )
        if found is not None:
            self._show(found)
        else:
            where = f"up to message {self._options.until}" if stopped else "to the end"
            counts = f"{player.inputs} inputs, {player.outputs} outputs"
            self._say(f"equal {where}: {counts}, 0 differences")
        if self._options.all:
            for line in self.counts.summary_lines():
                self._say(line)
        if found is None or self._options.all:
            self._say_how_fast(exchanges)
        return EQUAL if found is None else DIFFERENT

    def _say_how_fast(self, exchanges: list[TraceExchange]) -> None:
        played = exchanges[-1].input.time - exchanges[0].input.time if exchanges else 0.0
        if self._device is not None and self.seconds > 0:
            steps = self._device.steps
            self._say(f"the device computed {steps} steps, {steps / self.seconds:.1f} a second")
        self._say(f"replay took {self.seconds:.3f} s, the recording {played:.3f} s")

    def _show(self, found: Difference) -> None:
        for line in explain(self._recording, found):
            self._say(line)
        if self._options.json:
            print(json.dumps(found.as_json()))

    def _crashed(self, error: Exception) -> int:
        traceback.print_exception(error)
        exchange = self._player.current
        at = "before the first message"
        if exchange is not None:
            at = f"on message {exchange.input.seq}: {exchange.input.kind}"
        self._say(f"the stage crashed {at}: {type(error).__name__}: {error}")
        recorded = self._recording.header.error
        if recorded:
            same = recorded == f"{type(error).__name__}: {error}"
            self._say(
                "reproduced: same exception" if same else f"the recorded one died of {recorded}"
            )
        if self._options.json and exchange is not None:
            found = Difference(
                exchange.input.seq, exchange.input.channel, "", recorded or "no exception",
                f"{type(error).__name__}: {error}", exchange.input,
            )  # fmt: skip
            print(json.dumps(found.as_json()))
        return CRASHED


def debugger(core: Core, entry: TraceEntry) -> None:
    """Here is `core`, just before `core.handle(message, now)`; the next frame up is the player."""
    message, now = entry.message, entry.time
    print(f"message {entry.seq}: {type(message).__name__} at {now:.6f}, before it is handled")
    breakpoint()


def _begins(exchange: TraceExchange, incarnation: int) -> bool:
    """True for the Begin of an epoch that this engine takes part in."""
    listed = getattr(exchange.input.message, "incarnations", ())
    return exchange.input.kind == "Begin" and incarnation in listed
