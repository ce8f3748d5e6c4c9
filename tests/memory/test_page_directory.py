"""The page directory: what a successor believes, whenever and wherever its writer was killed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.memory.manager import Rows
from pipeinfer.memory.page_directory import (
    NO_PARENT,
    NO_SALT,
    ChainTracker,
    PageChains,
    PageDirectory,
    directory_bytes,
    page_digest,
    salt_digest,
)
from pipeinfer.memory.pages import PageTable, SlotArrays

SIZE, PAGES, SLOTS = 2, 12, 3


class Killed(Exception):
    pass


class Dying:
    """An array of the directory whose writer is killed before its write number `left`."""

    def __init__(self, array, life):
        self.array, self.life = array, life

    def __getitem__(self, at):
        return self.array[at]

    def __setitem__(self, at, value):
        if not self.life:
            raise Killed
        self.life.pop()
        self.array[at] = value

    def __array__(self, dtype=None, copy=None):
        return self.array


def empty():
    return PageDirectory(memoryview(bytearray(directory_bytes(PAGES, SIZE))), PAGES, SIZE)


def rows_of(chains):
    return [
        (page, depth, digest.tobytes(), parent.tobytes(), salt.tobytes(), ids)
        for page, depth, digest, parent, salt, ids in zip(
            chains.pages.tolist(), chains.depths.tolist(), chains.digests, chains.parents,
            chains.salts, chains.ids, strict=True,
        )
    ]  # fmt: skip


def chain(pages, ids, salt=""):
    """Pages that hold `ids`, one after the other."""
    found, parent, of = [], NO_PARENT, salt_digest(salt)
    for depth, page in enumerate(pages):
        part = np.array(ids[depth * SIZE : (depth + 1) * SIZE], np.int32)
        digest = page_digest(parent, of, part)
        found.append((page, depth, digest, parent, of, part))
        parent = digest
    return PageChains.of(found)


def held(chains):
    """Pages, and what their whole chain holds."""
    return {
        int(pages[depth]): (salt, tuple(ids[: (depth + 1) * SIZE].tolist()))
        for salt, ids, pages in chains.sequences()
        for depth in range(len(pages))
    }


@given(
    st.lists(st.tuples(st.lists(st.integers(1, PAGES - 1), min_size=1, max_size=3, unique=True),
                       st.integers(0, 2), st.booleans()), max_size=8),
    st.integers(0, 60),
)  # fmt: skip
def test_a_page_that_is_believed_holds_its_chain_whenever_the_writer_is_killed(moves, life):
    directory = empty()
    directory.begin(b"m")
    content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # what each page truly holds
    left = [None] * life
    for name in ("_valid", "_depths", "_digests", "_parents", "_salts", "_ids"):
        setattr(directory, name, Dying(getattr(directory, name), left))
    try:
        for pages, seed, salted in moves:
            salt, ids = (
                "s" if salted else "",
                [(seed * 7 + at) % 5 for at in range(len(pages) * SIZE)],
            )
            directory.invalidate(np.array(pages, np.int32))
            for depth, page in enumerate(pages):  # the device may write from now on
                content[page] = salt_digest(salt), tuple(ids[: (depth + 1) * SIZE])
            directory.validate(chain(pages, ids, salt))
    except Killed:
        pass
    for name in ("_valid", "_depths", "_digests", "_parents", "_salts", "_ids"):
        setattr(directory, name, getattr(directory, name).array)
    for page, what in held(directory.read().verified()).items():
        assert content[page] == what


def test_a_successor_reads_what_was_written():
    directory = empty()
    directory.begin(b"model")
    directory.validate(chain([3, 5, 4], [1, 2, 3, 4, 5, 6]))
    directory.validate(chain([7], [1, 2], "salt"))
    assert held(directory.read().verified()) == {
        3: (NO_SALT, (1, 2)), 5: (NO_SALT, (1, 2, 3, 4)), 4: (NO_SALT, (1, 2, 3, 4, 5, 6)),
        7: (salt_digest("salt"), (1, 2)),
    }  # fmt: skip
    directory.invalidate(np.array([5], np.int32))
    assert set(held(directory.read().verified())) == {3, 7}
    directory.invalidate_all()
    assert len(directory.read()) == 0


def test_pages_of_another_model_or_of_a_faulty_engine_are_not_believed():
    directory = empty()
    assert not directory.belongs_to(b"model")
    directory.begin(b"model")
    assert directory.belongs_to(b"model") and not directory.belongs_to(b"other")
    directory.make_unusable()
    assert not directory.belongs_to(b"model")


@pytest.mark.parametrize("part", ["digests", "parents", "ids", "depths", "salts"])
def test_a_page_whose_words_do_not_fit_its_digest_is_not_believed(part):
    chains = chain([1, 2], [1, 2, 3, 4])
    copied = getattr(chains, part).copy()
    copied[1] += 1
    broken = PageChains(**{**chains.__dict__, part: copied})
    assert broken.verified().pages.tolist() == [1]


def test_two_pages_with_the_same_digest_are_one():
    both = PageChains.of(
        rows_of(chain([4, 2], [1, 2, 3, 4])) + rows_of(chain([3, 5], [1, 2, 3, 4]))
    )
    assert both.verified().pages.tolist() == [3, 2]


def agreed(mine, other):
    """What the first of two ranks believes."""
    theirs = []
    other.agreed(6, lambda held: theirs.append(held) or held[None])
    return mine.agreed(6, lambda held: np.stack([held, *theirs]))


def test_ranks_believe_what_all_of_them_hold():
    mine, other = chain([1, 2, 3], [1, 2, 3, 4, 5, 6]), chain([1, 4, 3], [1, 2, 3, 4, 5, 6])
    assert agreed(mine, mine).pages.tolist() == [1, 2, 3]
    assert agreed(mine, other).pages.tolist() == [1], "page 3 has lost the one before it"
    assert len(agreed(mine, PageChains.none(2))) == len(agreed(PageChains.none(2), mine)) == 0


class Tracked:
    """A tracker with one slot's pages, and rows of its plans."""

    def __init__(self):
        self.tracker = ChainTracker(PAGES, SIZE, SLOTS)
        self.table, self.slots = PageTable(SLOTS, 8), SlotArrays(SLOTS)

    def admit(self, slot, ids, pages):
        tokens = np.array(ids, np.int32)
        self.slots.put(slot, tokens, 20, "")
        self.table.append(np.array([slot]), np.array([len(pages)]), np.array(pages))
        self.tracker.admit(slot, NO_SALT, tokens[:0], np.empty(0, np.int32))

    def plan(self, number, slot, start, count, prefill):
        one = np.array([slot], np.int32)
        rows = Rows(one, np.array([start], np.int32), np.array([count], np.int32),
                    np.array([True]), np.array([prefill]), np.array([False]))  # fmt: skip
        rows.number = number
        return self.tracker.plan(rows, self.table, self.slots)


