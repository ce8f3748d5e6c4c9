"""What waits in the pipeline, as requests and as prompt tokens, and whether there is room for more.

Sizes are bounded below by what a request occupies, so a bound of tokens is one of memory as well.
Knows no client and no time.
"""

from __future__ import annotations

from pipeinfer.gateway.events import Call
from pipeinfer.json_values import JsonValue
from pipeinfer.logprobs import size
from pipeinfer.params import SamplingParams

BYTES_PER_TOKEN = 4  # of ids exactly, of English text about
# Output tokens whose log-probs count: how many there will be nobody knows, and what a client asks
# for at most may be any number.
MOST_SCORED_OUTPUTS = 4096
TEXT_BYTES = 28  # that a text which is not all ASCII occupies more, beside its letters
VALUE_BYTES = 64  # that a value of a conversation or of template arguments occupies beside its text


def occupied_tokens(params: SamplingParams, prompt_tokens: int) -> int:
    """As how many prompt tokens a request counts: with log-probs, what these will occupy, too."""
    outputs = min(params.max_tokens or MOST_SCORED_OUTPUTS, MOST_SCORED_OUTPUTS)
    scores = prompt_tokens * size(params.prompt_logprobs) + outputs * size(params.logprobs)
    return prompt_tokens + scores // BYTES_PER_TOKEN


def call_tokens(call: Call) -> int:
    """Prompt tokens as which a call counts, as far as can be told before it is tokenized."""
    return occupied_tokens(call.params, _tokens(call))


def _tokens(call: Call) -> int:
    """Prompt tokens of a call, as far as can be told before it is tokenized.

    The number of its ids; else a quarter of the bytes that its text or chat occupies, with four for
    each letter of a text that is not all ASCII. It takes no time that grows with a text's length.
    """
    if call.prompt_ids is not None:
        return len(call.prompt_ids) // BYTES_PER_TOKEN
    found = 0
    rest: list[JsonValue] = (
        [call.text] if call.chat is None else [*call.chat, call.template_arguments]
    )
    while rest:  # no recursion: a caller of AsyncLLM may nest as deeply as it likes
        value = rest.pop()
        if isinstance(value, str):
            found += len(value) if value.isascii() else 4 * len(value) + TEXT_BYTES
            continue
        found += VALUE_BYTES
        if isinstance(value, dict):
            rest += value.keys()
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value
    return found // BYTES_PER_TOKEN + 1


class Backlog:
    """Counts the requests of which nothing was delivered. None and 0 tokens are no limit."""

    def __init__(self, most_requests: int | None = None, most_tokens: int = 0) -> None:
        self._most_requests = most_requests
        self._most_tokens = most_tokens
        self.requests = self.tokens = 0

    def add(self, tokens: int) -> None:
        """A request begins to wait."""
        self.requests += 1
        self.tokens += tokens

    def grow(self, tokens: int) -> None:
        """One that waits turned out to be larger by so many."""
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        """A request waits no more."""
        self.requests -= 1
        self.tokens -= tokens

    def refusal_reason(self, requests: int, tokens: int) -> str:
        """Why so many more cannot wait; "" if they can.

        One that alone has more tokens than may wait has room where no other waits.
        """
        most = self._most_requests
        if most is not None and self.requests + requests > most:
            return f"{self.requests} requests are waiting already"
        if not self._most_tokens or not self.requests:
            return ""
        if self.tokens >= self._most_tokens or self.tokens + tokens > self._most_tokens:
            return f"requests with {self.tokens} prompt tokens are waiting already"
        return ""
