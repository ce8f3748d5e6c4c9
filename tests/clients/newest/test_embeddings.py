"""Vectors by openai's client and LangChain's OpenAIEmbeddings, as their users ask for them."""

import math

import openai
import pytest
from bounded import KEY, MODEL, TEXTS
from langchain_openai import OpenAIEmbeddings


def length(vector):
    return math.sqrt(sum(number * number for number in vector))


def close(one, other):
    return all(abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def expected(vectors_url):
    """By openai's client, which asks for base64 by itself."""
    client = openai.OpenAI(base_url=vectors_url, api_key=KEY, max_retries=0)
    return [one.embedding for one in client.embeddings.create(model=MODEL, input=TEXTS).data]


def test_openai_client(vectors_url, expected):
    client = openai.OpenAI(base_url=vectors_url, api_key=KEY, max_retries=0)
    assert all(abs(length(vector) - 1) < 1e-5 for vector in expected)
    answer = client.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="float")
    assert close(answer.data[0].embedding, expected[1])
    short = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=16).data[0].embedding
    assert len(short) == 16 and abs(length(short) - 1) < 1e-5


def test_langchain(vectors_url, expected):
    """It would send the ids of OpenAI's own models, unless it is told to send texts."""
    made = OpenAIEmbeddings(
        model=MODEL, base_url=vectors_url, api_key=KEY, check_embedding_ctx_length=False
    )
    assert all(map(close, made.embed_documents(TEXTS), expected))
    assert close(made.embed_query(TEXTS[2]), expected[2])
