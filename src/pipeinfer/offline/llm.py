"""Models for scripts, which block; the event loop of AsyncLLM runs on a thread of its own.

- `LLM` has the methods of vLLM's class.
- `Engine` has those of SGLang's, for its scripts: dicts in, dicts out.

Requests are AsyncLLM's business. Knows prompts and outputs, and the progress bar; no pipeline.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, Self, TypedDict, TypeVar, cast

from tqdm import tqdm

from pipeinfer.messages import SleepMode
from pipeinfer.offline import calls
from pipeinfer.offline.async_llm import AsyncLLM
from pipeinfer.offline.calls import (
    AnyParams,
    ChatOptions,
    LoopThread,
    LoRARequest,
    Message,
    PoolingParams,
    Prompt,
    SamplingParams,
    StructuredOutputsParams,
)
from pipeinfer.offline.keywords import EngineArgs, is_neutral
from pipeinfer.offline.outputs import (
    CompletionOutput,
    Delta,
    EmbeddingRequestOutput,
    Logprobs,
    OfflineRequest,
    Progress,
    RequestError,
    RequestOutput,
    ScoringRequestOutput,
)
from pipeinfer.other_servers import TEXTS_ONLY
from pipeinfer.params import JsonObject, JsonValue

T = TypeVar("T")


class ProgressBar:
    """Shows a batch's progress until its context ends.

    use_tqdm: True shows it, False does not, None does where stderr is a terminal. Or what makes the
    bar, called as tqdm is; `show` then works with anything that has update() and set_postfix_str().
    """

    def __init__(self, progress: Progress, use_tqdm: bool | Callable[..., object] | None) -> None:
        make = cast("Callable[..., Any]", use_tqdm) if callable(use_tqdm) else tqdm
        quiet = {None: None, True: False, False: True}
        bar_options = {} if callable(use_tqdm) else {"disable": quiet[use_tqdm]}
        self._progress = progress
        self._bar = make(
            total=progress.total, desc="requests", unit="", dynamic_ncols=True, **bar_options
        )
        self._shown = 0
        self._began = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.show()
        self._bar.close()

    def show(self) -> None:
        """Shows the progress so far; rates are those of the whole batch."""
        if getattr(self._bar, "disable", False):
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        prompts, outputs = (count / seconds for count in self._progress.tokens())
        rates = f"tokens/s: {prompts:,.0f} of prompts, {outputs:,.0f} of outputs"
        self._bar.set_postfix_str(rates, refresh=False)
        ended, self._shown = self._progress.ended - self._shown, self._progress.ended
        self._bar.update(ended)
        self._bar.refresh()


if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Params = AnyParams | Sequence[AnyParams] | None
NO_TARGETS = {"itl_target": 0.0, "ttft_target": 0.0}
# No client waits for single tokens of a batch, and a batch has no pauses for capturing graphs.
FOR_BATCHES = {**NO_TARGETS, "policy": "throughput", "all_graphs_first": True}

VECTORS = "LLM.embed makes vectors of texts and LLM.score scores of pairs; there are no classes"
FROM_OUTSIDE = "the model is in processes of its own; LLM.stats() says what they do"
AT_ONCE = "give all prompts to LLM.generate at once, or use AsyncLLM"
# Attributes that vLLM's LLM has and this one has not, and what to use instead.
MISSING = {
    **dict.fromkeys(("encode", "classify", "reward"), VECTORS),
    "beam_search": "there is no beam search: ask for n outputs, choose by cumulative_logprob",
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), AT_ONCE),
    "release_kv_cache_memory": "sleep() gives pages and weights back",
    **dict.fromkeys(("start_profile", "stop_profile"), "use the settings profile and profile_dir"),
    **dict.fromkeys(
        ("llm_engine", "model_config", "collective_rpc", "apply_model", "get_world_size"),
        FROM_OUTSIDE,
    ),
    "get_metrics": "LLM.stats() has the statistics of each stage",
    "reset_mm_cache": "models take and give texts only",
    **dict.fromkeys(
        ("init_weight_transfer_engine", "update_weights", "start_weight_update"),
        "LLM(...) loads a changed checkpoint",
    ),
}


def batch_defaults(settings: Mapping[str, object]) -> dict[str, object]:
    """`settings` over the defaults of a batch. Who gives a target for steps wants a policy that
    heeds it."""
    targets = any(settings.get(name) for name in NO_TARGETS)
    return FOR_BATCHES | ({"policy": "mixed"} if targets else {}) | dict(settings)


class SyncModel:
    """A model, loaded when the constructor returns; an AsyncLLM on a thread of its own.

    Arguments:
    - model: a folder, a hub id, or nothing for the bundled demo model
    - settings: the flags of `pipeinfer serve` with underscores; its defaults are no targets of
      steps, no late graphs, and the policy `throughput`; keywords of vLLM's LLM and SGLang's
      Engine are taken as AsyncLLM does
    - skip_tokenizer_init: outputs have no texts
    - chat_template: a file, or a template as text

    Raises ConfigurationError if the model cannot be loaded. The processes behind it end with
    close(), with the `with` block, when no reference to it is left, or with the interpreter.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        skip_tokenizer_init: bool = False,
        chat_template: str | os.PathLike[str] | None = None,
        **settings: object,
    ) -> None:
        self._detokenize = not skip_tokenizer_init
        given = os.fspath(chat_template or "")
        self._template = given if "{%" in given or "{{" in given else None
        if given and self._template is None:
            settings["chat_template"] = given
        self._llm = AsyncLLM(model, **batch_defaults(settings))
        self._thread = LoopThread()
        # Runs once: on close(), when no reference to the LLM is left, or when the interpreter ends.
        self._end = weakref.finalize(self, _end, self._llm, self._thread, os.getpid())
        try:
            self._thread.run(self._llm.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes. May be called again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of the parameters of a request without params: vLLM's defaults under the
        checkpoint's own. The caller may change it."""
        return self._llm.get_default_sampling_params()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer as transformers has it."""
        return self._llm.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; whether all groups have done so."""
        self._check_open()
        return self._thread.run(self._llm.reset_prefix_cache())

    def sleep(self, level: int = 1, mode: SleepMode = "wait") -> None:
        """Gives memory back until wake_up(), as AsyncLLM.sleep(); requests that other threads send
        meanwhile are refused with RequestError."""
        self._check_open()
        self._thread.run(self._llm.sleep(level, mode, wait=False))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends sleep(); see AsyncLLM.wake_up()."""
        self._check_open()
        self._thread.run(self._llm.wake_up(tags))

    def stats(self) -> dict[str, dict[str, float]]:
        """The statistics of each stage, as of its latest heartbeat (twice a second)."""
        return self._llm.stats()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RuntimeError("this model is closed")


class LLM(SyncModel):
    """Batches of prompts or chats in, whole outputs out, in the form of vLLM's LLM."""

    if not TYPE_CHECKING:  # it would hide what is misspelled

        def __getattr__(self, name: str) -> object:
            reason = MISSING.get(name)
            hint = f": {reason}" if reason else ""
            raise AttributeError(f"LLM has no {name!r}{hint}")

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """An LLM of the keywords in EngineArgs."""
        return cls(**vars(args))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., object] | None = None,
        *,
        params: Params = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or many, each a text, token ids, or a dict with one of them (see
        TextPrompt, TokensPrompt); results in the prompts' order.

        - sampling_params: for all prompts, or a list with one for each; None is
          get_default_sampling_params(); `params` is another name of it
        - use_tqdm: whether a bar shows requests and tokens a second; None: where stderr is a
          terminal; or what makes one, as tqdm does
        - lora_request: the adapter of all prompts, or of each one; needs enable_lora
        - priority: a lower one goes first; or one for each prompt
        - tokenization_kwargs: {"add_special_tokens": False} leaves them out of texts

        Raises ValueError if lengths differ, RequestError for a prompt that is refused (all others
        are aborted then), PipelineStopped if the stages are gone. What fails later ends with
        finish_reason "error".
        """
        listed = calls.as_list(prompts)
        count = len(listed)
        given = self._params(sampling_params, params, count)
        options = calls.with_options(
            count, priority, None, tokenization_kwargs, mm_processor_kwargs
        )
        adapters = self._llm.adapters.add_to(options, lora_request)
        batch = [
            calls.completion(self._llm.name(), prompt, one, **call_options)
            for prompt, one, call_options in zip(listed, given, options, strict=True)
        ]
        return self._run(batch, use_tqdm, adapters)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., object] | None = None,
        *,
        params: Params = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answers one chat (a list of dicts with "role" and "content") or a list of chats.

        - tools: what the template shows as such, in OpenAI's form; calls come as text
        - continue_final_message: the last message goes on; needs add_generation_prompt=False, which
          leaves the assistant's turn unopened
        - chat_template: another template, as text
        - chat_template_kwargs: further variables of it

        The rest is as for generate().
        """
        calls.check_content_format(chat_template_content_format)
        chats = calls.as_chats(messages)
        count = len(chats)
        given = self._params(sampling_params, params, count)
        options = calls.with_options(
            count, priority, None, tokenization_kwargs, mm_processor_kwargs
        )
        adapters = self._llm.adapters.add_to(options, lora_request)
        chat_options = ChatOptions(
            chat_template=chat_template or self._template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        variables, _ = self._llm.template_arguments(chat_template_kwargs, chat_options)
        batch = [
            calls.chat(self._llm.name(), chat, one, variables, **rest)
            for chat, one, rest in zip(chats, given, options, strict=True)
        ]
        return self._run(batch, use_tqdm, adapters)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., object] | None = None,
        *,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, a text, token ids, or a dict with one of them, in their order.

        - pooling_params: for all of them
        - use_tqdm, tokenization_kwargs: as for generate()

        Raises as AsyncLLM.embed() does.
        """
        self._check_open()
        listed = calls.as_list(prompts)
        [options] = calls.with_options(1, None, lora_request, tokenization_kwargs, None)
        special, progress = options.get("add_special_tokens", True), Progress(len(listed))
        asked = self._llm.embed(
            listed, pooling_params, add_special_tokens=special, progress=progress
        )
        with ProgressBar(progress, use_tqdm) as bar:
            return self._thread.run(asked, bar.show)

    def score(
        self,
        data_1: str | list[str],
        data_2: str | list[str],
        use_tqdm: bool | Callable[..., object] | None = None,
        *,
        instruction: str | None = None,
        lora_request: object = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` fits to that of `data_1`, which may be one for all; see
        AsyncLLM.score(). use_tqdm: as for generate()."""
        self._check_open()
        calls.with_options(1, None, lora_request, None, None)
        progress = Progress(len(data_2) if isinstance(data_2, list) else 1)
        asked = self._llm.score(data_1, data_2, instruction=instruction, progress=progress)
        with ProgressBar(progress, use_tqdm) as bar:
            return self._thread.run(asked, bar.show)

    def _params(self, first: Params, second: Params, count: int) -> list[AnyParams]:
        """The parameters of each of `count` prompts: `first`, or `second` if that is None, or the
        defaults."""
        chosen = next((one for one in (first, second) if one is not None), None)
        given = self.get_default_sampling_params() if chosen is None else chosen
        listed = calls.each_params(given, count)
        return listed if self._detokenize else [calls.without_texts(one) for one in listed]

    def _run(
        self,
        batch: list[OfflineRequest],
        use_tqdm: bool | Callable[..., object] | None,
        adapters: Sequence[LoRARequest | None],
    ) -> list[RequestOutput]:
        self._check_open()
        progress = Progress(sum(asked.call.params.n for asked in batch))
        with ProgressBar(progress, use_tqdm) as bar:
            outputs = self._thread.run(self._llm.collect(batch, progress), bar.show)
        for output, adapter in zip(outputs, adapters, strict=True):
            output.lora_request = adapter
        return outputs


