"""`verify`: an answer that is asked for again is the same, or the first difference is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replay_tool import tool

import servers

CHAT = {"messages": [{"role": "user", "content": "Count from 3 to 9."}], "seed": 5, "n": 2}
CALLS = {
    "chat": {**CHAT, "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "max_tokens": 12},
    "completion": {"prompt": "3 4 5", "temperature": 0, "logprobs": 1, "max_tokens": 8},
}


@pytest.fixture(scope="module")
def server():
    with servers.Server("--exact", "--dtype", "float32", "--device", "cpu") as running:
        yield running


def written(path: Path, request: object, response: object = None) -> Path:
    answer = {"request": request} | ({"response": response} if response else {})
    path.write_text(json.dumps(answer))
    return path


@pytest.mark.parametrize("kind", CALLS)
def test_an_answer_is_recorded_and_verified(server, tmp_path, kind):
    path = written(tmp_path / "answer.json", CALLS[kind])
    done = tool("verify", path, "--url", server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(path.read_text())
    assert answer["request"] == CALLS[kind]
    tokens = sum(len(choice["token_ids"]) for choice in answer["response"]["choices"])
    done = tool("verify", path, "--url", server.url, "--logprob-tolerance", 0.001)
    assert done.returncode == 0, done.stdout + done.stderr
    fingerprint = answer["response"]["system_fingerprint"]
    assert done.stdout == f"equal: {tokens} tokens of {fingerprint}\n"


def test_the_first_difference_is_told(server, tmp_path):
    path = written(tmp_path / "answer.json", CALLS["chat"])
    assert tool("verify", path, "--url", server.url).returncode == 0
    answer = json.loads(path.read_text())
    second = answer["response"]["choices"][1]
    now = second["token_ids"][3]
    second["token_ids"][3] = now + 1
    path.write_text(json.dumps(answer))
    done = tool("verify", path, "--url", server.url)
    assert done.returncode == 1
    assert done.stdout == f"choice 1: token 3 differs: recorded {now + 1}, now {now}\n"
    second["token_ids"][3] = now
    second["logprobs"]["content"][0]["logprob"] -= 0.5
    path.write_text(json.dumps(answer))
    done = tool("verify", path, "--url", server.url, "--logprob-tolerance", 0.001)
    assert done.returncode == 1 and done.stdout.startswith("choice 1: log-prob 0 differs: ")
    second["logprobs"]["content"].pop()
    path.write_text(json.dumps(answer))
    done = tool("verify", path, "--url", server.url, "--logprob-tolerance", 0.001)
    assert done.returncode == 1 and "log-probs of 11 tokens recorded, of 12 now" in done.stdout
    answer["response"]["choices"].pop()
    path.write_text(json.dumps(answer))
    done = tool("verify", path, "--url", server.url)
    assert done.returncode == 1 and done.stdout == "1 choice recorded, 2 now\n"
    answer["response"]["system_fingerprint"] = "fp_other"
    path.write_text(json.dumps(answer))
    done = tool("verify", path, "--url", server.url)
    assert done.returncode == 1 and done.stdout.startswith("another fingerprint: 'fp_other' ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "answer.json: "),
        ('{"request": {"prompt": "a"}}', "the request has no seed"),
        ('{"request": {"prompt": "a", "seed": 1}, "response": {"choices": 3}}', "Expected `array`"),
        ('{"request": {"prompt": "a", "seed": 1}, "response": 7}', "Expected `object`, got `int`"),
        ('{"request": {"prompt": "a", "seed": 1, "max_tokens": -1}}', "status 400: "),
    ],
)
def test_what_cannot_be_verified_is_said(server, tmp_path, text, said):
    path = tmp_path / "answer.json"
    path.write_text(text)
    done = tool("verify", path, "--url", server.url)
    assert done.returncode == 2 and said in done.stderr
    assert path.read_text() == text


def test_no_server_is_said(tmp_path):
    path = written(tmp_path / "answer.json", CALLS["completion"])
    done = tool("verify", path, "--url", "http://127.0.0.1:9")
    assert done.returncode == 2 and done.stderr.startswith("error: http://127.0.0.1:9: ")
