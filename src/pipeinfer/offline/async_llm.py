"""AsyncLLM: a model on the caller's event loop, as streams of deltas or as whole outputs.

Pipeline has its stages: processes or tasks, and a gateway core in this process that has no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack, get_args

import msgspec
import zmq

from pipeinfer import settings as config
from pipeinfer.checkpoint.lora import parse_lora_modules
from pipeinfer.checkpoint.pooling import Pooling, label_ids, read_pooling
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.health import Health, StageStatus, expected_stages
from pipeinfer.gateway.ledger import (
    Call,
    ClientDisconnected,
    Failed,
    OutputDelta,
    RequestTraces,
    Started,
    StatusChanged,
)
from pipeinfer.gateway.pooling import PairScorer, takes_query_and_document
from pipeinfer.gateway.requests import COMPLETION_MAX_TOKENS, sampling_defaults
from pipeinfer.gateway.sessions import (
    CANNOT_SLEEP,
    LOOK_SECONDS,
    SLEEP_TAGS,
    CacheResets,
    reach_sleep_level,
)
from pipeinfer.gateway.stage import TICK
from pipeinfer.gguf.header import is_gguf
from pipeinfer.messages import CacheReset, Message, SetSleep, SleepMode, State
from pipeinfer.offline import calls
from pipeinfer.offline.calls import (
    NOT_EMBEDDING,
    NOT_GENERATING,
    NOT_SCORING,
    SCORES_ALONE,
    AnyParams,
    ChatOptions,
    LoRARequest,
    OfflineAdapters,
    Options,
    PoolingParams,
    Prompt,
    SamplingParams,
    embedding_batch,
    public,
    score_batch,
)
from pipeinfer.offline.keywords import settings_of
from pipeinfer.offline.outputs import (
    ChoiceStream,
    Collector,
    Delta,
    DeltaStream,
    EmbeddingRequestOutput,
    OfflineRequest,
    Progress,
    RequestError,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    output_of,
    vector_of,
)
from pipeinfer.params import JsonObject, JsonValue, choice_ids
from pipeinfer.runtime import entry
from pipeinfer.runtime.child import MISCONFIGURED
from pipeinfer.runtime.entry import InProcess
from pipeinfer.runtime.logs import waiting_summary
from pipeinfer.runtime.shell import ProcessOptions, Shell
from pipeinfer.runtime.stage import Stage, StageContext, death_subscriptions
from pipeinfer.runtime.supervisor import Supervisor, check_model, local_stages, prepare_settings
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.text import load_tokenizer, read_tokenizer_config, special_tokens, template_sources
from pipeinfer.topology import Identity, Topology

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


log = logging.getLogger(__name__)


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """`folder`: of a checkpoint, or a GGUF file."""
    # Some seconds, which only who asks for a tokenizer pays. By their modules: all names of the
    # package at once cost the type checker a quarter of its time.
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

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
    `async with AsyncLLM(...) as llm`, or call start() and close(). adapters: that requests name.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **settings: object) -> None:
        given = {"model": os.fspath(model), **settings} if model else settings
        # A caller that gives a template runs in this process already.
        self._given = {"trust_request_chat_template": True, **settings_of(given)}
        built = config.build(self._given)
        parse_lora_modules(built)  # raises for what is wrong with them
        self.adapters = OfflineAdapters(built)
        self._defaults = SamplingParams()
        self._folder = Path()
        self._pooling: Pooling | None = None
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
        """A copy of the parameters of a request without params: vLLM's defaults under the
        checkpoint's own. The caller may change it."""
        return self._defaults.clone()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer as transformers has it, once this is started."""
        self._running()
        return tokenizer_of(self._folder)

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes that no request uses; whether all groups have done so."""
        return await self._running().reset_prefix_cache()

    async def sleep(self, level: int = 1, mode: SleepMode = "wait", *, wait: bool = True) -> None:
        """Gives memory back, as `/sleep` of a server does; returns when it is free.

        - level: 1: weights of a GPU are copied to the host, 2: all weights are dropped, and read
          again at waking
        - mode: what becomes of requests that run: they are answered first ("wait"), go on at waking
          ("keep"), or end with what they have ("abort")
        - wait: requests that come meanwhile wait for wake_up; else they are refused

        Raises ValueError for another level or mode, RuntimeError where memory cannot be given back.
        """
        modes = get_args(SleepMode)
        if level not in (1, 2) or mode not in modes:
            raise ValueError(f"level is 1 or 2, and mode {', '.join(modes)}: {level!r}, {mode!r}")
        await self._running().set_sleep(SetSleep(level, mode, not wait))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Returns when requests are answered again. Weights and pages come together: `tags` must
        name both, or nothing."""
        if tags is not None and set(tags) != set(SLEEP_TAGS):
            raise ValueError(f"weights and pages come together: {' and '.join(SLEEP_TAGS)}")
        await self._running().set_sleep(SetSleep(0))

    def stats(self) -> dict[str, dict[str, float]]:
        """The statistics of each stage, as of its latest heartbeat (twice a second)."""
        return self._running().stats()

    def waits_for(self) -> str:
        """The step for which start() waits at the moment, in words; any thread may ask."""
        return self._step if self._pipeline is None else waiting_summary(self._pipeline.states())

    def generate(
        self,
        prompt: Prompt,
        sampling_params: AnyParams | None = None,
        request_id: str | None = None,
        *,
        params: AnyParams | None = None,
        lora_request: LoRARequest | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Delta, None]:
        """Completes a text or token ids; leaving the iterator early aborts the request. Of several
        choices (`n`) the deltas come as they come; `index` says whose each is.

        - params: another name of sampling_params
        - priority: a lower one goes first
        - timeout: seconds after which the request ends with "abort", 0 is never
        - cache_salt: shares cached prefixes only with requests of the same
        - add_special_tokens: whether a text gets them
        - lora_request: its adapter, which needs enable_lora

        Raises RequestError if it is refused, PipelineStopped if the stages are gone.
        """
        options["adapter"] = self.adapters.of(lora_request)
        given = self._chosen(sampling_params, params)
        return self.stream(calls.completion(self.name(request_id), prompt, given, **options))

    def chat(
        self,
        messages: Sequence[calls.Message],
        sampling_params: AnyParams | None = None,
        request_id: str | None = None,
        *,
        params: AnyParams | None = None,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
        lora_request: LoRARequest | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Delta, None]:
        """Answers `messages` (dicts with "role" and "content") by the model's chat template.

        chat_template_kwargs: further variables of the template; `tools`, in OpenAI's form, are one
        of them. chat_template, add_generation_prompt and continue_final_message as in vLLM's chats.
        The rest is as for generate().
        """
        given = self._chosen(sampling_params, params)
        arguments, rest = self.template_arguments(chat_template_kwargs, options)
        rest["adapter"] = self.adapters.of(lora_request)
        return self.stream(calls.chat(self.name(request_id), messages, given, arguments, **rest))

    def template_arguments(
        self, variables: Mapping[str, JsonValue] | None, options: ChatOptions
    ) -> tuple[JsonObject, Options]:
        """Template arguments and other options of a chat: see calls.template_arguments. Raises
        RequestError for tools that the template would leave out."""
        arguments, rest = calls.template_arguments(variables, options)
        template = str(arguments.get("chat_template") or "")
        if arguments.get("tools") and "tools" not in (template or self._chat_template):
            message = "tools: the model's chat template has none, so the model would not see them"
            raise RequestError(message, "tools")
        return arguments, rest

    @cached_property
    def _chat_template(self) -> str:
        """The texts of the model's templates."""
        config, settings = read_tokenizer_config(self._folder), self._running().settings
        return "\n".join(template_sources(self._folder, config, settings.chat_template).values())

    async def collect(
        self, batch: Sequence[OfflineRequest], progress: Progress
    ) -> list[RequestOutput]:
        """The outputs of all calls, in the batch's order. Raises what gather() raises, and
        ValueError where the model generates no texts."""
        if self._pooling is not None:
            raise ValueError(NOT_GENERATING)
        gathered = await self.gather(batch, progress)
        return [output_of(some, asked) for some, asked in zip(gathered, batch, strict=True)]

    async def embed(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        add_special_tokens: bool = True,
        progress: Progress | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each of `prompts`, a text, token ids, or a dict with one of them; in their
        order. pooling_params, add_special_tokens: for all of them.

        Raises ValueError where the model generates texts, RequestError for a prompt that is refused
        or fails (all others are aborted then), PipelineStopped if the stages are gone.
        """
        self._running()
        if self._pooling is None:
            raise ValueError(NOT_EMBEDDING)
        if self._pooling.scores:
            raise ValueError(SCORES_ALONE)
        params = pooling_params or PoolingParams()
        name = self.name("embed")
        batch = embedding_batch(name, prompts, params, add_special_tokens, self._pooling)
        gathered = await self.gather(batch.asked, progress or Progress(len(prompts)))
        return batch.outputs([collector for [collector] in gathered])

    async def score(
        self,
        data_1: str | list[str],
        data_2: str | list[str],
        *,
        instruction: str | None = None,
        progress: Progress | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` fits to that of `data_1`, which may be one for all.

        A model that makes embeddings scores by the cosine of two vectors. With task="score" the
        model is asked, and the score is the probability of yes. instruction: what a document is to
        do for a query. Raises as embed() does.
        """
        self._running()
        if self._pooling is None:
            raise ValueError(NOT_SCORING)
        scorer = self._scorer(self._pooling)
        name = self.name("score")
        pairs, asked = score_batch(name, data_1, data_2, instruction, scorer)
        progress = progress or Progress(0)
        progress.total = len(asked)  # of vectors, one for each different text
        gathered = await self.gather(asked, progress)
        scores = scorer.scores(pairs, [vector_of(collector) for [collector] in gathered])
        return [
            ScoringRequestOutput(f"{name}-{i}", ScoringOutput(score))
            for i, score in enumerate(scores)
        ]

    def _scorer(self, pooling: Pooling) -> PairScorer:
        if not pooling.scores:
            return PairScorer(pooling)
        tokenizer = load_tokenizer(self._folder, read_tokenizer_config(self._folder))
        roles = takes_query_and_document([self._chat_template])
        return PairScorer(pooling, label_ids(tokenizer), roles)

    async def gather(
        self, batch: Sequence[OfflineRequest], progress: Progress
    ) -> list[list[Collector]]:
        """Runs all calls to their ends, those with the largest max_tokens first; what was gathered
        of the choices of each, in the batch's order.

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
        return collectors

    def name(self, requested: str | None = None) -> str:
        """An id for one more request, unique even if the wanted one is used twice."""
        return f"{requested or 'request'}-{self._prefix}-{next(self._numbers)}"

    async def stream(self, *batch: OfflineRequest) -> AsyncGenerator[Delta, None]:
        """The deltas of all choices of all calls, as they come; their `index` counts through."""
        pipeline, stream, open_choices = self._running(), DeltaStream(), 0
        if self._pooling is not None:
            raise ValueError(NOT_GENERATING)
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
        if settings.gateways > 1:
            raise ConfigurationError("--gateways: in Python the caller is the only one")
        self._folder = Path(settings.model)
        check_model(settings)
        self._pooling = read_pooling(self._folder, settings.task)
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


class OutputSink(Protocol):
    """Takes what one request gets; the last is a delta with `finish`, or a failure."""

    def started(self, started: Started) -> None: ...

    def delta(self, delta: OutputDelta) -> None: ...

    def failed(self, failed: Failed) -> None: ...


class OfflineDriver:
    """Routes by request id. `on_ready` is called each time the pipeline became ready."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._sinks: dict[str, OutputSink] = {}
        self._feed: Callable[[Message], None] | None = None
        self._resets = CacheResets()

    async def start(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed

    def open(self, call: Call, sinks: Sequence[OutputSink]) -> None:
        """Sends the call; what comes of each choice goes to its sink, a refusal perhaps before this
        returns."""
        assert self._feed is not None
        names = choice_ids(call.request_id, range(call.params.n))
        self._sinks.update(zip(names, sinks, strict=True))
        self._feed(call)

    def hang_up(self, request_id: str) -> None:
        """Aborts the request if it still runs; its sink gets nothing more."""
        if self._sinks.pop(request_id, None) is not None and self._feed is not None:
            self._feed(ClientDisconnected(request_id))

    async def reach_sleep_level(self, asked: SetSleep, health: Health) -> None:
        """Returns when all groups sleep as asked, or are awake. Raises RuntimeError where memory
        cannot be given back."""
        assert self._feed is not None
        while asked.level and (row := health.cannot_sleep()) is not None:
            if "can_sleep" in row.stats:
                raise RuntimeError(CANNOT_SLEEP.format(row.stage))
            await asyncio.sleep(LOOK_SECONDS)  # it has not said so yet
        await reach_sleep_level(asked, health, self._feed)

    async def reset_caches(self, stages: Iterable[StageStatus]) -> set[int]:
        """Groups of `stages` that were asked to forget what is cached, and have not said so."""
        assert self._feed is not None
        return await self._resets.reset(self._feed, stages)

    def deliver(self, message: Message) -> None:
        """Takes the core's local outputs; outputs without a waiting caller are dropped."""
        if isinstance(message, OutputDelta):  # hot path: once for every token of every request
            if message.finish is None:
                sink = self._sinks.get(message.request_id)
            else:
                sink = self._sinks.pop(message.request_id, None)
            if sink is not None:
                sink.delta(message)
        elif isinstance(message, Started):
            if (sink := self._sinks.get(message.request_id)) is not None:
                sink.started(message)
        elif isinstance(message, Failed):
            if (sink := self._sinks.pop(message.request_id, None)) is not None:
                sink.failed(message)
        elif isinstance(message, CacheReset):
            self._resets.on_answer(message)
        elif isinstance(message, StatusChanged) and message.status == "ready":
            self._on_ready()

    def fail_all(self, reason: str, code: str) -> None:
        """Ends every live request with an error and aborts it in the pipeline."""
        for request_id, sink in list(self._sinks.items()):
            self.hang_up(request_id)
            sink.failed(Failed(request_id, 503, reason, code=code))

    async def stop(self) -> None:
        """Nothing: the pipeline knows why it ends, and fails what still runs with that reason."""

    def stats(self) -> dict[str, float]:
        return {}


PATIENCE = 3.0  # seconds that the stages get to end by themselves: nothing is left to finish


class PipelineStopped(RuntimeError):
    """The pipeline ended by itself; the text says why, the stages' log says more."""


class Pipeline:
    """All stages for one caller, on the event loop that is running. Used once: start, then stop."""

    def __init__(self, settings: Settings) -> None:
        """`settings` are prepared: the model is a local folder. Stages that are stopped finish
        nothing: by then all requests have been aborted."""
        self.settings = msgspec.structs.replace(settings, drain_timeout=0.0)
        self._resources = ExitStack()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._driver = OfflineDriver(self._on_ready)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._core: GatewayCore | None = None
        self._shell: Shell | None = None
        self._service: Supervisor | InProcess | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopped: asyncio.Task[None] | None = None
        self._cause = ""  # why nothing is answered any more

    async def start(self) -> None:
        """Returns when requests are answered. Raises ConfigurationError or PipelineStopped."""
        try:
            self._begin()
            await self._ready
        except BaseException:
            await self.stop()
            raise

    def open(self, call: Call, sinks: Sequence[OutputSink]) -> None:
        """Sends a call, with a sink for each choice. Raises PipelineStopped if the pipeline is not
        there any more."""
        if self._cause or self._stopped is not None:
            raise PipelineStopped(self._cause or "it was closed")
        self._driver.open(call, sinks)

    def hang_up(self, call: Call) -> None:
        """Aborts those of its choices that still run."""
        for name in choice_ids(call.request_id, range(call.params.n)):
            self._driver.hang_up(name)

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes that no request uses; whether all groups have done so."""
        return not await self._driver.reset_caches(self._health().stages.values())

    async def set_sleep(self, asked: SetSleep) -> None:
        """Returns when all groups sleep as asked, or are awake."""
        reached = asyncio.ensure_future(self._driver.reach_sleep_level(asked, self._health()))
        try:
            await asyncio.wait([reached, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            if not reached.done():
                self._health()
            await reached
        finally:
            reached.cancel()

    def _health(self) -> Health:
        """Raises PipelineStopped if the pipeline is not there any more."""
        if self._core is None or self._cause or self._stopped is not None:
            raise PipelineStopped(self._cause or "it was closed")
        return self._core.health

    def stats(self) -> dict[str, dict[str, float]]:
        """The statistics in each stage's latest heartbeat, by stage id."""
        rows = {} if self._core is None else self._core.health.stages
        return {stage: dict(row.stats) for stage, row in rows.items()}

    def states(self) -> dict[str, tuple[State, str]]:
        """The state of each stage by its id, and what it does or waits for."""
        return {} if self._service is None else self._service.states()

    async def stop(self) -> None:
        """Fails what runs and ends all stages; returns when they are gone. Callable again."""
        if self._stopped is None:
            self._stopped = self._loop.create_task(self._stop())
        await asyncio.shield(self._stopped)

    # ------------------------------------------------------------------------------------ beginning

    def _begin(self) -> None:
        stages = self._resources.enter_context(
            local_stages(
                self.settings, self._context, without="gateway", on_give_up=self._on_give_up
            )
        )
        self._service = stages.service
        # The caller's own loop, and perhaps the only core that it has: awake only if asked to be.
        poll_seconds = entry.BUSY_POLL_SECONDS if self.settings.stay_awake == "always" else 0.0
        self._shell = Shell(
            self.settings, stages.topology, Identity("gateway"), self._context, self._build,
            ProcessOptions(busy_poll=poll_seconds),
        )  # fmt: skip
        self._core = GatewayCore(
            expected_stages(stages.topology),
            seed=self.settings.seed,
            incarnation=self._shell.incarnation,
            traces=RequestTraces(str(self._shell.incarnation), bool(self.settings.otlp_endpoint)),
        )
        for work in (self._shell.run(), self._service.run()):
            task = self._loop.create_task(work)
            task.add_done_callback(self._on_end)
            self._tasks.append(task)

    def _build(self, context: StageContext) -> Stage:
        assert self._core is not None
        return Stage(self._core, self._driver, TICK, _other_telemetry(context.topology))

    # --------------------------------------------------------------------------------- what happens

    def _on_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _on_give_up(self, reason: str) -> None:
        """A stage cannot go on; the aborts let the others end without delay."""
        self._cause = reason
        self._driver.fail_all(reason, "pipeline_stopped")

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        """The shell or the stages ended; unasked, that is the end of everything."""
        # A loop that is shut down around an open pipeline cancels all of its tasks.
        error = PipelineStopped("cancelled") if task.cancelled() else task.exception()
        if self._stopped is not None:
            return
        unsaid = "the stages have ended; their own message is on stderr"  # with in_process
        self._cause = self._cause or str(error or unsaid)
        self._driver.fail_all(self._cause, "pipeline_stopped")
        if self._ready.done():
            return
        if error is None and task.result() == MISCONFIGURED:
            error = ConfigurationError(self._cause)
        self._ready.set_exception(error or PipelineStopped(self._cause))

    # ----------------------------------------------------------------------------------------- end

    async def _stop(self) -> None:
        """The shell first: it still has aborts to send, and the stages then have nothing to do."""
        self._driver.fail_all("the pipeline was closed", "closed")
        if self._shell is not None and self._service is not None:
            if not self._ready.done():
                self._ready.set_exception(PipelineStopped("it was closed while it started"))
            shell, stages = self._tasks
            self._shell.stop()
            await asyncio.wait([shell])
            await self._stop_stages(self._service, stages)
        self._resources.close()
        self._context.destroy(linger=0)

    @staticmethod
    async def _stop_stages(service: Supervisor | InProcess, task: asyncio.Task[Any]) -> None:
        service.stop()
        _, running = await asyncio.wait([task], timeout=PATIENCE)
        if running:
            service.stop()  # a supervisor kills now
            await asyncio.wait([task])


def _other_telemetry(topology: Topology) -> tuple[tuple[str, str], ...]:
    others = topology.without("gateway").ids()
    return (
        *((stage, "telemetry") for stage in others),
        *death_subscriptions(topology, "telemetry"),
    )
