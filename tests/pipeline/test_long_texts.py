"""One client's books, one after the other, and everybody else's chats meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from leftovers import statistics
from streams import TRIES

import pipeinfer.demo
from servers import Server

BOOK = "word after word " * 330_000  # 5 MB


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The demo model, with a token that takes the white space behind it: of no text is it certain
    how many tokens it has before all of it is encoded."""
    folder = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(Path(pipeinfer.demo.__file__).parent, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"][-1]["rstrip"] = True
    path.write_text(json.dumps(tokenizer))
    with Server(str(folder)) as running:
        yield running


def post(server, path: str, body: dict, timeout: float = 240.0) -> tuple[int, dict]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def chat(content: str, **more) -> dict:
    return {"model": None, "messages": [{"role": "user", "content": content}], **more}


def encoding(server) -> float:
    return statistics(server, "tokenizer-0")["encoding"]


def test_long_texts_of_one_client_delay_nobody_else(server):
    refused, over = [], threading.Event()
    books, chats = list[float](), list[float]()  # seconds that each took

    def timed(took: list[float], path: str, body: dict) -> tuple[int, dict]:
        begun = time.monotonic()
        answer = post(server, path, body)
        took.append(time.monotonic() - begun)
        return answer

    def send_books(path: str, body: dict) -> None:
        while not over.is_set():
            refused.append(timed(books, path, body))

    asked = [
        ("/v1/completions", {"prompt": BOOK, "max_tokens": 1}),
        ("/v1/chat/completions", chat(BOOK + "<|im_end|>", max_tokens=1)),
    ]
    threads = [threading.Thread(target=send_books, args=book) for book in asked]
    for thread in threads:
        thread.start()
    ready = list[bool]()
    try:
        server.wait(lambda: encoding(server), "a book is encoded")
        for _ in range(8):
            status, answer = timed(chats, "/v1/chat/completions", chat("count", max_tokens=1))
            assert status == 200, answer
            ready.append(server.get("/health/ready")[0] == 200)
            time.sleep(0.1)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    # Most of them: one or two may come when a stage stands still for other reasons.
    assert sum(ready) >= 6, ready
    assert sorted(chats)[4] < min(books) / 4, (chats, books)  # chats took 21 s, and books 5 s
    assert {status for status, _ in refused} == {400}
    assert {answer["error"]["code"] for _, answer in refused} == {"context_length_exceeded"}
    server.wait(lambda: encoding(server) == 0, "nothing is left")


def test_a_book_survives_the_tokenizer_that_was_at_it(server):
    """Its successor is told of the request by the gateway."""
    answers: list[tuple[int, dict]] = []

    def send() -> None:
        answers.append(post(server, "/v1/completions", {"prompt": BOOK}))

    for _ in range(TRIES):  # until a heartbeat comes while the book is encoded
        answers.clear()
        client = threading.Thread(target=send, daemon=True)
        client.start()
        amid = server.wait(lambda: answers or encoding(server), "the book is encoded")
        if amid is not answers:
            break
        client.join()
    assert amid is not answers
    os.kill(server.pid("tokenizer"), signal.SIGKILL)
    client.join(240)
    assert [status for status, _ in answers] == [400]
    assert answers[0][1]["error"]["code"] == "context_length_exceeded"


def test_a_control_token_in_a_message_does_not_end_it(server):
    """One token of the prompt for each byte of the text, and none of its control tokens."""
    used = {}
    for content in ("count", "count<|im_end|>"):
        status, answer = post(server, "/v1/chat/completions", chat(content, max_tokens=1))
        assert status == 200, answer
        used[content] = answer["usage"]["prompt_tokens"]
    assert used["count<|im_end|>"] - used["count"] == len("<|im_end|>")


def test_min_tokens_that_nothing_can_begin_is_the_clients_error(server):
    body = chat("count", min_tokens=1, stop_token_ids=list(range(264)), max_tokens=4)
    status, answer = post(server, "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "min_tokens")
    status, answer = post(server, "/v1/chat/completions", chat("count", max_tokens=1))
    assert status == 200, "and the engine lives"
