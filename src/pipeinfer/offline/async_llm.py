"""AsyncLLM: a model on the caller's event loop, as streams of deltas or as whole outputs.

Knows the pipeline and the shapes of what goes in and comes out; no processes and no threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import msgspec

from pipeinfer import settings as config
from pipeinfer.checkpoint.config import read_outline
from pipeinfer.gateway.requests import COMPLETION_MAX_TOKENS, sampling_defaults
from pipeinfer.gguf.header import is_gguf
from pipeinfer.offline import calls
from pipeinfer.offline.calls import ChatOptions, Message, Options, Prompt
from pipeinfer.offline.keywords import settings_of
from pipeinfer.offline.outputs import (
    ChoiceStream,
    Collector,
    Delta,
    DeltaStream,
    OfflineRequest,
    Progress,
    RequestError,
    RequestOutput,
    output_of,
)
from pipeinfer.offline.pipeline import Pipeline
from pipeinfer.offline.sampling import AnyParams, SamplingParams, public
from pipeinfer.params import JsonValue
from pipeinfer.runtime.local import prepare_settings
from pipeinfer.runtime.logs import waiting_summary
from pipeinfer.settings import Settings
from pipeinfer.text import load_tokenizer, read_tokenizer_config, special_tokens, template_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # some seconds, which only get_tokenizer pays


log = logging.getLogger(__name__)


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """`folder`: of a checkpoint, or a GGUF file."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not is_gguf(folder):
        return AutoTokenizer.from_pretrained(str(folder))
    config = read_tokenizer_config(folder)
    named = special_tokens(config)
    made = PreTrainedTokenizerFast(
        tokenizer_object=load_tokenizer(folder, config),
        **{name: text for name, text in named.items() if text is not None},
    )
    made.chat_template = template_sources(folder, config, "").get("default")
    return made


