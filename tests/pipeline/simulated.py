"""All stages' cores joined by queues in memory, for tests that kill them: no sockets, no processes.

Every pair of processes has its own queue, as every pair has its own connection. A process that
dies takes with it a part of what was under way to it (the oldest: a connection's buffers) and of
what it had sent (the newest). Who is heard next is random. The engine is the scheduler tests'
model, whose tokens depend on the whole sequence.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from tokenizers import Tokenizer, decoders, models

from pipeinfer.bus.frames import Header
from pipeinfer.core import LOCAL, Send
from pipeinfer.detokenizer.core import DetokenizerCore
from pipeinfer.detokenizer.incremental import DecoderFactory
from pipeinfer.events import Leave, Tick
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.events import Call, Delta, Failed, Hangup
from pipeinfer.gateway.health import Expected
from pipeinfer.messages import PROTOCOL, Heartbeat, Message, Open, Text, TokenRow, Tokens, pack
from pipeinfer.params import SamplingParams
from pipeinfer.runtime.fence import Fence
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.tokenizer.core import TokenizerCore
from pipeinfer.tokenizer.prompts import PromptEncoder
from pipeinfer.tokenizer.routing import Router
from pipeinfer.tokenizer.templates import ChatTemplates
from scheduler.model_engine import ModelEngine, expected_outputs

EOS = (3, 11)
VOCABULARY = 50
# Letters, and bytes that are parts of characters of two, three and four bytes.
BYTES = [*b"abcdefghijklmnopqrstuvwxyz .", *[0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x99, 0x82]]


def _alphabet() -> dict[int, str]:
    """GPT-2's character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def _decoders() -> DecoderFactory:
    names = [_alphabet()[byte] for byte in BYTES]
    names += [f"<{n}>" for n in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, "<0>"))
    tokenizer.decoder = decoders.ByteLevel()
    return DecoderFactory(tokenizer)


DECODERS = _decoders()


@dataclass
class Client:
    """One request and what its client saw."""

    prompt: list[int]
    params: SamplingParams
    text: str = ""
    ids: bytes = b""
    finish: str | None = None
    failed: Failed | None = None
    gone: bool = False  # it hung up, or its gateway died

    def take(self, delta: Delta) -> None:
        assert self.finish is None and self.failed is None, f"{delta} after the end"
        assert delta.byte_offset == len(self.text.encode()), f"{delta} after {self.text!r}"
        assert delta.token_offset == len(self.ids) // 4
        self.text, self.ids, self.finish = (
            self.text + delta.text,
            self.ids + delta.ids,
            delta.finish,
        )

    def undisturbed(self) -> tuple[str, bytes, str | None]:
        """(text, ids, finish) as one detokenizer that gets everything at once says them."""
        most = self.params.max_tokens or 0
        outputs = expected_outputs(self.prompt, most, frozenset(EOS), self.params.min_tokens)
        stopped = outputs[-1] in EOS
        row = TokenRow("r", 0, pack(outputs), "stop" if stopped else "length")
        if stopped:
            row = TokenRow("r", 0, pack(outputs), "stop", outputs[-1])
        core = DetokenizerCore(DECODERS)
        core.handle(Open("r", 1, 0, self.params, len(self.prompt), pack(self.prompt[-16:])), 0.0)
        message = core.handle(Tokens((row,)), 0.0)[0].message
        assert isinstance(message, Text)
        (shown,) = message.rows
        return shown.text, shown.ids, shown.finish


class EngineNode:
    """The model engine with a core's interface."""

    def __init__(self, incarnation: int) -> None:
        self.model = ModelEngine(60, 4, 6, 24, caching=True)
        self.model.incarnation = incarnation
        self.model.outbox.append(self.model.hello())

    def handle(self, event: Message, _now: float) -> list[Send]:
        if isinstance(event, Tick):
            if not self.model.epoch:
                self.model.outbox.append(self.model.hello())
        elif not isinstance(event, Leave):
            self.model.receive(event)
        sends = [Send("result", "scheduler-0", message) for message in self.model.outbox]
        self.model.outbox.clear()
        return sends

    def idle(self) -> bool:
        return True


@dataclass
class Process:
    """One life of a stage."""

    core: object
    incarnation: int
    fence: Fence = field(default_factory=Fence)


STAGES = ("gateway-0", "tokenizer-0", "scheduler-0", "engine-0-0", "detokenizer-0")


