"""Endpoints that make vectors of texts: /v1/embeddings in OpenAI's form, /score in vLLM's and
/v1/rerank in Cohere's.

    EmbeddingRequest              the body of /v1/embeddings
    embedding_calls               the core's calls of such a body, one for each text
    VectorSink                    gathers the vectors
    embedding_response            the answer
    ScoreRequest, RerankRequest   the bodies of the others
    TextPairs                     the pairs of such a body
    PairScorer                    from pairs to the core's calls, and from their vectors to scores

A call for a vector samples one token, which is dropped. A model that makes vectors scores a pair
by the cosine of its two vectors. A model of --task score is asked, as Qwen3-Reranker was trained:
the score is the probability of "yes" against "no". Knows no HTTP and no tokens.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from pipeinfer.checkpoint.pooling import LABELS, Pooling
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import Call, Failed, OutputDelta, Started
from pipeinfer.gateway.requests import (
    RequestDefaults,
    listed_prompts,
    prompt_calls,
    shared_call,
)
from pipeinfer.gateway.response_encoders import api_error
from pipeinfer.gateway.schema import (
    AddSpecialTokens,
    Int32,
    PoolingBody,
    TokenId,
    TruncatePromptTokens,
    TruncationSide,
    about,
)
from pipeinfer.params import InvalidParameter, JsonObject, JsonValue, RequestParams, normalized

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

Texts = str | list[str]


class EmbeddingRequest(PoolingBody, frozen=True, kw_only=True):
    """The body of /v1/embeddings."""

    # fmt: off
    input: Annotated[str | list[TokenId | str | list[TokenId]], about(
        "A text, a list of token ids, or a list of at most `--max-prompts` of either. Each gives a "
        "vector. Required.")]
    encoding_format: Annotated[Literal["float", "base64"] | None, about(
        "`base64`: a vector is a text, its numbers as little-endian float32. Default: `float`, a "
        "list of numbers.")] = None
    dimensions: Annotated[Int32 | None, about(
        "So many of a vector's first numbers are kept, before it gets its length. For models that "
        "were trained for it. Default: all.")] = None
    normalize: Annotated[bool | None, about(
        "Vectors get the length 1. Default: as the checkpoint's modules.json has it, else "
        "true.")] = None
    prompt_name: Annotated[str | None, about(
        "Which of the checkpoint's prompts (config_sentence_transformers.json) comes before each "
        "text, as `query`. Not with token ids. Default: the checkpoint's default, mostly "
        "none.")] = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: TruncationSide = None
    add_special_tokens: AddSpecialTokens = None
    # fmt: on


VECTORS_AT_ONCE = 2  # vectors written before other tasks get their turn, 1 ms at 4,096 numbers each


class VectorOptions(msgspec.Struct, frozen=True):
    """How a request wants its vectors.

    Attributes:
    - size: numbers of each
    - normalize: they get the length 1
    - as_base64: they are written as texts
    """

    size: int
    normalize: bool
    as_base64: bool


def vector_options(request: EmbeddingRequest, pooling: Pooling) -> VectorOptions:
    """ApiError 400 for more dimensions than the model has."""
    size = pooling.hidden_size if request.dimensions is None else request.dimensions
    if not 1 <= size <= pooling.hidden_size:
        message = f"dimensions must be from 1 to {pooling.hidden_size}, not {size}"
        raise ApiError(400, message, "dimensions", "invalid_value")
    normalize = pooling.normalize if request.normalize is None else request.normalize
    return VectorOptions(size, normalize, request.encoding_format == "base64")


def embedding_calls(
    request: EmbeddingRequest,
    request_id: str,
    options: VectorOptions,
    pooling: Pooling,
    defaults: RequestDefaults,
    trace: str,
) -> list[Call]:
    """Calls to embed texts or lists of ids, one call for each. If there are several, their ids are
    `request_id` with -0, -1 ... Raises ApiError 400."""
    prompts = listed_prompts(request.input, defaults.max_prompts, "input")
    before = prompt_before(request, pooling)
    shared = shared_call(request, embedding_params(request, options.size), defaults, trace)
    if request.prompt_name is not None and not isinstance(prompts[0], str):
        message = "prompt_name is not allowed with token ids"
        raise ApiError(400, message, "prompt_name", "invalid_value")
    special = request.add_special_tokens is not False
    return list(prompt_calls(shared, request_id, prompts, special, before))


def vector_params(size: int) -> RequestParams:
    """Parameters of a request for a vector: one greedy token, which costs least."""
    return RequestParams(temperature=0, max_tokens=1, ignore_eos=True, vector_size=size)


def embedding_params(request: EmbeddingRequest, size: int) -> RequestParams:
    """Parameters of a call for a vector of `size` numbers. Raises ApiError 400."""
    kept, side = request.truncate_prompt_tokens, request.truncation_side
    params = replace(vector_params(size), truncate_prompt_tokens=kept)
    if side is not None:
        params = replace(params, truncation_side=side)
    try:
        return normalized(params)
    except InvalidParameter as error:
        raise ApiError(400, str(error), error.param, "invalid_value") from None


def prompt_before(request: EmbeddingRequest, pooling: Pooling) -> str:
    """The checkpoint's prompt that comes before each text. ApiError 400."""
    name = pooling.default_prompt if request.prompt_name is None else request.prompt_name
    if not name:
        return ""
    if name not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "the checkpoint has none"
        message = f"prompt_name {name[:100]!r} is no prompt of the checkpoint: {known}"
        raise ApiError(400, message, "prompt_name", "invalid_value")
    return pooling.prompts[name]


