"""What each code of an error says: for clients that look at it, and for the reference.

A test compares these with the codes that the gateway and the tokenizer give.
"""

from __future__ import annotations

# {code: (statuses, when)}. Whatever has no code here has none in its answer either.
CODES: dict[str, tuple[tuple[int, ...], str]] = {
    "invalid_json": ((400,), "The body is empty or no JSON."),
    "invalid_type": ((400,), "A field has the wrong type, or a required field is missing."),
    "invalid_value": (
        (400,),
        "A field's value is outside its range, or the body is nested too deeply or holds too many "
        "values.",
    ),
    "unsupported_parameter": (
        (400,),
        "The field changes an answer in other servers and is not built here.",
    ),
    "context_length_exceeded": (
        (400,),
        "The prompt, or prompt and `max_tokens`, exceed the model's context.",
    ),
    "bad_request": ((400,), "What came is no HTTP."),
    "invalid_body": ((400,), "The body is cut off or cannot be decompressed."),
    "invalid_api_key": ((401,), "The API key is wrong or missing."),
    "host_not_allowed": (
        (403,),
        "The server is asked by a name that is not its own: see `--allowed-hosts`.",
    ),
    "origin_not_allowed": (
        (403,),
        "A web page of another site asks a server without keys: see `--allowed-origins`.",
    ),
    "model_not_found": ((404,), "Another model is served."),
    "not_found": ((404,), "There is no such path."),
    "not_seen": ((404,), "Nothing was seen of the request that `/monitor/requests` was asked for."),
    "timeout": ((408,), "The request's `timeout` passed before the first output."),
    "body_timeout": ((408,), "The body does not come."),
    "body_too_large": ((413,), "The body has more than `--max-body-mib`."),
    "unsupported_encoding": ((415,), "The body is compressed otherwise than by gzip or deflate."),
    "unsupported_media_type": (
        (415,),
        "The body's Content-Type is not `application/json`, at a server without keys.",
    ),
    "unknown_expectation": (
        (417,),
        "`Expect` says something else than `100-continue`. A client that asks so is told to send "
        "its body only when its key, its limits and the body's length allow it.",
    ),
    "queue_full": (
        (429,),
        "`--max-queue` requests or `--max-queue-tokens` prompt tokens wait already.",
    ),
    "rate_limit_exceeded": ((429,), "A limit of the key is reached. `Retry-After` says how long."),
    "request_failed": (
        (500,),
        "This request failed: its logits were not finite, or the engine crashed on it repeatedly.",
    ),
    "stream_broken": ((500,), "A part of this request's text was lost."),
    "not_implemented": ((501,), "The model cannot do this."),
    "too_many_pages": ((503,), "64 feeds of `/monitor/events` are open at this gateway."),
    "reset_unanswered": ((503,), "A group has not said that its cache is reset."),
    "host_lost": ((503,), "A stage that it needs was silent for ten times `--host-loss`."),
    "starting": ((503,), "The server is not ready yet."),
    "draining": ((503,), "The server shuts down and takes no new requests."),
    "overloaded": ((503,), "Too many large bodies are being read."),
    "too_many_connections": ((503,), "All connections are busy."),
    "shutting_down": ((503,), "The drain timeout passed before the request was done."),
}
