"""Engine: a model behind the methods of SGLang's Engine, for its scripts; dicts in, dicts out.

Knows the names of both; requests are AsyncLLM's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, TypeVar, cast

from pipeinfer.offline import calls
from pipeinfer.offline.calls import SamplingParams, StructuredOutputsParams
from pipeinfer.offline.keywords import is_neutral
from pipeinfer.offline.llm import SyncModel
from pipeinfer.offline.outputs import (
    CompletionOutput,
    Delta,
    Logprobs,
    OfflineRequest,
    Progress,
    RequestError,
    RequestOutput,
)
from pipeinfer.other_servers import NO_ADAPTERS, TEXTS_ONLY

T = TypeVar("T")
Given = Mapping[str, object]

MAX_NEW_TOKENS = 128  # SGLang's default
# SGLang's names of what SamplingParams call otherwise, and of forms.
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
# What there is not, and what to use instead.
NOT_SAMPLING = {
    "stop_regex": "use stop",
    "custom_params": "no code of others runs in a step",
    "structural_tag": "use ebnf or json_schema",
    "beam_width": "ask for n outputs",
    "watermark": "outputs are not marked",
}
NOT_GENERATING = {
    **dict.fromkeys(("image_data", "audio_data", "video_data"), TEXTS_ONLY),
    **dict.fromkeys(("mm_hashes", "mm_content_hashes"), TEXTS_ONLY),
    "lora_path": NO_ADAPTERS,
    "token_ids_logprob": "use top_logprobs_num, of the likeliest ids",
    "custom_logit_processor": "use logit_bias",
    "require_reasoning": "a form begins where thoughts end by itself",
    "session_params": "give the whole prompt: what is cached is found again",
    "return_hidden_states": "they are not returned",
    "return_routed_experts": "they are not returned",
}


class Chunk(TypedDict):
    """An output so far. meta_info: "id", "finish_reason" (None before the end), "prompt_tokens",
    "completion_tokens", "cached_tokens", and log-probs if asked for. index: of the output, in
    streams of several."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: NotRequired[int]


@dataclass(frozen=True)
class _Scores:
    """Which log-probs are returned: `of` outputs, with those of so many `others`, and of the
    prompt's tokens from `start` on, if that is not negative."""

    of: bool = False
    start: int = -1
    others: int = 0


@dataclass(frozen=True)
class _Batch:
    """Calls, and the form of what is returned. `single`: one dict, and no list of them."""

    asked: list[OfflineRequest]
    single: bool
    scores: _Scores

    def result(self, outputs: Sequence[RequestOutput]) -> Chunk | list[Chunk]:
        """Of each prompt, each of its choices."""
        made = [
            _finished_chunk(output, one, self.scores)
            for output in outputs
            for one in output.outputs
        ]
        return made[0] if self.single else made