def as_vector(raw: bytes, normalize: bool) -> np.ndarray:
    """float32 [n] of the bytes that the engine gave."""
    vector = np.frombuffer(raw, dtype="<f4")
    length = float(np.linalg.norm(vector)) if normalize else 0.0
    return vector / np.float32(length) if length else vector


class VectorSink:
    """A ResponseSink that waits for the vectors of all calls."""

    def __init__(self, calls: int) -> None:
        self._vectors: list[bytes | None] = [None] * calls
        self._missing = calls
        self._prompt_tokens = 0
        self._result: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        """The end of the call says how long its prompt is."""

    def delta(self, index: int, delta: OutputDelta) -> None:
        if delta.finish is None or self._result.done():
            return
        if not delta.vector:  # it was aborted before it had one
            message = "the server fell asleep before the vector was computed"
            self.failed(index, Failed(delta.request_id, 503, message, code="asleep"))
            return
        self._prompt_tokens += delta.prompt_tokens
        self._vectors[index] = delta.vector
        self._missing -= 1
        if not self._missing:
            self._result.set_result(None)

    def failed(self, index: int, failed: Failed) -> None:
        if not self._result.done():
            self._result.set_result(failed)

    async def vectors(self) -> tuple[list[bytes], int]:
        """The vectors in the order of the calls, and tokens of all prompts. Raises ApiError."""
        failed = await self._result
        if failed is not None:
            raise api_error(failed)
        return [vector for vector in self._vectors if vector is not None], self._prompt_tokens


async def embedding_response(
    vectors: list[bytes], prompt_tokens: int, options: VectorOptions, model: str
) -> bytes:
    """The JSON of /v1/embeddings. Others get their turn meanwhile: a thousand vectors are millions
    of numbers."""
    data: list[msgspec.Raw] = []
    for index, raw in enumerate(vectors):
        vector = as_vector(raw, options.normalize)
        written: JsonValue = (
            base64.b64encode(vector.tobytes()).decode() if options.as_base64 else vector.tolist()
        )
        row: JsonObject = {"object": "embedding", "index": index, "embedding": written}
        data.append(msgspec.Raw(msgspec.json.encode(row)))
        if index % VECTORS_AT_ONCE == VECTORS_AT_ONCE - 1:
            await asyncio.sleep(0)
    usage: JsonObject = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    answer = {"object": "list", "data": data, "model": model, "usage": usage}
    return msgspec.json.encode(answer)


# fmt: off
class ScoreRequest(PoolingBody, frozen=True, kw_only=True):
    """The body of /score; either `text_1` and `text_2`, or `queries` and `documents` are given."""

    text_1: Annotated[Texts | None, about(
        "A text, or a list of as many as `text_2` has. One text is paired with each of "
        "`text_2`.")] = None
    text_2: Annotated[Texts | None, about("A text, or a list of at most `--max-prompts`.")] = None
    queries: Annotated[Texts | None, about("Another name of `text_1`.")] = None
    documents: Annotated[Texts | None, about("Another name of `text_2`.")] = None
    instruction: Annotated[str | None, about(
        "What a document is to do for a query. For models of `--task score`. Default: answer a "
        "search in the web.")] = None


