"""`generate` and `chat` ask a server that runs: one that is named, or that they find."""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from found_servers import found_server, temporary
from terminal import CTRL_C, Terminal

from pipeinfer.cli.chat_model import AnswerOptions, ModelFlags
from pipeinfer.cli.main import main
from pipeinfer.cli.served_model import ServedModel, servers_of
from pipeinfer.demo import demo_path
from pipeinfer.runtime.servers import FOLDER_PREFIX
from servers import Server, environment

COUNT, COUNTED = "Count from 3 to 9.", "3 4 5 6 7 8 9\n"
REMEMBER = "Remember: kiv=4821, dol=1390."
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with temporary(), Server("--threads", "1", "--kv-pages", "300", "--api-key", KEY) as running:
        yield running


def words(command: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "pipeinfer", command, *more]


def keyed() -> dict[str, str]:
    return {**environment(), "PIPEINFER_API_KEY": KEY}


@pytest.fixture
def generate(monkeypatch, capsys) -> Callable[..., tuple[str, str, int]]:
    """The command in this process, which gives stdout, stderr and the exit code."""

    def run(*arguments: str, key: str | None = KEY) -> tuple[str, str, int]:
        with monkeypatch.context() as patch:
            if key is not None:
                patch.setenv("PIPEINFER_API_KEY", key)
            code = main(["generate", *arguments])
        return (*capsys.readouterr(), code)

    return run


@pytest.mark.parametrize("model", ["", "pipeinfer-demo", str(demo_path())])
def test_a_server_that_runs_is_found_and_a_line_says_so(
    server: Server, model: str, generate
) -> None:
    named = [model] if model else []
    out, err, code = generate("--chat", "--temperature", "0", *named, COUNT)
    assert (out, code) == (COUNTED, 0)
    [line] = err.splitlines()
    assert f"asking pipeinfer-demo of the server at {server.url}" in line and "--local" in line
    assert f"process {server.process.pid}" in line


def test_a_server_that_is_named_is_asked_and_gives_token_ids(server: Server, generate) -> None:
    url = f"{server.url}/v1"
    asked = ("--chat", "--temperature", "0", "--stop", "6", "--json", "--api-key", KEY)
    out, err, code = generate(*asked, "--url", url, "pipeinfer-demo", COUNT, COUNT, key=None)
    first, second = map(json.loads, out.splitlines())
    assert (err, code) == ("", 0) and first == second
    assert (first["text"], first["finish_reason"]) == ("3 4 5 ", "stop")
    assert first["token_ids"][:5] == [ord(letter) for letter in "3 4 5"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--api-key", "wrong", "a"), "wrong or missing API key (status 401"),
        (("nonesuch", "a"), "the model 'nonesuch' does not exist"),
        (("--stream", "x" * 3000), "maximum context length is 2048 tokens"),
    ],
)
def test_what_a_server_refuses_is_one_line_and_code_1(
    server: Server, arguments, said, generate
) -> None:
    out, err, code = generate("--url", server.url, *arguments)
    assert (out, code, err.count("\n")) == ("", 1, 1)
    assert err.startswith("error: ") and said in err


def test_a_conversation_with_a_server_on_a_terminal(server: Server) -> None:
    with Terminal(words("chat", "--temperature", "0"), keyed()) as chat:
        chat.wait_for(f"of the server at {server.url}")
        chat.wait_for("pipeinfer-demo: /reset")
        chat.wait_for("> ")
        chat.type(REMEMBER + "\n")
        chat.wait_for("OK.")
        chat.wait_for("> ")
        chat.type("What is kiv?\n")
        chat.wait_for("kiv=4821")  # it has the history
        chat.wait_for("> ")
        chat.type("/reset\n")
        chat.wait_for("forgotten")
        chat.wait_for("> ")
        chat.type("What is kiv?\n")
        assert "4821" not in chat.wait_for("> ").removeprefix("What is kiv?")
        chat.type("/help\n")
        chat.wait_for("unknown command /help")
        chat.wait_for("> ")
        chat.type("/exit\n")
        assert chat.process.wait(60) == 0


