"""Finished responses in a file, which outlives all processes: `--store`.

One thread owns the SQLite connection. It takes all work that waits into one transaction, so that
many responses that end together cost one write to the disk; whoever waits for a response to be
stored knows that it survives the death of every process, and of the machine.

Knows no HTTP, and nothing of what a response says.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from pipeinfer.settings import ConfigurationError

VERSION = 1  # of the table, in the file's user_version
STORED_SECONDS = 30 * 86_400  # seconds for which a response is stored
BUSY_SECONDS = 10.0  # seconds for which another process may hold the file
MAX_TOGETHER = 256  # pieces of work in one transaction
TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT NOT NULL, created REAL NOT NULL,
    response BLOB NOT NULL, input BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_time ON responses (created);
"""
COLUMNS = "id, owner, previous, response, input"

Result = TypeVar("Result")


class StoredResponse(NamedTuple):
    """One response.

    owner: name of the key that asked for it. previous: id of the response before it, "" for none.
    response, input: JSON of the response, and of the items that came with its own request.
    """

    id: str
    owner: str
    previous: str
    response: bytes
    input: bytes


class ConversationBroken(LookupError):
    """A response of a conversation is not stored, or belongs to another key. id: its id."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class ConversationTooLarge(ValueError):
    """A conversation has more bytes or more responses than may be read at once."""


class _Job(NamedTuple):
    """Work for the thread, and what is called with its result, or with an exception."""

    work: Callable[[sqlite3.Connection], object]
    done: Callable[[object, Exception | None], None]


class ResponseStore:
    """The responses in the file `path`, which is made if it is missing, for its owner alone.

    clock(): Unix seconds. Raises ConfigurationError if the file cannot be used.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(f"--store {path}: {reason}") from None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="response-store", daemon=True)
        self._thread.start()

    async def put(self, stored: StoredResponse) -> None:
        """Returns when the response is on the disk. Raises sqlite3.Error."""
        await self._do(partial(_put, stored=stored, now=self._clock()))

    async def get(self, id: str, owner: str) -> StoredResponse | None:
        """The owner's response; None if there is none. Raises sqlite3.Error."""
        return await self._do(partial(_get, id=id, owner=owner))

    async def conversation(
        self, id: str, owner: str, max_responses: int, max_bytes: int
    ) -> list[StoredResponse]:
        """The response and all before it, oldest first.

        Raises ConversationBroken, ConversationTooLarge, sqlite3.Error.
        """
        bounds = max_responses, max_bytes
        return await self._do(partial(_conversation, id=id, owner=owner, bounds=bounds))

    async def delete(self, id: str, owner: str) -> bool:
        """Whether there was such a response. Raises sqlite3.Error."""
        return await self._do(partial(_delete, id=id, owner=owner))

    def close(self) -> None:
        """Does what waits, then closes the file."""
        self._jobs.put(None)
        self._thread.join()

    async def _do(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: object, error: Exception | None) -> None:
            if future.done():  # whoever waited was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def done(result: object, error: Exception | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._jobs.put(_Job(work, done))
        return await future

    def _run(self) -> None:
        while (first := self._jobs.get()) is not None:
            jobs, last = [first], False
            while len(jobs) < MAX_TOGETHER and not self._jobs.empty() and not last:
                job = self._jobs.get()
                last = job is None
                jobs += [job] if job is not None else []
            self._do_together(jobs)
            if last:
                break
        self._connection.close()

    def _do_together(self, jobs: list[_Job]) -> None:
        """All jobs in one transaction; without a commit none has a result."""
        outcomes: list[tuple[object, Exception | None]] = []
        try:
            with self._connection:
                outcomes += [_outcome(job, self._connection) for job in jobs]
        except sqlite3.Error as error:
            outcomes = [(None, error)] * len(jobs)
        for job, (result, error) in zip(jobs, outcomes, strict=True):
            job.done(result, error)


def _connect(path: str) -> sqlite3.Connection:
    """Raises sqlite3.Error for a file that is no database, or one of a later version."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # a commit survives a loss of power
    connection.execute("PRAGMA secure_delete = ON")  # a deleted text does not stay in the file
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise sqlite3.DatabaseError(f"it is of version {version}, this server knows {VERSION}")
    connection.executescript(TABLE)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.commit()
    return connection


def _outcome(job: _Job, connection: sqlite3.Connection) -> tuple[object, Exception | None]:
    try:
        return job.work(connection), None
    except (LookupError, ValueError) as error:
        return None, error


def _put(connection: sqlite3.Connection, stored: StoredResponse, now: float) -> None:
    connection.execute("DELETE FROM responses WHERE created < ?", (now - STORED_SECONDS,))
    connection.execute(
        f"INSERT OR REPLACE INTO responses ({COLUMNS}, created) VALUES (?, ?, ?, ?, ?, ?)",
        (*stored, now),
    )


def _get(connection: sqlite3.Connection, id: str, owner: str) -> StoredResponse | None:
    query = f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ?"
    row = connection.execute(query, (id, owner)).fetchone()
    return None if row is None else StoredResponse(*row)


def _conversation(
    connection: sqlite3.Connection, id: str, owner: str, bounds: tuple[int, int]
) -> list[StoredResponse]:
    found: list[StoredResponse] = []
    size, (max_responses, max_bytes) = 0, bounds
    while id:
        stored = _get(connection, id, owner)
        if stored is None:
            raise ConversationBroken(id)
        size += len(stored.response) + len(stored.input)
        if len(found) == max_responses or size > max_bytes:
            raise ConversationTooLarge
        found.append(stored)
        id = stored.previous
    return found[::-1]


def _delete(connection: sqlite3.Connection, id: str, owner: str) -> bool:
    query = "DELETE FROM responses WHERE id = ? AND owner = ?"
    return connection.execute(query, (id, owner)).rowcount > 0
