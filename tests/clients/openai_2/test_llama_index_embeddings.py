"""Vectors by LlamaIndex' OpenAILikeEmbedding, which its users take for a server of their own."""

import os

import httpx
import pytest
from bounded import KEY, MODEL
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

from servers import Server

TEXTS = ["Once upon a time", "There was a king", "Count from 3 to 9."]


@pytest.fixture(scope="module")
def vectors_url():
    with Server("--task", "embed", python=os.environ["PYTHON_OF_SERVER"]) as running:
        yield f"{running.url}/v1"


def test_texts_and_a_query(vectors_url):
    body = {"input": TEXTS}
    answer = httpx.post(f"{vectors_url}/embeddings", json=body, timeout=60).json()
    expected = [one["embedding"] for one in answer["data"]]
    made = OpenAILikeEmbedding(model_name=MODEL, api_base=vectors_url, api_key=KEY)
    found = made.get_text_embedding_batch(TEXTS)
    query = made.get_query_embedding(TEXTS[0])
    for vector, right in zip([*found, query], [*expected, expected[0]], strict=True):
        assert vector == pytest.approx(right, abs=1e-5)
