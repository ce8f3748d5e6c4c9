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
    held = table.num_owned
    found = allocator.num_free + cache.num_evictable + cache.num_locked + held
    if found != allocator.num_pages:
        raise IntegrityError(
            f"{allocator.num_free} free, {cache.num_evictable} evictable, {cache.num_locked} "
            f"locked and {held} held pages are {found}, not {allocator.num_pages}"
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
    in_cache = cache.check_integrity([node for node in slots.locked_node if node is not None])
    owned = [table.owned_pages(slot) for slot in range(slots.num_slots)]
    pages = np.concatenate([allocator.free_pages(), in_cache, *owned])
    owners = np.bincount(pages, minlength=allocator.num_pages + 1)
    if owners[0] or (owners[1:] != 1).any():
        wrong = [(page, int(n)) for page, n in enumerate(owners.tolist()) if n != (page > 0)]
        raise IntegrityError(f"(page, owners) that are wrong: {wrong[:20]}")
    is_cached = np.zeros(allocator.num_pages + 1, dtype=bool)
    is_cached[in_cache] = True
    for slot in np.flatnonzero(table.num_shared).tolist():
        shared = table.pages_of(slot)[: table.num_shared[slot]]
        if not is_cached[shared].all():
            lost = shared[~is_cached[shared]].tolist()
            raise IntegrityError(f"slot {slot} reads pages {lost} as cached, the cache lacks them")


def _check_slots(table: PageTable, slots: SlotArrays, page_size: int) -> None:
    expected = -(-slots.num_computed // page_size)
    wrong = np.flatnonzero((table.num_pages != expected) | (table.num_shared > table.num_pages))
    if len(wrong):
        slot = int(wrong[0])
        raise IntegrityError(
            f"slot {slot}: {slots.num_computed[slot]} tokens computed, {table.num_pages[slot]} "
            f"pages held, {table.num_shared[slot]} of them shared, page size {page_size}"
        )
    owned = int((table.num_pages - table.num_shared).sum(dtype=np.int64))
    if owned != table.num_owned:
        raise IntegrityError(f"requests own {owned} pages, {table.num_owned} were counted")
    idle = ~slots.active & (
        (slots.num_known > 0) | (slots.num_computed > 0) | (table.num_pages > 0)
    )
    if idle.any():
        raise IntegrityError(f"empty slots {np.flatnonzero(idle).tolist()} have tokens or pages")
