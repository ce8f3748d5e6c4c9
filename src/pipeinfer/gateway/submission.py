"""What the pipeline is told of a client's call, and told again.

Knows messages and records; no health, and not how a seed is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from pipeinfer.gateway.events import Call
from pipeinfer.gateway.ledger import Record
from pipeinfer.messages import Submit


def submission(call: Call, gateway: int, seed: int) -> Submit:
    """The first attempt of `call`, from the gateway of that index. Of several choices each is a
    request that has one."""
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
        trace=call.trace,
        return_prompt_ids=call.return_prompt_ids,
        return_prompt_text=call.return_prompt_text,
        only_encode=call.only_encode,
        choices=tuple(range(call.params.n)),
    )


def again(records: Iterable[Record]) -> Iterator[Submit]:
    """What a tokenizer that was started again must know: of choices that belong together those
    that are live, in one for each group that has some."""
    together: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        together.setdefault((record.submit.request_id, record.group), []).append(record)
    for (_, group), live in together.items():
        choices = tuple(record.choice for record in live)
        yield replace(live[0].submit, group=group, choices=choices)