class Engine(SyncModel):
    """A model, loaded when the constructor returns, with the methods of SGLang's Engine; its
    keywords are LLM's, `model_path` the model. skip_tokenizer_init: there are no texts."""

    def shutdown(self) -> None:
        """Ends all processes. May be called again."""
        self.close()

    def flush_cache(self) -> bool:
        """Forgets cached prefixes; whether all groups have done so."""
        return self.reset_prefix_cache()

    def get_server_info(self) -> dict[str, object]:
        """The statistics of each stage."""
        return {"internal_states": [self.stats()]}

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Given | Sequence[Given] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **options: object,
    ) -> Chunk | list[Chunk] | Iterator[Chunk]:
        """A dict for one prompt; for several a list of them in order, each of `n` outputs apart.
        With `stream` an iterator of dicts that have all of a text so far; of several outputs,
        "index" says whose.

        sampling_params: by SGLang's names, for all prompts or one for each; without max_new_tokens
        128. options: return_logprob, logprob_start_len and top_logprobs_num ask for log-probs, as
        (log-prob, id, None); priority, cache_salt, rid. RequestError names what there is not.
        """
        batch = self._read(prompt, sampling_params, input_ids, options, stream)
        if stream:
            return self._chunks(batch)
        return batch.result(self._thread.run(self._collect(batch)))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Given | Sequence[Given] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **options: object,
    ) -> Chunk | list[Chunk] | AsyncIterator[Chunk]:
        """The same on the caller's event loop; with `stream` it is an async iterator."""
        batch = self._read(prompt, sampling_params, input_ids, options, stream)
        if stream:
            return self._chunks_async(batch)
        return batch.result(await self._elsewhere(self._collect(batch)))

    def _read(
        self,
        prompt: str | Sequence[str] | None,
        params: Given | Sequence[Given] | None,
        ids: Sequence[int] | Sequence[Sequence[int]] | None,
        options: dict[str, Any],
        stream: bool,
    ) -> _Batch:
        self._check_open()
        if (prompt is None) == (ids is None):
            raise RequestError("give either prompt or input_ids", "prompt")
        scores = _scores(options, stream)
        priority, salt = options.pop("priority", None), options.pop("cache_salt", None)
        rid = options.pop("rid", None)
        _refuse("generate", options, NOT_GENERATING)
        given: Any = ids if prompt is None else prompt
        listed = calls.as_list(given)
        wanted = params if isinstance(params, Sequence) else [params or {}] * len(listed)
        read = [_sampling(one, scores) for one in wanted]
        each = calls.each(read, len(listed), "sampling_params")
        if not self._detokenize:
            each = [calls.without_texts(one) for one in each]
        names = [rid] * len(listed) if rid is None or isinstance(rid, str) else list(rid)
        call_options = calls.Options(priority=priority or 0, cache_salt=salt or "")
        asked = [
            calls.completion(self._llm.name(name), one, chosen, **call_options)
            for name, one, chosen in zip(names, listed, each, strict=True)
        ]
        single = listed == [given] and asked[0].call.params.n == 1
        return _Batch(asked, single, scores)

    async def _collect(self, batch: _Batch) -> list[RequestOutput]:
        total = sum(asked.call.params.n for asked in batch.asked)
        return await self._llm.collect(batch.asked, Progress(total))

    def _chunks(self, batch: _Batch) -> Iterator[Chunk]:
        chunks = self._made(batch)
        try:
            while (chunk := self._thread.run(_next(chunks))) is not None:
                yield chunk
        finally:
            self._thread.run(chunks.aclose())

    async def _chunks_async(self, batch: _Batch) -> AsyncIterator[Chunk]:
        chunks = self._made(batch)
        try:
            while (chunk := await self._elsewhere(_next(chunks))) is not None:
                yield chunk
        finally:
            await self._elsewhere(chunks.aclose())

    async def _elsewhere(self, coroutine: Coroutine[object, None, T]) -> T:
        """What the coroutine gives on the model's own loop, for the caller's."""
        return await asyncio.wrap_future(self._thread.submit(coroutine))

    async def _made(self, batch: _Batch) -> AsyncGenerator[Chunk, None]:
        """On the model's loop: a chunk for each delta."""
        sizes = [(asked, n) for asked in batch.asked for n in range(asked.call.params.n)]
        outputs = [CompletionOutput(n, "", [], None, logprobs=[]) for _, n in sizes]
        prompts: dict[str, tuple[int, int]] = {}  # their tokens, and how many were cached
        async for delta in self._llm.stream(*batch.asked):
            (asked, _), output = sizes[delta.index], outputs[delta.index]
            _add(output, delta)
            name = asked.call.request_id
            if delta.prompt_tokens:
                prompts[name] = delta.prompt_tokens, delta.cached_tokens
            made = _chunk(name, output, prompts.get(name, (0, 0)), batch.scores)
            yield made if batch.single else {**made, "index": delta.index}


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


def _sampling(given: Given, scores: _Scores) -> SamplingParams:
    """From SGLang's names. RequestError names all that there are not."""
    known = SamplingParams.__struct_fields__
    kept: dict[str, Any] = {"max_tokens": MAX_NEW_TOKENS}
    rest: dict[str, Any] = {}
    form: dict[str, Any] = {}
    for name, value in given.items():
        if name in FORMS:
            form |= {} if value is None else {FORMS[name]: value}
        elif NAMES.get(name, name) in known:
            kept[NAMES.get(name, name)] = value
        else:
            rest[name] = value
    _refuse("sampling_params", rest, NOT_SAMPLING)
    if form:
        kept["structured_outputs"] = StructuredOutputsParams(**form)
    if scores.of:
        kept["logprobs"] = scores.others
        kept["prompt_logprobs"] = scores.others if scores.start >= 0 else None
    return SamplingParams(**kept)


