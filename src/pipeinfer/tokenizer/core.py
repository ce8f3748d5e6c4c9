"""The tokenizer stage without its I/O: requests in, tokenized work out to the chosen group.

Keeps every unfinished request with the group that it went to, so that its end takes the same way
and a restarted scheduler can be told. Knows no transport, no clock and no model beyond its
vocabulary and its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec

from pipeinfer.beats import GIVE_UP
from pipeinfer.choices import choice_id, choice_ids, choice_seed
from pipeinfer.core import LOCAL, Send
from pipeinfer.events import Drain, Leave, Tick, Unsent
from pipeinfer.fair_queue import FairQueue
from pipeinfer.messages import (
    Abort,
    Accepted,
    Delivered,
    Done,
    Ended,
    GroupFault,
    GroupStatus,
    HandOver,
    Message,
    RankStatus,
    Recover,
    Recovered,
    Refused,
    ResetCache,
    State,
    Submit,
    Work,
)
from pipeinfer.packing import unpack
from pipeinfer.recovery import REPEAT, RollCall, answer, number
from pipeinfer.tokenizer.encoding import Encoding, LongPrompt, first_choice, without
from pipeinfer.tokenizer.events import Encode, Encoded, EncodeNext, Tried, Try
from pipeinfer.tokenizer.group_watch import GroupWatch
from pipeinfer.tokenizer.ledger import Entry, Ledger
from pipeinfer.tokenizer.prompts import Prompt, PromptEncoder, Rejected
from pipeinfer.tokenizer.routing import Report, Router
from pipeinfer.tokenizer.verdicts import Verdict, digest

DETOKENIZER = 0  # there is one so far; a request stays with the one that it was given
# Bytes of text up to which a prompt is encoded when it comes.
AT_ONCE = 1024
# Bytes up to which it is encoded here, when it is its client's turn. That takes 2 to 3 ms for most
# texts of this length and 8 ms for the worst (one-letter words). So long everything else waits.
HERE = 8 * 1024
GRAMMAR = "structured_outputs"  # the field that a grammar is refused by


class TokenizerCore:
    """Encodes requests and sends each to one scheduler.

    `watch`: over its groups. `eos_ids`: ids that end a request by themselves. `stage` and
    `incarnation`: of this process. `gateways`: stages that are asked at the start for the requests
    of the process before this one.
    """

    __transient__ = ("_encoder",)  # no part of a snapshot: made of the checkpoint alone

    def __init__(
        self,
        encoder: PromptEncoder,
        router: Router,
        watch: GroupWatch,
        eos_ids: tuple[int, ...],
        stage: str = "tokenizer-0",
        incarnation: int = 0,
        gateways: Sequence[str] = (),
    ) -> None:
        self._encoder = encoder
        self._router = router
        self._watch = watch
        self._eos_ids = eos_ids
        self._ledger = Ledger(watch.groups)
        self._encoding = Encoding()
        self._here: FairQueue[tuple[str, int]] = FairQueue()  # first choice and attempt
        self._roll_call = RollCall(stage, incarnation, gateways)
        self._draining = False
        self._left = False
        self._asked: dict[int, float] = {}  # when a group was asked to hand over what it has
        self._counts = dict.fromkeys(
            ("accepted", "encoded", "refused", "moved", "prompt_tokens"), 0
        )

    def handle(self, event: Message, now: float) -> list[Send]:
        """See Core. Raises TypeError for a message that is not a tokenizer's."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"the tokenizer takes no {type(event).__name__}")
        return handler(self, event, now)

    def state(self) -> tuple[State, str]:
        return ("draining" if self._draining or self._left else "ready", "")

    def stats(self) -> dict[str, float]:
        return {
            "abandoned_total": self._encoding.abandoned,
            **{f"{name}_total": count for name, count in self._counts.items()},
            "ledger": len(self._ledger),
            "encoding": len(self._encoding),
            "groups_up": self._router.up,
        }

    def idle(self) -> bool:
        return not len(self._encoding)

    def encoding(self, request_id: str, attempt: int) -> Submit | None:
        """For the driver: the request that it was told to encode, while somebody wants it."""
        waiting = self._encoding.get(request_id, attempt)
        if waiting is None or waiting.submit.choices == (0,):
            return None if waiting is None else waiting.submit
        return msgspec.structs.replace(waiting.submit, request_id=request_id, choices=(0,))

    def untried(self, request_id: str, attempt: int) -> Submit | None:
        """For the driver: the request whose grammar it was told to try, while it has no verdict and
        somebody wants one."""
        waiting = self._encoding.get(request_id, attempt)
        untried = waiting is not None and waiting.untried
        return self.encoding(request_id, attempt) if untried else None

    def _on_submit(self, event: Submit, _now: float) -> list[Send]:
        unknown = None if self._left else self._unknown(event)
        if unknown is None:
            return []  # the gateway tells the successor; a repeated one was passed on before
        event = unknown
        if self._draining:
            return self._refuse_all(event, 503, "the server is shutting down")
        # Until the gateways have told all, it may be one that was sent to a group nobody remembers.
        alone = self._roll_call.complete
        try:
            weight = self._encoder.weigh(event)
        except Rejected as error:
            return self._reject(event, error)
        prompt, verdict = self._judged(LongPrompt(event, alone))
        if verdict is None:
            self._encoding.put(prompt)
            return [_to_try(prompt)]
        if verdict.refusal:
            return self._refuse_all(event, 400, verdict.refusal, GRAMMAR)
        if weight > AT_ONCE:
            self._encoding.put(prompt)
            return self._in_turn(event, weight)
        return self._encode(prompt)

    def _judged(self, prompt: LongPrompt) -> tuple[LongPrompt, Verdict | None]:
        """`prompt` with the first of its grammars that is not refused, and what is known of that;
        None where it is to be tried."""
        submit = prompt.submit
        spec = None if submit.only_encode else submit.params.structured_outputs
        if spec is None:
            return prompt, Verdict()
        grammar = digest(spec)
        verdict = self._encoding.verdicts.get(grammar)
        if verdict is None:
            return replace(prompt, untried=grammar), None
        if verdict.refusal and submit.otherwise is not None:
            return self._judged(prompt.with_other_grammar(verdict.refusal))
        return prompt, verdict

    def _in_turn(self, event: Submit, weight: int) -> list[Send]:
        """Its prompt is encoded when it is its client's turn, here or in another process."""
        name = first_choice(event)
        if weight > HERE:
            return [Send(LOCAL, "", Encode(name, event.attempt, weight, event.client))]
        self._here.put(event.client, max(weight, 1), (name, event.attempt))
        return [Send(LOCAL, "", EncodeNext())]

    def _on_encode_next(self, _event: EncodeNext, _now: float) -> list[Send]:
        """One prompt that somebody wants still."""
        while len(self._here):
            name, attempt = self._here.take()
            waiting = self._encoding.get(name, attempt)
            if waiting is not None:
                self._encoding.encoded(name)
                return self._encode(waiting)
        return []

    def _encode(self, asked: LongPrompt) -> list[Send]:
        try:
            prompt = self._encoder.prompt(asked.submit)
        except Rejected as error:
            return self._reject(asked.submit, error)
        return self._pass_on(asked, prompt)

    def _reject(self, event: Submit, error: Rejected) -> list[Send]:
        return self._refuse_all(event, error.status, str(error), error.param, error.code)

    def _on_tried(self, event: Tried, _now: float) -> list[Send]:
        """The verdict holds for all that wait for one on this grammar."""
        if event.grammar and event.status in (0, 400):
            # Also where who asked for it has left, who may come again.
            self._encoding.verdicts.put(event.grammar, Verdict(event.message, event.slow))
            names = self._encoding.untried(event.grammar)
        else:
            names = [event.request_id] * (self.untried(event.request_id, event.attempt) is not None)
        out: list[Send] = []
        here = 0
        for name in names:
            waiting = self._encoding.tried(name)
            status, message = event.status, event.message
            if event.grammar and status == 400:
                waiting, verdict = self._judged(waiting)
                self._encoding.waits(name, waiting)
                if verdict is None:
                    out.append(_to_try(waiting))
                    continue
                status, message = (400, verdict.refusal) if verdict.refusal else (0, "")
            submit = waiting.submit
            weight = 0 if status else self._encoder.weigh(submit)  # which it has passed
            here += weight
            if weight > AT_ONCE or here > HERE:
                out += self._in_turn(submit, weight)
                continue
            self._encoding.encoded(name)
            if status:
                out += self._refuse_all(submit, status, message, GRAMMAR)
            else:
                out += self._encode(waiting)
        return out

    def _unknown(self, event: Submit) -> Submit | None:
        """`event` with the choices that are not known here yet; None if all are."""
        left: Submit | None = event
        for name in _names(event):
            known = self._ledger.knows(name, event.attempt)
            if left and (known or self._encoding.knows(name, event.attempt)):
                left = without(left, name)
        return left

    def _on_encoded(self, event: Encoded, _now: float) -> list[Send]:
        waiting = self._encoding.get(event.request_id, event.attempt)
        if waiting is None:
            return []  # it has ended meanwhile, or is the successor's
        self._encoding.encoded(event.request_id)
        if event.status:
            why = (event.status, event.message, event.param, event.code)
            return self._refuse_all(waiting.submit, *why)
        prompt = Prompt(unpack(event.prompt_ids), event.left, event.thoughts)
        return self._pass_on(waiting, prompt)

    def _refuse_all(
        self,
        event: Submit,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
    ) -> list[Send]:
        """Every choice of it."""
        each = [msgspec.structs.replace(event, request_id=name) for name in _names(event)]
        return [s for one in each for s in self._refuse(one, status, message, param, code)]

    def _refuse(
        self,
        event: Submit | Work,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
    ) -> list[Send]:
        self._counts["refused"] += 1
        refusal = Refused(
            request_id=event.request_id,
            attempt=event.attempt,
            gateway=event.gateway,
            status=status,
            message=message,
            param=param,
            code=code,
        )
        return [Send("text", f"gateway-{event.gateway}", refusal)]

    def _pass_on(self, asked: LongPrompt, prompt: Prompt) -> list[Send]:
        """To a group, all choices to one."""
        event, alone = asked.submit, asked.alone
        names, ids = _names(event), prompt.ids
        for name in names:
            self._encoding.forget(name)  # an attempt before this one
        self._counts["prompt_tokens"] += len(ids)
        if event.only_encode:
            self._counts["encoded"] += len(names)
            return [self._accepted(asked, prompt, -1)]
        routed = event.group in self._watch.groups
        request = (names[0], ids, event.params.max_tokens, event.cache_salt)
        group = (
            self._router.sent(event.group, *request) if routed else self._router.choose(*request)
        )
        for name in names[1:]:
            self._router.follows(name, group, event.params.max_tokens)
        self._counts["accepted"] += len(names)
        works = self._works(event, prompt)
        for work in works:
            self._ledger.put(Entry(work, group, routed or alone, alone))
        accepted = self._accepted(asked, prompt, group)
        return [accepted, *(Send("work", f"scheduler-{group}", work) for work in works)]

    def _accepted(self, asked: LongPrompt, prompt: Prompt, group: int) -> Send:
        event, ids = asked.submit, prompt.ids
        texted = event.return_prompt_text and event.text is None
        # What a template made of a chat: without special tokens its turns would run together.
        skip = event.params.skip_special_tokens and event.chat is None
        accepted = Accepted(
            request_id=event.request_id,
            attempt=event.attempt,
            group=group,
            prompt_tokens=len(ids),
            prompt_ids=ids.tobytes() if event.return_prompt_ids else b"",
            prompt_text=self._encoder.text(ids, skip) if texted else "",
            choices=event.choices,
            thoughts=prompt.left,
            refusal=asked.refusal,
            token_strs=self._encoder.token_strs(ids) if event.return_token_strs else (),
        )
        return Send("text", f"gateway-{event.gateway}", accepted)

    def _works(self, event: Submit, prompt: Prompt) -> list[Work]:
        """One for each choice. They share the bytes of their prompt here."""
        first = self._work(event, prompt)
        if event.choices == (0,):
            return [first]
        return [
            msgspec.structs.replace(
                first,
                request_id=choice_id(event.request_id, number),
                seed=choice_seed(event.seed, number),
                leader=event.request_id,
            )
            for number in event.choices
        ]

    def _work(self, event: Submit, prompt: Prompt) -> Work:
        spec = event.params.structured_outputs
        verdict = None if spec is None else self._encoding.verdicts.get(digest(spec))
        return Work(
            request_id=event.request_id,
            attempt=event.attempt,
            gateway=event.gateway,
            detokenizer=DETOKENIZER,
            prompt_ids=prompt.ids.tobytes(),
            params=event.params,
            seed=event.seed,
            eos_ids=() if event.params.ignore_eos else self._eos_ids,
            priority=event.priority,
            timeout=event.timeout,
            cache_salt=event.cache_salt,
            trace=event.trace,
            banned=self._encoder.banned(event.params),
            client=event.client,
            slow_grammar=verdict is not None and verdict.slow,
            thoughts=prompt.thoughts,
            token_offsets=event.token_offsets,
        )

    def _on_unsent(self, event: Unsent, _now: float) -> list[Send]:
        """A scheduler or the gateway cannot be told of it; the gateway's Done ends what was."""
        entry = self._ledger.get(event.request_id)
        if entry is None or entry.work.attempt != event.attempt:
            return []
        message = f"the request cannot be passed on: {event.reason}"
        return self._refuse(entry.work, 500, message, code="request_failed")

    # ---------------------------------------------------------------------------------- their end

    def _on_abort(self, event: Abort, _now: float) -> list[Send]:
        self._router.ended(event.request_id)
        self._encoding.forget(event.request_id)
        entry = self._ledger.get(event.request_id)
        if entry is not None and entry.work.attempt > event.attempt:  # it has moved meanwhile
            event = msgspec.structs.replace(event, attempt=entry.work.attempt)
        groups = self._ledger.forget(event.request_id)
        if groups is None:  # of a gateway that died, or one that only the last tokenizer knew
            groups = self._watch.groups
        return [Send("work", f"scheduler-{to}", event) for to in groups]

    def _on_done(self, event: Done, _now: float) -> list[Send]:
        ended: dict[int, list[str]] = {}
        for request_id in event.request_ids:
            self._router.ended(request_id)
            returned = self._encoding.returned(request_id)
            self._encoding.forget(request_id)
            groups = self._ledger.forget(request_id)
            if groups is None:
                # It was refused here; or, before the gateways have told all, it may run anywhere,
                # as may one that they told of.
                here = self._roll_call.complete and not returned
                groups = () if here else self._watch.groups
            for group in groups:
                ended.setdefault(group, []).append(request_id)
        return [Send("work", f"scheduler-{to}", Done(tuple(ids))) for to, ids in ended.items()]

    def _on_reset_cache(self, event: ResetCache, _now: float) -> list[Send]:
        """To every group. Work that is sent later comes behind it; what is still being encoded
        is later work."""
        event = msgspec.structs.replace(event, detokenizer=DETOKENIZER)
        return [Send("work", f"scheduler-{group}", event) for group in self._watch.groups]

    # ----------------------------------------------------------------------------------- recovery

    def _on_recover(self, event: Recover, now: float) -> list[Send]:
        group, gateway = number(event.stage, "scheduler"), number(event.stage, "gateway")
        if group is not None:
            works = self._ledger.of_group(group)
            known = (Send("work", event.stage, work) for work in works)
            return answer(self._roll_call.stage, event, known)
        out: list[Send] = []
        if gateway is None:
            return out
        self._encoding.forget_gateway(gateway)
        for work in self._ledger.of_gateway(gateway):
            gone = Abort(work.request_id, work.attempt, "its gateway was restarted")
            out += self._on_abort(gone, now)
        return out

    def _on_recovered(self, event: Recovered, _now: float) -> list[Send]:
        self._roll_call.hear(event)
        return []

    # ---------------------------------------------------------------------------- to another group

    def _take_over(self, now: float, deserted: Sequence[int]) -> list[Send]:
        """Asks groups without engines for their requests, while there is another to take them."""
        out: list[Send] = []
        for group in deserted if self._router.up else ():
            if self._is_due(group, now):
                for work in self._ledger.leaving(group):
                    asked = HandOver(work.request_id, work.attempt)
                    out.append(Send("work", f"scheduler-{group}", asked))
        return out

    def _leave_lost(self, now: float) -> list[Send]:
        """The same for groups that cannot be asked: gateways know what of it clients have. What
        nobody takes fails in the end."""
        out: list[Send] = []
        for group, seconds in self._watch.lost(now):
            over = seconds > GIVE_UP * self._watch.host_loss
            if not (over or self._router.up) or not self._is_due(group, now):
                continue
            for work in self._ledger.leaving(group):
                if over:
                    why = f"scheduler-{group} has not been heard for {seconds:.0f} s"
                    out += self._refuse(work, 503, why, code="host_lost")
                    continue
                asked = HandOver(work.request_id, work.attempt, self._roll_call.stage)
                out.append(Send("recovery", f"gateway-{work.gateway}", asked))
        return out

    def _is_due(self, group: int, now: float) -> bool:
        """Whether it is time to ask again for what the group has."""
        due = now >= self._asked.get(group, float("-inf")) + REPEAT
        if due:
            self._asked[group] = now
        return due

    def _on_delivered(self, event: Delivered, now: float) -> list[Send]:
        """A group has handed a request over, with its output so far; or a gateway has, as the next
        attempt, and what its group still does is in vain. One that has ended nobody takes, and all
        forget it."""
        if event.ended:
            gone = Abort(event.request_id, event.attempt, "nobody has taken its end")
            return self._on_abort(gone, now)
        entry = self._ledger.get(event.request_id)
        if entry is None or event.attempt < entry.work.attempt:
            return []  # it has ended meanwhile, which was told to all groups
        ids = unpack(entry.work.prompt_ids)
        work, left = entry.work, list[Send]()
        if event.attempt > work.attempt:
            gone = Abort(work.request_id, work.attempt, "another group goes on with it")
            groups = (entry.group,) if entry.alone else self._watch.groups
            left += [Send("work", f"scheduler-{group}", gone) for group in groups]
        request = (event.request_id, ids, work.params.max_tokens, work.cache_salt)
        beside = self._ledger.beside(entry)
        self._router.ended(event.request_id)
        group = (
            self._router.choose(*request) if beside is None else self._router.sent(beside, *request)
        )
        work = self._ledger.move(event.request_id, group, event.attempt)
        self._counts["moved"] += 1
        accepted = Accepted(
            request_id=event.request_id, attempt=event.attempt, group=group, prompt_tokens=len(ids)
        )
        return [
            *left,
            Send("recovery", f"scheduler-{group}", event),
            Send("work", f"scheduler-{group}", work),
            Send("text", f"gateway-{work.gateway}", accepted),
        ]

    # ------------------------------------------------------------------------------ time and stop

    def _on_group(self, event: GroupStatus, now: float) -> list[Send]:
        if not 0 <= event.group < len(self._watch.groups):
            return []
        return self._report(event.group, self._watch.hear(event, now), now)

    def _on_ended(self, event: Ended, now: float) -> list[Send]:
        group, report = self._watch.ended(event)
        return self._report(group, report, now)

    def _report(self, group: int, report: Report | None, now: float) -> list[Send]:
        if report is None:
            return []
        before = self._router.up
        self._router.report(group, report)
        if not before:
            return self._take_over(now, self._watch.deserted())
        # One group: what is said of one may not cost more the more of them there are.
        return self._take_over(now, [group] * self._watch.is_deserted(group))

    def _on_tick(self, _event: Tick, now: float) -> list[Send]:
        self._watch.tick(now)
        for group, report in self._watch.silent(now):
            self._router.report(group, report)
        moved = [*self._take_over(now, self._watch.deserted()), *self._leave_lost(now)]
        return [*self._roll_call.ask(now), *moved]

    def _on_drain(self, _event: Drain, _now: float) -> list[Send]:
        self._draining = True
        return []

    def _on_leave(self, _event: Leave, _now: float) -> list[Send]:
        self._left = True
        self._encoding.clear()  # the gateways tell the successor of all that is unfinished
        return []

    def _ignore(self, _event: Message, _now: float) -> list[Send]:
        return []

    _handlers: ClassVar[dict[type[Message], Callable[..., list[Send]]]] = {
        Submit: _on_submit,
        Encoded: _on_encoded,
        EncodeNext: _on_encode_next,
        Tried: _on_tried,
        Abort: _on_abort,
        Done: _on_done,
        ResetCache: _on_reset_cache,
        Recover: _on_recover,
        Recovered: _on_recovered,
        Delivered: _on_delivered,
        GroupStatus: _on_group,
        Ended: _on_ended,
        GroupFault: _ignore,  # and RankStatus: others are meant
        RankStatus: _ignore,
        Tick: _on_tick,
        Drain: _on_drain,
        Leave: _on_leave,
        Unsent: _on_unsent,
    }


def _to_try(prompt: LongPrompt) -> Send:
    """To the driver: its grammar."""
    submit = prompt.submit
    return Send(LOCAL, "", Try(first_choice(submit), submit.attempt, submit.client))


def _names(event: Submit) -> list[str]:
    """The ids of its choices."""
    return choice_ids(event.request_id, event.choices)
