"""Rewrites a trace so that it has no text and no token ids, and a scheduler's still replays.

Every field that could carry either is named here; a message that is not named is left out of the
trace. Token ids are renamed by a keyed bijection with fixed points: a substitution, which hides
what a text says, not how often an id occurs. Knows messages and a scheduler's state; no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from pipeinfer.grammars.bounds import GRAMMAR_ERROR, NO_GRAMMAR_MEMORY
from pipeinfer.params import RequestParams
from pipeinfer.trace.format import Record, RecordDecoder, Row, TraceHeader, Unencoded
from pipeinfer.trace.snapshot import known_class

RANKS = 8  # 64-bit ranks out of one hash


class TokenPermutation:
    """A bijection on 0 .. vocabulary-1; ids in `fixed` stay, and so do those beyond the vocabulary.

    The others are sorted by a keyed hash, so that the same key and model give the same renaming on
    any machine. key: at most 64 bytes.
    """

    def __init__(self, key: bytes, vocabulary: int, fixed: Iterable[int]) -> None:
        kept = np.zeros(vocabulary, dtype=bool)
        kept[[token for token in fixed if 0 <= token < vocabulary]] = True
        free = np.flatnonzero(~kept)
        blocks = range(-(-vocabulary // RANKS))
        hashes = [blake2b(n.to_bytes(8, "little"), key=key, digest_size=64) for n in blocks]
        ranks = np.frombuffer(b"".join(one.digest() for one in hashes), dtype="<u8")
        self._table = np.arange(vocabulary, dtype=np.int32)
        self._table[free] = free[np.argsort(ranks[free], kind="stable")]

    def ids(self, raw: bytes) -> bytes:
        """Little-endian int32 bytes, renamed."""
        return self.array(np.frombuffer(raw, dtype="<i4")).tobytes()

    def array(self, ids: np.ndarray) -> np.ndarray:
        """Renames the ids of an array int32 [n]."""
        table = self._table
        inside = (ids >= 0) & (ids < len(table))
        return np.where(inside, table[np.where(inside, ids, 0)], ids).astype("<i4")

    def one(self, token: int) -> int:
        """The new name of one id."""
        return int(self._table[token]) if 0 <= token < len(self._table) else token


Attribute = tuple[str, str]  # a class and an attribute of it
Rewrite = Callable[[msgspec.Struct], msgspec.Struct]

_REQUEST = "pipeinfer.scheduler.request:Request"
IDS: frozenset[Attribute] = frozenset((_REQUEST, name) for name in ("outputs", "stops"))
ZEROED: frozenset[Attribute] = frozenset(
    (_REQUEST, name) for name in ("logprobs", "prompt_logprobs")
)
NUMBERS: frozenset[Attribute] = frozenset(
    (
        (_REQUEST, "counts_in_flight"),
        ("pipeinfer.scheduler.drafting:DraftCounts", "accepted"),
        ("pipeinfer.scheduler.engine_state:StepInFlight", "drafts"),
        ("pipeinfer.scheduler.engine_state:StepInFlight", "slots"),
        ("pipeinfer.scheduler.engine_state:Slots", "_free"),
        ("pipeinfer.scheduler.engine_state:PageCredits", "_reserved"),
        ("pipeinfer.scheduler.epochs:Epochs", "_asleep"),
        ("pipeinfer.scheduler.epochs:Epochs", "_steps"),
        ("pipeinfer.scheduler.epochs:FencedRanks", "_fenced"),
        ("pipeinfer.scheduler.epochs:FencedRanks", "_to_kill"),
        ("pipeinfer.scheduler.queue:GrammarQueue", "_processes"),
        ("pipeinfer.scheduler.queue:PendingGrammar", "compiled_ranks"),
        ("pipeinfer.scheduler.adapters:AdapterSlots", "_processes"),
        ("pipeinfer.scheduler.adapters:LoadedAdapter", "ranks_loaded"),
        ("pipeinfer.scheduler.queue:PrefixesInProgress", "_blocks_led"),
        ("pipeinfer.core:_Flows", "_last"),
        ("pipeinfer.core:Histogram", "counts"),
        ("pipeinfer.scheduler.engine_state:_Rank", "first"),
        ("pipeinfer.scheduler.engine_state:_Rank", "digests"),
    )
)
_SEQUENCES = ("list", "tuple", "set", "frozenset", "deque")
_MAPPINGS = ("dict", "ordered", "counter")


def redact_state(state: bytes, message: Rewrite, names: TokenPermutation) -> bytes:
    """The snapshot with `message` applied to every message and the ids renamed by `names`.

    Raises ValueError for a part of the state that may hold ids and is not known to.
    """
    try:
        version, nodes = msgspec.msgpack.decode(state, type=tuple[int, list[list[Any]]])
        attributes = _attributes(nodes)
        rewritten = [_node(n, attributes[i], message, names) for i, n in enumerate(nodes)]
        return _encode([version, rewritten])
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"the state is none: {type(error).__name__}: {error}") from None


def _attributes(nodes: list[list[Any]]) -> list[Attribute]:
    """For each node the attribute that it hangs from; what is inside a container hangs with it."""
    attributes: list[Attribute | None] = [None] * len(nodes)
    attributes[0] = ("", "")
    waiting = [0]
    while waiting:
        number = waiting.pop()
        node, attribute = nodes[number], attributes[number]
        for inner, value in _inner(node, attribute or ("", "")):
            if type(value) is list and attributes[value[0]] is None:
                attributes[value[0]] = inner
                waiting.append(value[0])
    return [attribute or ("", "") for attribute in attributes]


def _inner(node: list[Any], attribute: Attribute) -> list[tuple[Attribute, Any]]:
    if node[0] == "object":
        flat = node[2]
        return [((node[1], name), raw) for name, raw in zip(flat[::2], flat[1::2], strict=True)]
    if node[0] in (*_SEQUENCES, *_MAPPINGS):
        return [(attribute, raw) for raw in node[1]]
    return [(attribute, raw) for raw in node[2]] if node[0] == "named" else []


def _node(
    node: list[Any],
    attribute: Attribute,
    message: Rewrite,
    names: TokenPermutation,
) -> list[Any]:
    kind = node[0]
    if kind == "struct":
        found = known_class(node[1])
        if not issubclass(found, msgspec.Struct):
            raise ValueError(f"{node[1]} was expected to be a message")
        return [kind, node[1], _encode(message(msgspec.msgpack.decode(node[2], type=found)))]
    if attribute in ZEROED and kind == "bytearray":
        return [kind, bytes(len(node[1]))]
    if attribute in IDS and kind == "ints":
        return [kind, names.ids(node[1])]
    if attribute in IDS:
        if kind not in _SEQUENCES or not all(type(token) is int for token in node[1]):
            raise ValueError(f"{'.'.join(attribute)} was expected to hold token ids")
        ids = names.array(np.array(node[1], dtype="<i4")).tolist()
        return [kind, ids, *node[2:]]
    for inner, raw in _inner(node, attribute):
        if type(raw) is bytes:
            raise ValueError(f"{'.'.join(inner)} may hold token ids: it cannot be redacted")
    numbers = kind in (*_SEQUENCES, *_MAPPINGS) and node[1] and all(type(v) is int for v in node[1])
    if (numbers or kind in ("array", "bytearray", "ints")) and attribute not in NUMBERS:
        raise ValueError(f"{'.'.join(attribute)} may hold token ids: it cannot be redacted")
    return node


REDACTED_FIELDS: dict[str, dict[str, str]] = {
    "Submit": {"params": "params", "text": "text", "prompt_ids": "ids", "chat": "list",
               "template_arguments": "dict", "cache_salt": "salt", "fallback_grammar": "struct",
               "retention": "struct"},
    "Call": {"params": "params", "text": "text", "prompt_ids": "ids", "chat": "list",
             "template_arguments": "dict", "cache_salt": "salt", "fallback_grammar": "struct",
             "retention": "struct"},
    "Retention": {"owner": "salt", "format": "bytes", "origin": "bytes"},
    "Adopt": {"submit": "struct", "accepted": "struct"},
    "TokenizedRequest": {"params": "params", "prompt_ids": "ids", "eos_ids": "some",
                         "cache_salt": "salt", "bad_word_ids": "each some", "reasoning": "struct",
                         "retention": "struct"},
    "Plan": {"releases": "nested", "admits": "nested", "appends": "nested"},
    "AppendTokens": {"ids": "ids"},
    "CompileGrammar": {"spec": "struct"},
    "Compile": {"spec": "struct"},
    "GrammarCompiled": {"error": "why"},
    "Compiled": {"error": "why"},
    "StructuredOutputs": {"json": "salt", "regex": "salt", "grammar": "salt", "choice": "salts",
                          "after": "salt"},
    "ReasoningContext": {"opening": "salt", "closing": "salt"},
    "Release": {"output_ids": "ids"},
    "Admit": {"params": "params", "token_ids": "ids", "suppressed_ids": "sorted",
              "cache_salt": "salt", "bad_word_ids": "each some", "reasoning": "struct"},
    "PromptLogprobs": {"logprobs": "zeros"},
    "Result": {"token_ids": "ids", "logprobs": "zeros", "refused": "each why"},
    "Refused": {"message": "error"},
    "FoundPages": {"ids": "ids", "digests": "zeros", "parents": "zeros", "salts": "zeros"},
    "StepDone": {"token_ids": "ids", "logprobs": "zeros", "prompt_logprobs": "all zeros",
                 "refused": "each why"},
    "OpenStream": {"params": "params", "context_ids": "ids", "retention": "struct"},
    "Tokens": {"rows": "nested"},
    "TokenRow": {"ids": "ids", "stop_token": "one", "logprobs": "zeros", "error": "error"},
    "PromptTokens": {"ids": "ids", "logprobs": "zeros"},
    "Delivered": {"ids": "ids", "logprobs": "zeros", "prompt_logprobs": "zeros",
                  "error": "error"},
    "Accepted": {"prompt_ids": "ids", "prompt_text": "text", "refusal": "text",
                 "token_strs": "texts"},
    "Encoded": {"prompt_ids": "ids", "message": "text", "reasoning": "struct"},
    "GrammarVerdict": {"message": "text", "grammar": "digest"},
    "Started": {"prompt_ids": "ids", "prompt_text": "text", "refusal": "text",
                 "token_strs": "texts"},
    "Text": {"rows": "nested"},
    "TextRow": {"text": "text", "ids": "ids", "stop_reason": "one", "error": "text",
                "logprobs": "none", "prompt": "none", "offsets": "bytes", "vector": "bytes"},
    "OutputDelta": {"text": "text", "ids": "ids", "stop_reason": "one", "logprobs": "none",
              "prompt": "none", "offsets": "bytes", "vector": "bytes"},
    "Failed": {"message": "text"},
    "SendFailed": {"reason": "text"},
}  # fmt: skip
# Names, numbers and what stages say of themselves: nothing of a client's but its request's id.
UNCHANGED_MESSAGES = {
    "Abort", "Done", "BeginEpoch", "Hello", "Ready", "Admitted", "Digests", "Fault", "MissedPlan",
    "HandOver", "ResetCache", "CacheReset", "StopHit", "Heartbeat",
    "GroupStatus", "RankStatus", "Ended", "Fenced", "GroupFault",
    "Recover", "Recovered", "Tick", "Drain", "Leave", "NewEpoch", "GraphDue", "Capture", "Encode",
    "EncodeNext", "ValidateGrammar", "MarkPagesUnusable", "FindPages", "Suspend", "Suspended",
    "Resume", "Resumed", "SetSleep", "Sleep", "Asleep", "LoadAdapter", "AdapterLoaded",
    "AdapterRead", "Adapter", "QueueShare", "AdapterChanges", "AdapterState", "SetAdapters",
    "Reattached", "AdoptionEnded",
    "StepFailed", "ClientDisconnected", "StatusChanged", "StepNote", "PagesNote", "Unencoded",
    "Crash", "End", "StepCost",
}  # fmt: skip

M = TypeVar("M", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode


class Redactor:
    """Rewrites rows of a stage called `stage` ("scheduler")."""

    def __init__(self, stage: str, key: bytes, names: TokenPermutation) -> None:
        self._bodies = RecordDecoder(stage)
        self._key = key
        self.permutation = names
        self._how: dict[str, Callable[[Any], Any]] = {
            "ids": names.ids,
            "one": lambda value: names.one(value) if isinstance(value, int) else "",
            "some": lambda ids: tuple(names.one(token) for token in ids),
            "each some": lambda each: tuple(tuple(map(names.one, ids)) for ids in each),
            "sorted": lambda ids: tuple(sorted(names.one(token) for token in ids)),
            "params": self._params,
            "salt": self._salt,
            "why": self._why,
            "each why": lambda rows: {row: self._why(why) for row, why in rows.items()},
            "error": self._error,
            "salts": lambda salts: tuple(map(self._salt, salts)),
            "struct": self.message,
            "nested": lambda parts: tuple(self.message(part) for part in parts),
            "text": lambda _: "",
            "texts": lambda _: (),
            "digest": lambda _: b"",
            "bytes": lambda _: b"",  # lengths of tokens' texts, by which ids could be found
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
        if name not in REDACTED_FIELDS and name not in UNCHANGED_MESSAGES:
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
            state = redact_state(state, self.message, self.permutation)
        return msgspec.structs.replace(header, redacted=True, snapshot=state)

    def message(self, message: M) -> M:
        """A copy of the message without text, with its ids renamed."""
        fields = REDACTED_FIELDS.get(type(message).__name__, {})
        changed = {}
        for name, how in fields.items():
            value = getattr(message, name)
            if value is not None:
                changed[name] = self._how[how](value)
        return msgspec.structs.replace(message, **changed) if changed else message

    def _params(self, params: RequestParams) -> RequestParams:
        spec = params.structured_outputs
        return msgspec.structs.replace(
            params,
            stop=tuple(f"[{number}]" for number in range(len(params.stop))),
            stop_token_ids=tuple(self.permutation.one(token) for token in params.stop_token_ids),
            structured_outputs=None if spec is None else self.message(spec),
            logit_bias={
                self.permutation.one(token): bias for token, bias in params.logit_bias.items()
            },
            allowed_token_ids=params.allowed_token_ids
            and tuple(self.permutation.one(token) for token in params.allowed_token_ids),
            bad_words=tuple(f"[{number}]" for number in range(len(params.bad_words))),
        )

    def _salt(self, salt: str) -> str:
        """Equal salts stay equal."""
        return blake2b(salt.encode(), key=self._key, digest_size=16).hexdigest() if salt else ""

    def _why(self, error: str) -> str:
        """The redacted error of a grammar's compiler. NO_GRAMMAR_MEMORY stays, since a scheduler
        compares its text; so does "", which is no error."""
        return error if error == NO_GRAMMAR_MEMORY else self._salt(error)

    def _error(self, error: str) -> str:
        """The redacted error of a scheduler: its own words hold numbers alone, and stay."""
        if not error.startswith(GRAMMAR_ERROR):
            return error
        return GRAMMAR_ERROR + self._why(error.removeprefix(GRAMMAR_ERROR))


def redactor(key: str, stage: str, folder: str) -> Redactor:
    """A redactor for the checkpoint in `folder`; `key` as hexadecimal text, at most 64 bytes.

    End-of-sequence ids and all special tokens keep their ids. Raises ConfigurationError, or
    ValueError for a key that is none.
    """
    from pipeinfer.checkpoint.config import read_generation, read_outline
    from pipeinfer.text import load_tokenizer, read_tokenizer_config

    secret = bytes.fromhex(key)
    if not 16 <= len(secret) <= 64:
        raise ValueError("a key for redaction has 16 to 64 bytes")
    path = Path(folder)
    fixed = set(read_generation(path).eos_ids)
    tokenizer = load_tokenizer(path, read_tokenizer_config(path))
    if tokenizer is not None:
        added = tokenizer.get_added_tokens_decoder()
        fixed |= {token for token, how in added.items() if how.special}
    return Redactor(stage, secret, TokenPermutation(secret, read_outline(path).vocab_size, fixed))
