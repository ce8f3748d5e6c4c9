"""A gateway under test, with the other stages played by `Pipeline`.

The pipeline answers as the real one would, but with words of the prompt instead of a model's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import openai

from pipeinfer.bus import frames
from pipeinfer.core import LOCAL, Send
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.stage import HttpDriver
from pipeinfer.messages import (
    Abort,
    Accepted,
    AdapterChanges,
    CacheReset,
    Done,
    Heartbeat,
    Message,
    Reattached,
    Recover,
    Recovered,
    Refused,
    ResetCache,
    SetSleep,
    Submit,
    Text,
    TextRow,
)
from pipeinfer.params import ReasoningState, choice_ids
from pipeinfer.wire import pack, unpack

STAGES = ("tokenizer-0", "scheduler-0", "engine-0-0", "detokenizer-0")


def heartbeat(stage: str, state: str = "ready", incarnation: int = 1, **stats: float) -> Heartbeat:
    """What `stage` says of itself."""
    name, group, *rank = stage.split("-")
    group = int(group) if name in ("scheduler", "engine") else 0
    return Heartbeat(stage, name, group, int((rank or [0])[0]), 0, 7, incarnation, state, "", stats)


def words_of(submit: Submit) -> list[str]:
    """The answer to a request: the words of its prompt, each with a space, at most max_tokens."""
    if submit.prompt_ids is not None:
        words = [str(token) for token in unpack(submit.prompt_ids)]
    else:
        words = (submit.text or str((submit.chat or [{}])[-1].get("content", ""))).split()
    return [word + " " for word in words][
        : None if submit.only_encode else submit.params.max_tokens
    ]


def each_choice(submit: Submit) -> list[Submit]:
    """As many requests with one choice; the further ones end with their number as a word."""
    names = choice_ids(submit.request_id, submit.choices)
    text, chat = submit.text, submit.chat
    made: list[Submit] = []
    for number, name in zip(submit.choices, names, strict=True):
        more = f" {number}" if number else ""
        said = text + more if text is not None else None
        turns = [*chat[:-1], {"content": str(chat[-1].get("content", "")) + more}] if chat else chat
        made.append(
            msgspec.structs.replace(submit, request_id=name, choices=(0,), text=said, chat=turns)
        )
    return made


def nothing_kept(question: Send) -> list[Recovered]:
    """What a stage answers to a new gateway, if the one before has left nothing."""
    assert isinstance(question.message, Recover)
    number = question.message.incarnation
    return [Recovered(question.to, number, opening=True), Recovered(question.to, number)]


class Pipeline:
    """Plays the bus and the stages behind the gateway.

    By its prompt's first word a request is refused ("refuse"), accepted and left alone ("hang"),
    left alone after its first word ("pause"), or broken after its first word ("break").
    """

    def __init__(self, core: GatewayCore, driver: HttpDriver) -> None:
        self._core, self._driver = core, driver
        self._loop = asyncio.get_running_loop()
        self.submits: list[Submit] = []
        self.fed: list[Message] = []  # from the stages behind
        self.done: list[str] = []  # ids of requests that nobody need keep
        # What stages tell a new gateway of the one before it.
        self.left_by: dict[str, list[Message]] = {}
        self.aborts: asyncio.Queue[Abort] = asyncio.Queue()
        self.gone: set[str] = set()
        self.sleeps: list[SetSleep] = []
        self.resets = [0]  # groups that say that their caches are reset
        self.cut = words_of  # a request's answer, as the pieces in which it comes
        self.left: ReasoningState = "before"  # where prompts leave the thoughts
        self.context = 0  # words of a whole chat that fit, with those of its answer; 0: all
        self.refuses_all = False  # unread, but encoded as for the bus, which takes its time

    def feed(self, event: Message) -> None:
        if isinstance(event, Accepted | Text):
            self.fed.append(event)
        for send in self._core.handle(event, self._loop.time()):
            if send.channel == LOCAL:
                self._driver.deliver(send.message)
            elif isinstance(send.message, Abort):
                self.gone.add(send.message.request_id)
                self.aborts.put_nowait(send.message)
            elif isinstance(send.message, ResetCache):
                for group in self.resets:
                    told = CacheReset(send.message.name, send.message.gateway, group)
                    self._loop.call_soon(self.feed, told)
            elif isinstance(send.message, SetSleep):
                self.sleeps.append(send.message)
            elif isinstance(send.message, Recover):
                opening, end = nothing_kept(send)
                for answer in (opening, *self.left_by.get(send.to, ()), end):
                    self._loop.call_soon(self.feed, answer)
            elif isinstance(send.message, Done):
                self.done += send.message.request_ids
            elif not isinstance(send.message, AdapterChanges | Reattached):
                assert isinstance(send.message, Submit)
                if self.refuses_all:
                    self._refuse(send.message)
                    continue
                self.submits.append(send.message)
                for one in each_choice(send.message):
                    self._loop.call_soon(self._answer, one)

    def beat(self, state: str = "ready", **stats: float) -> None:
        for stage in STAGES:
            self.feed(heartbeat(stage, state, **stats))

    def rows(self, *rows: TextRow) -> None:
        self.feed(Text(rows))

    def _refuse(self, submit: Submit) -> None:
        assert frames.encode("requests", frames.FrameHeader(1, "gateway-0", 1, 1, 0.0), submit)
        refused = Refused(submit.request_id, submit.attempt, 0, 400, "too long", "prompt", "length")
        self._loop.call_soon(self.feed, refused)

    def _fits(self, submit: Submit) -> bool:
        words = " ".join(str(turn.get("content", "")) for turn in submit.chat or ()).split()
        return not self.context or len(words) + (submit.params.max_tokens or 1) <= self.context

    def _answer(self, submit: Submit) -> None:
        if not self._fits(submit):
            code = "context_length_exceeded"
            name, attempt = submit.request_id, submit.attempt
            self.feed(Refused(name, attempt, 0, 400, "too long", "messages", code))
            return
        words = self.cut(submit)
        if words[0] == "refuse ":
            self.feed(
                Refused(submit.request_id, submit.attempt, 0, 400, "too long", "prompt", "length")
            )
            return
        count = len(unpack(submit.prompt_ids or b"")) or len(words)
        accepted = Accepted(
            submit.request_id, submit.attempt, 0, count, reasoning=self.left,
            token_strs=tuple(words) if submit.return_token_strs else (),
        )  # fmt: skip
        self.feed(accepted)
        if words[0] != "hang ":
            self._say(submit, words, 0)

    def _say(self, submit: Submit, words: list[str], at: int) -> None:
        if submit.request_id in self.gone or (words[0] == "pause " and at == 1):
            return
        text = words[at]
        before = len("".join(words[:at]).encode())
        finish, error = None, ""
        if words[0] == "break " and at == 1:
            text, finish, error = "", "error", "the engine is on fire"
        elif at + 1 == len(words):
            finish = "length" if len(words) == submit.params.max_tokens else "stop"
        count = at + 1 if finish else 0
        row = TextRow(
            submit.request_id, submit.attempt, text, before, at, pack([at]), finish, None,
            count, 2 if finish else 0, error,
            offsets=pack([len("".join(words[:at]))]) if submit.token_offsets else b"",
        )  # fmt: skip
        self.rows(row)
        if finish is None:
            self._loop.call_soon(self._say, submit, words, at + 1)


class Gateway:
    """A running gateway stage."""

    def __init__(
        self,
        core: GatewayCore,
        driver: HttpDriver,
        pipeline: Pipeline,
        reload: Callable[[], None] | None = None,
    ) -> None:
        self.core, self.driver, self.pipeline, self.reload = core, driver, pipeline, reload
        self._clients: list[openai.AsyncOpenAI] = []
        self._http: httpx.AsyncClient | None = None

    @property
    def url(self) -> str:
        return self.driver.url

    def client(self, api_key: str = "none") -> openai.AsyncOpenAI:
        url, patience = f"{self.url}/v1", 600.0
        self._clients.append(
            openai.AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=patience)
        )
        return self._clients[-1]

    def http(self) -> httpx.AsyncClient:
        """One client for requests of any kind: a new one takes as long as many requests."""
        if self._http is None:
            self._http = httpx.AsyncClient(timeout=60)
        return self._http

    async def stop(self) -> None:
        """Closes the clients, then the gateway."""
        if self._http is not None:
            await self._http.aclose()
        for client in self._clients:
            await client.close()
        await self.driver.stop()


StartGateway = Callable[..., Awaitable[Gateway]]
