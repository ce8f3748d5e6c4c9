"""The page of all errors: statuses from gateway/openapi.py, codes from gateway/errors.py.

Types are those that the errors themselves give.
"""

from __future__ import annotations

import json

from docs.markdown import bullets
from docs.markdown import page as page_of
from pipeinfer.gateway.anthropic import ERROR_TYPES as OF_MESSAGES
from pipeinfer.gateway.errors import CODES, ApiError
from pipeinfer.gateway.openapi import ERRORS

INTRODUCTION = """An error has a status and a body:

```json
{"error": {"message": "suffix is not supported by this server", "type": "invalid_request_error", \
"param": "suffix", "code": "unsupported_parameter"}}
```

`param` names the field that is wrong, or is null. `code` is null where nothing below fits: a \
wrong method, or a prompt that has an unknown token id, that its template refuses, or that does \
not fit into the KV pool. 429 and 503 carry `Retry-After` where trying again makes sense."""


OF_MESSAGES_SAID = """`/v1/messages` has Anthropic's form, for errors of the key and of unknown \
models as well. 529 stands where other endpoints say 503. Other statuses are \
`invalid_request_error`, and from 500 on `api_error`.

```json
{"type": "error", "error": {"type": "not_found_error", \
"message": "the model 'x' does not exist; this server has 'demo'"}}
```"""


def page() -> str:
    """docs/reference/errors.md."""
    statuses = (f"{status}, {_type(status)}: {said}" for status, said in ERRORS.items())
    codes = (
        f"`{code}` ({', '.join(map(str, told))}): {said}" for code, (told, said) in CODES.items()
    )
    messages = (f"{status}: `{kind}`" for status, kind in OF_MESSAGES.items())
    return page_of(
        "Errors",
        INTRODUCTION,
        "## Statuses",
        bullets(statuses),
        "## Codes",
        bullets(codes),
        "## Types of /v1/messages",
        OF_MESSAGES_SAID,
        bullets(messages),
    )


def _type(status: int) -> str:
    """As ApiError says it."""
    body = json.loads(ApiError(status, "").body())
    return f"`{body['error']['type']}`"
