"""/score in vLLM's form and /v1/rerank in Cohere's: how well texts fit to others.

- ScoreRequest, RerankRequest: the bodies.
- TextPairs: the pairs of a body.
- PairScorer: from pairs to the core's calls, and from the vectors of these to scores.

A model that makes vectors scores a pair by the cosine of its two vectors. A model of --task score
is asked, as Qwen3-Reranker was trained: the score is the probability of "yes" against "no". Knows
no HTTP and no tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec.structs import replace

from pipeinfer.checkpoint.pooling import Pooling
from pipeinfer.gateway.embeddings import PoolingBody, as_vector, shared_call, vector_params
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import Call
from pipeinfer.gateway.requests import RequestDefaults
from pipeinfer.gateway.schema import Int32, about
from pipeinfer.params import JsonObject, JsonValue

LABELS = ("no", "yes")  # a token each
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

Texts = str | list[str]


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
    """queries, documents: as many of each; the field of the request that has each is named by
    `fields`. instruction: what a document is to do for a query."""

    queries: list[str]
    documents: list[str]
    instruction: str = INSTRUCTION


def takes_query_and_document(templates: Iterable[str]) -> bool:
    """Whether a chat template takes the roles of a pair that is scored."""
    text = "\n".join(templates)
    return all(re.search(f"['\"]{role}['\"]", text) for role in ("query", "document"))


def pairs_to_score(request: ScoreRequest, max_pairs: int) -> TextPairs:
    """ApiError 400."""
    named = request.queries is not None or request.documents is not None
    names = ("queries", "documents") if named else ("text_1", "text_2")
    first, second = (_texts(getattr(request, name), name) for name in names)
    if len(first) not in (1, len(second)):
        message = (
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: give one, or as many"
        )
        raise ApiError(400, message, names[0], "invalid_value")
    _check_count(second, names[1], max_pairs)
    queries = first * len(second) if len(first) == 1 else first
    return TextPairs(queries, second, request.instruction or INSTRUCTION)


def pairs_to_rerank(request: RerankRequest, max_pairs: int) -> TextPairs:
    """ApiError 400."""
    documents = _texts(list(map(_document_text, request.documents)), "documents")
    _check_count(documents, "documents", max_pairs)
    if request.top_n is not None and request.top_n < 1:
        message = f"top_n must be at least 1, not {request.top_n}"
        raise ApiError(400, message, "top_n", "invalid_value")
    queries = _texts(request.query, "query") * len(documents)
    return TextPairs(queries, documents, request.instruction or INSTRUCTION)


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
    ) -> list[Call]:
        """The calls, each for a vector; their ids are `request_id` with -0, -1 ..."""
        size = len(LABELS) if self.pooling.scores else self.pooling.hidden_size
        params = replace(vector_params(size), vector_token_ids=self.label_ids)
        shared = shared_call(request, params, defaults, trace)
        if self.pooling.scores:
            calls = [self._asking(shared, pairs, i) for i in range(len(pairs.documents))]
        else:
            calls = [replace(shared, text=text) for text in _different(self._prompted(pairs))]
        return [replace(call, request_id=f"{request_id}-{i}") for i, call in enumerate(calls)]

    def scores(self, pairs: TextPairs, vectors: Sequence[bytes]) -> list[float]:
        """The score of each pair, from the vectors of its calls."""
        if self.pooling.scores:
            logits = [as_vector(raw, normalize=False).tolist() for raw in vectors]
            return [_sigmoid(yes - no) for no, yes in logits]
        texts = self._prompted(pairs)
        by_text = {
            text: as_vector(raw, normalize=True)
            for text, raw in zip(_different(texts), vectors, strict=True)
        }
        return [float(np.dot(by_text[query], by_text[text])) for query, text in texts]

    def _asking(self, shared: Call, pairs: TextPairs, i: int) -> Call:
        query, document = pairs.queries[i], pairs.documents[i]
        if self.template_roles:
            turns = ("system", pairs.instruction), ("query", query), ("document", document)
        else:
            text = f"<Instruct>: {pairs.instruction}\n<Query>: {query}\n<Document>: {document}"
            turns = ("system", JUDGE), ("user", text)
        chat: list[JsonObject] = [{"role": role, "content": content} for role, content in turns]
        return replace(shared, chat=chat, template_arguments={"enable_thinking": False})

    def _prompted(self, pairs: TextPairs) -> list[tuple[str, str]]:
        """The pairs behind the checkpoint's prompts for each of them."""
        prompts = self.pooling.prompts
        query, document = prompts.get("query", ""), prompts.get("document", "")
        return [
            (query + one, document + other)
            for one, other in zip(pairs.queries, pairs.documents, strict=True)
        ]


def _different(texts: list[tuple[str, str]]) -> list[str]:
    """All texts, each once."""
    return list(dict.fromkeys(text for pair in texts for text in pair))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


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
