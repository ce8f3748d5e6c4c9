"""Parameters of a request, and nothing about how they are applied; the ids of a request's choices;
and types of JSON values.

Shared vocabulary of the gateway, the offline classes, the scheduler and the engine. Knows no HTTP,
no tokenizer and no torch; names and defaults are those of vLLM's SamplingParams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, cast

import msgspec

# JSON values of bodies, templates' arguments and files. Code that takes a value from outside checks
# it with isinstance.
if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
    )
else:
    JsonValue = Any  # msgspec decodes into no type that names itself

JsonObject: TypeAlias = dict[str, JsonValue]
T = TypeVar("T")

MAX_INT = 2**31 - 1  # counts and ids are int32 on the device
# At this temperature the logits of any model differ by less than the noise, so all tokens are
# equally likely. Far larger values are infinite in float32.
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2  # OpenAI's
# Logits are float32: divided or multiplied by these they stay finite, and a token that is a hundred
# times rarer or more frequent is never or always chosen already.
MIN_REPETITION = 0.01
MAX_REPETITION = 100.0
# float32's smallest normal number. Devices may flush smaller ones to 0, which is no valid top_p.
MIN_TOP_P = 2.0**-126
MAX_STOP_STRINGS = 16
# of each; all output is searched for it, in a process that handles the text of all requests
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024  # as for biases; each row with min_tokens masks them
MAX_BIASES = 1024  # OpenAI's limit; each row that samples adds them
MAX_BIAS = 100.0  # OpenAI's
MAX_ALLOWED_TOKENS = 1024  # as for biases; each row that samples looks all of them up
# Bad words are compared with the output at every step, in every row that has them.
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_BAD_WORD_IDS = 64  # tokens of one spelling of a word
MAX_BAD_IDS = 2048  # tokens of all spellings
# choices of a prompt: OpenAI's; each has a slot, an entry in every ledger, a prompt
MAX_CHOICES = 128
MAX_VECTOR_SIZE = 65_536  # no model has so large a hidden state
MAX_LOGPROBS = 20  # alternatives: OpenAI's limit for chats, vLLM's for all requests


# The bytes kept of each token follow from this number, so no frame may have more.
Alternatives = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
# State of an answer's reasoning. before: it may begin, by the opening tag; open: the next tokens
# are reasoning; over: it has ended, or there is none.
ReasoningState = Literal["before", "open", "over"]
# An id or a count that fits into the device's int32.
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A low-rank adapter (LoRA) of a request.

    Attributes:
    - name: name in requests and in /v1/models
    - path: its folder, on the hosts of engines
    - digest: of its files (checkpoint/lora.py), hexadecimal; equal digests mean equal adapters
    """

    name: str
    path: str
    digest: str

    def salted(self, cache_salt: str) -> str:
        """The salt of prefix caches for requests with this adapter: a different text for each pair
        of content and `cache_salt`, and none that a client can give."""
        return f"\0lora:{self.digest}:{cache_salt}"


class StructuredOutputs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A grammar for the whole output; exactly one of the first four is given.

    Attributes:
    - json: a JSON schema, as text
    - regex: a regular expression
    - choice: texts, one of which the output must be
    - grammar: in llguidance's Lark, or GBNF
    - after: text up to which the output is free, and not a part of the structured output
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    after: str = ""


class ReasoningContext(msgspec.Struct, frozen=True, array_like=True):
    """The reasoning of an answer, whose end a grammar waits for, or whose tokens a budget counts.

    Attributes:
    - opening, closing: texts around it. No `opening`: it can only be open already
    - state: at the end of the prompt
    """

    opening: str
    closing: str
    state: ReasoningState


class RequestParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Parameters of a request: how to choose tokens, when to stop, which log-probs to return.
    Callers of the offline classes write SamplingParams, with vLLM's fields (offline/calls.py).

    Attributes:
    - temperature: 0 is greedy, at most 100
    - top_k: 0 or -1 turns it off
    - top_p, min_p: in [0, 1]
    - seed: None lets the server choose one
    - max_tokens: None means as many as fit
    - min_tokens: no stop token of either kind is sampled before that many output tokens
    - ignore_eos: the model's own end does not end the output; `stop_token_ids` still do
    - stop: strings that end the text, not part of it unless include_stop_str_in_output
    - stop_token_ids: ids that end the output beside the model's own
    - skip_special_tokens: special tokens have no text
    - repetition_penalty: in [0.01, 100]. The logits of tokens in prompt and output are divided by
      it if they are positive, else multiplied; above 1 makes these tokens rarer
    - presence_penalty, frequency_penalty: in [-2, 2], subtracted from the logits of tokens in the
      output: once, or as often as the token occurs
    - logit_bias: added to the logits of these ids before all else, each in [-100, 100]. Ids may be
      texts of digits, as in JSON
    - logprobs: alternatives (0 to 20) of each output token's log-prob; None asks for no log-probs.
      Computed from the model's own logits, before all changes above
    - prompt_logprobs: alternatives of the log-probs of the prompt's tokens, all but the first
    - structured_outputs: grammar of the whole output; not with min_tokens, allowed_token_ids or
      bad_words
    - n: choices of the prompt, 1 to 128; choice i is computed with seed + i (mod 2**64)
    - allowed_token_ids: no other id is sampled, not even one that ends the output; None allows all
    - bad_words: texts that the output must not have: the last token of each spelling, with a space
      before it and without, is not sampled if the others are the output's last ones
    - truncate_prompt_tokens: number of the prompt's last tokens that are kept; -1: as many as leave
      room for max_tokens, or for one; None keeps all
    - thinking_token_budget: most reasoning tokens, between <think> and </think> or the model's own
      tags; then the reasoning is ended
    - truncation_side: with "right" the prompt's first tokens are kept instead
    - vector_size: asks for a pooled output: the first `vector_size` numbers of the hidden state of
      the prompt's last token, after the model's last norm. The token sampled after it means
      nothing. Not with log-probs. 0: no vector is asked for
    - vector_token_ids: the vector consists of the logits of these ids after the prompt, in place of
      the hidden state; vector_size is their number. Empty: the hidden state
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: Number | None = 16
    min_tokens: Number = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Number, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Number, float] = {}
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    structured_outputs: StructuredOutputs | None = None
    n: int = 1
    allowed_token_ids: tuple[Number, ...] | None = None
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: Number | None = None
    truncation_side: Literal["left", "right"] = "left"
    vector_size: Number = 0
    vector_token_ids: tuple[Number, ...] = ()


