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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec.structs import replace

from pipeinfer.checkpoint.pooling import LABELS, Pooling
from pipeinfer.gateway.embeddings import as_vector, vector_params
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import Call
from pipeinfer.gateway.requests import RequestDefaults, shared_call
from pipeinfer.gateway.schema import Int32, PoolingBody, about
from pipeinfer.params import JsonObject, JsonValue

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
    """queries, documents: as many of each. instruction: what a document is to do for a query; "":
    INSTRUCTION. field: of the request, that has the documents."""

    queries: list[str]
    documents: list[str]
    instruction: str = ""
    field: str = "documents"


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
            f"{names[0]} must have one text, or {len(second)} as {names[1]} has, not {len(first)}"
        )
        raise ApiError(400, message, names[0], "invalid_value")
    _check_count(second, names[1], max_pairs)
    queries = first * len(second) if len(first) == 1 else first
    return TextPairs(queries, second, request.instruction or "", names[1])


def pairs_to_rerank(request: RerankRequest, max_pairs: int) -> TextPairs:
    """ApiError 400."""
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
                f"the pairs have {letters:,} letters, of which at most {max_letters:,} are taken"
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
