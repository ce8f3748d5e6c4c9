"""What happens to all cores, from a seed: requests, deaths, hand-overs, doubts; and what must hold.

`python tests/pipeline/stories.py --seeds 1000` tells how many stories reached each kind of event.
Beside the texts at the end, every scheduler is watched while the story goes on: see Watch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import msgspec  # noqa: E402
from simulated import HOST_LOSS, Simulation, host_of  # noqa: E402
from simulated_engine import PAGE_SIZE, POISON, EngineNode  # noqa: E402
from simulated_grammars import DEAD, HUGE, WRONG, spec_of  # noqa: E402

from pipeinfer.core import Send  # noqa: E402
from pipeinfer.grammars.bounds import GRAMMAR_ERROR  # noqa: E402
from pipeinfer.messages import (  # noqa: E402
    Abort,
    Digests,
    Done,
    GroupFault,
    HandOver,
    Message,
    Plan,
    Result,
    StopHit,
    TokenizedRequest,
    Tokens,
)
from pipeinfer.wire import unpack  # noqa: E402

# What every story may come to; none may be missing among many of them.
EVENTS = (
    "death", "several deaths", "hand-over of a stage", "hand-over of a request", "deferral",
    "preemption", "preemption in flight", "deadline", "stop string", "digest mismatch",
    "crash by a request", "hang-up", "follow-up", "log-probs", "log-probs of a prompt", "choices",
    "held", "grammar", "grammar refused", "grammar that engines cannot have",
    "grammar that a new engine cannot have", "grammar without an end", "preparing",
    "death amid compiling", "end amid compiling", "preemption with a grammar", "jump",
    "token that was forced before", "loss of a host", "hand-over by the gateway",
    "late word of a lost host", "loss of a host with the detokenizer",
)  # fmt: skip
GATEWAY, TOKENIZER, DETOKENIZER = "gateway-0", "tokenizer-0", "detokenizer-0"
STEPS = 60  # of a story
MOST = 25  # tokens of an answer
# Grammars of whoever comes, with their lengths; most have none.
KINDS = [("w", 4), ("w", 20), ("w", 20), ("dead", 1), ("dead", 4), ("huge", 4), ("wrong", 4)]
KINDS += [("odd", 24)] * 4
LOGPROBS = (None, None), (2, None), (None, 1), (None, None), (0, 3)  # log-probs, of whoever comes


class Watch:
    """One life of a scheduler, by what it hears and says. Counts events into `seen`.

    - No token that was sampled for a request that goes on is thrown away.
    - When a tick has told it the time, nobody whose timeout is over gets another token.
    """

    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen
        self._flying: deque[tuple[int, int, dict[int, str]]] = deque()  # epoch, number, by slot
        self._slots: dict[int, str] = {}  # who has it
        self._released: dict[str, bool] = {}  # in this epoch; whether rows of it were in flight
        self._prompts: dict[str, int] = {}  # tokens, of whoever was admitted
        self._told: dict[str, int] = {}  # output tokens
        self._epoch = -1
        self._due: dict[str, float] = {}
        self._ticked = 0.0

    def heard(self, event: Message, sends: list[Send], now: float, flying: float) -> None:
        """An event, and what the scheduler made of it; it has so many plans in flight now."""
        name = type(event).__name__
        said = [row for s in sends if isinstance(s.message, Tokens) for row in s.message.rows]
        self._end([row.request_id for row in said if row.finish is not None])
        self._told |= {row.request_id: row.offset + len(row.ids) // 4 for row in said}
        match event:
            case TokenizedRequest():
                self._end([event.request_id])  # if it is there, it starts over
                if event.timeout:
                    self._due[event.request_id] = now + event.timeout
            case HandOver():
                self._seen["hand-over of a request"] += 1
            case StopHit() | Abort():
                self._seen["stop string"] += isinstance(event, StopHit)
                self._end([event.request_id])
            case Done():
                self._end(list(event.request_ids))
            case Result():
                self._result(event)
            case _ if name == "Tick":
                self._ticked = now
        self._seen["deadline"] += sum(row.finish == "abort" for row in said)
        for row in said:
            due = self._due.get(row.request_id, float("inf"))
            assert row.finish == "abort" or not row.ids or due > self._ticked, (
                f"{row.request_id} goes on at {now}, its time was over at {due}"
            )
        for send in sends:
            if isinstance(send.message, Plan):
                self._plan(send.message)
            if isinstance(send.message, GroupFault):
                self._seen["digest mismatch"] += "differ in their memory" in send.message.reason
        if not flying:  # lost, if there are any left: what comes of them is not heard any more
            self._flying.clear()

    def _end(self, names: list[str]) -> None:
        """Nobody waits for what is in flight of them."""
        for name in names:
            self._due.pop(name, None)
        for _, _, rows in self._flying:
            for slot in [slot for slot, name in rows.items() if name in names]:
                del rows[slot]

    def _plan(self, plan: Plan) -> None:
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            self._flying.clear()
            self._slots.clear()
            self._released.clear()
        for release in plan.releases:
            name = self._slots.pop(release.slot)
            self._released[name] = any(name in rows.values() for _, _, rows in self._flying)
        for admit in plan.admits:
            self._slots[admit.slot] = name = admit.request_id
            self._prompts[name] = admit.prompt_len
            self._told[name] = len(admit.token_ids) // 4 - admit.prompt_len
            if admit.request_id in self._released:
                self._seen["preemption"] += 1
                grammar = admit.params.structured_outputs is not None
                self._seen["preemption with a grammar"] += grammar
                self._seen["preemption in flight"] += self._released.pop(admit.request_id)
        self._seen["jump"] += bool(plan.appends)
        rows = {slot: self._slots[slot] for slot in unpack(plan.slots).tolist()}
        self._flying.append((plan.epoch, plan.number, rows))

    def _result(self, result: Result) -> None:
        if not self._flying or self._flying[0][:2] != (result.epoch, result.number):
            return
        _, _, rows = self._flying.popleft()
        self._seen["deferral"] += bool(result.deferred)
        ends, produced = unpack(result.starts) + unpack(result.counts), unpack(result.produced)
        for slot, end, many in zip(*map(list, (unpack(result.slots), ends, produced)), strict=True):
            name = rows.get(slot)
            if not many or name is None:
                continue
            told = self._prompts[name] + self._told[name]
            assert told >= end + many, f"{name} has {told} tokens, and {many} behind {end} are lost"
            self._seen["token that was forced before"] += told > end + many


class Story(Simulation):
    """A simulation of whose schedulers each is watched; `seen` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._watches: dict[tuple[str, int], Watch] = {}
        self._preparing: Counter[tuple[str, int]] = Counter()
        self._lying = False
        random = Random(seed)
        groups, tp = random.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
        super().__init__(
            random, random.choice(["mixed", "throughput", "prefill-first", "decode-first"]),
            random.choice([1, 2, 2, 4]), groups, pages=random.choice([12, 14, 16, 20, 60]), tp=tp,
        )  # fmt: skip

    def heard(self, stage: str, event: Message, sends: list[Send]) -> None:
        if stage == GATEWAY:
            self.seen["hand-over by the gateway"] += isinstance(event, HandOver) and bool(sends)
        if stage.startswith("scheduler"):
            life = stage, self.processes[stage].incarnation
            stats = self.processes[stage].core.stats()  # type: ignore[attr-defined]
            watch = self._watches.setdefault(life, Watch(self.seen))
            watch.heard(event, sends, self.now, stats["in_flight"])
            self.seen["held"] += stats["held"] > 0
            self.seen["preparing"] += stats["preparing"] > 0
            gone = isinstance(event, Abort | Done) and self._preparing[life] > stats["preparing"]
            self.seen["end amid compiling"] += gone
            self._preparing[life] = stats["preparing"]
        for at, send in enumerate(sends):
            if self._lying and isinstance(send.message, Digests):
                wrong = bytes(255 - byte for byte in send.message.values)
                message = msgspec.structs.replace(send.message, values=wrong)
                sends[at], self._lying = send._replace(message=message), False

    def tell(self) -> Counter[str]:
        """The whole story, to its end."""
        happenings = (
            [self._submit] * 6 + [self._deliver] * 8 + [self._time_passes] * 2 + [self._die]
            + [self._leave, self._hang_up, self._follow_up, self._doubt, self.start_all]
            + [self._cut, self._join]
        )  # fmt: skip
        for _ in range(STEPS):
            self.random.choice(happenings)()
        self._outlive_cut()
        for _ in range(2):  # ranks that a late word condemned are complained of after five seconds
            self.run()
        self.check()
        self._count_ends()
        self.tick(61.0)  # what was delivered of requests that nobody asks for
        self.run()
        self.check_ledgers()
        return self.seen

    def kill(self, *stages: str, down: bool = False) -> None:
        """See Simulation."""
        for stage in stages:
            life = self.processes.get(stage)
            if life is not None and isinstance(life.core, EngineNode):
                self.seen["death amid compiling"] += bool(life.later)
        super().kill(*stages, down=down)

    def _count_ends(self) -> None:
        """Of requests that failed by their grammars."""
        for client in self.clients.values():
            message = client.failed.message if client.failed is not None else ""
            self.seen["grammar refused"] += message == WRONG
            self.seen["grammar without an end"] += message == GRAMMAR_ERROR + DEAD
            which = "a new engine" if client.ids else "engines"
            self.seen[f"grammar that {which} cannot have"] += message == GRAMMAR_ERROR + HUGE

    # ------------------------------------------------------------------------------- what happens

    def _submit(self) -> None:
        salt = self.random.choice([0, 1, self.random.randrange(40)])  # many share their beginning
        length = self.random.randint(1, 20)
        prompt = [(salt + i) % POISON for i in range(length)]
        if self.random.random() < 0.01:
            prompt[0] = POISON
            self.seen["crash by a request"] += 1
        self._ask(prompt)

    def _follow_up(self) -> None:
        """What somebody was told, and a little more: found in the prefix cache where it fits."""
        told = [[*c.prompt, *unpack(c.ids).tolist()] for c in self.clients.values() if c.finish]
        fitting = [ids for ids in told if len(ids) + MOST < self.pages * PAGE_SIZE]
        if fitting:
            self._ask([*self.random.choice(fitting), self.random.randrange(POISON)])
            self.seen["follow-up"] += 1

    def _ask(self, prompt: list[int]) -> None:
        most = self.random.randint(1, MOST)
        stop = self.random.choice([(), (), ("a",), ("th", "é")])
        timeout = self.random.choice([0.0, 0.0, 0.0, 0.4, 2.0])
        least = self.random.choice([0, 0, min(3, most)])
        of_output, of_prompt = LOGPROBS[len(self.clients) % len(LOGPROBS)]
        self.seen["log-probs"] += of_output is not None
        self.seen["log-probs of a prompt"] += of_prompt is not None
        many = self.random.choice([1, 1, 1, 1, 1, 1, 2, 3, 5])
        self.seen["choices"] += many > 1
        seed = None if many == 1 else self.random.randrange(100)
        spec = None
        if prompt[0] != POISON and self.random.random() < 0.4:
            spec = spec_of(*self.random.choice(KINDS))
            self.seen["grammar"] += 1
            least = 0
        self.submit(
            prompt, timeout, max_tokens=most, min_tokens=least, stop=stop, logprobs=of_output,
            prompt_logprobs=of_prompt, n=many, seed=seed, structured_outputs=spec,
        )  # fmt: skip

    def _deliver(self) -> None:
        for _ in range(self.random.randint(1, 50)):
            self.deliver()

    def _time_passes(self) -> None:
        self.tick(self.random.choice([0.01, 0.5, 1.1]))

    def _die(self) -> None:
        some = self.random.sample(self.stages[1:], self.random.choice([1, 1, 1, 2, 3]))
        self.kill(*some, down=self.random.random() < 0.3)
        self.seen["death"] += 1
        self.seen["several deaths"] += len(some) > 1

    def _leave(self) -> None:
        self.leave(self.random.choice(self.stages[1:]))
        self.seen["hand-over of a stage"] += 1

    def _hang_up(self) -> None:
        if self.clients:
            self.hang_up(self.random.choice(sorted(self.clients)))
            self.seen["hang-up"] += 1

    def _cut(self) -> None:
        """A host is lost, or the way to it. Others than its group may have run there, too."""
        if self.groups > 1 and not self.cut:
            self.cut = f"group-{self.random.randrange(self.groups)}"
            with_it = self.random.sample([TOKENIZER, DETOKENIZER], self.random.choice([0, 1, 2]))
            self.kill(*with_it)  # and are started elsewhere
            self.seen["loss of a host"] += 1
            self.seen["loss of a host with the detokenizer"] += DETOKENIZER in with_it

    def _join(self) -> None:
        """It is back, soon or after everybody has gone on without it."""
        if self.cut and self.random.random() < 0.5:
            self._outlive_cut()
        self.cut = ""

    def _outlive_cut(self) -> None:
        """All requests end without the host that is lost. Its late words change nothing."""
        if not self.cut:
            return
        for _ in range(int(HOST_LOSS) + 10):
            self.start_all()
            while self.deliver():
                pass
            self.tick(1.0)
        self.check()
        late = [
            link for link, queue in self.links.items() if queue and host_of(link[0]) == self.cut
        ]
        self.seen["late word of a lost host"] += len(late)
        self.cut = ""

    def _doubt(self) -> None:
        """A rank's memory decides otherwise, as the next digests will say."""
        self._lying = self.tp > 1


def reached(seeds: Iterable[int]) -> dict[str, int]:
    """In how many of the stories each event happened."""
    found: Counter[str] = Counter()
    for seed in seeds:
        found.update(name for name, count in Story(seed).tell().items() if count)
    return {name: found[name] for name in EVENTS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    first = options.first
    print(json.dumps({"stories": options.seeds} | reached(range(first, first + options.seeds))))
