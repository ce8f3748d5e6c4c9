"""The tokenizer without its I/O: requests in, token ids out to the chosen data-parallel group.

Every unfinished request is kept with the group that it was sent to, so that aborts follow it and a
restarted scheduler gets it again (routing.py). Short prompts are encoded here, long ones and
grammars by worker processes (workers.py), to which the local events below go. Knows no transport
and no clock; of the model only its vocabulary and its context length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec

from pipeinfer.core import (
    GIVE_UP_FACTOR,
    LATE_WORK_SECONDS,
    LOCAL,
    RECOVER_RETRY_SECONDS,
    Drain,
    FairQueue,
    Leave,
    RollCall,
    Send,
    SendFailed,
    Tick,
    bracketed_answer,
    stage_id,
    stage_number,
)
from pipeinfer.messages import (
    Abort,
    Accepted,
    AdapterChanges,
    Adopt,
    Delivered,
    Done,
    Ended,
    GroupFault,
    GroupStatus,
    HandOver,
    Message,
    RankStatus,
    Reattached,
    Recover,
    Recovered,
    Refused,
    ResetCache,
    SetSleep,
    State,
    Submit,
    TokenizedRequest,
)
from pipeinfer.params import ReasoningContext, ReasoningState, choice_id, choice_ids, choice_seed
from pipeinfer.tokenizer.prompts import PromptEncoder, Rejected, TokenizedPrompt
from pipeinfer.tokenizer.routing import (
    GroupMonitor,
    GroupReport,
    GroupRouter,
    Origin,
    PendingPrompt,
    PendingPrompts,
    RoutedRequest,
    RoutedRequests,
    Verdict,
    first_choice,
    grammar_digest,
    with_origin,
    without_choice,
)
from pipeinfer.wire import unpack

# Bytes of text up to which a prompt is encoded on arrival.
ENCODE_AT_ONCE_BYTES = 1024
# Bytes up to which a prompt is encoded in this process, in its client's turn. That takes 2 to 3 ms
# for most texts of this length and 8 ms for the worst (one-letter words), in which all else waits.
ENCODE_HERE_BYTES = 8 * 1024
GRAMMAR_PARAM = "structured_outputs"  # the parameter that a refusal of a grammar names


class Encode(Message, frozen=True):
    """core -> driver: encode the prompt of this request (TokenizerCore.submit_to_encode).

    weight: about how many bytes there are to render and to encode.
    client: as in Submit.
    """

    request_id: str
    attempt: int
    weight: int
    client: str = ""


class Encoded(Message, frozen=True):
    """driver -> core: the ids of a prompt, or why the prompt is refused.

    Attributes:
    - prompt_ids: int32 bytes
    - status, message, param, code: of the refusal; status 0: none
    - reasoning_state, reasoning: of the TokenizedPrompt
    """

    request_id: str
    attempt: int
    prompt_ids: bytes = b""
    status: int = 0
    message: str = ""
    param: str | None = None
    code: str | None = None
    reasoning_state: ReasoningState = "before"
    reasoning: ReasoningContext | None = None


class EncodeNext(Message, frozen=True):
    """core -> driver and back: encode one of the short prompts that wait in the core. The driver
    gives one back in each turn of its loop, so that other messages come in between."""


class ValidateGrammar(Message, frozen=True):
    """core -> driver: validate the grammar of this request (TokenizerCore.submit_to_validate).

    client: as in Submit.
    """

    request_id: str
    attempt: int
    client: str = ""


class GrammarVerdict(Message, frozen=True):
    """driver -> core: the verdict on a grammar.

    Attributes:
    - status, message: why it is not served; status 0: it is served
    - grammar: digest of the grammar; empty if the verdict holds for this request only
    - slow: it took so long to compile that other grammars must not wait for it
    """

    request_id: str
    attempt: int
    status: int = 0
    message: str = ""
    grammar: bytes = b""
    slow: bool = False


class TokenizerCore:
    """Encodes requests and sends each to one scheduler. See core.Core.

    Arguments:
    - encoder: prompts to token ids
    - router: chooses the group
    - monitor: which groups are up
    - eos_ids: ids that end a request by themselves
    - stage, incarnation: of this process
    - gateways: stages that are asked at the start for the requests of the process before this one
    """

    __transient__ = ("_encoder",)  # no part of a snapshot: made of the checkpoint alone

    def __init__(
        self,
        encoder: PromptEncoder,
        router: GroupRouter,
        monitor: GroupMonitor,
        eos_ids: tuple[int, ...],
        stage: str = "tokenizer-0",
        incarnation: int = 0,
        gateways: Sequence[str] = (),
    ) -> None:
        self._encoder = encoder
        self._router = router
        self._monitor = monitor
        self._eos_ids = eos_ids
        self._routed = RoutedRequests(monitor.groups)
        self._pending = PendingPrompts()
        self._short_prompts: FairQueue[tuple[str, int]] = FairQueue()  # first choice and attempt
        self._roll_call = RollCall(stage, incarnation, gateways)
        self._adapters = AdapterChanges()  # for gateways that are started again
        self._drains_since: float | None = None
        self._has_left = False
        # By group: when it was asked last to hand over its requests, in seconds.
        self._hand_over_asked_at: dict[int, float] = {}
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
        return ("draining" if self._drains_since is not None or self._has_left else "ready", "")

    def stats(self) -> dict[str, float]:
        return {
            "abandoned_total": self._pending.abandoned,
            **{f"{name}_total": count for name, count in self._counts.items()},
            "ledger": len(self._routed),
            "encoding": len(self._pending),
            "groups_up": self._router.up,
        }

    def idle(self) -> bool:
        return not len(self._pending)

    def submit_to_encode(self, request_id: str, attempt: int) -> Submit | None:
        """For the driver: the request of an Encode; None if the request has ended."""
        pending = self._pending.get(request_id, attempt)
        if pending is None or pending.submit.choices == (0,):
            return None if pending is None else pending.submit
        return msgspec.structs.replace(pending.submit, request_id=request_id, choices=(0,))

    def submit_to_validate(self, request_id: str, attempt: int) -> Submit | None:
        """For the driver: the request of a ValidateGrammar; None if its grammar has a verdict by
        now, or if the request has ended."""
        pending = self._pending.get(request_id, attempt)
        without_verdict = pending is not None and pending.grammar_to_validate
        return self.submit_to_encode(request_id, attempt) if without_verdict else None

    def _on_submit(self, event: Submit, now: float) -> list[Send]:
        unknown = None if self._has_left else self._without_known(event)
        if unknown is None:
            return []  # the successor gets it from the gateway; a repeated one was passed on before
        event = unknown
        if self._drains_since is not None and now >= self._drains_since + LATE_WORK_SECONDS:
            return self._refuse_all(event, 503, "the server is shutting down")
        # Before all gateways have answered the roll call, the process before this one may have sent
        # the request to any group.
        in_one_group = self._roll_call.complete
        try:
            weight = self._encoder.weigh(event)
        except Rejected as error:
            return self._reject(event, error)
        pending, verdict = self._with_verdict(PendingPrompt(event, in_one_group))
        if verdict is None:
            self._pending.put(pending)
            return [_validate(pending)]
        if verdict.refusal:
            return self._refuse_all(event, 400, verdict.refusal, GRAMMAR_PARAM)
        if weight > ENCODE_AT_ONCE_BYTES:
            self._pending.put(pending)
            return self._enqueue(event, weight)
        return self._encode(pending)

    def _with_verdict(self, pending: PendingPrompt) -> tuple[PendingPrompt, Verdict | None]:
        """`pending` with the first of its grammars that is not refused, and the verdict on that
        one; None if the grammar must be validated first."""
        submit = pending.submit
        spec = None if submit.only_encode else submit.params.structured_outputs
        if spec is None:
            return pending, Verdict()
        grammar = grammar_digest(spec)
        verdict = self._pending.verdicts.get(grammar)
        if verdict is None:
            return replace(pending, grammar_to_validate=grammar), None
        if verdict.refusal and submit.fallback_grammar is not None:
            return self._with_verdict(pending.with_fallback_grammar(verdict.refusal))
        return pending, verdict

    def _enqueue(self, event: Submit, weight: int) -> list[Send]:
        """Has the prompt encoded in its client's turn, here or by a worker process."""
        name = first_choice(event)
        if weight > ENCODE_HERE_BYTES:
            return [Send(LOCAL, "", Encode(name, event.attempt, weight, event.client))]
        self._short_prompts.put(event.client, max(weight, 1), (name, event.attempt))
        return [Send(LOCAL, "", EncodeNext())]

    def _on_encode_next(self, _event: EncodeNext, _now: float) -> list[Send]:
        """Encodes the next prompt whose request has not ended."""
        while len(self._short_prompts):
            name, attempt = self._short_prompts.take()
            pending = self._pending.get(name, attempt)
            if pending is not None:
                self._pending.pop(name)
                return self._encode(pending)
        return []

    def _encode(self, pending: PendingPrompt) -> list[Send]:
        try:
            prompt = self._encoder.prompt(pending.submit)
        except Rejected as error:
            return self._reject(pending.submit, error)
        return self._route(pending, prompt)

    def _reject(self, event: Submit, error: Rejected) -> list[Send]:
        return self._refuse_all(event, error.status, str(error), error.param, error.code)

    def _on_grammar_verdict(self, event: GrammarVerdict, _now: float) -> list[Send]:
        """Goes on with all requests that wait for a verdict on this grammar."""
        if event.grammar and event.status in (0, 400):
            # Also if the client has left meanwhile: the same grammar may come again.
            self._pending.verdicts.put(event.grammar, Verdict(event.message, event.slow))
            names = self._pending.waiting_for_verdict(event.grammar)
        else:
            names = [event.request_id] * (
                self.submit_to_validate(event.request_id, event.attempt) is not None
            )
        out: list[Send] = []
        here = 0
        for name in names:
            pending = self._pending.end_validation(name)
            status, message = event.status, event.message
            if event.grammar and status == 400:
                pending, verdict = self._with_verdict(pending)
                self._pending.replace(name, pending)
                if verdict is None:
                    out.append(_validate(pending))
                    continue
                status, message = (400, verdict.refusal) if verdict.refusal else (0, "")
            submit = pending.submit
            weight = 0 if status else self._encoder.weigh(submit)  # which it has passed
            here += weight
            if weight > ENCODE_AT_ONCE_BYTES or here > ENCODE_HERE_BYTES:
                out += self._enqueue(submit, weight)
                continue
            self._pending.pop(name)
            if status:
                out += self._refuse_all(submit, status, message, GRAMMAR_PARAM)
            else:
                out += self._encode(pending)
        return out

    def _without_known(self, event: Submit) -> Submit | None:
        """`event` with the choices that have not come before; None if all have."""
        unknown: Submit | None = event
        for name in _choice_names(event):
            known = self._routed.has(name, event.attempt)
            if unknown and (known or self._pending.has(name, event.attempt)):
                unknown = without_choice(unknown, name)
        return unknown

    def _on_encoded(self, event: Encoded, _now: float) -> list[Send]:
        pending = self._pending.get(event.request_id, event.attempt)
        if pending is None:
            return []  # it has ended meanwhile, or is the successor's
        self._pending.pop(event.request_id)
        if event.status:
            why = (event.status, event.message, event.param, event.code)
            return self._refuse_all(pending.submit, *why)
        prompt = TokenizedPrompt(unpack(event.prompt_ids), event.reasoning_state, event.reasoning)
        return self._route(pending, prompt)

    def _refuse_all(
        self,
        event: Submit,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
    ) -> list[Send]:
        """Refuses every choice of the request."""
        each = [msgspec.structs.replace(event, request_id=name) for name in _choice_names(event)]
        return [s for one in each for s in self._refuse(one, status, message, param, code)]

    def _refuse(
        self,
        event: Submit | TokenizedRequest,
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
        return [Send("text", stage_id("gateway", event.gateway), refusal)]

    def _route(self, pending: PendingPrompt, prompt: TokenizedPrompt) -> list[Send]:
        """Chooses a group and sends all choices there."""
        event, in_one_group = pending.submit, pending.in_one_group
        names, ids = _choice_names(event), prompt.ids
        for name in names:
            self._pending.discard(name)  # an attempt before this one
        self._counts["prompt_tokens"] += len(ids)
        if event.only_encode:
            self._counts["encoded"] += len(names)
            accepted = self._accepted(pending, prompt, -1)
            return [Send("text", stage_id("gateway", event.gateway), accepted)]
        routed = event.group in self._monitor.groups
        request = (names[0], ids, event.params.max_tokens, event.cache_salt)
        group = (
            self._router.record_sent(event.group, *request)
            if routed
            else self._router.choose(*request)
        )
        for name in names[1:]:
            self._router.add_follower(name, group, event.params.max_tokens)
        self._counts["accepted"] += len(names)
        works = self._works(event, prompt)
        accepted = self._accepted(pending, prompt, group)
        origin = None if event.retention is None else Origin(event, accepted)
        if origin is not None:
            works = with_origin(works, origin, self._roll_call.stage)
        for work in works:
            certain = routed or in_one_group
            self._routed.put(RoutedRequest(work, group, certain, in_one_group, origin))
        return [
            Send("text", stage_id("gateway", event.gateway), accepted),
            *(Send("work", stage_id("scheduler", group), work) for work in works),
        ]

    def _accepted(self, pending: PendingPrompt, prompt: TokenizedPrompt, group: int) -> Accepted:
        event, ids = pending.submit, prompt.ids
        with_text = event.return_prompt_text and event.text is None
        # Without special tokens the turns of a rendered chat would run together.
        skip_special_tokens = event.params.skip_special_tokens and event.chat is None
        return Accepted(
            request_id=event.request_id,
            attempt=event.attempt,
            group=group,
            prompt_tokens=len(ids),
            prompt_ids=ids.tobytes() if event.return_prompt_ids else b"",
            prompt_text=self._encoder.text(ids, skip_special_tokens) if with_text else "",
            choices=event.choices,
            reasoning=prompt.reasoning_state,
            refusal=pending.refusal,
            token_strs=self._encoder.token_strs(ids) if event.return_token_strs else (),
        )

    def _works(self, event: Submit, prompt: TokenizedPrompt) -> list[TokenizedRequest]:
        """A TokenizedRequest for each choice; all share the bytes of the prompt."""
        first = self._work(event, prompt)
        if event.choices == (0,):
            return [first]
        return [
            msgspec.structs.replace(
                first,
                request_id=choice_id(event.request_id, number),
                seed=choice_seed(event.seed, number),
                sampling_group=event.request_id,
            )
            for number in event.choices
        ]

    def _work(self, event: Submit, prompt: TokenizedPrompt) -> TokenizedRequest:
        spec = event.params.structured_outputs
        verdict = None if spec is None else self._pending.verdicts.get(grammar_digest(spec))
        return TokenizedRequest(
            request_id=event.request_id,
            attempt=event.attempt,
            gateway=event.gateway,
            detokenizer=event.detokenizer,
            prompt_ids=prompt.ids.tobytes(),
            params=event.params,
            seed=event.seed,
            eos_ids=() if event.params.ignore_eos else self._eos_ids,
            priority=event.priority,
            timeout=event.timeout,
            cache_salt=event.cache_salt,
            trace=event.trace,
            bad_word_ids=self._encoder.bad_word_ids(event.params),
            client=event.client,
            slow_grammar=verdict is not None and verdict.slow,
            reasoning=prompt.reasoning,
            token_offsets=event.token_offsets,
            adapter=event.adapter,
            retention=None
            if event.retention is None
            else msgspec.structs.replace(event.retention, format=b""),
        )

    def _on_send_failed(self, event: SendFailed, _now: float) -> list[Send]:
        """A message about a request could not be sent: the request is refused. The gateway's
        Done ends what has been sent of it."""
        entry = self._routed.get(event.request_id)
        if entry is None or entry.work.attempt != event.attempt:
            return []
        message = f"the request cannot be passed on: {event.reason}"
        return self._refuse(entry.work, 500, message, code="request_failed")

    # ---------------------------------------------------------------------------------- their end

    def _on_abort(self, event: Abort, _now: float) -> list[Send]:
        self._router.on_ended(event.request_id)
        self._pending.discard(event.request_id)
        entry = self._routed.get(event.request_id)
        if entry is not None and entry.work.attempt > event.attempt:  # it has moved meanwhile
            event = msgspec.structs.replace(event, attempt=entry.work.attempt)
        groups = self._routed.remove(event.request_id)
        if groups is None:
            # Its prompt is being encoded, its gateway died, or only the last tokenizer knew it.
            groups = self._monitor.groups
        return [Send("work", stage_id("scheduler", to), event) for to in groups]

    def _on_done(self, event: Done, _now: float) -> list[Send]:
        ended: dict[int, list[str]] = {}
        for request_id in event.request_ids:
            self._router.on_ended(request_id)
            returned = self._pending.may_be_elsewhere(request_id)
            self._pending.discard(request_id)
            groups = self._routed.remove(request_id)
            if groups is None:
                # The request was refused here. Before all gateways have answered the roll call, it
                # may run in any group, as may a request that a gateway has sent again.
                here = self._roll_call.complete and not returned
                groups = () if here else self._monitor.groups
            for group in groups:
                ended.setdefault(group, []).append(request_id)
        return [
            Send("work", stage_id("scheduler", to), Done(tuple(ids))) for to, ids in ended.items()
        ]

    def _on_reset_cache(self, event: ResetCache, _now: float) -> list[Send]:
        """Sends the reset to every group. Work that is sent later comes behind it; prompts that are
        still being encoded are later work."""
        return [Send("work", stage_id("scheduler", group), event) for group in self._monitor.groups]

    def _on_set_sleep(self, event: SetSleep, _now: float) -> list[Send]:
        return [Send("work", stage_id("scheduler", group), event) for group in self._monitor.groups]

    # ----------------------------------------------------------------------------------- recovery

    def _on_recover(self, event: Recover, now: float) -> list[Send]:
        group, gateway = (
            stage_number(event.stage, "scheduler"),
            stage_number(event.stage, "gateway"),
        )
        if group is not None:
            works = self._routed.of_group(group)
            sends = (Send("work", event.stage, work) for work in works)
            return bracketed_answer(self._roll_call.stage, event, sends)
        out: list[Send] = []
        if gateway is None:
            return out
        if not event.again:  # later requests are the new gateway's own
            self._pending.discard_unretained(gateway)
            for work in self._routed.of_gateway(gateway):
                if work.retention is None:
                    abort = Abort(work.request_id, work.attempt, "its gateway was restarted")
                    out += self._on_abort(abort, now)
        stage = self._roll_call.stage
        known: list[Message] = [self._adapters] * (self._adapters != AdapterChanges())
        known += [Adopt(stage=stage, submit=submit) for submit in self._pending.retained(gateway)]
        known += [
            Adopt(
                stage=stage,
                submit=origin.submit,
                accepted=origin.accepted,
                waited=origin.waited,
            )
            for origin in self._routed.retained(gateway, now)
        ]
        sends = (Send("recovery", event.stage, one) for one in known)
        return [*out, *bracketed_answer(stage, event, sends)]

    def _on_adapters(self, event: AdapterChanges, _now: float) -> list[Send]:
        self._adapters = self._adapters.updated(event)
        return []

    def _on_reattached(self, event: Reattached, _now: float) -> list[Send]:
        for request_id in event.request_ids:
            self._routed.on_reattached(request_id)
        return []

    def _on_recovered(self, event: Recovered, _now: float) -> list[Send]:
        self._roll_call.on_recovered(event)
        return []

    # ---------------------------------------------------------------------------- to another group

    def _hand_over(self, now: float, deserted: Sequence[int]) -> list[Send]:
        """Asks groups without engines for their requests, while another group can take them."""
        out: list[Send] = []
        for group in deserted if self._router.up else ():
            if self._is_due(group, now):
                for work in self._routed.mark_leaving(group):
                    hand_over = HandOver(work.request_id, work.attempt)
                    out.append(Send("work", stage_id("scheduler", group), hand_over))
        return out

    def _hand_over_lost(self, now: float) -> list[Send]:
        """Hands over requests of groups that cannot be asked: gateways do it, since they know the
        output that clients have. Requests that no group takes are refused after GIVE_UP_FACTOR
        times --host-loss."""
        out: list[Send] = []
        for group, seconds in self._monitor.lost(now):
            give_up = seconds > GIVE_UP_FACTOR * self._monitor.host_loss
            if not (give_up or self._router.up) or not self._is_due(group, now):
                continue
            for work in self._routed.mark_leaving(group):
                if give_up:
                    why = f"{stage_id('scheduler', group)} has been silent for {seconds:.0f} s"
                    out += self._refuse(work, 503, why, code="host_lost")
                    continue
                hand_over = HandOver(work.request_id, work.attempt, self._roll_call.stage)
                out.append(Send("recovery", stage_id("gateway", work.gateway), hand_over))
        return out

    def _is_due(self, group: int, now: float) -> bool:
        """Whether it is time to ask again for the requests of `group`."""
        due = now >= self._hand_over_asked_at.get(group, float("-inf")) + RECOVER_RETRY_SECONDS
        if due:
            self._hand_over_asked_at[group] = now
        return due

    def _on_delivered(self, event: Delivered, now: float) -> list[Send]:
        """A group has handed a request over, with its output so far; or a gateway has, as the next
        attempt, and its old group is to abort it. A request that has ended is aborted."""
        if event.ended:
            abort = Abort(event.request_id, event.attempt, "nobody has taken its end")
            entry, out = self._routed.get(event.request_id), list[Send]()
            if entry is not None and entry.work.retention is not None:
                out.append(Send("recovery", stage_id("gateway", entry.work.gateway), abort))
            return [*out, *self._on_abort(abort, now)]
        entry = self._routed.get(event.request_id)
        if entry is None or event.attempt < entry.work.attempt:
            return []  # it has ended meanwhile, and all groups got its Abort or Done
        ids = unpack(entry.work.prompt_ids)
        work, aborts = entry.work, list[Send]()
        if event.attempt > work.attempt:
            abort = Abort(work.request_id, work.attempt, "another group goes on with it")
            groups = (entry.group,) if entry.in_one_group else self._monitor.groups
            aborts += [Send("work", stage_id("scheduler", group), abort) for group in groups]
        request = (event.request_id, ids, work.params.max_tokens, work.cache_salt)
        leader_group = self._routed.group_of_leader(entry)
        self._router.on_ended(event.request_id)
        group = (
            self._router.choose(*request)
            if leader_group is None
            else self._router.record_sent(leader_group, *request)
        )
        work = self._routed.move(event.request_id, group, event.attempt)
        self._counts["moved"] += 1
        accepted = Accepted(
            request_id=event.request_id, attempt=event.attempt, group=group, prompt_tokens=len(ids)
        )
        return [
            *aborts,
            Send("recovery", stage_id("scheduler", group), event),
            Send("work", stage_id("scheduler", group), work),
            Send("text", stage_id("gateway", work.gateway), accepted),
        ]

    # ------------------------------------------------------------------------------ time and stop

    def _on_group_status(self, event: GroupStatus, now: float) -> list[Send]:
        if not 0 <= event.group < len(self._monitor.groups):
            return []
        return self._on_group_report(event.group, self._monitor.on_status(event, now), now)

    def _on_ended(self, event: Ended, now: float) -> list[Send]:
        group, report = self._monitor.on_ended(event)
        return self._on_group_report(group, report, now)

    def _on_group_report(self, group: int, report: GroupReport | None, now: float) -> list[Send]:
        if report is None:
            return []
        before = self._router.up
        self._router.on_report(group, report)
        if not before:
            return self._hand_over(now, self._monitor.deserted())
        # Only this group: the cost of a report may not grow with the number of groups.
        return self._hand_over(now, [group] * self._monitor.is_deserted(group))

    def _on_tick(self, _event: Tick, now: float) -> list[Send]:
        self._monitor.tick(now)
        for group, report in self._monitor.newly_silent(now):
            self._router.on_report(group, report)
        moved = [*self._hand_over(now, self._monitor.deserted()), *self._hand_over_lost(now)]
        return [*self._roll_call.ask(now), *moved]

    def _on_drain(self, _event: Drain, now: float) -> list[Send]:
        if self._drains_since is None:
            self._drains_since = now
        return []

    def _on_leave(self, _event: Leave, _now: float) -> list[Send]:
        self._has_left = True
        self._pending.clear()  # the successor gets them again from the gateways
        return []

    def _ignore(self, _event: Message, _now: float) -> list[Send]:
        return []

    _handlers: ClassVar[dict[type[Message], Callable[..., list[Send]]]] = {
        Submit: _on_submit,
        Encoded: _on_encoded,
        EncodeNext: _on_encode_next,
        GrammarVerdict: _on_grammar_verdict,
        Abort: _on_abort,
        Done: _on_done,
        ResetCache: _on_reset_cache,
        SetSleep: _on_set_sleep,
        AdapterChanges: _on_adapters,
        Reattached: _on_reattached,
        Recover: _on_recover,
        Recovered: _on_recovered,
        Delivered: _on_delivered,
        GroupStatus: _on_group_status,
        Ended: _on_ended,
        GroupFault: _ignore,  # and RankStatus: others are meant
        RankStatus: _ignore,
        Tick: _on_tick,
        Drain: _on_drain,
        Leave: _on_leave,
        SendFailed: _on_send_failed,
    }


def _validate(prompt: PendingPrompt) -> Send:
    """Has the driver validate the grammar."""
    submit = prompt.submit
    return Send(LOCAL, "", ValidateGrammar(first_choice(submit), submit.attempt, submit.client))


def _choice_names(event: Submit) -> list[str]:
    """The request ids of its choices."""
    return choice_ids(event.request_id, event.choices)
