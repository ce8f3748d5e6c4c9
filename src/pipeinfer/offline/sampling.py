"""SamplingParams and forms as scripts for vLLM write them: mutable, and with vLLM's other fields.

What stages are sent is `pipeinfer.params.SamplingParams`; `plain` makes it from these. Knows no
request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from pipeinfer import params
from pipeinfer.offline.keywords import is_neutral
from pipeinfer.offline.outputs import RequestError

# Fields of vLLM's that ask for what there is not, unless their value is one of those here (None:
# one that asks for nothing, see is_neutral); and what to use instead.
Refusals = Mapping[str, tuple[tuple[object, ...] | None, str]]
OF_SAMPLING: Refusals = {
    "spaces_between_special_tokens": ((True,), "special tokens are written as they are"),
    "output_kind": ((0, 2), "LLM returns whole outputs, AsyncLLM yields deltas"),
    "stream_interval": ((1,), "AsyncLLM yields output as it comes"),
    "flat_logprobs": (None, "logprobs are a list with a dict for each token"),
    "prompt_logprob_token_ids": (None, "use prompt_logprobs, of the likeliest ids, at most 20"),
    "prompt_logprob_start": (None, "use prompt_logprobs, which are of the whole prompt"),
    "logprob_token_ids": (None, "use logprobs, of the likeliest ids, at most 20"),
    "extra_args": (None, "no code of others runs in a step"),
    "logits_processors": (None, "use logit_bias, allowed_token_ids or bad_words"),
    "skip_clone": ((True, False), ""),
    "skip_reading_prefix_cache": (None, "use a cache_salt of its own"),
    "repetition_detection": (None, "use repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": (None, "routed experts are not returned"),
    "trace_decode_token_ids": (None, "give the ids as a prompt, with prompt_logprobs"),
    "watermarking": (None, "outputs are not marked"),
    "best_of": ((1,), "use n, and choose by cumulative_logprob"),
    "guided_decoding": (None, "use structured_outputs"),
}
OF_FORMS: Refusals = {
    "disable_any_whitespace": (None, "say in the schema or grammar what may stand between"),
    "disable_additional_properties": ((True,), "the setting allow_additional_properties says so"),
    "whitespace_pattern": (None, "use grammar"),
    "structural_tag": (None, "use grammar, or after for text that goes before"),
}
ELSEWHERE = ("logit_bias", "structured_outputs")  # whose types are checked where they are read
ANY_OBJECT = '{"type":"object"}'


class StructuredOutputsParams(msgspec.Struct, kw_only=True):
    """What the whole output must be; exactly one of these is given. json: a JSON schema, as text or
    as a dict. regex: a regular expression. choice: one of these texts. grammar: in llguidance's
    Lark, or GBNF. json_object: any JSON object. after: what comes up to this text is free.

    The other fields are vLLM's. RequestError names all that ask for something that there is not,
    and fields of another type.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: str = ""
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None

    @classmethod
    def of(cls, given: object) -> StructuredOutputsParams | params.StructuredOutputs | None:
        """`given`, of a dict with these fields what it says. Raises RequestError."""
        fields = params.StructuredOutputs.__struct_fields__
        if given is None or all(hasattr(given, name) for name in fields):
            return cast("StructuredOutputsParams | params.StructuredOutputs | None", given)
        if not isinstance(given, Mapping):
            what = f"{given!r:.60}" if isinstance(given, str) else type(given).__name__
            message = f"structured_outputs is StructuredOutputsParams or a dict, not {what}"
            raise RequestError(message, "structured_outputs")
        said: dict[str, Any] = {str(name): value for name, value in given.items()}
        if unknown := [name for name in said if name not in cls.__struct_fields__]:
            known = ", ".join(cls.__struct_fields__)
            message = f"structured_outputs has no {', '.join(unknown)}; its fields are {known}"
            raise RequestError(message, "structured_outputs")
        return cls(**said)

    def __post_init__(self) -> None:
        if wrong := _wrong_types(self):
            said = ", ".join(f"structured_outputs.{one}" for one in wrong)
            raise RequestError(said, "structured_outputs")
        _refuse(self, OF_FORMS, "structured_outputs")
        kinds = ("json", "regex", "choice", "grammar")
        given = [name for name in kinds if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            message = f"an output has one form of {', '.join(kinds)} and json_object, not {what}"
            raise RequestError(message, "structured_outputs")

    def plain(self) -> params.StructuredOutputs:
        """As stages know it."""
        self.__post_init__()  # fields may have been set since
        json: Any = ANY_OBJECT if self.json_object else self.json
        choice = None if self.choice is None else tuple(self.choice)
        return params.StructuredOutputs(
            json=json, regex=self.regex, choice=choice, grammar=self.grammar, after=self.after
        )


class SamplingParams(msgspec.Struct, kw_only=True):
    """How to choose tokens and when to stop; fields may be changed until a call is made.

    Up to truncation_side these are the fields of pipeinfer.params.SamplingParams, which says what
    they are. `stop` and `bad_words` may be one text; these, `stop_token_ids` and `logit_bias` may
    be None, and `structured_outputs` a dict of its fields. A seed of -1 and a
    thinking_token_budget of -1 are None; logprobs of True are 1. max_tokens may be 0: the prompt
    alone is computed, for its prompt_logprobs or for the prefix cache. detokenize: False leaves
    `text` empty; not with `stop`.

    The other fields are vLLM's, for scripts that give their defaults. RequestError names all that
    ask for something that there is not; values out of range are refused when a call is made.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: (
        StructuredOutputsParams | params.StructuredOutputs | Mapping[str, Any] | None
    ) = None
    n: int = 1
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = ()
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    truncation_side: str = "left"
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: Any = None
    stream_interval: int | None = None
    flat_logprobs: bool = False
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Any = None
    extra_args: Any = None
    logits_processors: Any = None
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Any = None
    watermarking: bool | None = None
    best_of: int | None = None
    guided_decoding: Any = None

    def __post_init__(self) -> None:
        _refuse(self, OF_SAMPLING, "SamplingParams")
        self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        self.seed = None if self.seed == -1 else self.seed
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs

    @classmethod
    def from_optional(cls, **given: object) -> SamplingParams:
        """None counts as not given, but for max_tokens, which is without limit then."""
        kept: dict[str, Any] = {
            name: value
            for name, value in given.items()
            if value is not None or name == "max_tokens"
        }
        return cls(**kept)

    def clone(self) -> SamplingParams:
        """A copy of its own."""
        return msgspec.structs.replace(self)

    def plain(self) -> params.SamplingParams:
        """As stages know them; max_tokens may still be 0. Raises RequestError."""
        self.__post_init__()  # fields may have been set since
        if self.stop and not self.detokenize:
            raise RequestError("stop looks at the text, which detokenize=False leaves out", "stop")
        names = params.SamplingParams.__struct_fields__
        kept: dict[str, Any] = {name: getattr(self, name) for name in names}
        make = getattr(self.structured_outputs, "plain", None)  # else it is as stages know it
        if make is not None:
            kept["structured_outputs"] = make()
        return params.SamplingParams(**kept)


class BeamSearchParams:
    """Refused: there is no beam search."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RequestError(
            "there is no beam search: ask for n outputs, and choose by cumulative_logprob",
            "beam_width",
        )


