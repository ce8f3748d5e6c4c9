"""What the pipeline is told of a client's call, and told again.

Knows messages and records; no health.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from pipeinfer.choices import SEED_MASK
from pipeinfer.gateway.events import Call
from pipeinfer.gateway.ledger import Record
from pipeinfer.gateway.tracing import RequestTraces
from pipeinfer.messages import Submit


class SubmitBuilder:
    """First attempts of calls, from the gateway of that index; `seed`: of those that have none."""

    def __init__(self, gateway: int, seed: int, traces: RequestTraces) -> None:
        self._gateway = gateway
        self._random = random.Random(seed + gateway)
        self._traces = traces

    def build(self, call: Call) -> Submit:
        """That of `call`. Of several choices each is a request that has one."""
        drawn = self._random.getrandbits(63)  # always, so that seeds depend on the order alone
        seed = drawn if call.params.seed is None else call.params.seed & SEED_MASK
        trace = self._traces.traceparent(call.request_id, call.trace)
        return _submit(call, self._gateway, seed, trace)


def _submit(call: Call, gateway: int, seed: int, trace: str) -> Submit:
    return Submit(
        request_id=call.request_id,
        attempt=1,
        gateway=gateway,
        params=replace(call.params, n=1) if call.params.n > 1 else call.params,
        seed=seed,
        text=call.text,
        prompt_ids=call.prompt_ids,
        chat=call.chat,
        template_arguments=call.template_arguments,
        add_special_tokens=call.add_special_tokens,
        priority=call.priority,
        timeout=call.timeout,
        cache_salt=call.cache_salt,
        trace=trace,
        return_prompt_ids=call.return_prompt_ids,
        return_prompt_text=call.return_prompt_text,
        only_encode=call.only_encode,
        choices=tuple(range(call.params.n)),
        client=call.client,
        otherwise=call.otherwise,
        token_offsets=call.token_offsets,
        return_token_strs=call.return_token_strs,
    )


def resubmissions(records: Iterable[Record]) -> Iterator[Submit]:
    """What a tokenizer that was started again must know: of choices that belong together those
    that are live, in one for each group that has some."""
    together: dict[tuple[str, int, int], list[Record]] = {}
    for record in records:
        key = record.submit.request_id, record.group, record.attempt
        together.setdefault(key, []).append(record)
    for (_, group, _), live in together.items():
        choices = tuple(record.choice for record in live)
        yield replace(live[0].submit, group=group, choices=choices)