class InvalidParameter(ValueError):
    """A parameter outside its range.

    Attributes:
    - param: the field's name, for the client's error
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def normalized(params: RequestParams) -> RequestParams:
    """A copy of `params` with tuples for `stop` and `stop_token_ids`, a dict of integers for
    `logit_bias`, `top_k` 0 and `thinking_token_budget` None if they are off, and a `top_p` that
    float32 can tell from 0; raises InvalidParameter."""
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    words = (params.bad_words,) if isinstance(params.bad_words, str) else params.bad_words
    params = msgspec.structs.replace(
        params,
        stop=stop,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        top_k=0 if params.top_k == -1 else params.top_k,
        thinking_token_budget=_but_minus_one(params.thinking_token_budget),
        top_p=MIN_TOP_P if 0 <= params.top_p < MIN_TOP_P else params.top_p,
        logit_bias=_biases(params.logit_bias),
        structured_outputs=_plain(params.structured_outputs),
        allowed_token_ids=_each_once(params.allowed_token_ids),
        bad_words=_each_once(words) or (),
    )
    _check_sampling(params)
    _check_penalties(params)
    _check_lengths(params)
    _check_stops(params)
    kept = params.truncate_prompt_tokens
    if kept not in (None, -1) and not 1 <= kept <= MAX_INT:
        message = f"truncate_prompt_tokens must be -1 or from 1 to {MAX_INT}, not {kept}"
        raise InvalidParameter("truncate_prompt_tokens", message)
    if params.truncation_side not in ("left", "right"):
        message = f'truncation_side must be "left" or "right", not {params.truncation_side!r:.100}'
        raise InvalidParameter("truncation_side", message)
    _check_biases(params.logit_bias)
    _check_allowed(params.allowed_token_ids)
    _check_words(params.bad_words)
    _check_logprobs(params)
    _check_form(params)
    check_choices("n", params.n)
    return params


def _but_minus_one(limit: int | None) -> int | None:
    """The limit; None for -1, by which other servers mean no limit."""
    return None if limit == -1 else limit


def _plain(spec: StructuredOutputs | None) -> StructuredOutputs | None:
    """A copy with the schema as text and the choice as a tuple; callers may give a dict and a
    list."""
    if spec is None:
        return None
    schema = cast("JsonValue", spec.json)
    if schema is not None and not isinstance(schema, str):
        schema = msgspec.json.encode(schema).decode()
    choice = None if spec.choice is None else tuple(spec.choice)
    return msgspec.structs.replace(spec, json=schema, choice=choice)


def _biases(given: dict[int, float] | dict[str, float] | None) -> dict[int, float]:
    try:
        return msgspec.convert(given, dict[int, float], str_keys=True) if given else {}
    except msgspec.ValidationError as error:
        raise InvalidParameter("logit_bias", f"logit_bias: {error}") from None


def _each_once(given: Sequence[T] | None) -> tuple[T, ...] | None:
    return None if given is None else tuple(dict.fromkeys(given))


def _check_sampling(params: RequestParams) -> None:
    _check_within("temperature", params.temperature, 0, MAX_TEMPERATURE)
    if not 0 <= params.top_k <= MAX_INT:
        raise InvalidParameter(
            "top_k", f"top_k must be -1, 0 or positive, at most {MAX_INT}, not {params.top_k}"
        )
    if not 0 < params.top_p <= 1:
        raise InvalidParameter("top_p", f"top_p must be in [0, 1], not {params.top_p}")
    _check_within("min_p", params.min_p, 0, 1)
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise InvalidParameter("seed", f"seed must fit into 64 bits, not {params.seed}")


NO_PENALTIES = 1.0, 0.0, 0.0


def penalties(params: RequestParams) -> tuple[float, float, float]:
    """The penalties for repetition, frequency and presence."""
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _check_penalties(params: RequestParams) -> None:
    _check_within("repetition_penalty", params.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
    for name in ("presence_penalty", "frequency_penalty"):
        _check_within(name, getattr(params, name), -MAX_PENALTY, MAX_PENALTY)


def _check_lengths(params: RequestParams) -> None:
    if params.max_tokens is not None:
        _check_within("max_tokens", params.max_tokens, 1, MAX_INT)
    _check_within("min_tokens", params.min_tokens, 0, MAX_INT)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidParameter(
            "min_tokens", f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}"
        )


def _check_stops(params: RequestParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidParameter(
            "stop", f"at most {MAX_STOP_STRINGS} stop strings, not {len(params.stop)}"
        )
    for text in params.stop:
        if not text:
            raise InvalidParameter("stop", "a stop string must not be empty")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidParameter(
                "stop", f"at most {MAX_STOP_CHARS} characters a stop string, not {len(text)}"
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        count = len(params.stop_token_ids)
        raise InvalidParameter(
            "stop_token_ids", f"at most {MAX_STOP_TOKENS} stop_token_ids, not {count}"
        )
    for token in params.stop_token_ids:
        _check_within("stop_token_ids", token, 0, MAX_INT)


def _check_biases(biases: dict[int, float]) -> None:
    if len(biases) > MAX_BIASES:
        raise InvalidParameter(
            "logit_bias", f"at most {MAX_BIASES} ids in logit_bias, not {len(biases)}"
        )
    for token, bias in biases.items():
        _check_within("logit_bias", token, 0, MAX_INT)
        _check_within("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def _check_allowed(allowed: tuple[int, ...] | None) -> None:
    if allowed is None:
        return
    if not 0 < len(allowed) <= MAX_ALLOWED_TOKENS:
        reason = (
            f"be at most {MAX_ALLOWED_TOKENS}, not {len(allowed)}" if allowed else "not be empty"
        )
        raise InvalidParameter("allowed_token_ids", f"allowed_token_ids must {reason}")
    for token in allowed:
        _check_within("allowed_token_ids", token, 0, MAX_INT)


def _check_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        message = f"at most {MAX_BAD_WORDS} bad_words, not {len(words)}"
        raise InvalidParameter("bad_words", message)
    for word in words:
        if not word.strip():
            raise InvalidParameter("bad_words", "a bad word must not be empty or white space alone")
        if len(word) > MAX_BAD_WORD_CHARS:
            message = f"at most {MAX_BAD_WORD_CHARS} characters a bad word, not {len(word)}"
            raise InvalidParameter("bad_words", message)


def _check_logprobs(params: RequestParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        most = getattr(params, name)
        if most is not None:
            _check_within(name, most, 0, MAX_LOGPROBS)
            if params.vector_size:
                raise InvalidParameter(name, f"{name} is not allowed where a vector is asked for")
    _check_within("vector_size", params.vector_size, 0, MAX_VECTOR_SIZE)


def _check_form(params: RequestParams) -> None:
    """Raises InvalidParameter for parameters that forbid tokens beside a grammar, or beside a
    reasoning budget: perhaps no token would be left."""
    for name in ("min_tokens", "allowed_token_ids", "bad_words"):
        if params.structured_outputs is not None and getattr(params, name):
            raise InvalidParameter(name, f"{name} is not allowed with structured_outputs")
    budget = params.thinking_token_budget
    if budget is None:
        return
    _check_within("thinking_token_budget", budget, 0, MAX_INT)
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(params, name):
            raise InvalidParameter(name, f"{name} is not allowed with thinking_token_budget")


def check_choices(name: str, count: int) -> None:
    """Raises InvalidParameter for a number of choices that no prompt may have."""
    if count == 0:
        message = f"{name} is 0, which asks for no choice at all; leave it out for one"
        raise InvalidParameter(name, message)
    _check_within(name, count, 1, MAX_CHOICES)


def _check_within(name: str, value: float, least: float, limit: float) -> None:
    if not least <= value <= limit:  # also for NaN
        raise InvalidParameter(name, f"{name} must be from {least:g} to {limit:.10g}, not {value}")


# ------------------------------------------------------------- choices of one request

SEED_MASK = 2**64 - 1


def choice_id(request_id: str, number: int) -> str:
    """The request id of choice `number`, from 0; the first one's is the request's own."""
    return f"{request_id}/{number}" if number else request_id


def choice_ids(request_id: str, numbers: Iterable[int]) -> list[str]:
    """Request ids of the choices `numbers`."""
    return [choice_id(request_id, number) for number in numbers]


def request_of(choice: str) -> str:
    """The request id to which the id of a `choice` belongs."""
    return choice.partition("/")[0]


def choice_seed(seed: int, number: int) -> int:
    """The seed of choice `number`, in 64 bits."""
    return (seed + number) & SEED_MASK
