"""The file of stored responses: what was put is there for its owner, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeinfer.gateway.response_store import (
    STORED_SECONDS,
    ConversationBroken,
    ConversationTooLarge,
    ResponseStore,
    StoredResponse,
)
from pipeinfer.settings import ConfigurationError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def store(path: Path) -> Iterator[ResponseStore]:
    made = ResponseStore(str(path))
    yield made
    made.close()


def response(number: int, owner: str = "a", previous: str = "") -> StoredResponse:
    return StoredResponse(f"r{number}", owner, previous, b'{"n": %d}' % number, b"[]")


async def test_what_was_put_is_there_for_its_owner_alone(store: ResponseStore) -> None:
    await store.put(response(1))
    assert await store.get("r1", "a") == response(1)
    assert await store.get("r1", "b") is None and await store.get("r2", "a") is None
    assert not await store.delete("r1", "b") and await store.get("r1", "a") is not None
    assert await store.delete("r1", "a") and not await store.delete("r1", "a")


async def test_a_conversation_is_its_chain_of_one_owner(store: ResponseStore) -> None:
    chain = [response(n, previous=f"r{n - 1}" if n else "") for n in range(5)]
    for one in chain:
        await store.put(one)
    await store.put(response(9, owner="b", previous="r4"))
    assert await store.conversation("r3", "a", 10, 1000) == chain[:4]
    for last, owner, missing in (("r9", "b", "r4"), ("r4", "b", "r4"), ("r7", "a", "r7")):
        with pytest.raises(ConversationBroken) as broken:
            await store.conversation(last, owner, 10, 1000)
        assert broken.value.id == missing
    for bounds in ((4, 1000), (10, 40)):
        with pytest.raises(ConversationTooLarge):
            await store.conversation("r4", "a", *bounds)
    await store.delete("r2", "a")
    with pytest.raises(ConversationBroken):
        await store.conversation("r4", "a", 10, 1000)
    await store.put(response(6, previous="r6"))
    with pytest.raises(ConversationTooLarge):
        await store.conversation("r6", "a", 10, 1000)


async def test_many_that_end_together_are_all_on_the_disk(path: Path, store: ResponseStore) -> None:
    await asyncio.gather(*(store.put(response(n)) for n in range(500)))
    other = sqlite3.connect(path)
    assert other.execute("SELECT count(*) FROM responses").fetchone() == (500,)
    assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


async def test_what_waits_is_done_before_it_closes(path: Path) -> None:
    store = ResponseStore(str(path))
    waiting = [asyncio.ensure_future(store.put(response(n))) for n in range(50)]
    await asyncio.sleep(0)
    await asyncio.to_thread(store.close)
    await asyncio.gather(*waiting)
    again = ResponseStore(str(path))
    assert [await again.get(f"r{n}", "a") for n in range(50)] == [response(n) for n in range(50)]
    again.close()


async def test_a_failed_write_is_the_error_of_each_who_waits(
    path: Path, store: ResponseStore
) -> None:
    other = sqlite3.connect(path)
    other.execute("DROP TABLE responses")
    other.commit()
    outcomes = await asyncio.gather(*(store.put(response(n)) for n in range(3)),
                                    return_exceptions=True)  # fmt: skip
    assert all(isinstance(one, sqlite3.Error) for one in outcomes)
    with pytest.raises(sqlite3.Error):
        await store.get("r1", "a")
    other.close()


async def test_a_response_is_stored_for_thirty_days(path: Path) -> None:
    now = [1000.0]
    store = ResponseStore(str(path), lambda: now[0])
    await store.put(response(1))
    now[0] += STORED_SECONDS - 1
    await store.put(response(2))
    assert await store.get("r1", "a") is not None
    now[0] += 2
    await store.put(response(3))
    assert await store.get("r1", "a") is None and await store.get("r2", "a") is not None
    store.close()


def test_only_the_servers_user_may_read_it(path: Path) -> None:
    ResponseStore(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_store_is_refused_by_name(tmp_path: Path) -> None:
    text, later = tmp_path / "text", tmp_path / "later"
    text.write_text("no database at all " * 100)
    connection = sqlite3.connect(later)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    for path, reason in (
        (text, "not a database"),
        (tmp_path / "none" / "x", "No such file"),
        (tmp_path, "directory"),
        (later, "version 2"),
    ):
        with pytest.raises(ConfigurationError, match=f"--store {path}: .*{reason}"):
            ResponseStore(str(path))
    assert text.read_text().startswith("no database"), "it is left as it was"
