"""The other gateways of a server: what they tell one another, so that each can answer for all, and
requests for what another one keeps.

    LimitShare      one gateway's share of a limit that all hold together: it gives of it what
                    another gateway lacks
    SharedLimits    all limits of which a gateway has shares
    StateExchange   which of this gateway's changes each other one has received
    SharedQueue     the places of the queue, as a limit
    Peers           their messages: adapters that are loaded or unloaded, shares of limits, and at a
                    scrape what each has counted
    HostGateways        passes requests on to the gateways of this host, and to other hosts

A share is a bounded counter (Balegas and others, 2015): all that one gateway has ever given to each
other one, and taken from it. These numbers only grow, so they may arrive late, twice or not at
all, and the shares that gateways know of never add up to more than the limit. A gateway that is
started again gets what it gave and took before from the others.

Without other gateways nothing is sent, and nothing is waited for. All but Peers and HostGateways
are sans-IO.

Gateways of a host share the port, so a client that comes back for its stream, or its response, may
reach another gateway than the one that has it. The others are asked over sockets of their own, as
the client has asked, and the answer of the one that has it is passed on as it comes: keys, owners
and errors are its business.
Gateways of other hosts are asked in the same way where the topology says `http`; those ask the
others of their host, and no further ones.
The sockets are in Linux's abstract namespace: no file is left of a killed gateway, and another
container does not reach them. What they serve is what the port serves, to processes of the same
user; another process that has taken such a name gets no request, since requests have keys.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, Protocol

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler

from pipeinfer.control import (
    CountedMetrics,
    GatewayState,
    MetricSamples,
    Observed,
    Prefixes,
    ShareState,
    ShowMetrics,
)
from pipeinfer.core import stage_number
from pipeinfer.gateway.connections import PROBE, Acceptor, Connections
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.ledger import QueueShare
from pipeinfer.gateway.monitor import PipelineMonitor
from pipeinfer.gateway.requests import AdapterRegistry
from pipeinfer.gateway.resumable_answers import EVENT_END, write_comment
from pipeinfer.messages import AdapterChanges, Message
from pipeinfer.params import Adapter
from pipeinfer.processes import peer_of
from pipeinfer.topology import Identity

LOOK_SECONDS = 0.1  # between two looks at who is live, while something is waited for
REPEAT_SECONDS = 0.5  # after which what a gateway has not confirmed is sent again
# Seconds for which a request waits for the others' shares of a limit that is used up here: so long
# only where one of them hangs.
BORROW_SECONDS = 2.0
MEET_SECONDS = 3.0  # seconds for which a gateway that starts waits for what the others know
SCRAPE_SECONDS = 1.0  # seconds for which a scrape waits for what the others have counted
SPREAD_SECONDS = 5.0  # seconds for which a change waits until all have it
NOT_LIVE = ("starting", "lost")  # states of gateways that are not waited for


# The name of something that changes: (ADAPTERS,), all of them, or (LIMIT, name, kind).
Item = tuple[str, ...]
ADAPTERS, LIMIT = "adapters", "limit"


class SharedLimitHolder(Protocol):
    """An object with limits of several kinds, which uses of each limit only this gateway's
    share."""

    def whole(self, kind: str) -> int:
        """The limit that all gateways hold together; 0: none."""
        ...

    def free(self, kind: str, now: float) -> int:
        """The unused part of the share at `now` (seconds); below zero if more was used."""
        ...

    def set_share(self, kind: str, size: int, now: float) -> None:
        """The share is `size` from now on; what was used stays used."""
        ...


class LimitShare:
    """The share of gateway `index` of one limit.

    Attributes:
    - given, taken: units, by index of the other gateway; they only grow
    - wanted: units that are lacking now
    - published_free: free units, as they were published last
    """

    def __init__(self, index: int, gateways: int, limit: int = 0) -> None:
        self._index = index
        self.limit = limit
        self.given = [0] * gateways
        self.taken = [0] * gateways
        self.wanted = 0
        self.published_free: int | None = None
        self._free_elsewhere: dict[int, int] = {}

    @property
    def size(self) -> int:
        """Units of the share. Below zero for a time, if the limit was lowered."""
        return self._first_size(self._index) + sum(self.taken) - sum(self.given)

    def _first_size(self, index: int) -> int:
        """Units with which gateway `index` begins."""
        each, rest = divmod(self.limit, len(self.given))
        return each + (index < rest)

    def free_elsewhere(self) -> int:
        """Units that the other gateways have left, as far as they have said."""
        others = (index for index in range(len(self.given)) if index != self._index)
        return sum(self._free_elsewhere.get(index, self._first_size(index)) for index in others)

    def give(self, to: int, wanted: int, free: int) -> int:
        """Gives gateway `to` the units that it lacks, or half of what is `free` here if that is
        more, so that it need not ask for each. Returns how many."""
        units = min(max(wanted, (free + 1) // 2), free, self.size)
        if units <= 0 or wanted <= 0:
            return 0
        self.given[to] += units
        return units

    def merge(self, sender: int, given: int, taken: int, free: int) -> bool:
        """Takes the units that gateway `sender` has given to this one, has taken from it, and has
        left. Returns whether something was given, or was taken from the process before this one."""
        self._free_elsewhere[sender] = free
        news = given > self.taken[sender] or taken > self.given[sender]
        self.taken[sender] = max(self.taken[sender], given)
        self.given[sender] = max(self.given[sender], taken)
        return news


def first_share(index: int, gateways: int, limit: int) -> int:
    """The share with which gateway `index` begins."""
    return LimitShare(index, gateways, limit).size


class LimitName(NamedTuple):
    """name: whose limit it is, "" for all clients'. kind: which one."""

    name: str
    kind: str


