"""How long a request may grow, and which requests are refused because they never could fit.

Knows the engine's shape (context length, pool size) and one request, nothing else.
"""

from __future__ import annotations

from pipeinfer.messages import Hello
from pipeinfer.scheduler.request import Request


class TooLong(ValueError):
    """The request cannot be served by this group, ever; `param` is the field to blame."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def max_total(request: Request, shape: Hello) -> int:
    """Most tokens, prompt and output, that `request` may have; raises TooLong.

    A max_tokens that was given must fit as it is; where none was given, it is what fits.
    """
    prompt, wanted = request.prompt_len, request.work.params.max_tokens
    pool = shape.pages * shape.page_size
    limit = min(shape.max_model_len, pool)
    if wanted is not None and prompt + wanted > limit:
        where = "the model's context" if limit == shape.max_model_len else "the KV pool"
        raise TooLong(
            "max_tokens",
            f"{prompt} prompt tokens and max_tokens {wanted} do not fit into {where} of {limit} "
            "tokens",
        )
    if prompt >= limit:
        raise TooLong("prompt", f"the prompt has {prompt} tokens, at most {limit - 1} fit")
    return limit if wanted is None else prompt + wanted
