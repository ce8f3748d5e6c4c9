"""A model of the hub is downloaded once, whatever happens to connections and processes, and what is
missing is named; its progress is shown. The hub is a server on this machine, the client the real
one.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import WeakFileLock

import hub
from pipeinfer.checkpoint import source as downloads
from pipeinfer.checkpoint.files import read_headers
from pipeinfer.checkpoint.source import (
    ProgressLines,
    Transfer,
    duration,
    progress,
    resolve_model,
    size,
)
from pipeinfer.demo import demo_path
from pipeinfer.settings import ConfigurationError

NAME = "someone/demo"
WEIGHTS = "model.safetensors"
SIZE = (demo_path() / WEIGHTS).stat().st_size


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hub.Hub]:
    """A hub with the demo model, which the client of this process asks, without a pause between
    tries."""
    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    with hub.serve({NAME: demo_path()}) as made:
        hub.use(monkeypatch, made.url, tmp_path / "cache")
        yield made


def whole(folder: Path) -> None:
    """`folder` has the demo model, byte by byte."""
    for path in demo_path().iterdir():
        if path.suffix in (".json", ".safetensors", ".jinja"):
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert read_headers(folder).keys() == read_headers(demo_path()).keys()


def first_byte(asked: str) -> int:
    """Of a Range header without an end."""
    return int(asked.removeprefix("bytes=").removesuffix("-"))


def refused(name: str = NAME, revision: str = "", weights: bool = True) -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve_model(name, revision, lambda text: None, weights)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    return message


# -------------------------------------------------------------------------------------- connections


def test_a_connection_that_breaks_is_gone_on_with_from_there(served: hub.Hub) -> None:
    served.cuts = [(1_500_000, "closed"), (800_000, "reset")]
    told: list[str] = []
    whole(resolve_model(NAME, "", told.append))
    first, second, third = served.ranges_of(WEIGHTS)
    assert first == ""
    at = [first_byte(second), first_byte(third)]
    assert 1_400_000 < at[0] <= 1_515_520 and at[0] < at[1] < SIZE
    assert told[0].startswith(f"{NAME}: downloading 6 files, 3.1 MiB, to ")
    assert sum("going on from there" in line for line in told) == 2
    assert "3.1 MiB came in" in told[-1]


def test_a_slow_download_says_how_far_it_is(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeinfer.checkpoint.source.LINE_PAUSE", 0.1)
    monkeypatch.setattr("pipeinfer.checkpoint.source.REFRESH_SECONDS", 0.05)
    served.rate = 6e6
    told: list[str] = []
    resolve_model(NAME, "", told.append)
    lines = [line for line in told if " left" in line]
    assert lines and all(f"{NAME}: " in line and "/s, " in line for line in lines)


def test_no_line_is_logged_for_each_request_of_the_client(
    served: hub.Hub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    resolve_model(NAME, "", logging.getLogger("pipeinfer").info)
    assert {record.name for record in caplog.records} == {"pipeinfer"}
    assert 2 <= len(caplog.records) <= 4
    assert logging.getLogger("httpx2").isEnabledFor(logging.INFO)  # as it was


def test_a_server_that_knows_no_ranges_sends_the_whole_again(served: hub.Hub) -> None:
    served.ranges = False
    served.cuts = [(1_500_000, "closed")]
    whole(resolve_model(NAME, "", lambda text: None))
    assert len(served.ranges_of(WEIGHTS)) == 2


def test_after_several_tries_for_nothing_the_error_says_how_far_it_came(served: hub.Hub) -> None:
    served.cuts = [(1_500_000, "closed"), *[(0, "closed")] * downloads.TRIES]
    message = refused()
    assert f"of 3.1 MiB of {WEIGHTS} came" in message and "1.4 MiB" in message
    assert "The same command goes on from there" in message
    whole(resolve_model(NAME, "", lambda text: None))
    assert 1_400_000 < first_byte(served.ranges_of(WEIGHTS)[-1]) <= 1_515_520


def test_a_busy_hub_is_asked_again(served: hub.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a status that may pass, and not of one that stays."""
    busy = {"left": 2}

    def sometimes(self: hub._Handler, path: Path) -> None:
        if path.name == WEIGHTS and self.command == "GET" and busy["left"]:
            busy["left"] -= 1
            self._refuse(503, "", "busy")
        else:
            send(self, path)

    send = hub._Handler._send
    monkeypatch.setattr(hub._Handler, "_send", sometimes)
    whole(resolve_model(NAME, "", lambda text: None))
    assert len(served.ranges_of(WEIGHTS)) == 3


