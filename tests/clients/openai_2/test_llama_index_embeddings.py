"""Vectors by LlamaIndex' OpenAILikeEmbedding, which its users take for a server of their own."""

import httpx
import pytest
from bounded import KEY, MODEL, TEXTS
from llama_index.embeddings.openai_like import OpenAILikeEmbedding


def test_texts_and_a_query(vectors_url):
    body = {"input": TEXTS}
    answer = httpx.post(f"{vectors_url}/embeddings", json=body, timeout=60).json()
    expected = [one["embedding"] for one in answer["data"]]
    made = OpenAILikeEmbedding(model_name=MODEL, api_base=vectors_url, api_key=KEY)
    found = made.get_text_embedding_batch(TEXTS)
    query = made.get_query_embedding(TEXTS[0])
    for vector, right in zip([*found, query], [*expected, expected[0]], strict=True):
        assert vector == pytest.approx(right, abs=1e-5)
