"""What the supervisor makes of the end of a stage: whether it had been ready must not get lost."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import zmq

from pipeinfer import topology as topologies
from pipeinfer.runtime.child import (
    FAILED,
    MAX_DEATHS,
    MAX_REASON_CHARS,
    MISCONFIGURED,
    ORDERLY,
    REPORT_FD_VARIABLE,
    Child,
    Command,
    StatusReader,
    StatusWriter,
    inherited_status_writer,
)
from pipeinfer.runtime.supervisor import Supervisor
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity
from waiting import until

# A stage as far as a supervisor sees it. It has no sockets: all its heartbeats are lost.
STAGE = """
import os, signal, sys, time
from pathlib import Path
from pipeinfer.runtime.child import inherited_status_writer

note, says, end, lives = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
with note.open("a") as file:
    file.write("begun\\n")
told = inherited_status_writer(os.environ, time.time_ns())
for state in filter(None, says.split(",")):
    told.write(state, "")
if note.read_text().count("begun") <= lives:
    os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else os._exit(int(end))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True:
    time.sleep(60)
"""


class Server:
    """A supervisor of one stage that is played by STAGE."""

    def __init__(self, folder: Path, context: zmq.Context, says: str, end: str, lives: int) -> None:
        self.note, script = folder / "note", folder / "stage.py"
        script.write_text(STAGE)
        topology = topologies.local(Settings(), f"ipc://{folder}/")
        self.supervisor = Supervisor(
            Settings(), topology, str(folder / "none.toml"), [Identity("tokenizer")], context
        )
        self.child = self.supervisor._children["tokenizer-0"]
        words = (sys.executable, str(script), str(self.note), says, end, str(lives))
        self.child.command = Command(words)
        self.reasons: list[str] = []
        self.supervisor.on_give_up = self.reasons.append

    def begun(self) -> int:
        return self.note.read_text().count("begun") if self.note.exists() else 0


@pytest.fixture
def server(short_path):
    with zmq.Context() as context:
        yield lambda says, end, lives: Server(short_path, context, says, end, lives)


@pytest.mark.parametrize("end", ["killed", "0", "2"])
async def test_a_stage_that_ends_just_after_it_was_ready_is_started_again(server, end):
    """As often as that happens: being ready in between, none of its ends is its sixth. Also where
    it is refused what the one before had."""
    one = server("starting,loading,ready", end, MAX_DEATHS + 1)
    task = asyncio.create_task(one.supervisor.run())
    await until(lambda: one.begun() == MAX_DEATHS + 2 or task.done(), 60)
    assert not task.done() and not one.reasons
    await until(lambda: one.child.config_valid and one.child.deaths == 0)
    one.supervisor.stop()
    assert await asyncio.wait_for(task, 60) == ORDERLY


@pytest.mark.parametrize(
    ("says", "end", "code", "reason"),
    [
        ("starting", "1", FAILED, "tokenizer-0 ended while it started (code 1)"),
        ("", "0", FAILED, "tokenizer-0 ended while it started (code 0)"),
        ("starting", "2", MISCONFIGURED, "tokenizer-0 cannot start"),
        ("loading", "1", FAILED, f"died {MAX_DEATHS + 1} times and was never ready between"),
    ],
)
async def test_a_stage_that_never_was_ready_ends_the_server(server, says, end, code, reason):
    one = server(says, end, MAX_DEATHS + 3)
    assert await asyncio.wait_for(one.supervisor.run(), 60) == code
    assert len(one.reasons) == 1 and reason in one.reasons[0]
    assert one.begun() == (MAX_DEATHS + 1 if says == "loading" else 1)


def test_what_was_said_is_read_after_the_end_of_who_said_it():
    reports = StatusReader()
    child = os.fork()
    if not child:
        StatusWriter(reports.sink, 7).write("loading", "x" * 3 * MAX_REASON_CHARS)
        StatusWriter(reports.sink, 7).write("ready", "")
        os._exit(0)
    os.waitpid(child, 0)
    reports.close_sink()
    first, last = reports.read()
    assert (first.state, first.pid, first.incarnation) == ("loading", child, 7)
    assert len(first.reason) == MAX_REASON_CHARS and last.state == "ready" and reports.ended
    reports.close()


def test_a_stage_does_not_wait_for_who_reads_nothing_or_has_gone():
    reports = StatusReader()
    told = StatusWriter(reports.sink, 1)
    for _ in range(5_000):
        told.write("waiting", "for the engine " * 20)
    assert all(report.state == "waiting" for report in reports.read())
    reports.close()
    told.write("ready", "")
    reports.close_sink()


@pytest.mark.parametrize("named", ["", "none", "9999:1", "-1:1", "9" * 30 + ":1", "0:x", "1:7"])
def test_a_command_around_a_stage_may_have_closed_the_pipe(named):
    environment = {REPORT_FD_VARIABLE: named} if named else {}
    assert inherited_status_writer(environment, 1) is None and REPORT_FD_VARIABLE not in environment


def test_what_a_command_around_the_stage_writes_is_no_report():
    reports = StatusReader()
    os.write(reports.sink, b"hello\n" + b"[" * 5_000 + b"\n{}\n\xff\n")
    StatusWriter(reports.sink, 1).write("ready", "")
    os.write(reports.sink, b'["ready')
    assert [report.state for report in reports.read()] == ["ready"]
    reports.close_sink()
    reports.close()


# Until it has set its handler, SIGHUP would end it.
SLOW_STAGE = """
import os, signal, sys, time
from pathlib import Path
from pipeinfer.runtime.child import inherited_status_writer

