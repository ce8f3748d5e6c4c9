"""What the pipeline is told of a client's call.

Knows both messages; nothing of ledgers, and not how a seed is drawn.
"""

from __future__ import annotations

from pipeinfer.gateway.events import Call
from pipeinfer.messages import Submit


def submission(call: Call, gateway: int, seed: int) -> Submit:
    """The first attempt of `call`, from the gateway of that index."""
    return Submit(
        request_id=call.request_id,
        attempt=1,
        gateway=gateway,
        params=call.params,
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
    )