def test_a_page_that_somebody_else_claimed_while_the_step_ran_is_left_out():
    """Its request may live on: it was repointed to a page of the cache that holds the same."""
    tracked = Tracked()
    tracked.admit(0, [1, 2, 3, 4], [5, 6])
    step = tracked.plan(1, 0, 0, 4, prefill=True)
    tracked.tracker.invalidate(np.array([6], np.int32), 2)
    found = tracked.tracker.filled(step, np.array([9], np.int32))
    assert held(found) == {5: (NO_SALT, (1, 2))}
    # The chain goes on behind it all the same.
    tracked.table.append(np.array([0]), np.array([1]), np.array([7]))
    tracked.tracker.filled(tracked.plan(3, 0, 4, 1, prefill=False), np.array([8], np.int32))
    found = tracked.tracker.filled(tracked.plan(4, 0, 5, 1, prefill=False), np.array([7], np.int32))
    expected = chain([5, 6, 7], [1, 2, 3, 4, 9, 8])
    assert found.digests[0].tobytes() == expected.digests[2].tobytes()


def test_a_request_that_has_left_fills_nothing_any_more():
    tracked = Tracked()
    tracked.admit(0, [1, 2], [5])
    step = tracked.plan(1, 0, 0, 2, prefill=True)
    tracked.tracker.release(0)
    assert tracked.tracker.filled(step, np.array([9], np.int32)) is None


