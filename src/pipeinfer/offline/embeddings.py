"""Vectors of texts and scores of pairs, in the form of vLLM's LLM.embed and LLM.score: what is
asked, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pipeinfer.checkpoint.pooling import Pooling
from pipeinfer.gateway.embeddings import (
    EmbeddingRequest,
    VectorOptions,
    as_vector,
    embedding_calls,
    vector_options,
)
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.requests import RequestDefaults
from pipeinfer.gateway.scores import PairScorer, ScoreRequest, TextPairs, pairs_to_score
from pipeinfer.offline.calls import Prompt, prompt_parts
from pipeinfer.offline.outputs import Collector, OfflineRequest, RequestError
from pipeinfer.params import MAX_INT, SamplingParams

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
    """

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None


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
    name: str, first: Sequence[str], second: Sequence[str], instruction: str | None,
    scorer: PairScorer,
) -> tuple[TextPairs, list[OfflineRequest]]:  # fmt: skip
    """The pairs, and the calls for their scores. Raises RequestError for what a server would
    refuse."""
    body = ScoreRequest(text_1=list(first), text_2=list(second), instruction=instruction)
    defaults = RequestDefaults(SamplingParams())
    try:
        pairs = pairs_to_score(body, max_pairs=MAX_INT)
        calls = scorer.calls(pairs, name, body, defaults, "")
    except ApiError as error:
        raise RequestError(str(error), error.param, error.code) from None
    return pairs, [OfflineRequest(call) for call in calls]


def embedding_batch(
    name: str, prompts: Sequence[Prompt], params: PoolingParams, pooling: Pooling
) -> EmbeddingBatch:
    """Calls for the vectors of `prompts`; `name` begins their ids. Raises RequestError for what a
    server would refuse."""
    defaults = RequestDefaults(SamplingParams(), max_prompts=1)
    asked: list[OfflineRequest] = []
    try:
        fields = {field: getattr(params, field) for field in PoolingParams.__slots__}
        shared = EmbeddingRequest(input="", **fields)
        options = vector_options(shared, pooling)
        for i, prompt in enumerate(prompts):
            text, ids, salt = prompt_parts(prompt)
            body = msgspec.structs.replace(
                shared, input=(text or "") if ids is None else ids, cache_salt=salt or None
            )
            [call] = embedding_calls(body, f"{name}-{i}", options, pooling, defaults, "")
            asked.append(OfflineRequest(call, text))
    except ApiError as error:
        raise RequestError(str(error), error.param, error.code) from None
    return EmbeddingBatch(asked, options)