class RerankRequest(PoolingBody, frozen=True, kw_only=True):
    """The body of /v1/rerank."""

    query: Annotated[str, about("A text. Required.")]
    documents: Annotated[list[str | dict[str, JsonValue]], about(
        'At most `--max-prompts` texts, or objects `{"text": ...}`. Required.')]
    top_n: Annotated[Int32 | None, about(
        "So many of the best are returned. Default: all.")] = None
    return_documents: Annotated[bool | None, about(
        "Results have the texts of their documents. Default: true.")] = None
    instruction: Annotated[str | None, about(
        "What a document is to do for the query. For models of `--task score`. Default: answer a "
        "search in the web.")] = None
# fmt: on


@dataclass(frozen=True)
class TextPairs:
    """Pairs of texts to be scored.

    Attributes:
    - queries, documents: as many of each
    - instruction: what a document is to do for a query; "": INSTRUCTION
    - field: the request's field that has the documents
    """

    queries: list[str]
    documents: list[str]
    instruction: str = ""
    field: str = "documents"


def takes_query_and_document(templates: Iterable[str]) -> bool:
    """Whether a chat template takes the roles of a pair that is scored."""
    text = "\n".join(templates)
    return all(re.search(f"['\"]{role}['\"]", text) for role in ("query", "document"))


def pairs_to_score(request: ScoreRequest, max_pairs: int) -> TextPairs:
    """The pairs of a /score body. Raises ApiError 400."""
    named = request.queries is not None or request.documents is not None
    names = ("queries", "documents") if named else ("text_1", "text_2")
    first, second = (_texts(getattr(request, name), name) for name in names)
    if len(first) not in (1, len(second)):
        message = (
            f"{names[0]} must have one text, or {len(second)} as {names[1]} has, not {len(first)}"
        )
        raise ApiError(400, message, names[0], "invalid_value")
    _check_count(second, names[1], max_pairs)
    queries = first * len(second) if len(first) == 1 else first
    return TextPairs(queries, second, request.instruction or "", names[1])


def pairs_to_rerank(request: RerankRequest, max_pairs: int) -> TextPairs:
    """The pairs of a /v1/rerank body. Raises ApiError 400."""
    documents = _texts(list(map(_document_text, request.documents)), "documents")
    _check_count(documents, "documents", max_pairs)
    if request.top_n is not None and request.top_n < 1:
        message = f"top_n must be at least 1, not {request.top_n}"
        raise ApiError(400, message, "top_n", "invalid_value")
    queries = _texts(request.query, "query") * len(documents)
    return TextPairs(queries, documents, request.instruction or "")


