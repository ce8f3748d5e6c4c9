"""A gateway in this process, with the other stages played: answers are the words of the prompt.

What the gateway's core sends passes through frames, as it would on the bus. Knows HTTP only as far
as the gateway's driver does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from pipeinfer.bus import frames
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.choices import choice_ids
from pipeinfer.core import LOCAL
from pipeinfer.events import Tick
from pipeinfer.gateway.stage import build
from pipeinfer.messages import PROTOCOL, Abort, Accepted, Heartbeat, Message, Submit, Text, TextRow
from pipeinfer.packing import pack, unpack
from pipeinfer.runtime.stage import StageContext
from pipeinfer.settings import Settings
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.topology import Identity

MODEL = "fuzz"
STAGES = ("tokenizer-0", "scheduler-0", "engine-0-0", "detokenizer-0")
MOST_WORDS = 8
BODY = 1  # MiB; little enough for an input to reach


class Gateway:
    """A gateway's core and driver. `failures`: what a core or a frame raised, since last asked."""

    def __init__(self) -> None:
        settings = Settings(port=0, served_model_name=MODEL, max_body_mib=BODY)
        topology = topologies.local(settings, "inproc://fuzz-")
        stage = build(StageContext(settings, topology, Identity("gateway"), 1, lambda *_: None))
        self._core, self._driver = stage.core, stage.driver
        self._gone: set[str] = set()
        self.failures: list[Exception] = []
        self.on_failure: Callable[[], None] = lambda: None

    async def start(self) -> str:
        """Its URL, when it serves."""
        self._loop = asyncio.get_running_loop()
        assert self._driver is not None
        await self._driver.start(self._feed)
        self.beat()
        while not getattr(self._driver, "url", ""):
            await asyncio.sleep(0.01)
        return getattr(self._driver, "url", "")

    async def stop(self) -> None:
        """Closes its sockets."""
        assert self._driver is not None
        await self._driver.stop()

    def beat(self) -> None:
        """The others say that they are well, and a timer fires."""
        for stage in STAGES:
            name, group, *rank = stage.split("-")
            at = int(group) if name in ("scheduler", "engine") else 0
            self._feed(
                Heartbeat(
                    stage=stage,
                    name=name,
                    group=at,
                    rank=int((rank or [0])[0]),
                    index=0,
                    pid=7,
                    incarnation=1,
                    state="ready",
                )
            )
        self._feed(Tick())

    def _feed(self, event: Message) -> None:
        """As the shell does; what would end the stage is noted."""
        assert self._driver is not None
        local: list[Any] = []
        try:
            for send in self._core.handle(event, self._loop.time()):
                if send.channel == LOCAL:
                    local.append(send.message)
                else:
                    self._travel(send.channel, send.message)
            for message in local:
                self._driver.deliver(message)
        except Exception as error:
            self.failures.append(error)
            self.on_failure()  # its client may wait for ever

    def _travel(self, channel: str, message: Message) -> None:
        parts = frames.encode(channel, FrameHeader(PROTOCOL, "gateway-0", 1, 0, 0.0), message)
        _, _, arrived = frames.decode(parts)
        if isinstance(arrived, Abort):
            self._gone.add(arrived.request_id)
        elif isinstance(arrived, Submit):
            for name in choice_ids(arrived.request_id, arrived.choices):
                one = msgspec.structs.replace(arrived, request_id=name, choices=(0,))
                self._loop.call_soon(self._answer, one)

    def _answer(self, submit: Submit) -> None:
        if submit.prompt_ids is not None:
            words = [str(token) for token in unpack(submit.prompt_ids)[:MOST_WORDS]]
        else:
            chat = submit.chat or [{"content": ""}]
            words = (submit.text or str(chat[-1].get("content", ""))).split()[:MOST_WORDS]
        words = [word[:20] + " " for word in words[: submit.params.max_tokens]] or ["nothing"]
        count = len(unpack(submit.prompt_ids or b"")) or len(words)
        self._feed(
            Accepted(
                request_id=submit.request_id, attempt=submit.attempt, group=0, prompt_tokens=count
            )
        )
        self._say(submit, words, 0, 0)

    def _say(self, submit: Submit, words: list[str], at: int, offset: int) -> None:
        if submit.request_id in self._gone:
            self._gone.discard(submit.request_id)
            return
        last = at + 1 == len(words)
        row = TextRow(
            request_id=submit.request_id,
            attempt=submit.attempt,
            text=words[at],
            byte_offset=offset,
            token_offset=at,
            ids=pack([at]),
            finish="stop" if last else None,
            stop_reason=None,
            output_tokens=at + 1 if last else 0,
            cached_tokens=0,
        )
        self._feed(Text((row,)))
        if not last:
            size = len(words[at].encode(errors="replace"))
            self._loop.call_soon(self._say, submit, words, at + 1, offset + size)
