"""/v1/embeddings of a whole server: the official client, and engines that are killed meanwhile."""

from __future__ import annotations

import base64
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from checkpoints import make_checkpoint
from embedding_checkpoints import cosines, expected_vectors, texts, with_modules
from servers import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_checkpoint(tmp_path_factory.mktemp("embedding") / "model", "Qwen3ForCausalLM")
    return with_modules(made, "Normalize", prompts={"prompts": {"query": "find: "}})


@pytest.fixture(scope="module")
def server(folder):
    with Server(str(folder), "--served-model-name", "vectors", "--kv-pages", "1000") as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as made:
        yield made


def test_the_official_client_gets_vectors(client, folder):
    asked = texts(20)
    expected = expected_vectors(folder, asked)
    answer = client.embeddings.create(model="vectors", input=asked)  # asks for base64
    assert [one.index for one in answer.data] == [*range(20)] and answer.model == "vectors"
    found = np.array([one.embedding for one in answer.data])
    assert cosines(found, expected).min() >= 0.9999
    np.testing.assert_allclose(found, expected, atol=2e-5)
    tokens = sum(map(len, asked))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    numbers = client.embeddings.create(model="vectors", input=asked[0], encoding_format="float")
    np.testing.assert_allclose(numbers.data[0].embedding, found[0], atol=1e-6)
    [short] = client.embeddings.create(model="vectors", input=asked[0], dimensions=16).data
    np.testing.assert_allclose(
        short.embedding, found[0, :16] / np.linalg.norm(found[0, :16]), atol=1e-5
    )


def embed(server: Server, **body) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120)


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def test_ids_and_prompts_of_the_checkpoint(server, folder):
    by_text = vectors(embed(server, input="find: river"))
    asked = {"prompt": "find: river"}
    ids = httpx.post(f"{server.url}/tokenize", json=asked, timeout=120).json()["tokens"]
    for body in ({"input": ids}, {"input": [ids]}, {"input": "river", "prompt_name": "query"}):
        np.testing.assert_allclose(vectors(embed(server, **body)), by_text, atol=1e-5)
    raw = embed(server, input="river", encoding_format="base64").json()["data"][0]["embedding"]
    assert len(base64.b64decode(raw)) == 64 * 4
    plain = vectors(embed(server, input="find: river", normalize=False))
    assert np.linalg.norm(plain) > 1.1
    np.testing.assert_allclose(plain / np.linalg.norm(plain), by_text, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 3]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name"),
        ({"input": [1, 2], "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "timeout": 0}, "timeout"),
        ({"input": "a" * 600}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)  # fmt: skip
def test_what_gives_no_vector_is_refused_by_name(server, body, param):
    answer = embed(server, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_texts_are_not_generated(server):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ):
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
        assert answer.status_code == 501, answer.text
    assert vectors(embed(server, input="a")).shape == (1, 64)


@pytest.fixture(scope="module")
def many(folder) -> tuple[list[str], np.ndarray]:
    asked = texts(160, seed=1)
    return asked, expected_vectors(folder, asked)


@pytest.mark.parametrize("stages", [["engine"], ["scheduler", "detokenizer"], ["tokenizer"]])
def test_killed_stages_lose_no_vector(server, many, stages):
    """Each answer is whole and right, whatever is killed under the load."""
    asked, expected = many
    with ThreadPoolExecutor(6) as pool:
        parts = [asked[n : n + 10] for n in range(0, len(asked), 10)]
        answers = [pool.submit(embed, server, input=part) for part in parts]
        answers[2].result()
        for stage in stages:
            os.kill(server.pid(stage), signal.SIGKILL)
        found = np.concatenate([vectors(answer.result()) for answer in answers])
    np.testing.assert_allclose(found, expected, atol=2e-5)
