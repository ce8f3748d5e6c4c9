"""A memory holder and engines that die: real processes, real descriptors."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_holders import running_holder
from pipeinfer.runtime.memory_holder import (
    LOSS_WINDOW,
    Attached,
    HolderLink,
    HolderState,
    Keep,
    MemoryHolder,
    listen,
    socket_address,
)

CLIENT = """
import mmap, os, sys
from pipeinfer.runtime.memory_holder import HolderLink, Keep
link = HolderLink(sys.argv[1], timeout=30)
kept, descriptors = link.attach()
found = dict(zip((entry.name for entry in kept.entries), descriptors))
if sys.argv[2:]:
    memory = os.memfd_create("pool")
    os.ftruncate(memory, 4096)
    view = mmap.mmap(memory, 4096)
    view[:5] = sys.argv[2].encode()
    link.keep(Keep("pool", "pages", b"note"), memory)
    link.keep(Keep("model", "weights"), memory)
    if sys.argv[3:]:
        link.leaving()
words = [mmap.mmap(fd, 4096)[:5].decode() for fd in found.values()]
print(kept.losses, ",".join(f"{name}={word}" for name, word in zip(found, words)), flush=True)
sys.stdin.read()
"""


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def holder():
    """A holder on a thread, its address and its clock."""
    clock = Clock()
    with running_holder(clock) as address:
        yield address, clock


def engine(address, *words):
    """A process that attaches; its first line is what it was handed."""
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, address, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(process):
    return process.stdout.readline().strip()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_memory_outlives_its_engine(holder):
    address, _ = holder
    one = engine(address, "first")
    assert first_line(one) == "0"
    kill(one)
    other = engine(address)
    assert first_line(other) == "1 pool=first,model=first"
    kill(other)


def test_nobody_gets_memory_while_its_owner_lives(holder):
    address, _ = holder
    one = engine(address, "first")
    assert first_line(one) == "0"
    os.kill(one.pid, signal.SIGSTOP)  # silent, and not dead
    link = HolderLink(address, timeout=0.5)
    with pytest.raises(TimeoutError):
        link.attach()
    link.close()
    kill(one)
    other = engine(address)
    assert first_line(other).endswith("pool=first,model=first")
    kill(other)


def test_a_standby_is_lent_weights_and_no_pages_while_their_owner_lives(holder):
    address, _ = holder
    owner = engine(address, "first")
    assert first_line(owner) == "0"
    link = HolderLink(address, timeout=30)
    for _ in range(2):
        found, [descriptor] = link.borrow()
        assert [entry.name for entry in found.shared] == ["model"]
        assert found.others == (Keep("pool", "pages", b"note"),)
        assert os.pread(descriptor, 5, 0) == b"first" and not os.get_inheritable(descriptor)
        os.close(descriptor)
    kill(owner)
    kept, descriptors = link.attach()
    assert kept.losses == 1 and len(descriptors) == 2, "what is lent is kept"
    for descriptor in descriptors:
        os.close(descriptor)
    assert len(link.borrow()[1]) == 1, "its own weights too"
    link.close()


def test_an_owner_that_closes_its_socket_owns_it_until_it_ends(holder):
    address, _ = holder
    mine = HolderLink(address, timeout=60)
    mine.attach()
    mine.close()
    link = HolderLink(address, timeout=0.5)
    with pytest.raises(TimeoutError):
        link.attach()
    link.close()


def test_a_second_loss_within_a_minute_drops_pages_and_a_third_one_weights(holder):
    address, clock = holder
    for expected in ("0", "1 pool=aaaaa,model=aaaaa", "2 model=aaaaa", "3"):
        one = engine(address, "aaaaa")
        assert first_line(one) == expected
        kill(one)
    one = engine(address, "aaaaa", "leaving")
    assert first_line(one) == "4"
    kill(one)
    clock.now += LOSS_WINDOW
    one = engine(address)
    assert first_line(one) == "0 pool=aaaaa,model=aaaaa"
    kill(one)


def test_an_end_in_good_order_is_no_loss(holder):
    address, _ = holder
    for _ in range(4):
        one = engine(address, "first", "leaving")
        assert first_line(one) in ("0", "0 pool=first,model=first")
        kill(one)


def test_what_is_no_message_does_no_harm(holder):
    address, _ = holder
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.connect(socket_address(address))
    read, write = os.pipe()
    for words in (b"\xff" * 100, b"\x80", msgspec.msgpack.encode(Keep("pool", "pages"))):
        socket.send_fds(raw, [words], [write, write])
    raw.send(msgspec.msgpack.encode(Keep("pool", "pages")))  # without a descriptor
    os.close(write)
    assert os.read(read, 1) == b""  # every copy was closed
    os.close(read)
    one = engine(address, "first")
    assert first_line(one) == "0"
    kill(one)
    raw.close()


def test_a_holder_ends_with_its_parent_and_so_does_what_it_kept(tmp_path):
    address = f"@pipeinfer-test-{secrets.token_hex(8)}"
    parent = (
        "import subprocess, sys, time\n"
        "from pipeinfer.runtime.memory_holder import listen\n"
        "s = listen(sys.argv[1]); s.set_inheritable(True)\n"
        "c = subprocess.Popen([sys.executable, '-m', 'pipeinfer.runtime.memory_holder', '--fd',"
        " str(s.fileno())], pass_fds=[s.fileno()])\n"
        "print(c.pid, flush=True); time.sleep(600)\n"
    )
    made = subprocess.Popen(
        [sys.executable, "-c", parent, address], stdout=subprocess.PIPE, text=True
    )
    holder_pid = int(first_line(made))
    read, write = os.pipe()
    link = HolderLink(address, timeout=30)
    link.attach()
    link.keep(Keep("pool", "pages"), write)
    os.close(write)
    kill(made)
    assert os.read(read, 1) == b""  # the holder's copy was the last one
    os.close(read)
    link.close()
    with suppress(ProcessLookupError):  # it has ended
        pidfd = os.pidfd_open(holder_pid)
        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)


@pytest.fixture
def orphan(tmp_path):
    """The thread of a holder whose server has ended, and its address; it waits for ten minutes."""
    address = str(tmp_path / "orphan")
    read, write = os.pipe()
    made = MemoryHolder(listen(address), patience=600.0, server=read)
    thread = threading.Thread(target=made.run)
    thread.start()
    os.close(write)
    yield thread, address
    made.stop()
    thread.join()
    os.close(read)


def left_by_a_server(address, *words):
    """An engine that has left memory, and has ended."""
    one = engine(address, "first", *words)
    assert first_line(one).startswith("0")
    kill(one)


def wait_until_it_listens(address, holder):
    while True:
        try:
            return HolderLink(address).close()
        except OSError:
            assert holder.poll() is None
            time.sleep(0.01)


def test_a_holder_outlives_its_server_for_a_while(tmp_path):
    address = str(tmp_path / "holder")
    read, write = os.pipe()
    started = subprocess.Popen(
        [sys.executable, "-m", "pipeinfer.runtime.memory_holder", address,
         "--server", str(read), "--patience", "2"],
        pass_fds=[read],
    )  # fmt: skip
    os.close(read)
    wait_until_it_listens(address, started)
    left_by_a_server(address, "leaving")
    engine_of_server = engine(address)
    assert first_line(engine_of_server) == "0 pool=first,model=first"
    os.close(write)  # the server has ended, and its engine goes on
    assert started.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(2.5)
    began = time.monotonic()
    kill(engine_of_server)
    assert started.wait(60) == 0
    assert time.monotonic() - began >= 2
    assert not Path(address).exists()


def test_the_next_servers_holder_takes_over_what_is_kept_and_the_losses(orphan, tmp_path):
    thread, address = orphan
    left_by_a_server(address)
    second = str(tmp_path / "second")
    after = MemoryHolder(listen(second))
    after.take_over(address)
    thread.join(60)
    assert not thread.is_alive()
    again = threading.Thread(target=after.run)
    again.start()
    try:
        for expected in ("1 pool=first,model=first", "2 model=first"):
            one = engine(second)
            assert first_line(one) == expected
            kill(one)
    finally:
        after.stop()
        again.join()


def test_that_a_server_slept_is_not_kept_for_the_next_server():
    state = HolderState()
    kept = Attached((Keep("pool", "pages"), Keep("sleep", "sleep")), 0)
    assert state.take_over(kept, [8, 9], 0.0) == [9]  # to be closed
    assert list(state.entries) == ["pool"]


def test_what_a_holder_kept_is_free_when_it_was_told_to_end(orphan):
    thread, address = orphan
    read, write = os.pipe()
    mine = HolderLink(address, timeout=60)
    mine.attach()
    mine.keep(Keep("pool", "pages"), write)
    os.close(write)
    HolderLink(address, timeout=60).end()
    os.set_blocking(read, False)
    assert os.read(read, 1) == b""  # its copy was the last one, and is closed already
    os.close(read)
    mine.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_holder_of_another_user_is_given_nothing(holder, monkeypatch):
    address, _ = holder
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match=f"is of user {mine}"):
        HolderLink(address)


MOVES = ["attach", "keep", "silent", "end", "leave", "wait", "over"]


@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 3)), max_size=40))
def test_one_process_at_a_time_owns_what_is_kept_and_every_descriptor_is_closed_once(moves):
    state, now, opened, closed = HolderState(), 0.0, 0, list[int]()
    ended: set[int] = set()
    for move, process in moves:
        if process in ended:
            continue
        if move == "attach":
            state.attach(process)
        elif move == "keep":
            opened += 1
            closed += state.keep(process, Keep("pool", "pages"), opened)
        elif move == "end":
            state.ended(process, now)
            ended.add(process)
        elif move == "silent":
            state.silent(process)
        elif move == "leave":
            state.leaving(process)
        elif move == "over":
            closed += state.end()
            assert state.over and not state.entries
        else:
            now += 40.0
        owner = state.owner
        found = state.hand_over(now)
        if found is not None:
            assert owner is None and found[0] not in ended
            assert len(found[1].entries) == len(found[2])
            closed += found[3]
        assert state.owner not in ended and state.owner not in state.waiting
        kept = [descriptor for _, descriptor in state.entries.values()]
        assert sorted(closed + kept) == list(range(1, opened + 1))