class SharedLimits:
    """All limits of which gateway `index` has shares."""

    def __init__(self, index: int, gateways: int) -> None:
        self._index, self._gateways = index, gateways
        self._shares: dict[LimitName, LimitShare] = {}
        self._holders: dict[str, SharedLimitHolder] = {}

    def add(self, name: str, holder: SharedLimitHolder, kinds: Iterable[str], now: float) -> None:
        """`holder` gets its shares from now on; again after its limits have changed."""
        self._holders[name] = holder
        for kind in kinds:
            limit = LimitName(name, kind)
            share = self._share(limit)
            share.limit = holder.whole(kind)
            self._apply(limit, now)

    def lacks(self, limit: LimitName, units: int) -> None:
        """So many units are wanted from the others; 0: none any more."""
        self._shares[limit].wanted = units

    def free(self, limit: LimitName, now: float) -> int:
        """The unused part of the share, below 0 if more is in use; 0 if there is no limit."""
        holder = self._holders.get(limit.name)
        return 0 if holder is None or not holder.whole(limit.kind) else holder.free(limit.kind, now)

    def state(self, limit: LimitName, now: float) -> ShareState:
        """This gateway's state of a limit, as it is sent to the others."""
        share = self._shares[limit]
        return ShareState(
            name=limit.name,
            kind=limit.kind,
            given=tuple(share.given),
            taken=tuple(share.taken),
            wanted=share.wanted,
            free=self._publish_free(limit, now),
        )

    def free_elsewhere(self, limit: LimitName) -> int:
        """The units that the other gateways have left, by their latest messages."""
        share = self._shares.get(limit)
        return 0 if share is None else share.free_elsewhere()

    def refresh(self, now: float) -> list[LimitName]:
        """The limits whose state should be published, since what is left here has changed. Of
        those of all clients, a quarter of the share is kept ready, so that requests need not wait
        for more."""
        changed: list[LimitName] = []
        for limit, share in self._shares.items():
            free = max(self.free(limit, now), 0)
            if not limit.name:
                share.wanted = max(share.size // 4, 1) if 4 * free < share.size else 0
            if share.wanted or free != share.published_free:
                changed.append(limit)
        return changed

    def _publish_free(self, limit: LimitName, now: float) -> int:
        free = self._shares[limit].published_free = max(self.free(limit, now), 0)
        return free

    def on_state(self, sender: int, state: ShareState, now: float, gives: bool = True) -> bool:
        """Takes what gateway `sender` says of a limit, and gives it what it lacks. Whether the
        others must hear of a change. gives: False for a process that has not heard all the others,
        and so does not know what the one before it gave."""
        counts = len(state.given), len(state.taken)
        if sender == self._index or sender >= self._gateways or counts != (self._gateways,) * 2:
            return False
        limit = LimitName(state.name, state.kind)
        share = self._share(limit)
        given, taken = state.given[self._index], state.taken[self._index]
        changed = share.merge(sender, given, taken, state.free)
        if changed:
            self._apply(limit, now)
        if gives and share.give(sender, state.wanted, self.free(limit, now)):
            self._apply(limit, now)
            return True
        return changed

    def _share(self, limit: LimitName) -> LimitShare:
        if limit not in self._shares:
            self._shares[limit] = LimitShare(self._index, self._gateways)
        return self._shares[limit]

    def _apply(self, limit: LimitName, now: float) -> None:
        holder = self._holders.get(limit.name)
        if holder is not None and holder.whole(limit.kind):
            holder.set_share(limit.kind, max(self._shares[limit].size, 0), now)


class _Peer:
    """Another gateway.

    Attributes:
    - incarnation: its process
    - heard: the latest of its changes that has come here
    - seen: the latest of ours that it has confirmed
    """

    __slots__ = ("heard", "incarnation", "seen")

    def __init__(self, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self.heard = self.seen = 0


class StateExchange:
    """Changes of process `incarnation`, by number, and which gateways have confirmed them.

    number: of the latest change.
    """

    def __init__(self, incarnation: int, peers: Sequence[str]) -> None:
        self.incarnation = incarnation
        self.number = 1  # so that there is something to say to a process that knows nothing
        self._changed: dict[Item, int] = {}  # by item, in the order of their numbers
        self._peers = {stage: _Peer() for stage in peers}

    def change(self, item: Item) -> int:
        """The number of this change."""
        self.number += 1
        self._changed.pop(item, None)
        self._changed[item] = self.number
        return self.number

    def merge(self, state: GatewayState) -> bool:
        """Whether there is news in what another gateway says, which must be answered then."""
        peer = self._peers.get(state.stage)
        if peer is None or state.incarnation < peer.incarnation:
            return False
        if state.incarnation > peer.incarnation:
            peer = self._peers[state.stage] = _Peer(state.incarnation)
        if state.heard_incarnation == self.incarnation:
            peer.seen = max(peer.seen, state.heard)
        if state.since > peer.heard:
            return False  # meant for the process before this one, which had received more
        news = state.number > peer.heard
        peer.heard = max(peer.heard, state.number)
        return news

    def heard_of(self, stage: str) -> tuple[int, int]:
        """The newest process of another gateway that has sent anything, and the number of its
        latest change; 0 before."""
        peer = self._peers[stage]
        return peer.incarnation, peer.heard

    def seen_by(self, stage: str) -> int:
        """The number of the latest change that another gateway has confirmed."""
        return self._peers[stage].seen

    def has_heard(self, stage: str, number: int) -> bool:
        """Whether another gateway has confirmed change `number`."""
        return self._peers[stage].seen >= number

    def news_for(self, stage: str) -> Iterator[Item]:
        """The items whose latest change another gateway has not confirmed, newest first."""
        seen = self._peers[stage].seen
        for item, number in reversed(self._changed.items()):
            if number <= seen:
                return
            yield item


class SharedQueue:
    """The requests that wait at this gateway, as SharedLimitHolder: `requests` and `tokens` may
    wait at all gateways together; 0: any. feed(): gives the core another share."""

    KINDS = ("requests", "tokens")

    def __init__(
        self, core: GatewayCore, feed: Callable[[Message], None], requests: int, tokens: int
    ) -> None:
        self._core, self._feed = core, feed
        self._whole = {"requests": requests, "tokens": tokens}
        self._share = dict(self._whole)

    def whole(self, kind: str) -> int:
        """See SharedLimitHolder."""
        return self._whole[kind]

    def free(self, kind: str, now: float) -> int:
        """See SharedLimitHolder."""
        waiting = {"requests": "waiting", "tokens": "waiting_tokens"}[kind]
        return self._share[kind] - int(self._core.stats()[waiting])

    def set_share(self, kind: str, size: int, now: float) -> None:
        """See SharedLimitHolder. A share of no tokens is one of one, since 0 is no bound."""
        if size != self._share[kind]:
            self._share[kind] = size
            tokens = max(self._share["tokens"], 1) if self._whole["tokens"] else 0
            self._feed(QueueShare(requests=self._share["requests"], tokens=tokens))


class Peers:
    """The other gateways. `open` it before anything is asked of it. See runtime.stage.ControlHook.

    Attributes:
    - identity, incarnation: of this one
    - gateways: ids of all
    - counted(): what this one has counted
    - monitor: gets the answers to its questions; None where there is no page
    - limits: those that all gateways hold together
    """

    def __init__(
        self,
        identity: Identity,
        incarnation: int,
        gateways: Sequence[str],
        health: Health,
        adapters: AdapterRegistry,
        counted: Callable[[], tuple[MetricSamples, ...]],
        monitor: PipelineMonitor | None = None,
    ) -> None:
        self._stage = identity.id
        self._health, self._adapters, self._counted = health, adapters, counted
        self._monitor = monitor
        self._others = [stage for stage in gateways if stage != identity.id]
        self._exchange = StateExchange(incarnation, self._others)
        self.limits = SharedLimits(identity.index, len(gateways))
        self._send: Callable[[str, Message], None] | None = None
        self._repeating: asyncio.Task[None] | None = None
        self._next_state = asyncio.Event()
        self._answers: dict[str, dict[str, tuple[MetricSamples, ...]]] = {}

    # ------------------------------------------------------------------------------- a ControlHook

    def open(self, ask: Callable[[str, Message], None]) -> None:
        """See ControlHook."""
        self._send = ask
        if self._monitor is not None:
            self._monitor.open(ask)
        if self._others:
            self._repeating = asyncio.get_running_loop().create_task(self._repeat())

    def on_message(self, message: Message) -> None:
        """See ControlHook."""
        if isinstance(message, GatewayState):
            self._on_state(message)
        elif isinstance(message, ShowMetrics):
            answer = CountedMetrics(message.question, self._stage, self._counted())
            if message.stage in self._others:
                self._post(message.stage, answer)
        elif isinstance(message, CountedMetrics):
            if message.question in self._answers:
                self._answers[message.question][message.stage] = message.metrics
                self._wake()
        elif isinstance(message, Observed | Prefixes) and self._monitor is not None:
            self._monitor.on_message(message)

    def close(self) -> None:
        """See ControlHook."""
        if self._repeating is not None:
            self._repeating.cancel()
        if self._monitor is not None:
            self._monitor.close()

    # -------------------------------------------------------------------------------------- limits

    def share(self, name: str, holder: SharedLimitHolder, kinds: Sequence[str]) -> None:
        """`holder` has a share of its limits from now on; again after these have changed."""
        self.limits.add(name, holder, kinds, time.monotonic())

    async def borrow(self, name: str, kind: str, units: int) -> None:
        """Returns when the share has so many free units more, or no gateway has any left to give,
        at the latest after BORROW_SECONDS."""
        limit = LimitName(name, kind)
        if not kind or not self._live():
            return
        wanted = self.limits.free(limit, time.monotonic()) + units
        self.limits.lacks(limit, units)
        number = self._exchange.change((LIMIT, *limit))
        self._publish(self._live())

        def settled() -> bool:
            heard = all(self._exchange.has_heard(stage, number) for stage in self._live())
            return heard or self.limits.free(limit, time.monotonic()) >= wanted

        await self._until(settled, BORROW_SECONDS)
        self.limits.lacks(limit, 0)
        self._exchange.change((LIMIT, *limit))

    # ------------------------------------------------------------------------------------ adapters

    async def change_adapter(self, name: str, adapter: Adapter | None) -> bool:
        """Requests may name `adapter` from now on, at all gateways; None: no adapter of that name.
        False if one of them has not confirmed it within SPREAD_SECONDS; it will get it."""
        self._adapters.change(name, adapter, stage_number(self._stage, "gateway") or 0)
        number = self._exchange.change((ADAPTERS,))
        self._publish(self._live())
        return await self._until(
            lambda: all(self._exchange.has_heard(stage, number) for stage in self._live()),
            SPREAD_SECONDS,
        )

    # -------------------------------------------------------------------------------- what they say

    async def meet(self) -> None:
        """Returns when all live gateways have sent what this process needs, at the latest after
        MEET_SECONDS. A gateway that has sent nothing at all may be live."""
        rows = [self._health.stages[stage] for stage in self._others]

        def met() -> bool:
            return self._has_met_all() and all(row.last_seen is not None for row in rows)

        await self._until(met, MEET_SECONDS)

    async def counted(self) -> dict[str, tuple[MetricSamples, ...]]:
        """The metrics of each other gateway, by its id, without gateways that do not answer."""
        question, asked = f"{self._stage}-{time.monotonic_ns()}", self._live()
        found = self._answers[question] = {}
        try:
            for stage in asked:
                self._post(stage, ShowMetrics(question, self._stage))
            await self._until(lambda: len(found) == len(asked), SCRAPE_SECONDS)
            return dict(found)
        finally:
            del self._answers[question]

    def _live(self) -> list[str]:
        stages = self._health.stages
        return [stage for stage in self._others if stages[stage].state not in NOT_LIVE]

    def _has_met_all(self) -> bool:
        return all(self._exchange.heard_of(stage)[1] for stage in self._live())

    def _on_state(self, state: GatewayState) -> None:
        if self._exchange.merge(state):
            now, sender = time.monotonic(), stage_number(state.stage, "gateway") or 0
            for share in state.shares:
                if self.limits.on_state(sender, share, now, gives=self._has_met_all()):
                    self._exchange.change((LIMIT, share.name, share.kind))
            if self._adapters.adopt(AdapterChanges(state.adapters, state.forgotten_adapters)):
                self._exchange.change((ADAPTERS,))
            self._publish([state.stage])
        self._wake()

    def _publish(self, stages: Sequence[str]) -> None:
        now = time.monotonic()
        for stage in stages:
            items = list(self._exchange.news_for(stage))
            changes = self._adapters.changes if (ADAPTERS,) in items else AdapterChanges()
            incarnation, heard = self._exchange.heard_of(stage)
            state = GatewayState(
                stage=self._stage,
                incarnation=self._exchange.incarnation,
                number=self._exchange.number,
                since=self._exchange.seen_by(stage),
                heard_incarnation=incarnation,
                heard=heard,
                adapters=changes.states,
                forgotten_adapters=changes.forgotten,
                shares=tuple(
                    self.limits.state(LimitName(*name), now) for of, *name in items if of == LIMIT
                ),
            )
            self._post(stage, state)

    async def _repeat(self) -> None:
        """Sends changes again that have not been confirmed."""
        while True:
            for limit in self.limits.refresh(time.monotonic()):
                self._exchange.change((LIMIT, *limit))
            number = self._exchange.number
            self._publish([s for s in self._live() if not self._exchange.has_heard(s, number)])
            await asyncio.sleep(REPEAT_SECONDS)

    def _post(self, stage: str, message: Message) -> None:
        if self._send is not None:
            self._send(stage, message)

    def _wake(self) -> None:
        self._next_state.set()
        self._next_state = asyncio.Event()

    async def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Whether `done()` is true within that time; asked whenever another gateway has spoken, and
        else at times."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not done():
            left = deadline - loop.time()
            if left <= 0:
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(self._next_state.wait(), min(left, LOOK_SECONDS))
        return True


log = logging.getLogger(__name__)

FORWARDED = "x-pipeinfer-forwarded"  # of a request that another gateway passes on: the gateway's id
FROM_HOST = "x-pipeinfer-from-host"  # the same, of a gateway of another host
RETRY_SECONDS = 0.5  # until the socket of a gateway that is about to end is tried again
ANSWER_SECONDS = 30.0  # until an answer begins; a gateway that hangs counts as lost before that
BACKLOG = 128  # connections that wait to be accepted
# Answers from which it does not follow that the gateway lacks the stream: 503 while it starts, 401
# before it has read the keys again, of which the asking gateway knows the client's already.
DOES_NOT_SAY = (401, 503)
# Gateways of another host may have other keys and other rules, or a proxy before them.
HOST_DOES_NOT_SAY = (502, 503, 504)
HOST_LACKS = (401, 403, 404)
# Seconds after which a silent host is asked whether it is there, then between questions; how many.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Headers of a request that the handlers and what is before them read.
ASKED_WITH = ("host", "origin", "authorization", "x-api-key", "last-event-id", "x-request-id")
# Headers of an answer that concern one connection, and those that this gateway adds itself.
NOT_PASSED_ON = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")
)


def socket_name(address: str) -> str:
    """The name of the socket of the gateway whose stage has that address: one in the abstract
    namespace, as different as the addresses of the stages of a host are."""
    return "\0pipeinfer-" + blake2b(address.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Place:
    """An address at which a gateway is asked, or any of the gateways that share a port.

    Attributes:
    - stages: their ids
    - url: without a path
    - connect: makes connections to it
    - mark: the header that says who passes a request on
    - lacks: statuses of who does not have what is asked for
    - unsure: statuses from which that does not follow
    """

    stages: Sequence[str]
    url: str
    connect: Callable[[], aiohttp.BaseConnector]
    mark: str
    lacks: Sequence[int]
    unsure: Sequence[int]


class HostGateways:
    """The other gateways of this host, and those of other hosts that can be asked.

    Attributes:
    - stage, address: of this one
    - others: addresses by id
    - health: who is there
    - first: whether this one is the first of the gateways, which says for all that the server is
      ready
    - elsewhere: ids of gateways of other hosts, by their URL
    """

    def __init__(
        self,
        stage: str,
        address: str,
        others: Mapping[str, str],
        health: Health,
        *,
        first: bool,
        elsewhere: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._stage, self._address = stage, address
        self._others, self._health = others, health
        self.first = first
        self._here: list[_Place] = []
        for other, at in others.items():
            connect = partial(_AbstractConnector, socket_name(at))
            place = _Place([other], "http://gateway", connect, FORWARDED, (404,), DOES_NOT_SAY)
            self._here.append(place)
        self._elsewhere = [
            _Place(ids, url, _connector, FROM_HOST, HOST_LACKS, HOST_DOES_NOT_SAY)
            for url, ids in (elsewhere or {}).items()
        ]
        self._acceptor: Acceptor | None = None
        self._listening: asyncio.Task[None] | None = None

    def listen(self, connections: Connections) -> None:
        """Serves the other gateways from now on, if there are any."""
        if self._others:
            self._listening = asyncio.create_task(self._listen(connections))

    def close(self) -> None:
        """Serves them no more."""
        if self._listening is not None:
            self._listening.cancel()
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    def connections(self) -> list[float]:
        """How many the others that are ready had each, as they said last."""
        rows = [self._health.stages[stage] for stage in self._others]
        return [row.stats.get("connections", 0.0) for row in rows if row.state == "ready"]

    def all_ready(self) -> bool:
        """Whether the others take requests, as they said last."""
        return all(self._health.stages[stage].state == "ready" for stage in self._others)

    async def forward(self, request: web.Request) -> web.StreamResponse | None:
        """The answer of the gateway that has what `request` asks for; None if none has. Its body,
        which such requests do not need, is not passed on. All are asked at once, so one that hangs
        or is being started delays no other. Raises ApiError 503 if none has it and one of them does
        not say."""
        if is_forwarded(request):
            return None
        places = [*self._here, *(() if FROM_HOST in request.headers else self._elsewhere)]
        asked = [place for place in places if not self._is_lost(place)]
        silent = len(places) - len(asked)
        async with AsyncExitStack() as stack:
            asks: list[asyncio.Task[tuple[_Place, aiohttp.ClientResponse | None]]] = []
            for place in asked:
                timeout = aiohttp.ClientTimeout(total=None)
                session = aiohttp.ClientSession(
                    connector=place.connect(), timeout=timeout, auto_decompress=False
                )
                await stack.enter_async_context(session)
                asks.append(asyncio.create_task(self._ask(request, place, session)))
            stack.push_async_callback(_drop, asks)
            for ask in asyncio.as_completed(asks):
                place, answer = await ask
                if answer is None or answer.status in place.unsure:
                    silent += 1
                elif answer.status not in place.lacks:
                    await _drop(asks, answer)
                    return await _pass_on(request, answer)
        if silent:
            message = "a gateway that may have it does not answer"
            raise ApiError(503, message, code="starting", retry_after=1)
        return None

    def _is_lost(self, place: _Place) -> bool:
        return all(self._health.stages[stage].state == "lost" for stage in place.stages)

    async def _ask(
        self, request: web.Request, place: _Place, session: aiohttp.ClientSession
    ) -> tuple[_Place, aiohttp.ClientResponse | None]:
        """Passes the request to the gateway at `place`; returns its answer, or None if it was
        killed or hangs."""
        given = {header: request.headers.get(header, "") for header in ASKED_WITH}
        # Bytes that are no UTF-8 cannot be passed on, and must not be left out: they are wrong.
        headers = {h: v.encode(errors="replace").decode() for h, v in given.items() if v}
        # Bodies are passed on as they come, also by a proxy before another host.
        headers |= {place.mark: self._stage, "accept-encoding": "identity"}
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await session.request(
                    request.method,
                    f"{place.url}{request.rel_url.raw_path_qs}",
                    headers=headers,
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, TimeoutError):
            return place, None
        return place, answer

    async def _listen(self, connections: Connections) -> None:
        def accepted(link: socket.socket) -> None:
            if peer_of(link)[1] == os.geteuid():
                connections.accept(link, None)
            else:
                link.close()

        listener, name = socket.socket(socket.AF_UNIX), socket_name(self._address)
        listener.setblocking(False)
        try:
            while True:
                try:
                    listener.bind(name)
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        log.error("other gateways cannot ask this one: %s", error)
                        return
                    await asyncio.sleep(RETRY_SECONDS)  # the process before this one has it still
            listener.listen(BACKLOG)
            self._acceptor = Acceptor(listener, accepted)
        finally:
            if self._acceptor is None:
                listener.close()


class _AbstractConnector(aiohttp.UnixConnector):
    """uvloop connects to no name of the abstract namespace, but takes a socket that has."""

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: object, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        found = socket.socket(socket.AF_UNIX)
        found.setblocking(False)
        try:
            found.connect(self.path)
            if peer_of(found)[1] != os.geteuid():
                raise ConnectionRefusedError(errno.ECONNREFUSED, "another user's process")
            _, protocol = await self._loop.create_unix_connection(self._factory, sock=found)
        except OSError:  # aiohttp makes a ClientOSError of it
            found.close()
            raise
        return protocol


def _connector() -> aiohttp.TCPConnector:
    """A connector whose connections end when the host at their other end is gone, also if nothing
    is sent on them."""

    def make(found: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
        made = socket.socket(*found[:3])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return made

    return aiohttp.TCPConnector(socket_factory=make)


def is_forwarded(request: web.Request) -> bool:
    """Whether another gateway of this host passes `request` on, which has looked into what they
    share."""
    return FORWARDED in request.headers


async def _drop(
    asks: Sequence[asyncio.Task[tuple[_Place, aiohttp.ClientResponse | None]]],
    but: aiohttp.ClientResponse | None = None,
) -> None:
    """Ends all connections but that of one answer, which may be a long one."""
    for ask in asks:
        ask.cancel()
    for found in await asyncio.gather(*asks, return_exceptions=True):
        if not isinstance(found, BaseException) and found[1] is not None and found[1] is not but:
            found[1].close()


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in NOT_PASSED_ON:
            response.headers.add(name, value)
    response.content_length = answer.content_length
    has_events = answer.content_type == "text/event-stream"
    between = has_events  # two events, as far as they were passed on

    def probe() -> None:
        if between:
            write_comment(request)

    with suppress(ConnectionResetError):  # the client has left
        await response.prepare(request)
        request[PROBE] = probe
        try:
            async for part in answer.content.iter_any():
                between = False
                await response.write(part)
                between = has_events and part.endswith(EVENT_END)
        except (aiohttp.ClientError, OSError):
            # No orderly end: the client must see that more was to come.
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
    return response
