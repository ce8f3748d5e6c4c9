"""Rewrites what a trace says so that it has no text and no token ids, and the scheduler replays.

Every field that could carry either is named here; a message that is not named is left out of the
trace. Knows messages and a renaming of ids; no file and no stage's state (trace/redact_state.py).
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeinfer.params import SamplingParams
from pipeinfer.trace.bodies import Bodies
from pipeinfer.trace.format import Record, Row, TraceHeader
from pipeinfer.trace.notes import Unencoded
from pipeinfer.trace.permutation import Permutation
from pipeinfer.trace.redact_state import redact_state

FIELDS: dict[str, dict[str, str]] = {
    "Submit": {"params": "params", "text": "text", "prompt_ids": "ids", "chat": "list",
               "template_arguments": "dict", "cache_salt": "salt", "otherwise": "struct"},
    "Call": {"params": "params", "text": "text", "prompt_ids": "ids", "chat": "list",
             "template_arguments": "dict", "cache_salt": "salt", "otherwise": "struct"},
    "Work": {"params": "params", "prompt_ids": "ids", "eos_ids": "some", "cache_salt": "salt",
             "banned": "each some", "thoughts": "struct"},
    "Plan": {"releases": "nested", "admits": "nested"},
    "Prepare": {"spec": "struct"},
    "Compile": {"spec": "struct"},
    "StructuredOutputs": {"json": "salt", "regex": "salt", "grammar": "salt", "choice": "salts",
                          "after": "salt"},
    "Thoughts": {"opening": "salt", "closing": "salt"},
    "Release": {"output_ids": "ids"},
    "Admit": {"params": "params", "token_ids": "ids", "suppress": "sorted", "cache_salt": "salt",
              "banned": "each some", "thoughts": "struct"},
    "PromptScores": {"logprobs": "zeros"},
    "Result": {"token_ids": "ids", "logprobs": "zeros"},
    "StepDone": {"token_ids": "ids", "logprobs": "zeros", "prompts": "all zeros"},
    "Open": {"params": "params", "context_ids": "ids"},
    "Tokens": {"rows": "nested"},
    "TokenRow": {"ids": "ids", "stop_token": "one", "logprobs": "zeros"},
    "PromptTokens": {"ids": "ids", "logprobs": "zeros"},
    "Delivered": {"ids": "ids", "logprobs": "zeros", "prompt_logprobs": "zeros"},
    "Accepted": {"prompt_ids": "ids", "prompt_text": "text", "refusal": "text",
                 "token_strs": "texts"},
    "Encoded": {"prompt_ids": "ids", "message": "text", "thoughts": "struct"},
    "Tried": {"message": "text", "grammar": "digest"},
    "Started": {"prompt_ids": "ids", "prompt_text": "text", "refusal": "text",
                 "token_strs": "texts"},
    "Text": {"rows": "nested"},
    "TextRow": {"text": "text", "ids": "ids", "stop_reason": "one", "error": "text",
                "logprobs": "none", "prompt": "none", "offsets": "bytes"},
    "Delta": {"text": "text", "ids": "ids", "stop_reason": "one", "logprobs": "none",
              "prompt": "none", "offsets": "bytes"},
    "Failed": {"message": "text"},
    "Unsent": {"reason": "text"},
}  # fmt: skip
# Names, numbers and what stages say of themselves: nothing of a client's but its request's id.
AS_THEY_ARE = {
    "Abort", "Done", "Begin", "Hello", "Ready", "Admitted", "Digests", "Fault", "Refused",
    "Prepared", "Compiled", "HandOver", "ResetCache", "CacheReset", "StopHit", "Heartbeat",
    "GroupStatus", "RankStatus", "Ended", "Fenced", "GroupFault",
    "Recover", "Recovered", "Tick", "Drain", "Leave", "NewEpoch", "GraphDue", "Capture", "Encode",
    "EncodeNext", "Try",
    "StepFailed", "Hangup", "StatusChanged", "StepNote", "Unencoded",
    "Crash", "End",
}  # fmt: skip

M = TypeVar("M", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode


class Redactor:
    """Rewrites rows of a stage called `stage` ("scheduler")."""

    def __init__(self, stage: str, key: bytes, names: Permutation) -> None:
        self._bodies = Bodies(stage)
        self._key = key
        self.names = names
        self._how: dict[str, Callable[[Any], Any]] = {
            "ids": names.ids,
            "one": lambda value: names.one(value) if isinstance(value, int) else "",
            "some": lambda ids: tuple(names.one(token) for token in ids),
            "each some": lambda each: tuple(tuple(map(names.one, ids)) for ids in each),
            "sorted": lambda ids: tuple(sorted(names.one(token) for token in ids)),
            "params": self._params,
            "salt": self._salt,
            "salts": lambda salts: tuple(map(self._salt, salts)),
            "struct": self.message,
            "nested": lambda parts: tuple(self.message(part) for part in parts),
            "text": lambda _: "",
            "texts": lambda _: (),
            "digest": lambda _: b"",
            "bytes": lambda _: b"",  # lengths of tokens' texts, by which ids could be told
            "list": lambda _: [],
            "dict": lambda _: {},
            "none": lambda _: None,
            # Log-probs name ids; a scheduler only cuts and joins them.
            "zeros": lambda raw: bytes(len(raw)),
            "all zeros": lambda parts: tuple(bytes(len(raw)) for raw in parts),
        }

    def row(self, row: Row) -> Row:
        """The row with another body."""
        time, direction, channel, peer, number, sent, _ = row
        message = self._bodies.decode(Record(*row))
        name = type(message).__name__
        if name not in FIELDS and name not in AS_THEY_ARE:
            message, direction = Unencoded(name), "note"
        elif name == "Refused" and channel == "text":
            # A tokenizer quotes what it refuses; the scheduler's own words are numbers alone.
            message = msgspec.structs.replace(message, message="")
        else:
            message = self.message(message)
        return time, direction, channel, peer, number, sent, _encode(message)

    def header(self, header: TraceHeader) -> TraceHeader:
        """The header of a redacted trace. Only a scheduler's has a state: the others cannot be
        replayed without their texts. Raises ValueError for a state with unknown parts."""
        state = header.snapshot if header.name == "scheduler" else None
        if state is not None:
            state = redact_state(state, self.message, self.names)
        return msgspec.structs.replace(header, redacted=True, snapshot=state)

    def message(self, message: M) -> M:
        """The same message without text, its ids renamed."""
        fields = FIELDS.get(type(message).__name__, {})
        changed = {}
        for name, how in fields.items():
            value = getattr(message, name)
            if value is not None:
                changed[name] = self._how[how](value)
        return msgspec.structs.replace(message, **changed) if changed else message

    def _params(self, params: SamplingParams) -> SamplingParams:
        spec = params.structured_outputs
        return msgspec.structs.replace(
            params,
            stop=tuple(f"[{number}]" for number in range(len(params.stop))),
            stop_token_ids=tuple(self.names.one(token) for token in params.stop_token_ids),
            structured_outputs=None if spec is None else self.message(spec),
            logit_bias={self.names.one(token): bias for token, bias in params.logit_bias.items()},
            allowed_token_ids=params.allowed_token_ids
            and tuple(self.names.one(token) for token in params.allowed_token_ids),
            bad_words=tuple(f"[{number}]" for number in range(len(params.bad_words))),
        )

    def _salt(self, salt: str) -> str:
        """Equal salts stay equal."""
        return blake2b(salt.encode(), key=self._key, digest_size=16).hexdigest() if salt else ""


def redactor(key: str, stage: str, folder: str) -> Redactor:
    """A redactor for the checkpoint in `folder`; `key` as hexadecimal text, at most 64 bytes.

    End-of-sequence ids and all special tokens keep their ids. Raises ConfigurationError, or
    ValueError for a key that is none.
    """
    from pipeinfer.checkpoint.config import read_generation, read_outline
    from pipeinfer.text.files import read_tokenizer_config
    from pipeinfer.text.loading import load_tokenizer

    secret = bytes.fromhex(key)
    if not 16 <= len(secret) <= 64:
        raise ValueError("a key for redaction has 16 to 64 bytes")
    path = Path(folder)
    fixed = set(read_generation(path).eos_ids)
    tokenizer = load_tokenizer(path, read_tokenizer_config(path))
    if tokenizer is not None:
        added = tokenizer.get_added_tokens_decoder()
        fixed |= {token for token, how in added.items() if how.special}
    return Redactor(stage, secret, Permutation(secret, read_outline(path).vocab_size, fixed))
