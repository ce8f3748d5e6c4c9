"""A model that is loaded for a command on the terminal, and ends with it.

Knows the offline classes only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pipeinfer.cli.questions import AnswerDelta, AnswerOptions, ModelFlags, Question, RequestFailed
from pipeinfer.llm import AsyncLLM, PipelineStopped, RequestError
from pipeinfer.offline.llm import batch_defaults
from pipeinfer.params import SamplingParams
from pipeinfer.settings import DEMO


class LocalModel:
    """`name`: as it was given."""

    def __init__(self, asked: ModelFlags, wanted: AnswerOptions) -> None:
        self.name = asked.model or DEMO
        self._asked = asked
        self._max_tokens = wanted.max_tokens
        settings = dict(asked.settings)
        model = str(settings.pop("model", ""))
        self._llm = AsyncLLM(model, **(batch_defaults(settings) if wanted.batch else settings))
        self._params = SamplingParams()

    async def start(self) -> None:
        try:
            await self._llm.start()
        except PipelineStopped as error:
            raise RequestFailed(str(error)) from None
        defaults = self._llm.get_default_sampling_params().plain()
        self._params = self._asked.params(defaults, self._max_tokens)

    def startup_status(self) -> str:
        return self._llm.waits_for()

    async def answer(self, question: Question) -> AsyncGenerator[AnswerDelta, None]:
        try:
            if isinstance(question, str):
                deltas = self._llm.generate(question, self._params)
            else:
                deltas = self._llm.chat([dict(message) for message in question], self._params)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield AnswerDelta(delta.text, delta.token_ids, False, delta.finish_reason)
                    if delta.error:
                        raise RequestFailed(delta.error)
        except (PipelineStopped, RequestError) as error:
            raise RequestFailed(str(error)) from None

    async def close(self) -> None:
        await self._llm.close()