AnyParams = SamplingParams | params.SamplingParams


def public(given: params.SamplingParams) -> SamplingParams:
    """The same for callers, who may change it."""
    return SamplingParams(**{name: getattr(given, name) for name in given.__struct_fields__})


def wrong_types(given: AnyParams) -> list[str]:
    """The fields whose values are of no type that they may have, each with its type and theirs."""
    names = params.SamplingParams.__struct_fields__
    return _wrong_types(SamplingParams(**{name: getattr(given, name) for name in names}))


def _wrong_types(given: msgspec.Struct) -> list[str]:
    wrong: list[str] = []
    for field in msgspec.structs.fields(given):
        if field.name in ELSEWHERE:
            continue
        try:
            msgspec.convert(getattr(given, field.name), field.type)
        except msgspec.ValidationError as error:
            wrong.append(f"{field.name}: {error}")
    return wrong


def _refuse(given: msgspec.Struct, table: Refusals, whole: str) -> None:
    wrong = {
        name: reason
        for name, (allowed, reason) in table.items()
        if not is_neutral(getattr(given, name), allowed)
    }
    if wrong:
        lines = [f"{name}={getattr(given, name)!r:.60}: {reason}" for name, reason in wrong.items()]
        first = next(iter(wrong)) if len(wrong) == 1 else whole
        raise RequestError("\n".join(lines), first)