# ---------------------------------------------------------------------------------------- processes


def test_a_model_whose_download_was_cut_off_is_loaded_and_answers(
    served: hub.Hub, tmp_path: Path
) -> None:
    served.cuts = [(SIZE // 2, "closed")]
    command = [sys.executable, "-m", "pipeinfer", "generate", "--model", NAME, "--max-tokens", "4"]
    environment = os.environ | hub.environment(served.url, tmp_path / "cache")
    done = subprocess.run(
        [*command, "--in-process", "--json", "1+1="],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert first_byte(served.ranges_of(WEIGHTS)[1]) > SIZE // 3


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_download_that_was_ended_goes_on_in_the_next_process(
    served: hub.Hub, tmp_path: Path, by: signal.Signals
) -> None:
    served.rate = 4e6
    code = f"from pipeinfer.checkpoint.source import resolve_model; resolve_model({NAME!r})"
    environment = os.environ | hub.environment(served.url, tmp_path / "cache")
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=quiet)
    assert served.reached.wait(60)
    process.send_signal(by)
    process.wait(60)
    served.rate = 0.0
    whole(resolve_model(NAME, "", lambda text: None))
    asked = served.ranges_of(WEIGHTS)
    assert len(asked) == 2 and first_byte(asked[1]) > SIZE // 3


def test_of_several_that_want_a_model_one_downloads_it(served: hub.Hub) -> None:
    served.rate = 4e6
    told: list[str] = []
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model(NAME, "", told.append)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    whole(found[0])
    assert served.ranges_of(WEIGHTS) == [""]
    assert told.count(f"{NAME}: another process downloads it, waiting for that") == 2
    assert sum("downloading 6 files" in line for line in told) == 1


def test_what_is_in_the_cache_is_not_downloaded_again(served: hub.Hub) -> None:
    resolve_model(NAME, "", lambda text: None)
    before, told = len(served.seen), list[str]()
    whole(resolve_model(NAME, "", told.append))
    assert told == [] and not any("/resolve/" in path for _, path, _ in served.seen[before:])


def test_a_model_in_the_cache_is_found_while_the_hub_is_away(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resolve_model(NAME, "", lambda text: None)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    hub.use(monkeypatch, away, tmp_path / "cache")
    whole(resolve_model(NAME, "", lambda text: None))
    message = refused("someone/other")
    assert f"the hub at {away} cannot be asked" in message and "is no copy of it" in message


# ---------------------------------------------------------------------------------- what is missing


def test_a_model_that_the_hub_lacks_is_said_to_be_nowhere(served: hub.Hub) -> None:
    message = refused("someone/nothing")
    assert "no such folder" in message and "has no model of that name" in message
    assert "HF_TOKEN" in message  # it may be a private one


def test_a_revision_that_there_is_not_is_named(served: hub.Hub) -> None:
    assert refused(NAME, "v9") == f"model {NAME!r} of the hub has no revision 'v9'"
    whole(resolve_model(NAME, "v2", lambda text: None))


def test_of_a_gated_model_the_variable_of_the_token_is_named(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.gated.add(NAME)
    message = refused()
    assert "is gated: no token is given as HF_TOKEN" in message and served.url in message
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_stranger")
    assert "the token of HF_TOKEN has no access" in refused()


def test_a_token_that_the_hub_does_not_take_is_named_and_a_right_one_is_sent(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.token = "hf_right"
    assert "wants a token: no token is given as HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token of HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    whole(resolve_model(NAME, "", lambda text: None))


def test_a_model_without_weights_is_refused_before_anything_is_downloaded(
    served: hub.Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    served.models["someone/empty"] = folder
    assert "has no weights as *.safetensors: it has none in any other" in refused("someone/empty")
    (folder / "model-Q4.gguf").write_bytes(b"GGUF")
    (folder / "model-Q8.gguf").write_bytes(b"GGUF")
    message = refused("someone/empty")
    assert "it has model-Q4.gguf, model-Q8.gguf" in message and "give its path" in message
    assert not any("/resolve/" in path for _, path, _ in served.seen)
    found = resolve_model("someone/empty", "", lambda text: None, weights=False)
    assert (found / "config.json").exists()  # for random weights


def test_without_the_network_what_is_missing_is_named(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model(NAME, "", lambda text: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    whole(resolve_model(NAME, "", lambda text: None))
    (folder / WEIGHTS).unlink()
    (folder / "tokenizer.json").unlink()
    message = refused()
    assert "HF_HUB_OFFLINE is set" in message
    assert message.endswith(f"its copy lacks {WEIGHTS}, tokenizer.json")
    assert refused("someone/other").endswith("is no copy of it")


def test_a_disk_without_room_is_known_before_anything_is_downloaded(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = downloads.shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: usage)
    message = refused()
    assert "needs 3.1 MiB in " in message and "1.0 MiB are free" in message
    assert not any("/resolve/" in path for _, path, _ in served.seen)


def test_a_word_that_no_model_could_be_called_is_said_to_be_none(served: hub.Hub) -> None:
    assert "no model of the hub is called so" in refused("what--is..this")
    assert served.seen == []


# ------------------------------------------------------------------------- what others left or hold


def blob_of(cache: Path, file: str) -> Path:
    """Where the cache keeps a file of the demo model."""
    sha = hashlib.sha256((demo_path() / file).read_bytes()).hexdigest()
    return cache / f"models--{NAME.replace('/', '--')}" / "blobs" / sha


def left_over(cache: Path, body: bytes) -> None:
    """Another process has written so much of the weights."""
    blob = blob_of(cache, WEIGHTS)
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.with_name(f"{blob.name}.incomplete").write_bytes(body)


@pytest.mark.parametrize("length", [SIZE // 2, SIZE], ids=["half", "whole"])
def test_what_a_disk_lost_of_an_unfinished_file_is_downloaded_again(
    served: hub.Hub, tmp_path: Path, length: int
) -> None:
    left_over(tmp_path / "cache", bytes(length))
    whole(resolve_model(NAME, "", lambda text: None))
    assert served.ranges_of(WEIGHTS)[-1] == ""


def test_a_file_that_is_not_what_the_hub_names_is_refused(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    send = hub._Handler._send_body
    monkeypatch.setattr(
        hub._Handler, "_send_body", lambda self, body: send(self, body[:-1] + bytes([body[-1] ^ 1]))
    )
    assert "has another SHA-256 than it names" in refused()
    assert not blob_of(tmp_path / "cache", WEIGHTS).exists()


def test_a_file_of_the_cache_that_lost_its_end_is_downloaded_again(
    served: hub.Hub, tmp_path: Path
) -> None:
    resolve_model(NAME, "", lambda text: None)
    os.truncate(blob_of(tmp_path / "cache", WEIGHTS), SIZE // 2)
    whole(resolve_model(NAME, "", lambda text: None))


def test_a_file_that_another_program_downloads_is_waited_for(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It holds the client's lock of the file, and writes the same unfinished file."""
    monkeypatch.setattr(downloads, "LOOK", 0.05)
    cache, body = tmp_path / "cache", (demo_path() / WEIGHTS).read_bytes()
    blob = blob_of(cache, WEIGHTS)
    lock = cache / ".locks" / f"models--{NAME.replace('/', '--')}" / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True)
    waits, told = threading.Event(), list[str]()

    def tell(text: str) -> None:
        told.append(text)
        if "waiting" in text:
            waits.set()

    found: list[Path] = []
    with WeakFileLock(lock):
        left_over(cache, body[:1000])
        thread = threading.Thread(target=lambda: found.append(resolve_model(NAME, "", tell)))
        thread.start()
        assert waits.wait(60)
        left_over(cache, body)
        blob.with_name(f"{blob.name}.incomplete").rename(blob)
    thread.join()
    whole(found[0])
    assert served.ranges_of(WEIGHTS) == []
    assert f"{WEIGHTS}: another program downloads it, waiting for that" in told


def test_what_is_kept_of_a_model_needs_no_more_room(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left_over(tmp_path / "cache", (demo_path() / WEIGHTS).read_bytes()[: SIZE - 1000])
    usage = downloads.shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: usage)
    whole(resolve_model(NAME, "", lambda text: None))


def test_a_password_in_the_address_of_the_hub_is_not_shown(
    served: hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = served.url.replace("://", "://me:secret@")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    message = refused("someone/nothing")
    assert "secret" not in message and served.url in message


MIB = 2**20


def test_a_line_comes_every_ten_seconds_or_five_percent_and_never_twice_a_second() -> None:
    lines = ProgressLines(began=100.0)
    assert lines.due(0, 1000 * MIB, 0, 100.2) == ""
    assert lines.due(60 * MIB, 1000 * MIB, 60 * MIB, 100.9) == ""  # enough, but too soon
    assert lines.due(60 * MIB, 1000 * MIB, 60 * MIB, 101.0) != ""
    assert lines.due(61 * MIB, 1000 * MIB, 61 * MIB, 108.0) == ""
    assert lines.due(110 * MIB, 1000 * MIB, 110 * MIB, 109.0) != ""  # five percent more
    assert lines.due(111 * MIB, 1000 * MIB, 111 * MIB, 119.0) != ""  # ten seconds later


def test_a_rate_is_of_what_came_lately_and_not_of_what_was_here_before() -> None:
    lines = ProgressLines(began=0.0)
    said = lines.due(500 * MIB, 1000 * MIB, 20 * MIB, 10.0)
    assert said == "500.0 MiB of 1000.0 MiB (50 %), 2.0 MiB/s, 4 min left"
    for second in range(11, 60):
        lines.due(500 * MIB, 1000 * MIB, 20 * MIB, float(second))
    assert lines.due(500 * MIB, 1000 * MIB, 20 * MIB, 60.0).endswith("nothing comes at the moment")


def test_sizes_and_times_are_in_units_that_a_person_reads() -> None:
    assert [size(n) for n in (512, 6 * MIB, 3 << 30)] == ["0.5 KiB", "6.0 MiB", "3.00 GiB"]
    assert [duration(s) for s in (4.4, 130, 7500)] == ["4 s", "2 min", "2 h 5 min"]
    assert progress(0, 0, 1.0) == "0.0 KiB of 0.0 KiB (100 %), 0.0 KiB/s, 0 s left"


def test_without_a_terminal_only_lines_are_said() -> None:
    stream, told = io.StringIO(), list[str]()
    with Transfer("a/model", {"one": 10, "two": 20}, told.append, stream) as transfer:
        transfer.set("one", 4)  # was here
        transfer.add("one", 6)
        transfer.expect("two", 30)
        transfer.add("two", 30)
        transfer.log("the connection broke")
        assert (transfer.total, transfer.done, transfer.received) == (40, 40, 36)
    assert stream.getvalue() == ""
    assert told[0] == "the connection broke"
    assert told[-1].startswith("a/model: 0.0 KiB came in ")


PROGRAM = """
import sys
from pipeinfer.checkpoint.source import Transfer
with Transfer("a/model", {"file": 64 << 20}, print) as transfer:
    transfer.add("file", 32 << 20)
    sys.stdin.readline()
    transfer.log("the connection broke")
    transfer.add("file", 32 << 20)
"""


def test_on_a_terminal_one_line_is_rewritten_and_removed_at_the_end() -> None:
    """Of a terminal that does not say how large it is."""
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=slave, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        shown = ""
        while "50%" not in shown:
            shown += os.read(master, 4096).decode()
        assert "\n" not in shown
        os.write(master, b"\n")
        while "came in" not in shown:
            shown += os.read(master, 4096).decode()
        assert process.wait(60) == 0
    os.close(master)
    assert re.search(r"a/model:\s+50%.*32\.0M/64\.0M \[[^\]]*B/s\]", shown)
    assert "the connection broke\r\n" in shown
    *_, last = shown.strip().split("\r")
    assert last.startswith("a/model: 64.0 MiB came in ")


def test_a_transfer_that_fails_does_not_say_that_all_came() -> None:
    told = list[str]()
    with pytest.raises(KeyError), Transfer("a/model", {"file": 1}, told.append, io.StringIO()):
        raise KeyError
    assert told == []
