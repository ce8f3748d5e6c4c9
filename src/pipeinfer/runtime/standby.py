"""Standbys: a second process of an engine, which has its weights and is silent until it is needed.

    StandbyBuild   in the process: builds the stage up to what the process that serves still has
    Standbys       in the supervisor: starts them, and promotes one where an engine has ended

A standby has no incarnation, opens no socket and no recording, and of its memory holder it only
borrows. It reports to its supervisor through the status pipe, and waits on stdin: a line with a
number promotes it, the end of the file ends it. One that claimed its place, such as a container,
waits for the lock of the engine instead (entry.py).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TextIO, TypeGuard

from pipeinfer.messages import State
from pipeinfer.processes import resident_bytes
from pipeinfer.runtime.child import FAILED, MAX_DEATHS, MISCONFIGURED, Child, exit_cause
from pipeinfer.runtime.stage import Stage, StageContext
from pipeinfer.settings import ConfigurationError

log = logging.getLogger(__name__)

STANDBY_FLAG = "--await-promotion"
SETTLED_SECONDS = 1.0  # that an engine serves before a standby starts beside its requests


class StandbyBuild:
    """Builds a stage on a thread of its own from now on. A process that has not been promoted ends
    when that fails."""

    def __init__(self, build: Callable[[StageContext], Stage], context: StageContext) -> None:
        """context: without an incarnation; it reports to the supervisor alone."""
        self._report = context.report_status
        self._promoted: Future[StageContext] = Future()
        self._built: Future[Stage] = Future()
        context = replace(context, report_status=self._say, promotion=self._wait)
        threading.Thread(
            target=self._run, args=(build, context), name="standby", daemon=True
        ).start()

    def __call__(self, context: StageContext) -> Stage:
        """The builder of the promoted process: `context` is what it serves with."""
        self._promoted.set_result(context)
        return self._built.result()

    def _run(self, build: Callable[[StageContext], Stage], context: StageContext) -> None:
        try:
            self._built.set_result(build(context))
        except BaseException as error:
            self._built.set_exception(error)
            if not self._promoted.done():
                misconfigured = isinstance(error, ConfigurationError)
                log.error("a standby cannot start: %s", error, exc_info=not misconfigured)
                self._report("failed", str(error))
                os._exit(MISCONFIGURED if misconfigured else FAILED)

    def _say(self, state: State, reason: str) -> None:
        if self._promoted.done():
            self._promoted.result().report_status(state, reason)
        else:
            self._report(state, reason)

    def _wait(self) -> StageContext:
        gc.collect()
        gc.freeze()  # so that the collection after the promotion has little to look at
        if not self._promoted.done():
            self._report("ready", f"a standby of {resident_bytes() / 2**30:.2f} GiB")
        return self._promoted.result()


def no_report(_state: State, _reason: str) -> None:
    """Where a command around the process has closed its status pipe."""


def log_report(state: State, reason: str) -> None:
    """Of a standby that nobody supervises."""
    if state == "ready":
        log.info("%s is ready", reason)


def read_promotion(source: TextIO) -> int:
    """Waits for the incarnation with which this process is to serve; 0: it is not needed."""
    return int(source.readline() or 0)


class Standbys:
    """At most one standby of each engine. Those of a group's ranks compute together, so they are
    promoted together, and where one ends, all begin again."""

    def __init__(
        self,
        start: Callable[[Child], Awaitable[asyncio.subprocess.Process]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start: starts a child's command as a standby; OSError if it cannot be executed."""
        self._start = start
        self._clock = clock
        self._ready_since: dict[str, float] = {}  # by the engine's id
        self._standbys: dict[str, Child] = {}  # by the engine's id; also those given up
        self._promised: dict[str, Child] = {}  # another rank of their group is promoted already
        self._given_up: set[int] = set()  # groups
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def ready(self) -> int:
        """How many groups could serve at once."""
        groups = {one.identity.group for one in self._standbys.values()}
        return sum(all(map(_is_ready, self._of_group(group))) for group in groups)

    def on_status(self, engine: Child) -> None:
        """Looks at an engine's state, again and again: one that has served for a while gets a
        standby, one that sleeps loses it."""
        state, name, now = engine.status[0], engine.identity.id, self._clock()
        if state == "asleep":
            self._drop(name)
        if state != "ready":
            self._ready_since.pop(name, None)
            return
        since = self._ready_since.setdefault(name, now)
        if now - since >= SETTLED_SECONDS and name not in self._standbys and not self._closed:
            self._begin(engine)

    def take(self, engine: Child, ranks: Sequence[Child]) -> Child | None:
        """The standby that is to be promoted to `engine`, ready or not; None: there is none, or
        only one of another command. ranks: all of its group; what the first of them gets, a standby
        or none, the others get as well, even if it has ended since."""
        name, group = engine.identity.id, engine.identity.group
        self._ready_since.pop(name, None)
        if name in self._promised:
            return self._promised.pop(name)
        found = {one.identity.id: self._standbys.get(one.identity.id) for one in ranks}
        if not all(_could_be(found[one.identity.id], one) for one in ranks):
            for one in self._of_group(group):
                self._drop(one.identity.id)
            return None
        for other in found:
            self._promised[other] = self._standbys.pop(other)
        return self._promised.pop(name)

    async def renew(self, engine: Child) -> None:
        """Puts a standby that reads everything anew in the place of the one before; returns when it
        is ready, or when there will be none."""
        self._drop(engine.identity.id)
        self._given_up.discard(engine.identity.group)
        if self._closed:
            return
        standby, ended = self._begin(engine)
        ready = asyncio.ensure_future(standby.ready.wait())
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    def stop(self) -> None:
        """Ends all, and begins none any more."""
        self._closed = True
        for name in [*self._standbys, *self._promised]:
            self._drop(name)

    async def close(self) -> None:
        """Returns when all have ended, those that were promoted as well."""
        self.stop()
        await asyncio.gather(*self._tasks)

    def _of_group(self, group: int) -> list[Child]:
        return [one for one in self._standbys.values() if one.identity.group == group]

    def _drop(self, name: str) -> None:
        for standbys in (self._standbys, self._promised):
            standby = standbys.pop(name, None)
            if standby is not None:
                self._given_up.discard(standby.identity.group)
                standby.kill()

    def _begin(self, engine: Child) -> tuple[Child, asyncio.Task[None]]:
        standby = Child(engine.identity, engine.command)
        standby.on_report = lambda: self._on_report(standby)
        self._standbys[engine.identity.id] = standby
        task = asyncio.create_task(self._run(standby))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return standby, task

    def _on_report(self, standby: Child) -> None:
        state, what = standby.status
        if state == "ready" and not standby.ready.is_set():
            standby.ready.set()
            log.info("%s has %s, process %d", standby.identity.id, what, standby.pid)

    async def _run(self, standby: Child) -> None:
        """Starts it again when it ends, until it is promoted, dropped or given up."""
        name, group = standby.identity.id, standby.identity.group
        while True:
            try:
                process = await self._start(standby)
            except OSError as error:
                why = f"cannot start {standby.command}: {error}"
                self._give_up(standby, why)
                return
            if self._standbys.get(name) is not standby and self._promised.get(name) is not standby:
                standby.kill()  # it was dropped before there was a process
            code = await process.wait()
            if self._standbys.get(name) is not standby:
                standby.close_reports()
                return
            standby.read_reports()
            if group in self._given_up:
                return
            if standby.killed_for_group is process:
                continue
            standby.deaths += 1
            if code == MISCONFIGURED or standby.deaths > MAX_DEATHS:
                why = standby.failure_reason or exit_cause(code)
                self._give_up(standby, f"the last one ended ({why})")
                return
            log.warning(
                "the standby of %s ended (%s), starting another one", name, exit_cause(code)
            )
            for other in self._of_group(group):
                if other is not standby:
                    other.kill_for_group()

    def _give_up(self, standby: Child, why: str) -> None:
        """The group's engines serve without; the next ones may have standbys again."""
        log.warning("%s has no standby any more: %s", standby.identity.id, why)
        self._given_up.add(standby.identity.group)
        for other in self._of_group(standby.identity.group):
            other.kill()


def _is_ready(standby: Child) -> bool:
    return standby.running and standby.status[0] == "ready"


def _could_be(standby: Child | None, engine: Child) -> TypeGuard[Child]:
    return standby is not None and standby.running and standby.command == engine.command
