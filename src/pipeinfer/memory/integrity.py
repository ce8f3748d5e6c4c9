"""The invariants of the memory: every page has exactly one owner, every lock exactly one holder.

Knows no plan; it looks at the parts and changes nothing.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.memory.allocator import PageAllocator
from pipeinfer.memory.errors import IntegrityError
from pipeinfer.memory.page_table import PageTable
from pipeinfer.memory.prefix_cache import PrefixCache
from pipeinfer.memory.slot_arrays import SlotArrays


def check_balance(allocator: PageAllocator, cache: PrefixCache, table: PageTable) -> None:
    """free + cached + held by requests = all pages, by the counters: cheap enough for each plan."""
    held = table.owned
    found = allocator.free + cache.evictable + cache.locked + held
    if found != allocator.total:
        raise IntegrityError(
            f"{allocator.free} free, {cache.evictable} evictable, {cache.locked} locked and {held} "
            f"held pages are {found}, not {allocator.total}"
        )


def check_everything(
    allocator: PageAllocator,
    cache: PrefixCache,
    table: PageTable,
    slots: SlotArrays,
    page_size: int,
) -> None:
    """The same page by page, and that locks and counts agree; raises IntegrityError."""
    check_balance(allocator, cache, table)
    _check_slots(table, slots, page_size)
    in_cache = cache.check_integrity([node for node in slots.node if node is not None])
    owned = [table.own(slot) for slot in range(slots.count)]
    pages = np.concatenate([allocator.free_pages(), in_cache, *owned])
    owners = np.bincount(pages, minlength=allocator.total + 1)
    if owners[0] or (owners[1:] != 1).any():
        wrong = [(page, int(n)) for page, n in enumerate(owners.tolist()) if n != (page > 0)]
        raise IntegrityError(f"(page, owners) that are wrong: {wrong[:20]}")
    is_cached = np.zeros(allocator.total + 1, dtype=bool)
    is_cached[in_cache] = True
    for slot in np.flatnonzero(table.shared).tolist():
        shared = table.row(slot)[: table.shared[slot]]
        if not is_cached[shared].all():
            lost = shared[~is_cached[shared]].tolist()
            raise IntegrityError(f"slot {slot} reads pages {lost} as cached, the cache lacks them")


def _check_slots(table: PageTable, slots: SlotArrays, page_size: int) -> None:
    expected = -(-slots.computed // page_size)
    wrong = np.flatnonzero((table.held != expected) | (table.shared > table.held))
    if len(wrong):
        slot = int(wrong[0])
        raise IntegrityError(
            f"slot {slot}: {slots.computed[slot]} tokens computed, {table.held[slot]} pages held, "
            f"{table.shared[slot]} of them shared, page size {page_size}"
        )
    owned = int((table.held - table.shared).sum(dtype=np.int64))
    if owned != table.owned:
        raise IntegrityError(f"requests own {owned} pages, {table.owned} were counted")
    idle = ~slots.active & ((slots.known > 0) | (slots.computed > 0) | (table.held > 0))
    if idle.any():
        raise IntegrityError(f"empty slots {np.flatnonzero(idle).tolist()} have tokens or pages")