class Simulation:
    """The pipeline; `random` decides who is heard next and what a death destroys."""

    def __init__(self, random: Random, policy: str = "mixed", depth: int = 2) -> None:
        self.random = random
        self.options = SchedulerOptions(policy, depth, 6, 24, watchdog=1e9)
        self.now = 0.0
        self.lives = 0
        self.links: dict[tuple[str, int, str], deque[Message]] = {}
        self.clients: dict[str, Client] = {}
        self.processes: dict[str, Process] = {}
        for stage in STAGES:
            self._start(stage)
        self._introduce()
        self.settle_start()

    # ------------------------------------------------------------------------------------ processes

    def _core(self, stage: str, incarnation: int):
        name = stage.split("-")[0]
        if name == "gateway":
            expected = [Expected(s, s.split("-")[0]) for s in STAGES]
            return GatewayCore(expected, incarnation=incarnation)
        if name == "tokenizer":
            encoder = PromptEncoder(None, ChatTemplates({}, {}, str), 100, 10_000)
            router = Router("round-robin", 1)
            return TokenizerCore(encoder, router, 1, EOS, stage, incarnation, ["gateway-0"])
        if name == "scheduler":
            peers = ["tokenizer-0"], ["detokenizer-0"]
            return SchedulerCore(self.options, 0, incarnation, *peers)
        if name == "detokenizer":
            return DetokenizerCore(DECODERS, stage, incarnation, ["scheduler-0"])
        return EngineNode(incarnation)

    def _start(self, stage: str) -> None:
        self.lives += 1
        self.processes[stage] = Process(self._core(stage, self.lives), self.lives)
        self.feed(stage, Tick())

    def _introduce(self) -> None:
        """Every stage's heartbeat, so that the gateway takes requests."""
        for stage in STAGES:
            name, group = stage.split("-")[:2]
            beat = Heartbeat(stage, name, int(group), 0, 0, 1, self.lives, "ready")
            self.feed("gateway-0", beat)

    def kill(self, *stages: str) -> None:
        """-9, all at once; then new processes in their place."""
        for (sender, incarnation, receiver), queue in self.links.items():
            if receiver in stages:
                for _ in range(self.random.randint(0, len(queue))):
                    queue.popleft()
            if sender in stages and incarnation == self.processes[sender].incarnation:
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()
        for stage in stages:
            self._start(stage)
        if "gateway-0" in stages:
            for client in self.clients.values():
                client.gone = True
            self._introduce()

    def leave(self, stage: str) -> None:
        """A planned hand-over: nothing is lost, the successor starts when this one is idle."""
        self.feed(stage, Leave())
        for _ in range(1_000):
            if self.processes[stage].core.idle():  # type: ignore[attr-defined]
                break
            assert self.deliver() or self.tick(0.1)
        else:
            raise AssertionError(f"{stage} never became idle")
        self._start(stage)

    # ------------------------------------------------------------------------------------- messages

    def feed(self, stage: str, event: Message) -> None:
        """One event through a core, and its outputs into the queues."""
        self.now += 0.0001
        process = self.processes[stage]
        for send in process.core.handle(event, self.now):  # type: ignore[attr-defined]
            if send.channel == LOCAL:
                self._local(send.message)
            elif send.channel != "telemetry":
                to = send.to or "engine-0-0"
                link = self.links.setdefault((stage, process.incarnation, to), deque())
                link.append(send.message)

    def _local(self, message: Message) -> None:
        name = getattr(message, "request_id", "")
        if isinstance(message, Delta):
            self.clients[name].take(message)
        elif isinstance(message, Failed):
            self.clients[name].failed = message

    def deliver(self) -> bool:
        """One message of a random queue; False if there is none."""
        waiting = [key for key, queue in self.links.items() if queue]
        if not waiting:
            return False
        sender, incarnation, receiver = key = self.random.choice(waiting)
        message = self.links[key].popleft()
        header = Header(PROTOCOL, sender, incarnation, 0, 0.0)
        if self.processes[receiver].fence.passes(header):
            self.feed(receiver, message)
        return True

    def tick(self, seconds: float) -> bool:
        """Time passes, and every stage's timer fires."""
        self.now += seconds
        for stage in self.random.sample(STAGES, len(STAGES)):
            self.feed(stage, Tick())
        return True

    # -------------------------------------------------------------------------------------- clients

    def submit(self, prompt: list[int], **params: object) -> str:
        name = f"r{len(self.clients)}"
        self.clients[name] = client = Client(prompt, SamplingParams(**params))  # type: ignore
        self.feed("gateway-0", Call(name, client.params, prompt_ids=pack(prompt)))
        return name

    def hang_up(self, name: str) -> None:
        self.clients[name].gone = True
        self.feed("gateway-0", Hangup(name))

    # ------------------------------------------------------------------------------------- the end

    def settle_start(self) -> None:
        """Until the scheduler has an engine."""
        self.run()
        assert self.processes["scheduler-0"].core.state()[0] == "ready"  # type: ignore

    def run(self) -> None:
        """Until nothing moves any more, with some time for questions to be repeated."""
        for _ in range(6):
            for _ in range(20_000):
                if not self.deliver():
                    break
            else:
                raise AssertionError("it never comes to rest")
            self.tick(1.1)

    def check(self) -> None:
        """Every request ended with its undisturbed text."""
        for name, client in self.clients.items():
            if not client.gone:
                assert client.failed is None, (name, client.failed)
                assert client.finish is not None, f"{name} never ended: {self.stats()}"
                assert (client.text, client.ids, client.finish) == client.undisturbed(), name

    def check_ledgers(self) -> None:
        """Nobody remembers anything of requests that are over."""
        stats = self.stats()
        assert self.processes["gateway-0"].core.idle()  # type: ignore[attr-defined]
        assert stats["tokenizer-0"]["ledger"] == 0, stats
        for stage, names in (
            ("scheduler-0", ("running", "waiting", "kept", "orphans", "in_flight")),
            ("detokenizer-0", ("running", "kept")),
        ):
            assert {name: stats[stage][name] for name in names} == dict.fromkeys(names, 0), stats
        assert not self.processes["engine-0-0"].core.model.slots  # type: ignore[attr-defined]

    def stats(self) -> dict[str, dict[str, float]]:
        return {
            stage: process.core.stats()  # type: ignore[attr-defined]
            for stage, process in self.processes.items()
            if not isinstance(process.core, EngineNode)
        }