def test_bad_logits_are_no_concern_of_who_has_the_slot_by_now():
    tracked = Tracked()
    tracked.admit(0, [1, 2], [5])
    first = tracked.plan(1, 0, 0, 2, prefill=True)
    tracked.tracker.release(0)
    tracked.table.clear(0)
    tracked.slots.clear(0)
    tracked.admit(0, [3, 4], [6])
    tracked.tracker.mark_unusable(first, np.array([0]))
    second = tracked.plan(2, 0, 0, 2, prefill=True)
    assert held(tracked.tracker.filled(second, np.array([9], np.int32))) == {6: (NO_SALT, (3, 4))}
    tracked.tracker.mark_unusable(second, np.array([0]))
    assert tracked.tracker.filled(second, np.array([9], np.int32)) is None


def test_a_page_that_is_being_filled_gives_its_digest_to_requests_that_match_it_early():
    tracker = ChainTracker(PAGES, SIZE, SLOTS)
    ids, pages = np.array([1, 2, 3, 4], np.int32), np.array([5, 6], np.int32)
    tracker.admit(1, NO_SALT, ids, pages)
    assert tracker._parents[1] == chain([5, 6], [1, 2, 3, 4]).digests[1].tobytes()


def test_a_buffer_of_another_size_is_refused():
    with pytest.raises(ValueError, match="takes"):
        PageDirectory(memoryview(bytearray(64)), PAGES, SIZE)


class Decoding:
    """A tracker, and steps of all its requests; `tells`: whether repeated steps are said to be."""

    def __init__(self, prompts: list[int], tells: bool):
        self.size, self.slots, self.tells = 4, len(prompts), tells
        self.tracker = ChainTracker(100, self.size, self.slots)
        self.table, self.arrays = PageTable(self.slots, 30), SlotArrays(self.slots)
        self.number, self.flying = 0, []
        self.starts = np.zeros(self.slots, np.int32)
        for slot, length in enumerate(prompts):
            self.enter(slot, length)
        self.plan(np.array(prompts, np.int32), repeats=False)

    def enter(self, slot: int, length: int) -> None:
        self.arrays.put(slot, np.arange(length, dtype=np.int32), 60, "")
        pages = np.arange(1 + 30 * slot, 26 + 30 * slot, dtype=np.int32)
        self.table.append(np.array([slot]), np.array([len(pages)]), pages)
        self.tracker.admit(slot, NO_SALT, np.empty(0, np.int32), np.empty(0, np.int32))

    def plan(self, counts: np.ndarray, repeats: bool) -> None:
        slots, prefill = np.arange(self.slots, dtype=np.int32), counts > 1
        nothing = np.zeros(self.slots, bool)
        rows = Rows(slots, self.starts.copy(), counts, ~nothing, prefill, nothing)
        rows.number, rows.same_as_previous = self.number, repeats and self.tells
        self.flying.append(self.tracker.plan(rows, self.table, self.arrays))
        self.number, self.starts = self.number + 1, self.starts + counts

    def end(self, sampled: list[int]) -> list | None:
        found = self.tracker.filled(self.flying.pop(0), np.array(sampled, np.int32))
        if found is None:
            return None
        return [found.pages.tolist(), found.digests.tolist(), found.ids.tolist()]


@given(
    prompts=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    moves=st.lists(st.tuples(st.sampled_from("dddddrxbc"), st.integers(0, 2), st.integers(0, 9)),
                   max_size=60),
)  # fmt: skip
def test_steps_that_repeat_the_one_before_fill_the_pages_that_any_step_would(prompts, moves):
    """Requests leave and are distrusted between and while steps are under way, rows sample none."""
    told, plain = Decoding(prompts, True), Decoding(prompts, False)
    repeats = False
    for move, slot, number in [*moves, *[("d", 0, n) for n in range(8)]]:
        slot %= len(prompts)
        for each in (told, plain):
            match move:
                case "r":
                    each.tracker.release(slot)
                case "x":
                    each.tracker.mark_unusable(each.flying[0], np.array([slot]))
                case "c":
                    each.tracker.invalidate(
                        each.table.columns(np.array([slot]), 0, 25)[0], each.number
                    )
                case _:
                    each.plan(np.ones(each.slots, np.int32), repeats)
        if move in "db":
            sampled = [number + row for row in range(len(prompts))]
            if move == "b":
                sampled[slot] = -1
            assert told.end(sampled) == plain.end(sampled)
            repeats = True  # from the second step of decodes on
    assert told.tracker._parents == plain.tracker._parents
