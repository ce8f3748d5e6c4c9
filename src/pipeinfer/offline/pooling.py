"""Vectors of texts and scores of pairs, in the form of vLLM's LLM.embed and LLM.score: what is
asked, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pipeinfer.checkpoint.pooling import Pooling
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.pooling import (
    EmbeddingRequest,
    PairScorer,
    ScoreRequest,
    TextPairs,
    Texts,
    VectorOptions,
    as_vector,
    embedding_params,
    pairs_to_score,
    prompt_before,
    vector_options,
)
from pipeinfer.gateway.requests import RequestDefaults
from pipeinfer.offline.calls import Prompt, completion, prompt_parts
from pipeinfer.offline.outputs import Collector, OfflineRequest, RequestError
from pipeinfer.params import MAX_INT, RequestParams

NOT_EMBEDDING = "this model generates texts; loaded with task='embed' it makes embeddings"
NOT_SCORING = "this model generates texts; loaded with task='score' it makes scores"
SCORES_ALONE = "this model makes scores alone: use score()"
NOT_GENERATING = "this model generates no texts: use embed() or score()"


@dataclass(slots=True)
class PoolingParams:
    """What is wanted of vectors.

    Attributes:
    - dimensions: so many of a vector's first numbers are kept; None: all
    - normalize: vectors get the length 1; None: as the checkpoint has it
    - truncate_prompt_tokens: so many of a text's last tokens are kept; None: all
    - prompt_name: which of the checkpoint's prompts comes before each text, as "query"; None: the
      checkpoint's default
    - task: for scripts of vLLM; None or "embed"
    - use_activation: vLLM's name of `normalize`
    """

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None
    task: str | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, "embed"):
            raise ValueError(f"task {self.task!r}: there are vectors of texts alone, 'embed'")
        if self.normalize is None:
            self.normalize = self.use_activation


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: the vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers the vector has."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The vector of one text, with the text's ids; num_cached_tokens: as in RequestOutput."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """True: there is no vector before the end."""
        return True


@dataclass(slots=True)
class ScoringOutput:
    """score: how well the second text fits to the first."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The score of one pair."""

    request_id: str
    outputs: ScoringOutput

    @property
    def finished(self) -> bool:
        """True: there is no score before the end."""
        return True


@dataclass(frozen=True)
class EmbeddingBatch:
    """Calls for a vector each, and how these are wanted."""

    asked: list[OfflineRequest]
    options: VectorOptions

    def outputs(self, collectors: Sequence[Collector]) -> list[EmbeddingRequestOutput]:
        """The vectors, in the order of the calls. Raises RequestError for one that failed."""
        return [self._output(collector) for collector in collectors]

    def _output(self, collector: Collector) -> EmbeddingRequestOutput:
        vector, output = vector_of(collector), collector.output()
        embedding = as_vector(vector, self.options.normalize).tolist()
        return EmbeddingRequestOutput(
            output.request_id,
            EmbeddingOutput(embedding),
            output.prompt_token_ids,
            output.cached_tokens,
        )


def vector_of(collector: Collector) -> bytes:
    """Float32. Raises RequestError if the request ended without it."""
    if not collector.vector:
        raise RequestError(str(collector.end.get("error") or "the request was aborted"))
    return collector.vector


def score_batch(
    name: str, data_1: Texts, data_2: Texts, instruction: str | None, scorer: PairScorer
) -> tuple[TextPairs, list[OfflineRequest]]:
    """The pairs, and the calls for their scores. Raises RequestError for what a server would
    refuse."""
    try:
        body = msgspec.convert(
            {"text_1": data_1, "text_2": data_2, "instruction": instruction}, ScoreRequest
        )
        pairs = pairs_to_score(body, max_pairs=MAX_INT)
        scorer.check(pairs, MAX_INT, MAX_INT)
        calls = scorer.calls(pairs, name, body, RequestDefaults(RequestParams()), "")
        return pairs, [OfflineRequest(call) for call in calls]
    except ApiError as error:
        raise RequestError(str(error), error.param, error.code) from None
    except msgspec.ValidationError as error:
        raise RequestError(f"data_1, data_2 and instruction are texts: {error}", "data_1") from None


def embedding_batch(
    name: str, prompts: Sequence[Prompt], params: PoolingParams, special: bool, pooling: Pooling
) -> EmbeddingBatch:
    """Calls for the vectors of `prompts`; `name` begins their ids. special: the tokenizer adds its
    tokens to texts. Raises RequestError for what a server would refuse."""
    if not hasattr(params, "prompt_name"):
        raise RequestError("pooling_params is one PoolingParams, for all prompts", "pooling_params")
    fields = {
        name: getattr(params, name)
        for name in ("dimensions", "normalize", "truncate_prompt_tokens", "prompt_name")
    }
    try:
        body = msgspec.convert({"input": "text", **fields}, EmbeddingRequest)
        options = vector_options(body, pooling)
        before, sampling = prompt_before(body, pooling), embedding_params(body, options.size)
    except ApiError as error:
        raise RequestError(str(error), error.param, error.code) from None
    except msgspec.ValidationError as error:
        raise RequestError(f"PoolingParams: {error}", "pooling_params") from None
    asked = [
        completion(f"{name}-{i}", _behind(before, prompt), sampling, add_special_tokens=special)
        for i, prompt in enumerate(prompts)
    ]
    return EmbeddingBatch(asked, options)


def _behind(before: str, prompt: Prompt) -> Prompt:
    """A text behind the checkpoint's prompt; ids have none."""
    text, ids, salt = prompt_parts(prompt)
    if not before or ids is not None or not isinstance(text, str):
        return prompt
    return {"prompt": before + text, "cache_salt": salt}
