"""A pool that outlives its engine: real processes that are killed, a real holder."""

from __future__ import annotations

import asyncio
import secrets
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import make_checkpoint
from memory_holders import running_holder
from pipeinfer.attention.interface import KVPool
from pipeinfer.engine.device_memory import HostMemory, cuda_unsupported_reason
from pipeinfer.engine.kept_memory import KeptMemory, model_key, unverified
from pipeinfer.runtime.memory_holder import HOLDER_VARIABLE, HolderLink, MemoryHolder, listen
from pipeinfer.step import AttentionShape

PAGES, SIZE, PAGE_BYTES = 9, 4, 3000  # a page ends within a page of the kernel's
ENGINE = """
import sys
import numpy as np
from pipeinfer.engine.device_memory import HostMemory
from pipeinfer.engine.kept_memory import KeptMemory
from pipeinfer.memory.page_directory import NO_PARENT, NO_SALT, PageChains, page_digest
kept = KeptMemory(sys.argv[1])
kept.begin(b"model")
pool = kept.open(9, 4, 9 * 3000, HostMemory)
pool.memory.array[:] = 7
ids = np.array([1, 2, 3, 4], np.int32)
digest = page_digest(NO_PARENT, NO_SALT, ids)
pool.directory.validate(PageChains.of([(5, 0, digest, NO_PARENT, NO_SALT, ids)]))
print("written", flush=True)
sys.stdin.read()
if sys.argv[2:]:
    kept.close()
"""


LENDER = """
import sys
from pipeinfer.engine.kept_memory import KeptMemory
from pipeinfer.engine.device_memory import HostMemory
kept = KeptMemory(sys.argv[1])
kept.begin(b"model")
kept.open(9, 4, 9 * 3000, HostMemory).memory.array[:] = 7
kept.write("step cost", "measured", b"note", b"12 ms")
if sys.argv[2:]:
    kept.write("weights", "weights", sys.argv[2].encode(), sys.argv[2].encode())
kept._drop("nothing")  # which is answered when the holder has all that came before
print("written", flush=True)
sys.stdin.read()
"""


FP8_ENGINE = """
import sys
from pathlib import Path
from pipeinfer.engine.kept_memory import KeptMemory
from pipeinfer.engine.loading import load_engine
from pipeinfer.settings import Settings
def wait():
    print("waits", flush=True)
    sys.stdin.readline()

kept = KeptMemory(sys.argv[1], wait if sys.argv[3:] else None)
settings = Settings(kv_pages=16, max_running=2, kv_cache_dtype="fp8_e4m3", threads=1)
engine = load_engine(settings, Path(sys.argv[2]), kept=lambda: kept)
centers = [one for one in engine.runner.pool.key_centers if one is not None]
print(sorted(kept.taken), len(centers), float(sum(one.abs().sum() for one in centers)), flush=True)
sys.stdin.read()
kept.close()
"""


LOOK = """
import sys
from pipeinfer.runtime.memory_holder import HolderLink
try:
    HolderLink(sys.argv[1], timeout=1.0).attach()
except TimeoutError:
    print("nothing while its owner lives")
"""


@pytest.fixture
def address():
    """Of a holder on a thread."""
    with running_holder() as where:
        yield where


def leave_pool(address):
    """An engine that is killed when its pool is full and one page is valid."""
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert engine.stdout.readline() == "written\n"
    engine.send_signal(signal.SIGKILL)
    engine.communicate()


def test_a_successor_finds_the_pool_and_believes_its_valid_pages(address):
    leave_pool(address)
    kept = KeptMemory(address)
    kept.begin(b"model")
    assert kept.losses == 1 and kept.found_pages(SIZE) == PAGES
    pool = kept.open(PAGES, SIZE, PAGES * PAGE_BYTES, HostMemory)
    assert pool.found.pages.tolist() == [5]
    assert pool.found.ids.tolist() == [[1, 2, 3, 4]]
    pool.memory.zero(PAGE_BYTES, 5 * PAGE_BYTES)
    pool.memory.zero(6 * PAGE_BYTES, 9 * PAGE_BYTES)
    by_page = pool.memory.array.reshape(PAGES, PAGE_BYTES)
    assert [(page == 7).all() for page in by_page] == [n in (0, 5) for n in range(PAGES)]
    assert not by_page[[1, 2, 3, 4, 6, 7, 8]].any()
    kept.close()