def _document_text(document: str | dict[str, JsonValue]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        message = 'documents must be texts, or objects with a text as "text"'
        raise ApiError(400, message, "documents", "invalid_type")
    return text


def _texts(given: Texts | None, field: str) -> list[str]:
    if given is None:
        raise ApiError(400, f"{field} must be given", field, "invalid_type")
    listed = [given] if isinstance(given, str) else given
    for i, text in enumerate(listed or [""]):
        if not text:
            where = field if isinstance(given, str) or not given else f"{field}[{i}]"
            raise ApiError(400, f"{where} must not be empty", where, "invalid_value")
    return listed


def _check_count(texts: list[str], field: str, limit: int) -> None:
    if len(texts) > limit:
        message = f"at most {limit} texts a request, not {len(texts)}"
        raise ApiError(400, message, field, "invalid_value")


@dataclass(frozen=True)
class PairScorer:
    """Scores pairs with the model of `pooling`.

    label_ids: the ids of LABELS, of a model that is asked. template_roles: its chat template takes
    the roles "query" and "document".
    """

    pooling: Pooling
    label_ids: tuple[int, ...] = ()
    template_roles: bool = False

    def calls(
        self,
        pairs: TextPairs,
        request_id: str,
        request: PoolingBody,
        defaults: RequestDefaults,
        trace: str,
    ) -> Iterator[Call]:
        """The calls, each for a vector, as many as `num_calls`; their ids are `request_id` with -0,
        -1 ... ApiError 400."""
        size = len(LABELS) if self.pooling.scores else self.pooling.hidden_size
        params = replace(vector_params(size), vector_token_ids=self.label_ids)
        shared = shared_call(request, params, defaults, trace)
        if self.pooling.scores:
            for i in range(len(pairs.documents)):
                yield self._asking(replace(shared, request_id=f"{request_id}-{i}"), pairs, i)
            return
        for i, (role, text) in enumerate(self._different(pairs)):
            yield replace(shared, request_id=f"{request_id}-{i}", text=self._prompted(role, text))

    def num_calls(self, pairs: TextPairs) -> int:
        """How many calls there are for the pairs."""
        return len(pairs.documents if self.pooling.scores else self._different(pairs))

    def check(self, pairs: TextPairs, max_calls: int, max_letters: int) -> None:
        """ApiError 400 for more than that, before any text is copied."""
        if pairs.instruction and not self.pooling.scores:
            message = "instruction is for models that are asked: this one makes vectors"
            raise ApiError(400, message, "instruction", "unsupported_parameter")
        if self.num_calls(pairs) > max_calls:
            message = f"at most {max_calls} different texts a request, not {self.num_calls(pairs)}"
            raise ApiError(400, message, pairs.field, "invalid_value")
        each = len(pairs.instruction)
        letters = sum(
            len(query) + len(document) + each
            for query, document in zip(pairs.queries, pairs.documents, strict=True)
        )
        if self.pooling.scores and letters > max_letters:
            message = (
                f"the pairs have {letters:,} characters, of which at most {max_letters:,} are taken"
            )
            raise ApiError(400, message, pairs.field, "invalid_value")

    def scores(self, pairs: TextPairs, vectors: Sequence[bytes]) -> list[float]:
        """The score of each pair, from the vectors of its calls."""
        if self.pooling.scores:
            logits = [as_vector(raw, normalize=False).tolist() for raw in vectors]
            return [_sigmoid(yes - no) for no, yes in logits]
        by_text = {
            text: as_vector(raw, normalize=True)
            for text, raw in zip(self._different(pairs), vectors, strict=True)
        }
        return [
            float(np.dot(by_text["query", query], by_text["document", document]))
            for query, document in zip(pairs.queries, pairs.documents, strict=True)
        ]

    def _asking(self, shared: Call, pairs: TextPairs, i: int) -> Call:
        query, document = pairs.queries[i], pairs.documents[i]
        instruction = pairs.instruction or INSTRUCTION
        if self.template_roles:
            turns = ("system", instruction), ("query", query), ("document", document)
        else:
            text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            turns = ("system", JUDGE), ("user", text)
        chat: list[JsonObject] = [{"role": role, "content": content} for role, content in turns]
        return replace(shared, chat=chat, template_arguments={"enable_thinking": False})

    def _different(self, pairs: TextPairs) -> list[tuple[str, str]]:
        """(its role, the text) of all texts, each once."""
        queries = (("query", text) for text in pairs.queries)
        documents = (("document", text) for text in pairs.documents)
        return list(dict.fromkeys((*queries, *documents)))

    def _prompted(self, role: str, text: str) -> str:
        """The text behind the checkpoint's prompt for its role."""
        return self.pooling.prompts.get(role, "") + text


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def score_response(
    request_id: str, created: int, model: str, scores: list[float], tokens: int
) -> JsonObject:
    """The JSON of /score."""
    data: list[JsonValue] = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    usage: JsonObject = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {
        "id": request_id,
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": usage,
    }


def rerank_response(
    request_id: str, model: str, request: RerankRequest, pairs: TextPairs, scores: list[float],
    tokens: int,
) -> JsonObject:  # fmt: skip
    """The JSON of /v1/rerank: the best first, of equal ones the earlier."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    results: list[JsonValue] = []
    for index in best:
        result: JsonObject = {"index": index, "relevance_score": scores[index]}
        if request.return_documents is not False:
            result["document"] = {"text": pairs.documents[index]}
        results.append(result)
    usage: JsonObject = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": request_id, "model": model, "results": results, "usage": usage}
