"""All stages' cores joined by queues in memory, for tests that kill them: no sockets, no processes.

Every pair of processes has its own queue, as every pair has its own connection. A process that
dies takes with it a part of what was under way to it (the oldest: a connection's buffers) and of
what it had sent (the newest). Who is heard next is random. Only the device is a model: its tokens
depend on the whole sequence, found through the pages of the real memory (simulated_engine.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from random import Random

import msgspec
from simulated_engine import PAGES, POISON, SEEDS, SLOTS, EngineNode, entry_of, noise_of
from simulated_grammars import DEAD, HUGE, WRONG, dies, grammar_of, trial
from simulated_grammars import expected_outputs as outputs_by_grammar
from tokenizers import Tokenizer, decoders, models

from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import LOCAL, Leave, Send, Tick
from pipeinfer.detokenizer.core import DetokenizerCore
from pipeinfer.detokenizer.text import DecoderFactory
from pipeinfer.engine.core import Compile
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.health import ExpectedStage
from pipeinfer.gateway.ledger import (
    AdoptionEnded,
    Call,
    ClientDisconnected,
    Failed,
    OutputDelta,
)
from pipeinfer.grammars.bounds import GRAMMAR_ERROR
from pipeinfer.messages import (
    PROTOCOL,
    Adopt,
    Ended,
    GroupFault,
    Heartbeat,
    Message,
    OpenStream,
    RankStatus,
    Retention,
    Text,
    TokenRow,
    Tokens,
)
from pipeinfer.params import RequestParams, choice_id, choice_ids
from pipeinfer.runtime.stage import IncarnationFilter
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.tokenizer.chat_templates import ChatTemplates
from pipeinfer.tokenizer.core import EncodeNext, GrammarVerdict, TokenizerCore, ValidateGrammar
from pipeinfer.tokenizer.prompts import PromptEncoder
from pipeinfer.tokenizer.routing import GroupMonitor, GroupRouter, grammar_digest
from pipeinfer.wire import pack, unpack
from scheduler.model_engine import expected_outputs

EOS = (3, 11)
VOCABULARY = 50
HOST_LOSS = 20.0  # seconds
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
    params: RequestParams
    text: str = ""
    ids: bytes = b""
    finish: str | None = None
    failed: Failed | None = None
    gone: bool = False  # it hung up, or its gateway died
    timeout: float = 0.0
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""  # entries of the prompt
    shown_ids: bytes = b""  # with these ids
    offsets: list[int] = field(default_factory=list)
    choice: int = 0
    kept: bool = False  # its answer outlives gateways
    lost: bool = False  # its gateway died, and none has adopted it since
    deltas: list[tuple[str, bytes, str | None]] = field(default_factory=list)
    before: list[tuple[str, bytes, str | None]] = field(default_factory=list)  # of dead gateways

    def begin_again(self) -> None:
        """Another gateway has adopted it: all of it comes again, in the same pieces."""
        self.before = max(self.before, self.deltas, key=len)
        self.deltas, self.lost = [], False
        self.text, self.ids, self.finish, self.failed = "", b"", None, None
        self.logprobs = self.prompt_logprobs = self.shown_ids = b""
        self.offsets = []

    def take(self, delta: OutputDelta) -> None:
        if self.kept and (delta.text or delta.ids or delta.finish):  # of which events are made
            self.deltas.append((delta.text, delta.ids, delta.finish))
            if len(self.deltas) <= len(self.before) and not self.timeout:
                assert self.deltas[-1] == self.before[len(self.deltas) - 1], "an event differs"
        assert self.finish is None and self.failed is None, f"{delta} after the end"
        assert delta.byte_offset == len(self.text.encode()), f"{delta} after {self.text!r}"
        assert delta.token_offset == len(self.ids) // 4
        self.text, self.ids, self.finish = (
            self.text + delta.text,
            self.ids + delta.ids,
            delta.finish,
        )
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs.logprobs
            self.offsets += unpack(delta.logprobs.offsets).tolist()
        if delta.prompt is not None:
            assert not self.ids
            self.prompt_logprobs += delta.prompt.logprobs
            self.shown_ids += delta.prompt.ids

    def check_logprobs(self) -> None:
        """It has the log-probs of all tokens that it has, each once."""
        most = self.params.logprobs
        if most is not None:
            first, ids = len(self.prompt), unpack(self.ids).tolist()
            entries = [entry_of(first + n, token, most) for n, token in enumerate(ids)]
            assert self.logprobs == b"".join(entries)
            assert len(self.offsets) == len(ids) and self.offsets == sorted(self.offsets)
        most = self.params.prompt_logprobs
        if most is not None and self.failed is None and self.finish != "abort":
            entries = [entry_of(n, token, most) for n, token in enumerate(self.prompt)]
            entries[0] = bytes(len(entries[0]))
            assert self.prompt_logprobs == b"".join(entries)
            assert self.shown_ids == pack(self.prompt)

    def check(self) -> None:
        """It ended with its undisturbed text, or as it had to."""
        self.check_logprobs()
        text, ids, finish = self.undisturbed()
        late = self.finish == "abort" or (self.failed is not None and self.failed.status == 408)
        if self._ended_by_grammar():
            assert ids.startswith(self.ids)
        elif self.prompt[0] == POISON:
            assert self.failed is not None and self.failed.status in (500, 408), self.failed
            assert "crashed repeatedly" in self.failed.message or self.timeout, self.failed
        elif self.timeout and late:
            whole, _, _ = self.undisturbed(stop=())  # of text that was held, all is shown
            assert ids.startswith(self.ids)
            assert text.startswith(self.text) or whole.startswith(self.text)
        else:
            assert self.failed is None, self.failed
            assert (self.text, self.ids, self.finish) == (text, ids, finish)

    def _ended_by_grammar(self) -> bool:
        """Whether it failed, as its grammar had to or could make it."""
        spec = self.params.structured_outputs
        if spec is None or self.failed is None or self.failed.status == 408:
            return False
        kind, told = grammar_of(spec).kind, (self.failed.status, self.failed.message)
        if kind == "dead":
            assert told == (500, GRAMMAR_ERROR + DEAD), told
            assert (self.text, self.ids, "error") == self.undisturbed()
            return True
        no_engine = GRAMMAR_ERROR + HUGE
        refused = {"wrong": (400, WRONG), "huge": (400, no_engine)}
        if kind == "odd":  # 500: it had outputs, though none may have been shown
            assert told in ((400, no_engine), (500, no_engine)), told
        else:
            assert told == refused[kind] and not self.ids, (told, self.ids)
        return True

    def undisturbed(self, **changes: object) -> tuple[str, bytes, str | None]:
        """(text, ids, finish) as one detokenizer that gets everything at once says them.

        changes: of the request's parameters.
        """
        plain = {"logprobs": None, "prompt_logprobs": None}
        params = msgspec.structs.replace(self.params, **{**plain, **changes})
        most = self.params.max_tokens or 0
        seed = SEEDS if self.params.seed is None else self.params.seed + self.choice
        noise, spec = noise_of(seed), self.params.structured_outputs
        if spec is not None:
            outputs = outputs_by_grammar(self.prompt, most, noise, spec)
            return self.shown(outputs, params, dies(spec, most))
        outputs = expected_outputs(self.prompt, most, frozenset(EOS), self.params.min_tokens, noise)
        return self.shown(outputs, params)

    def shown(
        self, outputs: list[int], params: RequestParams, failed: bool = False
    ) -> tuple[str, bytes, str | None]:
        """(text, ids, finish) of all these output tokens at once; `failed`: behind them."""
        stopped = not failed and outputs[-1] in EOS and not params.ignore_eos
        row = TokenRow("r", 0, pack(outputs), "error" if failed else "length")
        if stopped:
            row = TokenRow("r", 0, pack(outputs), "stop", outputs[-1])
        core = DetokenizerCore(DECODERS)
        core.handle(OpenStream("r", 1, 0, params, pack(self.prompt[-16:])), 0.0)
        message = core.handle(Tokens((row,)), 0.0)[0].message
        assert isinstance(message, Text)
        (shown,) = message.rows
        return shown.text, shown.ids, shown.finish


@dataclass
class Process:
    """One life of a stage. `later`: what is done for it elsewhere, trials and compilations."""

    core: object
    incarnation: int
    fence: IncarnationFilter = field(default_factory=IncarnationFilter)
    later: list[ValidateGrammar | EncodeNext | Compile] = field(default_factory=list)
    shown: object = None  # the state that its latest heartbeat told


@cache
def host_of(stage: str) -> str:
    """Each group has one."""
    name, group = stage.split()[0].split("-")[:2]
    return f"group-{group}" if name in ("scheduler", "engine") else "front"


def stages_of(groups: int, tp: int = 1) -> list[str]:
    """All stages' ids, of so many data-parallel groups of so many ranks."""
    front = ["gateway-0", "tokenizer-0", "detokenizer-0"]
    ranks = [[f"engine-{group}-{rank}" for rank in range(tp)] for group in range(groups)]
    return front + [stage for g, some in enumerate(ranks) for stage in (f"scheduler-{g}", *some)]