def _end(llm: AsyncLLM, thread: LoopThread, pid: int) -> None:
    if os.getpid() != pid:  # a fork has neither the thread nor the right to end the processes
        return
    if thread.is_current():  # collected as garbage there: it cannot wait for itself
        thread.start(llm.close())
        return
    try:
        thread.run(llm.close())
    finally:
        thread.close()


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
# Sampling parameters of SGLang that are missing here, and what to use instead.
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
    "lora_path": "LLM.generate takes a lora_request",
    "token_ids_logprob": "use top_logprobs_num, of the likeliest ids",
    "custom_logit_processor": "use logit_bias",
    "require_reasoning": "a form begins where reasoning ends by itself",
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
class _LogprobOptions:
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
    logprob_options: _LogprobOptions

    def result(self, outputs: Sequence[RequestOutput]) -> Chunk | list[Chunk]:
        """A chunk for each choice of each prompt; a single one if the batch is single."""
        made = [
            _finished_chunk(output, one, self.logprob_options)
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
        """Generates on the caller's event loop; with `stream` it returns an async iterator."""
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
        logprob_options = _logprob_options(options, stream)
        priority, salt = options.pop("priority", None), options.pop("cache_salt", None)
        rid = options.pop("rid", None)
        _refuse("generate", options, NOT_GENERATING)
        given: Any = ids if prompt is None else prompt
        listed = calls.as_list(given)
        wanted = params if isinstance(params, Sequence) else [params or {}] * len(listed)
        read = [_sampling(one, logprob_options) for one in wanted]
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
        return _Batch(asked, single, logprob_options)

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
        """Runs the coroutine on the model's own loop; returns its result on the caller's loop."""
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
            made = _chunk(name, output, prompts.get(name, (0, 0)), batch.logprob_options)
            yield made if batch.single else {**made, "index": delta.index}


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


def _sampling(given: Given, logprob_options: _LogprobOptions) -> SamplingParams:
    """SamplingParams of SGLang's names. The RequestError for unknown names lists all of them."""
    known = SamplingParams.__struct_fields__
    fields: dict[str, Any] = {"max_tokens": MAX_NEW_TOKENS}
    unknown: dict[str, Any] = {}
    form: dict[str, Any] = {}
    for name, value in given.items():
        if name in FORMS:
            form |= {} if value is None else {FORMS[name]: value}
        elif NAMES.get(name, name) in known:
            fields[NAMES.get(name, name)] = value
        else:
            unknown[name] = value
    _refuse("sampling_params", unknown, NOT_SAMPLING)
    if form:
        fields["structured_outputs"] = StructuredOutputsParams(**form)
    if logprob_options.of:
        fields["logprobs"] = logprob_options.others
        fields["prompt_logprobs"] = logprob_options.others if logprob_options.start >= 0 else None
    return SamplingParams(**fields)


def _logprob_options(options: dict[str, Any], stream: bool) -> _LogprobOptions:
    """Takes what it needs out of `options`."""
    of = bool(options.pop("return_logprob", False))
    start, others = options.pop("logprob_start_len", None), options.pop("top_logprobs_num", None)
    chosen = _LogprobOptions(of, -1 if start is None else start, others or 0)
    if stream and of and chosen.start >= 0:
        raise RequestError("logprob_start_len is not for streams: use stream=False", "stream")
    return chosen


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


def _finished_chunk(
    result: RequestOutput, output: CompletionOutput, logprob_options: _LogprobOptions
) -> Chunk:
    tokens = len(result.prompt_token_ids), result.cached_tokens
    made = _chunk(result.request_id, output, tokens, logprob_options)
    if logprob_options.of and logprob_options.start >= 0:
        pairs = list(zip(result.prompt_token_ids, result.prompt_logprobs or [], strict=True))
        pairs = pairs[logprob_options.start :]
        made["meta_info"]["input_token_logprobs"] = [
            _token_logprob(token, found) for token, found in pairs
        ]
        if logprob_options.others:
            made["meta_info"]["input_top_logprobs"] = [_top(found) for _, found in pairs]
    return made


def _chunk(
    name: str, output: CompletionOutput, prompt: tuple[int, int], logprob_options: _LogprobOptions
) -> Chunk:
    """The output so far. prompt: (tokens of the prompt, how many were cached)."""
    info: dict[str, Any] = {
        "id": name,
        "finish_reason": _finish(output),
        "prompt_tokens": prompt[0],
        "completion_tokens": len(output.token_ids),
        "cached_tokens": prompt[1],
    }
    if logprob_options.of:
        found = output.logprobs or []
        pairs = zip(output.token_ids, found, strict=True)
        info["output_token_logprobs"] = [_token_logprob(token, one) for token, one in pairs]
        if logprob_options.others:
            info["output_top_logprobs"] = [_top(one) for one in found]
    return {"text": output.text, "output_ids": list(output.token_ids), "meta_info": info}


def _token_logprob(token: int, found: Logprobs | None) -> tuple[float | None, int, None]:
    """(log-prob, id, None) of the token itself; the log-prob of the prompt's first token is
    None."""
    return (None if found is None else found[token].logprob, token, None)


def _top(found: Logprobs | None) -> list[tuple[float, int, None]] | None:
    """(log-prob, id, None) of the likeliest tokens, by rank."""
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
    """Yields the new text of each chunk of a stream."""
    seen = 0
    chunks = await llm.async_generate(prompt, sampling_params, stream=True)
    async for chunk in cast("AsyncIterator[Chunk]", chunks):
        yield chunk["text"][seen:]
        seen = len(chunk["text"])