@pytest.mark.parametrize(("key", "pages"), [(b"another", PAGES), (b"model", PAGES + 1)])
def test_a_pool_that_was_made_for_something_else_is_not_taken(address, key, pages):
    leave_pool(address)
    kept = KeptMemory(address)
    kept.begin(key)
    assert kept.found_pages(SIZE) == (PAGES if key == b"model" else 0)
    pool = kept.open(pages, SIZE, pages * PAGE_BYTES, HostMemory)
    assert not len(pool.found) and not pool.memory.array.any()
    kept.close()


def test_pages_in_fp8_are_left_with_what_their_keys_are_stored_less(address, tmp_path):
    """To the next engine, and to a standby that was lent none: it had begun before there were
    any."""
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    start = [sys.executable, "-c", FP8_ENGINE, address, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    kept = subprocess.Popen([*start, "standby"], **pipes)
    assert kept.stdout.readline() == "waits\n"
    engine = subprocess.Popen(start, **pipes)
    first = engine.stdout.readline()
    assert first.startswith("[] ") and not first.startswith("[] 0 ")
    end(engine)
    found = first.replace("[]", "['directory', 'key centers', 'pool']")
    with_weights = found.replace("'pool'", "'pool', 'weights'")  # the standby has its own
    engine = subprocess.Popen(start, **pipes)
    assert engine.stdout.readline() == with_weights
    engine.communicate()  # in good order: a second loss would drop the pool
    kept.stdin.write("\n")
    kept.stdin.flush()
    assert kept.stdout.readline() == found
    end(kept)


def test_a_holder_that_ends_before_it_answers_is_followed_by_the_next_one():
    """A standby asks it again, at its start and when it is promoted, and so does any engine."""
    address = f"@pipeinfer-test-{secrets.token_hex(8)}"
    listener = listen(address)

    def end_one_holder():
        # Without blocking in accept(): holders make that fail, of all copies of the socket.
        assert select.select([listener], [], [], 60)[0]
        link, _ = listener.accept()
        link.recv(100)
        link.close()

    @contextmanager
    def holder_after_one_that_ends():
        with ThreadPoolExecutor() as pool:
            ends = pool.submit(end_one_holder)
            made = MemoryHolder(listener.dup())
            serves = pool.submit(lambda: (ends.result(), made.run()))
            try:
                yield
            finally:
                made.stop()
            serves.result()

    with holder_after_one_that_ends():
        kept = KeptMemory(address, lambda: None)
        kept.begin(b"model")
    with holder_after_one_that_ends():
        kept.promote()
        assert kept.connected
        kept.close()
    listener.close()


def lender(address, *words):
    """An engine that serves, and keeps memory."""
    engine = subprocess.Popen(
        [sys.executable, "-c", LENDER, address, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert engine.stdout.readline() == "written\n"
    return engine


def standby(address, wait):
    kept = KeptMemory(address, wait)
    kept.begin(b"model")
    return kept


def end(engine):
    engine.send_signal(signal.SIGKILL)
    engine.communicate()


def test_a_standby_has_what_was_measured_at_once_and_pages_when_it_is_promoted(address):
    engine = lender(address, "these")
    kept = standby(address, lambda: end(engine))
    assert kept.is_standby and kept.found_pages(SIZE) == PAGES
    assert kept.read("step cost", b"note") == b"12 ms"
    with pytest.raises(AssertionError, match="pool is not lent"):
        kept.take("pool")
    assert kept.read("weights", b"these") == b"these"
    scratch = HostMemory(PAGES * PAGE_BYTES, scratch=True)
    scratch.array[:] = 1
    assert engine.poll() is None
    kept.promote()
    assert not kept.is_standby and kept.losses == 1 and engine.poll() is not None

    def allocate(_size, descriptor):
        scratch.map(descriptor)
        return scratch

    opened = kept.open(PAGES, SIZE, PAGES * PAGE_BYTES, allocate)
    assert (opened.memory.array == 7).all()
    kept.promote()  # nothing more comes of it
    link = HolderLink(address, 30)
    lent = [entry.name for entry in link.borrow()[0].shared]
    assert lent == ["step cost", "weights"], "they go on being kept"
    link.close()
    kept.close()


def test_a_standby_finds_nothing_of_another_model(address):
    engine = lender(address, "these")
    kept = KeptMemory(address, lambda: end(engine))
    kept.begin(b"another")
    assert not kept.left and kept.found_pages(SIZE) == 0
    link = HolderLink(address, 30)
    assert len(link.borrow()[0].shared) == 2, "only its copies are closed"
    link.close()
    kept.promote()
    assert not kept.left
    kept.close()


def test_a_standby_does_not_serve_with_weights_that_are_kept_no_more(address):
    """Three deaths, for which weights may be to blame."""
    engine = lender(address, "these")
    kept = standby(address, lambda: end(engine))
    assert kept.read("weights", b"these") == b"these"
    for _ in range(2):
        end(engine)
        engine = lender(address)
    with pytest.raises(RuntimeError, match="weights: dropped after 3 losses"):
        kept.promote()


def test_a_standby_does_not_serve_with_weights_that_were_replaced(address):
    engine = lender(address, "these")
    kept = standby(address, lambda: end(engine))
    assert kept.read("weights", b"these") == b"these"
    end(engine)
    engine = lender(address, "those")
    with pytest.raises(RuntimeError, match="weights: replaced since"):
        kept.promote()


async def test_what_a_standby_was_lent_goes_to_a_holder_that_knows_of_nothing():
    address = f"@pipeinfer-test-{secrets.token_hex(8)}"
    listener = listen(address)
    start = [sys.executable, "-m", "pipeinfer.runtime.memory_holder", f"--fd={listener.fileno()}"]
    holder = subprocess.Popen(start, pass_fds=[listener.fileno()])
    engine = await asyncio.to_thread(lender, address, "these")
    kept = await asyncio.to_thread(standby, address, lambda: end(engine))
    assert kept.read("weights", b"these") == b"these"
    holder.kill()
    holder.wait()
    end(engine)
    holder = subprocess.Popen(start, pass_fds=[listener.fileno()])
    await asyncio.to_thread(kept.promote)
    link = HolderLink(address, 30)
    assert [entry.name for entry in link.borrow()[0].shared] == ["weights"]
    link.close()
    kept.close()
    holder.kill()
    holder.wait()
    listener.close()


def test_an_engine_that_saw_a_fault_leaves_nothing_to_believe(address):
    first = KeptMemory(address)
    first.begin(b"model")
    pool = first.open(PAGES, SIZE, PAGES * PAGE_BYTES, HostMemory)
    pool.directory.make_unusable()
    assert not pool.directory.belongs_to(b"model")
    first.close()


def test_without_a_holder_an_engine_goes_on_alone(caplog):
    environ = {HOLDER_VARIABLE: "@pipeinfer-nobody-listens"}
    assert KeptMemory.from_environment(environ) is None and environ == {}
    assert "memory will not outlive this engine" in caplog.text
    assert KeptMemory.from_environment({}) is None


def test_where_a_gpus_memory_cannot_outlive_a_process_it_is_said_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)  # as without the package
    assert "cuda" in cuda_unsupported_reason()


async def test_a_holder_that_starts_late_still_gets_what_the_engine_keeps(monkeypatch):
    """Meanwhile the loop goes on: an engine that waited would let its streams wait."""
    monkeypatch.setattr("pipeinfer.engine.kept_memory.RECONNECT", 0.01)
    where = f"@pipeinfer-test-{secrets.token_hex(8)}"
    listener = listen(where)
    first = MemoryHolder(listener.dup())
    thread = threading.Thread(target=first.run)
    thread.start()
    kept = KeptMemory(where)
    kept.begin(b"model")
    kept.open(PAGES, SIZE, PAGES * PAGE_BYTES, HostMemory)
    kept.watch(asyncio.get_running_loop())
    first.stop()
    thread.join()
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert not kept.connected
    late = MemoryHolder(listener)
    thread = threading.Thread(target=late.run)
    thread.start()
    try:
        async with asyncio.timeout(20):
            while not kept.connected:
                await asyncio.sleep(0.01)
    finally:
        kept.close()
        late.stop()
        thread.join()


@pytest.mark.parametrize("listens", [False, True])
async def test_an_engine_sleeps_wakes_and_ends_while_no_holder_answers(monkeypatch, listens):
    """Whether or not the next one listens already."""
    monkeypatch.setattr("pipeinfer.engine.kept_memory.RECONNECT", 0.01)
    where = f"@pipeinfer-test-{secrets.token_hex(8)}"
    listener = listen(where)
    accepting = listener.dup()
    holder = MemoryHolder(accepting)
    thread = threading.Thread(target=holder.run)
    thread.start()
    kept = KeptMemory(where)
    kept.begin(b"model")
    kept.note_sleep(1, False)
    kept.watch(asyncio.get_running_loop())
    if not listens:
        listener.close()
    holder.stop()
    thread.join()
    accepting.close()
    async with asyncio.timeout(20):
        while kept.connected or (kept._link.fileno() < 0) is listens:
            await asyncio.sleep(0.01)
    slow = threading.Timer(20, listener.close)  # whoever waits for an answer gets an error then
    slow.start()
    kept.forget_sleep()
    kept.note_sleep(2, True)
    kept.withdraw("pool")
    kept.close()
    assert slow.is_alive()
    slow.cancel()
    listener.close()


async def test_the_next_holder_gets_what_the_one_before_kept():
    address = f"@pipeinfer-test-{secrets.token_hex(8)}"
    listener = listen(address)
    start = [
        sys.executable,
        "-m",
        "pipeinfer.runtime.memory_holder",
        "--fd",
        str(listener.fileno()),
    ]
    holder = subprocess.Popen(start, pass_fds=[listener.fileno()])
    kept = await asyncio.to_thread(KeptMemory, address)
    kept.begin(b"model")
    kept.open(PAGES, SIZE, PAGES * PAGE_BYTES, HostMemory).memory.array[:] = 7
    kept.watch(asyncio.get_running_loop())
    holder.kill()
    holder.wait()
    while kept.connected:
        await asyncio.sleep(0.01)
    holder = subprocess.Popen(start, pass_fds=[listener.fileno()])
    while not kept.connected:
        await asyncio.sleep(0.01)
    found = subprocess.run(
        [sys.executable, "-c", LOOK, address], stdout=subprocess.PIPE, text=True, check=True
    )
    assert found.stdout == "nothing while its owner lives\n"
    assert kept.connected
    kept.close()
    holder.kill()
    holder.wait()
    listener.close()


@given(st.integers(2, 30), st.sets(st.integers(1, 29)))
def test_pages_that_are_not_believed_are_zeroed_in_long_runs(pages, verified):
    verified = sorted(page for page in verified if page < pages)
    others = unverified(pages, np.array(verified, np.int32))
    assert others.tolist() == [page for page in range(1, pages) if page not in verified]
    pool = KVPool([AttentionShape(4, 1, 2, 1.0)], pages, 1, torch.float32)
    runs = list(pool.byte_runs(others))
    inside = [at for begin, end in runs for at in range(begin, end, 8)]
    wanted = [part * 8 * pages + 8 * page for part in range(2) for page in others.tolist()]
    assert inside == wanted and all(end % 8 == 0 for _, end in runs)
    edges = [begin for begin, _ in runs], [end for _, end in runs]
    assert not (set(edges[0]) & set(edges[1]) - {8 * pages})


def test_a_pool_in_given_memory_has_its_layers_one_after_the_other():
    shapes = [AttentionShape(4, 2, 8, 1.0), AttentionShape(4, 1, 16, 1.0)]
    plain = KVPool(shapes, 5, 2, torch.float32)
    memory = HostMemory(plain.total_bytes)
    pool = KVPool(shapes, 5, 2, torch.float32, memory=memory.data)
    for part in (*pool.k, *pool.v):
        part.fill_(1.0)
    assert (memory.array.view(np.float32) == 1.0).all()
    memory.zero_pages(pool, np.array([1, 2, 4], np.int32))
    for part in (*pool.k, *pool.v):
        assert [bool(page.any()) for page in part] == [True, False, False, True, False]


def test_the_key_follows_from_files_and_choices(tmp_path):
    small, large = tmp_path / "config.json", tmp_path / "model.safetensors"
    small.write_text("{}")
    large.write_bytes(bytes(3 << 20))
    key = model_key([[small, large]], ["bfloat16"])
    assert key == model_key([[large, small]], ["bfloat16"]) and len(key) == 32
    assert key != model_key([[small, large]], ["float32"])
    large.write_bytes(bytes(3 << 20)[:-1] + b"\1")
    assert key != model_key([[small, large]], ["bfloat16"])
    small.write_text("{ }")
    assert key != model_key([[small]], ["bfloat16"])