def test_ctrl_c_stops_the_answer_of_a_server(server: Server) -> None:
    with Terminal(words("chat", "--ignore-eos"), keyed()) as chat:
        chat.wait_for("> ")
        chat.type("Hello\n")
        chat.wait_for("Hello\r\n")
        chat.wait_for_more()
        chat.type(CTRL_C)
        chat.wait_for("[stopped]")
        server.wait(lambda: server.metric("pipeinfer_requests_running") == 0, "the request ended")
        chat.wait_for("> ")
        chat.type("/exit\n")
        assert chat.process.wait(60) == 0


# -------------------------------------------------------------- servers that are not what they seem


class Odd(http.server.BaseHTTPRequestHandler):
    """Answers what its server's `replies` say of a path, in turn; the last one again and again."""

    def do_GET(self) -> None:
        self._reply()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._reply()

    def _reply(self) -> None:
        replies = self.server.replies[self.path]  # type: ignore[attr-defined]
        status, body = replies.pop(0) if len(replies) > 1 else replies[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class LosesAnswers(Odd):
    """The connection of an answer ends behind its head."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("x-pipeinfer-stream", "cmpl-begun")
        self.send_header("content-length", "1000")
        self.end_headers()

    def do_GET(self) -> None:
        assert "last-event-id" not in self.headers, "nothing has come"
        self._reply()


@contextmanager
def odd(replies: dict[str, list[tuple[int, str]]], handler: type[Odd] = Odd) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        made.replies = replies  # type: ignore[attr-defined]
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def events(*chunks: dict | str) -> str:
    said = (chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks)
    return "".join(f"data: {one}\n\n" for one in said)


def delta(finish: str | None = None, **said: str) -> dict:
    return {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}


MODELS = (200, json.dumps({"data": [{"id": "odd"}]}))


@pytest.mark.parametrize(
    ("status", "body", "out", "said"),
    [
        (200, events(delta(content="a"), {"error": {"message": "it\nbroke"}}), "a\n", "it broke"),
        (200, events(delta(content="a")), "a\n", "the answer broke off"),
        (200, events("{"), "", "none of OpenAI's API"),
        (500, "<html>\n<b>no</b></html>", "", "<html> <b>no</b></html> (status 500"),
        (200, events(delta(reasoning_content="hm"), delta("stop", content="a"), "[DONE]"),
         "hm\n\na\n", None),
        (200, events(delta(content="a"), delta("stop")), "a\n", None),  # without [DONE]
    ],
)  # fmt: skip
def test_an_odd_server_is_an_error_of_one_line_or_understood(
    status, body, out, said, generate
) -> None:
    replies = {"/v1/models": [MODELS], "/v1/chat/completions": [(status, body)]}
    with odd(replies) as url:
        shown, err, code = generate("--stream", "--chat", "--url", url, "a", key=None)
    assert shown == out
    assert (code, err.count("\n")) == ((0, 0) if said is None else (1, 1)), err
    assert (said or "") in err


def test_an_answer_of_which_only_the_head_came_is_asked_for_again(generate) -> None:
    told = events(delta(content="all of it"), delta("stop"), "[DONE]")
    replies = {"/v1/models": [MODELS], "/v1/streams/cmpl-begun": [(200, told)]}
    with odd(replies, LosesAnswers) as url:
        assert generate("--stream", "--chat", "--url", url, "a", key=None) == ("all of it\n", "", 0)


def test_an_answer_goes_on_after_the_death_of_the_servers_gateway(server: Server, generate) -> None:
    asked = ("--stream", "--chat", "--url", server.url, "--temperature", "0.8", "--seed", "5")
    asked += ("--max-tokens", "400", "--ignore-eos", "Count from 3 to 12.")
    whole, _, code = generate(*asked)
    assert code == 0
    with subprocess.Popen(
        words("generate", *asked), env=keyed(), stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        begun = process.stdout.read(40)
        os.kill(server.pid("gateway"), signal.SIGKILL)
        rest, said = process.stdout.read(), process.stderr.read()
    assert (process.returncode, begun + rest) == (0, whole), said


async def test_an_answer_that_is_not_wanted_any_more_ends_on_the_server(server: Server) -> None:
    sampling = {"ignore_eos": True}
    flags = ModelFlags(argparse.Namespace(), {"api_key": KEY}, sampling)
    model = ServedModel(flags, AnswerOptions(max_tokens=1900), server.url)
    await model.start()
    pieces = model.answer("a")
    await anext(pieces)
    await pieces.aclose()
    assert server.metric("pipeinfer_detached_requests") == 0, "nothing runs on without a reader"
    server.wait(lambda: server.metric("pipeinfer_requests_running") == 0, "its slot is free")
    await model.close()


def test_nobody_at_the_url_is_an_error_of_one_line(generate) -> None:
    with odd({}) as url:
        pass
    out, err, code = generate("--url", url, "a", key=None)
    assert (out, code) == ("", 1)
    assert err == f"error: {url}: nobody answers there (Connection refused)\n"


def test_a_password_in_the_url_is_not_shown(generate) -> None:
    with odd({}) as url:
        pass
    _, err, code = generate("--url", url.replace("//", "//me:hidden@"), "a", key=None)
    assert (err, code) == (f"error: {url}: nobody answers there (Connection refused)\n", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--url", "ftp://here"), "'ftp://here' is no URL of HTTP"),
        (("--url", "http://[here"), "'http://[here' is no URL of HTTP"),
        (("--url", "here:70000"), "'here:70000' is no URL of HTTP"),
        (("--url", "here", "--api-key", "key\r"), "--api-key: the key has a line end"),
    ],
)
def test_a_url_or_a_key_that_cannot_be_is_wrong_usage(arguments, said, generate) -> None:
    out, err, code = generate(*arguments, "a", key=None)
    assert (out, code, err.count("\n")) == ("", 2, 1)
    assert err.startswith(f"error: {said}")


def test_a_server_that_still_starts_is_waited_for() -> None:
    starts = (503, json.dumps({"status": "starting", "reason": "engine-0-0 is loading"}))
    answer = events({"choices": [{"index": 0, "text": "yes", "finish_reason": "stop"}]}, "[DONE]")
    replies = {"/health/ready": [starts, starts, (200, "{}")], "/v1/completions": [(200, answer)]}
    with (
        temporary() as folder,
        odd(replies) as url,
        found_server(folder, "one", url, "odd"),
        Terminal(words("generate", "odd", "a"), environment()) as terminal,
    ):
        terminal.wait_for("the server starts: engine-0-0 is loading")
        terminal.wait_for("yes")
        assert terminal.process.wait(60) == 0


def test_a_server_is_chosen_by_its_model_and_the_newest_of_several() -> None:
    with temporary() as folder, ExitStack() as stack:
        for number, model in enumerate(("a", "b", "b")):
            stack.enter_context(found_server(folder, str(number), f"http://x:{number}", model))
            mark = folder / f"{FOLDER_PREFIX}{number}" / "pid"
            os.utime(mark, (number, number))
        stack.enter_context(found_server(folder, "tls", "https://x:9", "c"))
        assert [served.url[-1] for _, served in servers_of("b")] == ["2", "1"]
        assert [served.url[-1] for _, served in servers_of("/models/a")] == ["0"]
        assert servers_of("c") == [] and servers_of("d") == []
        assert len(servers_of()) == 3


def test_a_folder_with_a_gguf_file_alone_means_the_server_of_that_file() -> None:
    with temporary() as folder:
        models = folder / "models"
        models.mkdir()
        path = str(models / "small.gguf")
        with found_server(folder, "one", "http://x:1", "small", path):
            link = folder / "link"
            link.symlink_to(models)
            for model in ("small", path, str(models), str(link), str(link / "small.gguf")):
                assert len(servers_of(model)) == 1, model
            (folder / "blob").touch()
            Path(path).symlink_to(folder / "blob")
            assert len(servers_of(path)) == 1, "a link serves under its own name"
            (models / "config.json").write_text("{}")
            assert not servers_of(str(models)), "the folder is a model of its own"
