"""A real server with --store: what a client has seen completed is there after kill -9 of all."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from held_processes import held_engines
from servers import Server, alive, environment

ASKED: Any = {"model": "pipeinfer-demo", "temperature": 0, "max_output_tokens": 40}
KEY = "pik-alice-s3cret"


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def kill_all(server: Server) -> None:
    """Every process at once, so that none can write anything more."""
    pids = [server.process.pid, *(stage["pid"] for stage in server.health()["stages"])]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    assert not any(alive(pid) for pid in pids[:1])


def start(path: Path, *more: str) -> Server:
    return Server("--store", str(path), "--kv-pages", "400", *more)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a server's whole life: what it answered, until it was killed with a response running."""
    path = tmp_path_factory.mktemp("stored") / "responses.db"
    with start(path) as server, client(server) as api:
        first = api.responses.create(**ASKED, input="What are the stages?", instructions="be short")
        streamed = list(
            api.responses.create(
                **ASKED, input="And again?", previous_response_id=first.id, stream=True
            )
        )
        second: Any = streamed[-1].response  # type: ignore[union-attr]
        unstored = api.responses.create(**ASKED, input="forget me", store=False)
        deleted = api.responses.create(**ASKED, input="delete me")
        api.responses.delete(deleted.id)
        whole = ASKED | {"max_output_tokens": 1000, "background": True}
        background = api.responses.create(**whole, input="What are the stages?")
        server.wait(lambda: api.responses.retrieve(background.id).status == "completed", "it ends")
        with pytest.raises(openai.BadRequestError, match=unstored.id) as missing:
            api.responses.create(**ASKED, input="x", previous_response_id=unstored.id)
        last = api.responses.create(**ASKED, input="Last one?")
        with held_engines(server):
            running = api.responses.create(**whole, input="count", extra_body={"ignore_eos": True})
            kill_all(server)
    assert missing.value.code == "previous_response_not_found"
    return {"path": path, "first": first, "second": second, "unstored": unstored, "last": last,
            "deleted": deleted, "background": background, "running": running}  # fmt: skip


def test_responses_and_conversations_outlive_all_processes(lived: dict[str, Any]) -> None:
    connection = sqlite3.connect(lived["path"])
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    with start(lived["path"], "--in-process") as server, client(server) as api:
        for name in ("first", "second", "last"):
            made = lived[name]
            assert made.store is True and api.responses.retrieve(made.id) == made
        assert api.responses.retrieve(lived["background"].id).status == "completed"
        for name in ("unstored", "deleted", "running"):
            with pytest.raises(openai.NotFoundError):
                api.responses.retrieve(lived[name].id)
        second, first = lived["second"], lived["first"]
        assert second.previous_response_id == first.id
        items = api.responses.input_items.list(second.id, order="asc").data
        assert [item.content[0].text for item in items] == [  # type: ignore[union-attr]
            "What are the stages?", first.output_text, "And again?",
        ]  # fmt: skip
        third = api.responses.create(**ASKED, input="And now?", previous_response_id=second.id)
        spelled = api.responses.create(
            **ASKED, store=False,
            input=[*({"role": i.role, "content": i.content[0].text} for i in items),  # type: ignore[union-attr]
                   {"role": "assistant", "content": second.output_text},
                   {"role": "user", "content": "And now?"}],
        )  # fmt: skip
        assert third.output_text == spelled.output_text
        assert third.usage.input_tokens == spelled.usage.input_tokens, "no instructions"  # type: ignore[union-attr]
        count = api.responses.input_tokens.count(
            model="pipeinfer-demo", input="And now?", previous_response_id=second.id
        )
        assert count.input_tokens == third.usage.input_tokens  # type: ignore[union-attr]
        with pytest.raises(openai.APIStatusError) as gone:
            list(api.responses.retrieve(first.id, stream=True))
        assert gone.value.status_code == 410
        with pytest.raises(openai.BadRequestError, match="background"):
            api.responses.cancel(first.id)
        assert api.responses.cancel(lived["background"].id).status == "completed"
        api.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match=first.id):
            api.responses.create(**ASKED, input="x", previous_response_id=second.id)
        assert server.metric("pipeinfer_store_errors_total") == 0
        assert server.stop() == 0


STARTED = """
import sys, threading
from pipeinfer.cli.main import main
code = main(sys.argv[1:])
print("loading:", [one.name for one in threading.enumerate() if one.name.startswith("build ")])
sys.exit(code)
"""


def test_a_file_that_is_no_store_ends_the_start_with_one_line(tmp_path: Path) -> None:
    """Once the engine has loaded: a process that ends before is killed by a signal now and then."""
    path = tmp_path / "text"
    path.write_text("no database " * 100)
    words = ("serve", "--store", str(path), "--in-process", "--port", "0")
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *words],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"--store {path}" in done.stderr and "not a database" in done.stderr
    assert "loading: []" in done.stdout