class AsyncLLM:
    """A model, served by the same stages as `pipeinfer serve`, without HTTP.

    `model`: a folder, a hub id, or nothing for the bundled demo model. `settings`: the fields of
    Settings, which are the flags of `pipeinfer serve` with underscores, also under the names of
    other servers (other_servers.py). Keywords of theirs that ask for nothing are left out;
    ConfigurationError names all that are wrong. Chats may bring a template. Use it as
    `async with AsyncLLM(...) as llm`, or call start() and close().
    """

    def __init__(self, model: str | os.PathLike[str] = "", **settings: object) -> None:
        given = {"model": os.fspath(model), **settings} if model else settings
        # Whoever gives a template here runs in this process already.
        self._given = {"trust_request_chat_template": True, **settings_of(given)}
        config.build(self._given)
        self._defaults = SamplingParams()
        self._folder = Path()
        self._pipeline: Pipeline | None = None
        self._step = "looking for the model"
        self._prefix = uuid.uuid4().hex[:12]  # request ids are unique over all that ever ran
        self._numbers = itertools.count()  # drawn from by any thread
        self._submit_lock = asyncio.Lock()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Loads the model; returns when it answers.

        Raises ConfigurationError if it cannot be loaded, PipelineStopped if a stage fails.
        """
        if self._pipeline is not None:
            raise RuntimeError("AsyncLLM is started once")
        settings = await asyncio.to_thread(self._prepare)
        self._pipeline = Pipeline(settings)
        await self._pipeline.start()

    async def close(self) -> None:
        """Aborts what runs and ends all processes. May be called again."""
        if self._pipeline is not None:
            await self._pipeline.stop()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without params gets: vLLM's defaults under the checkpoint's own. A copy,
        which the caller may change."""
        return self._defaults.clone()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer as transformers has it, once this is started."""
        self._running()
        return tokenizer_of(self._folder)

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes that no request uses; whether all groups have done so."""
        return await self._running().reset_prefix_cache()

    def stats(self) -> dict[str, dict[str, float]]:
        """The statistics of each stage, as of its latest heartbeat (twice a second)."""
        return self._running().stats()

    def waits_for(self) -> str:
        """What start() waits for at the moment, in words; any thread may ask."""
        return self._step if self._pipeline is None else waiting_summary(self._pipeline.states())

    def generate(
        self,
        prompt: Prompt,
        sampling_params: AnyParams | None = None,
        request_id: str | None = None,
        *,
        params: AnyParams | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Delta, None]:
        """Completes a text or token ids; leaving the iterator early aborts the request. Of several
        choices (`n`) the deltas come as they come; `index` says whose each is.

        params: another name of sampling_params. priority: a lower one goes first. timeout: seconds
        after which the request ends with "abort", 0 is never. cache_salt: shares cached prefixes
        only with requests of the same. add_special_tokens: of a text. Raises RequestError if it is
        refused, PipelineStopped if the stages are gone.
        """
        given = self._chosen(sampling_params, params)
        return self.stream(calls.completion(self.name(request_id), prompt, given, **options))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: AnyParams | None = None,
        request_id: str | None = None,
        *,
        params: AnyParams | None = None,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Delta, None]:
        """Answers `messages` (dicts with "role" and "content") by the model's chat template.

        chat_template_kwargs: further variables of the template; `tools`, in OpenAI's form, are one
        of them. chat_template, add_generation_prompt and continue_final_message as in vLLM's chats.
        The rest is as for generate().
        """
        given = self._chosen(sampling_params, params)
        arguments, rest = calls.template_arguments(chat_template_kwargs, options)
        return self.stream(calls.chat(self.name(request_id), messages, given, arguments, **rest))

    async def collect(
        self, batch: Sequence[OfflineRequest], progress: Progress
    ) -> list[RequestOutput]:
        """Runs all calls to their ends, those with the largest max_tokens first; the outputs are in
        the batch's order.

        The first refusal aborts the others and is raised, as is a cancellation.
        """
        pipeline = self._running()
        sent = [msgspec.structs.replace(asked.call, return_prompt_ids=True) for asked in batch]
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(collector: Collector) -> None:
            progress.ended += 1
            if not over.done() and (progress.is_over() or collector.refusal is not None):
                over.set_result(None)

        collectors = [[Collector(call, ended) for _ in range(call.params.n)] for call in sent]
        progress.choices = [one for outputs in collectors for one in outputs]
        try:
            for call, some in calls.longest_first(sent, collectors):
                pipeline.open(call, some)
            if sent:
                await over
        finally:
            for call in sent:
                pipeline.hang_up(call)
        for index, some in enumerate(collectors):
            refusal = next((one.refusal for one in some if one.refusal is not None), None)
            if refusal is not None:
                text = str(refusal) if len(sent) == 1 else f"prompt {index}: {refusal}"
                raise RequestError(text, refusal.param, refusal.code)
        return [output_of(some, asked) for some, asked in zip(collectors, batch, strict=True)]

    def name(self, requested: str | None = None) -> str:
        """An id for one more request, unique even if the wanted one is used twice."""
        return f"{requested or 'request'}-{self._prefix}-{next(self._numbers)}"

    async def stream(self, *batch: OfflineRequest) -> AsyncGenerator[Delta, None]:
        """The deltas of all choices of all calls, as they come; their `index` counts through."""
        pipeline, stream, open_choices = self._running(), DeltaStream(), 0
        async with self._submit_lock:  # of many at once, one in each iteration of the loop
            for asked in batch:
                numbers = range(open_choices, open_choices + asked.call.params.n)
                pipeline.open(asked.call, [ChoiceStream(stream, n, asked) for n in numbers])
                open_choices = numbers.stop
        try:
            while open_choices:
                delta = await stream.next()
                open_choices -= delta.finish_reason is not None
                yield delta
        finally:
            for asked in batch:
                pipeline.hang_up(asked.call)

    def _prepare(self) -> Settings:
        """Finds, perhaps downloads the model, and refuses what no stage could load."""
        settings = prepare_settings(self._given, self._say)
        self._folder = Path(settings.model)
        read_outline(self._folder, settings.model_impl)
        defaults = public(sampling_defaults(self._folder))
        defaults.max_tokens = defaults.max_tokens or COMPLETION_MAX_TOKENS
        self._defaults = defaults
        return settings

    def _say(self, text: str) -> None:
        self._step = text
        log.info("%s", text)

    def _chosen(self, first: AnyParams | None, second: AnyParams | None) -> AnyParams:
        return next((one for one in (first, second) if one is not None), self._defaults)

    def _running(self) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError("AsyncLLM is not started: use `async with`, or call start()")
        return self._pipeline
