"""AsyncLLM: a model on the caller's event loop, as streams of deltas or as whole outputs.

Knows the pipeline and the shapes of what goes in and comes out; no processes and no threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from pipeinfer import other_names
from pipeinfer import settings as config
from pipeinfer.checkpoint.outline import read_outline
from pipeinfer.gateway.defaults import COMPLETION_MAX_TOKENS, sampling_defaults
from pipeinfer.gateway.events import Call
from pipeinfer.json_values import JsonValue
from pipeinfer.offline import calls
from pipeinfer.offline.calls import Message, Prompt
from pipeinfer.offline.outputs import ChoiceStream, Collector, Delta, DeltaStream, RequestError
from pipeinfer.offline.pipeline import Pipeline
from pipeinfer.params import SamplingParams
from pipeinfer.runtime.local import prepare
from pipeinfer.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)


class AsyncLLM:
    """A model, served by the same stages as `pipeinfer serve`, without HTTP.

    `model`: a folder, a hub id, or nothing for the bundled demo model. `settings`: the fields of
    Settings, which are the flags of `pipeinfer serve` with underscores, also under the names of
    other servers (other_names.py); ConfigurationError names a wrong one. Use it as
    `async with AsyncLLM(...) as llm`, or call start() and close().
    """

    def __init__(self, model: str = "", **settings: object) -> None:
        given = {"model": model, **settings} if model else settings
        try:
            self._given = other_names.translated(given)
        except other_names.NamedTwice as error:
            raise ConfigurationError(str(error)) from None
        config.build(self._given)
        self._defaults = SamplingParams()
        self._pipeline: Pipeline | None = None
        self._prefix = uuid.uuid4().hex[:12]  # request ids are unique over all that ever ran
        self._numbers = itertools.count()  # drawn from by any thread
        self._one_begins = asyncio.Lock()

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
        """What a request without params gets: vLLM's defaults under the checkpoint's own."""
        return self._defaults

    def stats(self) -> dict[str, dict[str, float]]:
        """The statistics of each stage, as of its latest heartbeat (twice a second)."""
        return self._running().stats()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float = 0.0,
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Completes a text or token ids; leaving the iterator early aborts the request. Of several
        choices (`params.n`) the deltas come as they come; `index` says whose each is.

        timeout: seconds after which the request ends with "abort", 0 is never. cache_salt: shares
        cached prefixes only with requests of the same. Raises RequestError if it is refused,
        PipelineStopped if the stages are gone.
        """
        call = calls.completion(
            self.name(request_id),
            prompt,
            self._checked(params),
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
        )
        return self._stream(call)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
        priority: int = 0,
        timeout: float = 0.0,
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Answers `messages` (dicts with "role" and "content") by the model's chat template.

        chat_template_kwargs: further variables of the template; `tools` are one, in OpenAI's form.
        The rest is as for generate().
        """
        call = calls.chat(
            self.name(request_id),
            messages,
            self._checked(params),
            chat_template_kwargs,
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
        )
        return self._stream(call)

    async def collect(
        self, batch: Sequence[Call], on_end: Callable[[Collector], None]
    ) -> list[list[Collector]]:
        """Runs all calls to their ends, those with the largest max_tokens first; the collectors are
        in the batch's order, one for each choice.

        The first refusal aborts the others and is raised, as is a cancellation.
        """
        pipeline = self._running()
        batch = [msgspec.structs.replace(call, return_prompt_ids=True) for call in batch]
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = sum(call.params.n for call in batch)

        def ended(collector: Collector) -> None:
            nonlocal left
            left -= 1
            on_end(collector)
            if not over.done() and (left == 0 or collector.refusal is not None):
                over.set_result(None)

        collectors = [[Collector(call, ended) for _ in range(call.params.n)] for call in batch]
        try:
            for call, some in calls.longest_first(batch, collectors):
                pipeline.open(call, some)
            if batch:
                await over
        finally:
            for call in batch:
                pipeline.hang_up(call)
        for index, some in enumerate(collectors):
            refusal = next((one.refusal for one in some if one.refusal is not None), None)
            if refusal is not None:
                text = str(refusal) if len(batch) == 1 else f"prompt {index}: {refusal}"
                raise RequestError(text, refusal.param, refusal.code)
        return collectors

    def name(self, wanted: str | None = None) -> str:
        """An id for one more request, unique even if the wanted one is used twice."""
        return f"{wanted or 'request'}-{self._prefix}-{next(self._numbers)}"

    async def _stream(self, call: Call) -> AsyncGenerator[Delta, None]:
        pipeline, stream, left = self._running(), DeltaStream(), call.params.n
        async with self._one_begins:  # of many at once, one in each iteration of the loop
            pipeline.open(call, [ChoiceStream(stream, index) for index in range(left)])
        try:
            while left:
                delta = await stream.next()
                left -= delta.finish_reason is not None
                yield delta
        finally:
            pipeline.hang_up(call)

    def _prepare(self) -> Settings:
        """Finds, perhaps downloads the model, and refuses what no stage could load."""
        settings = prepare(self._given, log.info)
        folder = Path(settings.model)
        read_outline(folder, settings.model_impl)
        defaults = sampling_defaults(folder)
        limit = defaults.max_tokens or COMPLETION_MAX_TOKENS
        self._defaults = msgspec.structs.replace(defaults, max_tokens=limit)
        return settings

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        return calls.checked(self._defaults if params is None else params)

    def _running(self) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError("AsyncLLM is not started: use `async with`, or call start()")
        return self._pipeline