def _scores(options: dict[str, Any], stream: bool) -> _Scores:
    """Takes what it needs out of `options`."""
    of = bool(options.pop("return_logprob", False))
    start, others = options.pop("logprob_start_len", None), options.pop("top_logprobs_num", None)
    scores = _Scores(of, -1 if start is None else start, others or 0)
    if stream and of and scores.start >= 0:
        raise RequestError("logprob_start_len is not for streams: use stream=False", "stream")
    return scores


def _refuse(of: str, given: Given, reasons: Mapping[str, str]) -> None:
    """Raises RequestError for unknown fields, and for fields whose value asks for something."""
    wrong = [
        f"{of}: {name}={value!r:.60}: {reasons.get(name, 'there is nothing like it here')}"
        for name, value in given.items()
        if not is_neutral(value)
    ]
    if wrong:
        raise RequestError("\n".join(wrong), of)


def _add(output: CompletionOutput, delta: Delta) -> None:
    output.text += delta.text
    output.token_ids += delta.token_ids
    output.logprobs = [*(output.logprobs or []), *(delta.logprobs or [])]
    output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
    output.error = delta.error


def _finished_chunk(result: RequestOutput, output: CompletionOutput, scores: _Scores) -> Chunk:
    tokens = len(result.prompt_token_ids), result.cached_tokens
    made = _chunk(result.request_id, output, tokens, scores)
    if scores.of and scores.start >= 0:
        pairs = list(zip(result.prompt_token_ids, result.prompt_logprobs or [], strict=True))
        pairs = pairs[scores.start :]
        made["meta_info"]["input_token_logprobs"] = [
            _token_logprob(token, found) for token, found in pairs
        ]
        if scores.others:
            made["meta_info"]["input_top_logprobs"] = [_top(found) for _, found in pairs]
    return made


def _chunk(name: str, output: CompletionOutput, prompt: tuple[int, int], scores: _Scores) -> Chunk:
    """The output so far. prompt: (tokens of the prompt, how many were cached)."""
    info: dict[str, Any] = {
        "id": name,
        "finish_reason": _finish(output),
        "prompt_tokens": prompt[0],
        "completion_tokens": len(output.token_ids),
        "cached_tokens": prompt[1],
    }
    if scores.of:
        found = output.logprobs or []
        pairs = zip(output.token_ids, found, strict=True)
        info["output_token_logprobs"] = [_token_logprob(token, one) for token, one in pairs]
        if scores.others:
            info["output_top_logprobs"] = [_top(one) for one in found]
    return {"text": output.text, "output_ids": list(output.token_ids), "meta_info": info}


def _token_logprob(token: int, found: Logprobs | None) -> tuple[float | None, int, None]:
    """Of the token itself; of the prompt's first one nothing is known."""
    return (None if found is None else found[token].logprob, token, None)


def _top(found: Logprobs | None) -> list[tuple[float, int, None]] | None:
    """Of the likeliest ones, those first."""
    if found is None:
        return None
    best = sorted(found.items(), key=lambda pair: pair[1].rank)
    return [(one.logprob, token, None) for token, one in best]


def _finish(output: CompletionOutput) -> dict[str, Any] | None:
    if output.finish_reason == "length":
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish_reason == "stop":
        return {"type": "stop", "matched": output.stop_reason}
    if output.finish_reason is None:
        return None
    return {"type": "abort", "message": output.error or output.finish_reason}


def stream_and_merge(llm: Engine, prompt: str, sampling_params: Given) -> str:
    """The whole text of a stream."""
    text = ""
    chunks = llm.generate(prompt, sampling_params, stream=True)
    for chunk in cast("Iterator[Chunk]", chunks):
        text = chunk["text"]
    return text


async def async_stream_and_merge(
    llm: Engine, prompt: str, sampling_params: Given
) -> AsyncIterator[str]:
    """What is new in each chunk of a stream."""
    seen = 0
    chunks = await llm.async_generate(prompt, sampling_params, stream=True)
    async for chunk in cast("AsyncIterator[Chunk]", chunks):
        yield chunk["text"][seen:]
        seen = len(chunk["text"])
