"""A server under test, and how it is asked: its address, its model, the body of a request.

Knows the fields of OpenAI's API; opens no connection.
"""

from __future__ import annotations

import msgspec

from pipeinfer.bench.prompts import SampleRequest
from pipeinfer.json_values import JsonObject


class EncodedRequest(msgspec.Struct, frozen=True):
    """A request as bytes, made before it is due. `prompt`: its tokens, as far as known."""

    body: bytes
    output_len: int
    prompt_len: int = 0


class Endpoint(msgspec.Struct, frozen=True):
    """Where requests go and what is in all of them.

    usage: whether the server is asked for token counts, with `stream_options`. exact: an answer
    with another number of tokens than asked for has failed. timeout: seconds of a whole answer;
    0: any. further: fields of the body that nobody here knows.
    """

    url: str
    chat: bool = False
    model: str | None = None
    api_key: str = ""
    temperature: float = 0.0
    ignore_eos: bool = True
    exact_length: bool = True
    include_usage: bool = True
    timeout: float = 0.0
    extra_body: JsonObject = {}

    @property
    def api_url(self) -> str:
        """Of the requests."""
        return f"{self.url}/v1/{'chat/completions' if self.chat else 'completions'}"

    @property
    def headers(self) -> dict[str, str]:
        """Of each of them."""
        known = {"content-type": "application/json"}
        return known | ({"authorization": f"Bearer {self.api_key}"} if self.api_key else {})

    def encode(self, request: SampleRequest) -> EncodedRequest:
        """The request as it is sent; token ids need the completions endpoint."""
        body: JsonObject = {"model": self.model, "max_tokens": request.output_len}
        if self.chat:
            user: JsonObject = {"role": "user", "content": request.text}
            body["messages"] = [*request.messages] or [user]
        else:
            body["prompt"] = [*request.prompt_ids] or request.text
        body |= {"temperature": self.temperature, "stream": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        encoded = msgspec.json.encode(body | self.extra_body)
        return EncodedRequest(encoded, request.output_len, len(request.prompt_ids))
