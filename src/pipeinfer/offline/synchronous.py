"""LLM: a model for callers without an event loop; batches in, whole outputs out.

An AsyncLLM on a thread of its own. Knows no processes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from pipeinfer.gateway.events import Call
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.offline import calls
from pipeinfer.offline.asynchronous import AsyncLLM
from pipeinfer.offline.calls import Message, Prompt
from pipeinfer.offline.loop_thread import LoopThread
from pipeinfer.offline.outputs import Collector, RequestOutput, output_of
from pipeinfer.params import SamplingParams

NO_TARGETS = {"itl_target": 0.0, "ttft_target": 0.0}
# Nobody waits for single tokens of a batch; and a batch does not pause, for graphs to be captured.
FOR_BATCHES = {**NO_TARGETS, "policy": "throughput", "all_graphs_first": True}


def for_batches(settings: Mapping[str, object]) -> dict[str, object]:
    """`settings` over the defaults of a batch. Who gives a target for steps wants a policy that
    heeds it."""
    targets = any(settings.get(name) for name in NO_TARGETS)
    return FOR_BATCHES | ({"policy": "mixed"} if targets else {}) | dict(settings)


class LLM:
    """A model, loaded when the constructor returns.

    `model`: a folder, a hub id, or nothing for the bundled demo model. `settings`: the flags of
    `pipeinfer serve` with underscores; its defaults are no targets of steps, no late graphs, and
    the policy `throughput`. Raises ConfigurationError if it cannot be loaded. The processes behind
    it end with close(), with the `with` block, or with the interpreter.
    """

    def __init__(self, model: str = "", **settings: object) -> None:
        self._llm = AsyncLLM(model, **for_batches(settings))
        self._thread = LoopThread()
        # Runs once: on close(), when nobody holds the LLM any more, or when the interpreter ends.
        self._end = weakref.finalize(self, _end, self._llm, self._thread, os.getpid())
        try:
            self._thread.run(self._llm.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes. May be called again."""
        self._end()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without params gets: vLLM's defaults under the checkpoint's own."""
        return self._llm.get_default_sampling_params()

    def stats(self) -> dict[str, dict[str, float]]:
        """The statistics of each stage, as of its latest heartbeat (twice a second)."""
        return self._llm.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes one prompt or many, each a text or token ids; results in the prompts' order.

        `params`: for all prompts, or a list with one for each; None is
        get_default_sampling_params(). Raises ValueError if the lengths differ, RequestError for a
        prompt that is refused (all others are aborted then), PipelineStopped if the stages are
        gone. What fails later ends with finish_reason "error".
        """
        listed = calls.as_list(prompts)
        each = calls.matched(params, len(listed), self.get_default_sampling_params())
        batch = [
            calls.completion(self._llm.name(), prompt, one)
            for prompt, one in zip(listed, each, strict=True)
        ]
        return self._run(batch, [p if isinstance(p, str) else None for p in listed], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> list[RequestOutput]:
        """Answers one chat (a list of dicts with "role" and "content") or a list of chats.

        tools: what the template shows as such, in OpenAI's form; calls come as text.
        The rest is as for generate().
        """
        chats = calls.as_chats(messages)
        each = calls.matched(params, len(chats), self.get_default_sampling_params())
        variables = calls.with_tools(chat_template_kwargs, tools)
        batch = [
            calls.chat(self._llm.name(), chat, one, variables)
            for chat, one in zip(chats, each, strict=True)
        ]
        return self._run(batch, [None] * len(chats), use_tqdm)

    def _run(
        self, batch: list[Call], prompts: list[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        if not self._end.alive:
            raise RuntimeError("this LLM is closed")
        ended: list[Collector] = []  # grows on the loop's thread, is read on this one
        total = sum(call.params.n for call in batch)
        with tqdm(total=total, desc="requests", unit="", disable=not use_tqdm) as bar:

            def show() -> None:
                if len(ended) > bar.n:
                    bar.update(len(ended) - bar.n)

            collected = self._llm.collect(batch, ended.append)
            collectors = self._thread.run(collected, show if use_tqdm else None)
            show()
        return [output_of(some, prompt) for some, prompt in zip(collectors, prompts, strict=True)]


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