note, name = Path(sys.argv[1]), sys.argv[2]
def say(text):
    with note.open("a") as file:
        file.write(f"{name} {text}\\\\n")
say("begun")
while name == "gateway" and not note.with_name("go").exists():
    time.sleep(0.01)
signal.signal(signal.SIGHUP, lambda *_: say("reads again"))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
inherited_status_writer(os.environ, time.time_ns()).write("ready", "")
while True:
    time.sleep(60)
"""


async def test_sighup_is_passed_on_to_the_gateway_alone_and_not_before_it_can_take_it(
    tmp_path, short_path
):
    note, script = tmp_path / "note", tmp_path / "stage.py"
    script.write_text(SLOW_STAGE)
    topology = topologies.local(Settings(), f"ipc://{short_path}/")
    settings, names = Settings(port=0), ("tokenizer", "gateway")
    with zmq.Context() as context:
        supervisor = Supervisor(
            settings, topology, str(tmp_path / "none.toml"), [Identity(n) for n in names], context
        )
        for child in supervisor._children.values():
            words = (sys.executable, str(script), str(note), child.identity.name)
            child.command = Command(words)
        task = asyncio.create_task(supervisor.run())
        await until(lambda: note.exists() and note.read_text().count("begun") == 2, 60)
        supervisor.reload()
        (tmp_path / "go").touch()
        await until(lambda: "gateway reads again" in note.read_text(), 60)
        supervisor.reload()
        await until(lambda: note.read_text().count("gateway reads again") == 2, 60)
        assert not task.done() and "tokenizer reads" not in note.read_text()
        assert note.read_text().count("begun") == 2
        supervisor.stop()
        assert await asyncio.wait_for(task, 60) == ORDERLY


THREADS = """
import os, sys
from pathlib import Path
import numpy
Path(sys.argv[1]).write_text(str(len(os.listdir("/proc/self/task"))))
"""


@pytest.mark.parametrize("name", ["scheduler", "engine"])
async def test_numpy_has_threads_where_there_is_a_model_and_nowhere_else(tmp_path, name):
    script, note = tmp_path / "stage.py", tmp_path / "note"
    script.write_text(THREADS)
    child = Child(Identity(name), Command((sys.executable, str(script), str(note))))
    kept = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    process = await child.start((), kept, ())
    assert await asyncio.wait_for(process.wait(), 60) == 0
    child.close_reports()
    alone = name == "scheduler" or len(os.sched_getaffinity(0)) == 1
    assert (int(note.read_text()) == 1) == alone