class Simulation:
    """The pipeline; `random` decides who is heard next and what a death destroys."""

    def __init__(
        self,
        random: Random,
        policy: str = "mixed",
        depth: int = 2,
        groups: int = 1,
        moody: bool = False,
        pages: int = PAGES,
        tp: int = 1,
    ) -> None:
        self.random, self.moody, self.pages, self.tp = random, moody, pages, tp
        self.groups, self.stages = groups, stages_of(groups, tp)
        self.options = SchedulerOptions(
            policy, depth, SLOTS, 24, tp=tp, watchdog=1e9, groups=groups, host_loss=HOST_LOSS
        )
        self.now = 0.0
        self.lives = 0
        self.cut = ""  # the host that nobody else can reach; see host_of
        self.links: dict[tuple[str, int, str], deque[Message]] = {}
        self.clients: dict[str, Client] = {}
        self.adopted = False  # the gateway knows what the one before it has left
        self.processes: dict[str, Process] = {}
        for stage in self.stages:
            self.start(stage)
        self._introduce()
        self.settle_start()

    # ------------------------------------------------------------------------------------ processes

    def _core(self, stage: str, incarnation: int):
        name, number = stage.split("-")[:2]
        schedulers = [f"scheduler-{group}" for group in range(self.groups)]
        if name == "gateway":
            expected = [
                ExpectedStage(s, s.split("-")[0], int(s.split("-")[1])) for s in self.stages
            ]
            return GatewayCore(expected, incarnation=incarnation)
        if name == "tokenizer":
            encoder = PromptEncoder(None, ChatTemplates({}, {}, str), 100, 10_000)
            router, gateways = GroupRouter("round-robin", self.groups), ["gateway-0"]
            watch = GroupMonitor(self.groups, HOST_LOSS)
            return TokenizerCore(encoder, router, watch, EOS, stage, incarnation, gateways)
        if name == "scheduler":
            peers = ["tokenizer-0"], ["detokenizer-0"]
            return SchedulerCore(self.options, int(number), incarnation, *peers)
        if name == "detokenizer":
            return DetokenizerCore(DECODERS, stage, incarnation, schedulers)
        rank = int(stage.rsplit("-", 1)[1])
        return EngineNode(incarnation, int(number), self.moody, self.pages, rank, self.tp)

    def start(self, stage: str) -> None:
        """A new process of `stage`."""
        self.lives += 1
        self.processes[stage] = Process(self._core(stage, self.lives), self.lives)
        self.feed(stage, Tick())

    def start_all(self) -> None:
        """New processes for all that are down."""
        for stage in self.stages:
            if stage not in self.processes:
                self.start(stage)

    def _introduce(self) -> None:
        """Every stage's heartbeat, so that the gateway takes requests."""
        for stage in self.stages:
            name, group = stage.split("-")[:2]
            beat = Heartbeat(stage, name, int(group), 0, 0, 1, self.lives, "ready")
            self.feed("gateway-0", beat)

    def kill(self, *stages: str, down: bool = False) -> None:
        """-9, all at once; then new processes in their place, but not yet if they stay `down`.

        With an engine all ranks of its group end, as their supervisor has it.
        """
        groups = {stage.split("-")[1] for stage in stages if stage.startswith("engine")}
        beside = [s for s in self.stages if s.startswith("engine") and s.split("-")[1] in groups]
        stages = (*stages, *(stage for stage in beside if stage not in stages))
        for (sender, incarnation, receiver), queue in self.links.items():
            if receiver in stages:
                for _ in range(self.random.randint(0, len(queue))):
                    queue.popleft()
            life = self.processes.get(sender)
            if sender in stages and life is not None and life.incarnation == incarnation:
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()
        for stage in stages:
            life = self.processes.pop(stage, None)
            if life is not None:
                self._tell_of_death(stage, life)
        for stage in () if down else stages:
            self.start(stage)
        if "gateway-0" in stages:
            for client in self.clients.values():
                client.lost = client.kept
                client.gone = client.gone or not client.kept
            if not down:
                self._introduce()

    def lose_plans(self, engine: str) -> None:
        """The connection breaks on which `engine` hears its scheduler: the newest are lost."""
        for (sender, _, receiver), queue in self.links.items():
            if receiver == engine and sender.startswith("scheduler"):
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()

    def _tell_of_death(self, stage: str, life: Process) -> None:
        """As a supervisor does, to those who listen to it, sooner or later."""
        name, group = stage.split("-")[:2]
        if name in ("scheduler", "engine"):
            word = Ended(stage, life.incarnation, self.lives, "its process ended")
            for to in ("tokenizer-0", f"scheduler-{group}"):
                self.links.setdefault(("supervisor-0", 0, to), deque()).append(word)

    def _beat(self, stage: str) -> None:
        """What an engine's shell says to its scheduler; on a connection of its own."""
        name, group, *rank = stage.split("-")
        life = self.processes[stage]
        life.shown = life.core.state()  # type: ignore[attr-defined]
        if name == "engine":
            told = RankStatus(int(group), int(rank[0]), life.incarnation, life.shown[0])
            link = (f"{stage} group", life.incarnation, f"scheduler-{group}")
            self.links.setdefault(link, deque()).append(told)

    def leave(self, stage: str) -> None:
        """A planned hand-over: nothing is lost, the successor starts when this one is idle."""
        if stage not in self.processes:
            return
        life = self.processes[stage]
        self.feed(stage, Leave())
        for _ in range(1_000):
            if self.processes[stage] is not life or life.core.idle():  # type: ignore[attr-defined]
                break
            assert self.deliver() or self.tick(0.1)
        else:  # a shell waits for some seconds only
            down = set(self.stages) - set(self.processes)
            assert down, f"{stage} never became idle"
        self.start(stage)

    # ------------------------------------------------------------------------------------- messages

    def feed(self, stage: str, event: Message) -> None:
        """One event through a core, and its outputs into the queues."""
        self.now += 0.0001
        process = self.processes[stage]
        torn = False
        sends = process.core.handle(event, self.now)  # type: ignore[attr-defined]
        self.heard(stage, event, sends)
        for send in sends:
            if send.channel == LOCAL:
                self._local(process, send.message)
            elif isinstance(send.message, GroupFault):
                torn |= self._hit(stage, send.message)
            elif send.channel == "group":
                link = (f"{stage} group", process.incarnation, "tokenizer-0")
                self.links.setdefault(link, deque()).append(send.message)
            else:
                ranks = [stage.replace("scheduler", "engine") + f"-{n}" for n in range(self.tp)]
                for to in [send.to] if send.to else ranks:
                    link = self.links.setdefault((stage, process.incarnation, to), deque())
                    link.append(send.message)
        if torn:  # what the supervisor does then
            self.kill(stage.replace("scheduler", "engine") + "-0")
        elif isinstance(process.core, EngineNode) and process.core.crashed:
            self.kill(stage)
        elif process.core.state() != process.shown:  # type: ignore[attr-defined]
            self._beat(stage)

    def _hit(self, scheduler: str, fault: GroupFault) -> bool:
        """Whether any of the processes that are to end is still there."""
        engines = scheduler.replace("scheduler", "engine")
        alive = [p.incarnation for s, p in self.processes.items() if s.startswith(f"{engines}-")]
        return any(incarnation in fault.incarnations for incarnation in alive)

    def heard(self, stage: str, event: Message, sends: list[Send]) -> None:
        """For those who look on: what `stage` made of `event`, before anybody hears of it."""

    def _local(self, process: Process, message: Message) -> None:
        name = getattr(message, "request_id", "")
        if isinstance(message, ValidateGrammar | EncodeNext | Compile):
            process.later.append(message)
        elif isinstance(message, Adopt):
            submit = message.submit
            for choice in choice_ids(submit.request_id, submit.choices):
                assert self.clients[choice].lost and self.clients[choice].kept
                self.clients[choice].begin_again()
        elif isinstance(message, AdoptionEnded):
            self.adopted = True
        elif isinstance(message, OutputDelta):
            self.clients[name].take(message)
        elif isinstance(message, Failed):
            self.clients[name].failed = message

    def deliver(self) -> bool:
        """One message of a random queue, or the end of a step, a trial or a compilation; False if
        there is none."""
        waiting = [
            key
            for key, queue in self.links.items()
            if queue and key[2] in self.processes and self._joined(key[0], key[2])
        ]
        computing = [
            (stage, process.core.done)
            for stage, process in self.processes.items()
            if isinstance(process.core, EngineNode) and process.core.done
        ]
        busy = [stage for stage, process in self.processes.items() if process.later]
        chosen = self.random.randrange(len(waiting) + len(computing) + len(busy) or 1)
        if chosen < len(waiting):
            sender, incarnation, receiver = key = waiting[chosen]
            message = self.links[key].popleft()
            header = FrameHeader(PROTOCOL, sender, incarnation, 0, 0.0)
            if self.processes[receiver].fence.accepts(header, self.now):
                self.feed(receiver, message)
            return True
        chosen -= len(waiting)
        if chosen < len(computing):
            stage, done = computing[chosen]
            self.feed(stage, done.popleft())
        elif busy:
            self._answer(busy[chosen - len(computing)])
        return bool(computing or busy)

    def _joined(self, one: str, other: str) -> bool:
        """Whether there is a way between two stages; what is sent meanwhile waits for it."""
        ends = {host_of(one), host_of(other)} if self.cut else set[str]()
        return self.cut not in ends or len(ends) == 1

    def _answer(self, stage: str) -> None:
        """The end of a trial, or of a compilation: whichever comes first."""
        process = self.processes[stage]
        asked = process.later.pop(self.random.randrange(len(process.later)))
        if isinstance(asked, Compile):
            self.feed(stage, process.core.compiled(asked))  # type: ignore[attr-defined]
            return
        if isinstance(asked, EncodeNext):
            self.feed(stage, asked)
            return
        submit = process.core.submit_to_validate(asked.request_id, asked.attempt)  # type: ignore[attr-defined]
        if submit is not None:
            spec = submit.params.structured_outputs
            said, known = trial(spec), grammar_digest(spec)
            status, slow = 400 if said else 0, known[0] % 2 == 0
            self.feed(
                stage, GrammarVerdict(asked.request_id, asked.attempt, status, said, known, slow)
            )

    def tick(self, seconds: float) -> bool:
        """Time passes, and every stage's timer fires."""
        self.now += seconds
        for stage in self.random.sample(self.stages, len(self.stages)):
            if stage in self.processes:
                self.feed(stage, Tick())
                self._beat(stage)
        return True

    # -------------------------------------------------------------------------------------- clients

    def submit(
        self, prompt: list[int], timeout: float = 0.0, kept: float = 0.0, **params: object
    ) -> str:
        name = f"r{len(self.clients)}"
        made = RequestParams(**params)  # type: ignore[arg-type]
        for n in range(made.n):
            client = Client(prompt, made, timeout=timeout, choice=n, kept=kept > 0)
            self.clients[choice_id(name, n)] = client
        retention = Retention(name, "owner", kept, 0, b"format") if kept else None
        call = Call(name, made, prompt_ids=pack(prompt), timeout=timeout, retention=retention)
        self.feed("gateway-0", call)
        return name

    def release(self) -> None:
        """Nobody needs kept answers that have ended."""
        for name, client in self.clients.items():
            if client.kept and (client.finish is not None or client.failed is not None):
                self.feed("gateway-0", ClientDisconnected(name))

    def hang_up(self, name: str) -> None:
        self.clients[name].gone = True
        self.feed("gateway-0", ClientDisconnected(name))

    # ------------------------------------------------------------------------------------- the end

    def settle_start(self) -> None:
        """Until the schedulers have their engines."""
        self.run()
        for group in range(self.groups):
            core = self.processes[f"scheduler-{group}"].core
            assert core.state() == ("ready", "")  # type: ignore[attr-defined]

    def run(self) -> None:
        """Until nothing moves any more, with some time for questions to be repeated."""
        self.start_all()
        for _ in range(6):
            for _ in range(20_000):
                if not self.deliver():
                    break
            else:
                raise AssertionError("it never comes to rest")
            self.tick(1.1)

    def run_until_recovered(self) -> None:
        """Until all new processes have been told what they asked for."""
        for _ in range(2_000):
            calls = [getattr(p.core, "_roll_call", None) for p in self.processes.values()]
            if all(call is None or call.complete for call in calls):
                return
            assert self.deliver() or self.tick(1.1)
        raise AssertionError("it never recovers")

    def check(self) -> None:
        """Every request ended as it would have without deaths."""
        for name, client in self.clients.items():
            if not client.gone and not client.lost:
                ended = client.finish is not None or client.failed is not None
                assert ended, f"{name} never ended: {self.stats()}"
                client.check()

    def check_ledgers(self) -> None:
        """Nobody remembers anything of requests that are over."""
        empty = {
            "gateway": ("running", "waiting", "kept"),
            "tokenizer": ("ledger",),
            "scheduler": ("running", "waiting", "kept", "orphans", "in_flight"),
            "detokenizer": ("running", "kept"),
        }
        for stage, stats in self.stats().items():
            core = self.processes[stage].core
            if isinstance(core, EngineNode):
                core.check_empty()
                continue
            names = empty[stage.split("-")[0]]
            assert {n: stats[n] for n in names} == dict.fromkeys(names, 0), (stage, stats)

    def stats(self) -> dict[str, dict[str, float]]:
        return {
            stage: process.core.stats()  # type: ignore[attr-defined]
            for stage, process in self.processes.items()
        }
