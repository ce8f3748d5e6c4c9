"""Prompts that begin alike: one computes the beginning, the others wait for its pages.

Knows requests and whole grains of their prompts, no page. Who waits is held as in families.py, but
only until the common beginning is computed, not the whole prompt. Nobody waits for a request that
is less urgent. Waiting cannot go in a circle: each waits for one that came to an earlier grain.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from pipeinfer.scheduler.request import TOKEN_BYTES, Request

KEY_BYTES = 8
COMING = ("waiting", "running", "held")


class Prefixes:
    """Of live requests, by the beginnings of their prompts. The first to want a beginning leads:
    it computes it, and whoever comes with the same one is held for it."""

    # Made of the prompts again where a recorded scheduler goes on: there are other ids in its
    # trace, if that was redacted.
    __transient__ = ("_leads", "_keys")

    def __init__(self) -> None:
        self._grain = 0  # tokens: whole pages
        self._leads: dict[bytes, Request] = {}  # by a beginning's key
        self._keys: dict[str, tuple[bytes, ...]] = {}  # of a request's beginnings, shortest first
        self._led: dict[str, tuple[Request, list[int]]] = {}  # which of its beginnings it leads
        self._held: dict[str, tuple[Request, list[Request]]] = {}  # by the lead's id

    def __len__(self) -> int:
        """How many are held."""
        return sum(len(behind) for _, behind in self._held.values())

    def begin(self, grain: int) -> bool:
        """Beginnings are of whole grains of so many tokens from now on; 0: nothing is shared.
        Whether that is new, so that all must be looked at again."""
        if grain == self._grain:
            return False
        self._grain = grain
        self._leads.clear()
        self._keys.clear()
        self._led.clear()
        return True

    def hold(self, request: Request) -> bool:
        """Whether `request`, which wants to run, has to wait for a beginning that another computes;
        then it is held. Else `behind` says in whose pages it will find `common` tokens, if in
        anybody's: those that have been planned."""
        request.common = 0
        if not self._grain or request.behind is not None or request.prompt_score_size:
            return False
        keys, leads = self._beginnings(request), self._index()
        lead, grains = None, 0
        for key in keys:
            other = leads.get(key)
            if other is None or other is request or not _goes_before(other, request):
                break
            lead, grains = other, grains + 1
        new = [at for at in range(grains, len(keys)) if keys[at] not in leads]
        if new:
            leads.update(dict.fromkeys([keys[at] for at in new], request))
            self._led.setdefault(request.id, (request, []))[1].extend(new)
        if lead is None:
            return False
        request.behind, request.common = lead, grains * self._grain
        if _has(lead, request.common):
            return False
        if request.phase != "held":
            request.move("held")
        self._held.setdefault(lead.id, (lead, []))[1].append(request)
        return True

    def ready(self) -> list[Request]:
        """Those that need not wait any more: their beginning has been planned, or whoever was to
        compute it will not come soon."""
        if not self._held:
            return []
        free: list[Request] = []
        for name, (lead, behind) in list(self._held.items()):
            stays: list[Request] = []
            for request in behind:
                if lead.phase not in COMING:
                    request.behind, request.common = None, 0
                    free.append(request)
                elif _has(lead, request.common):
                    free.append(request)
                else:
                    stays.append(request)
            self._keep(name, lead, stays)
        return free

    def gone(self, request: Request) -> list[Request]:
        """`request` is over. Returns those that waited for it, to be held anew or let in."""
        if request.id in self._led:
            leads, keys = self._index(), self._beginnings(request)
            for at in self._led.pop(request.id)[1]:
                del leads[keys[at]]
        self._keys.pop(request.id, None)
        lead = request.behind
        if lead is not None and lead.id in self._held:
            _, behind = self._held[lead.id]
            self._keep(lead.id, lead, [one for one in behind if one is not request])
        _, free = self._held.pop(request.id, (request, []))
        for one in free:
            one.behind, one.common = None, 0
        return free

    def _keep(self, name: str, lead: Request, behind: list[Request]) -> None:
        if behind:
            self._held[name] = lead, behind
        else:
            self._held.pop(name, None)

    def _index(self) -> dict[bytes, Request]:
        """Who leads, by key."""
        if self._led and not self._leads:
            for request, grains in self._led.values():
                keys = self._beginnings(request)
                self._leads.update(dict.fromkeys([keys[at] for at in grains], request))
        return self._leads

    def _beginnings(self, request: Request) -> tuple[bytes, ...]:
        """A key for each whole grain of its prompt that a cache may give it: all but the last
        token."""
        keys = self._keys.get(request.id)
        if keys is None:
            keys = self._keys[request.id] = tuple(self._made(request))
        return keys

    def _made(self, request: Request) -> Iterator[bytes]:
        prompt, size = request.work.prompt_ids, self._grain * TOKEN_BYTES
        key = blake2b(request.work.cache_salt.encode(), digest_size=KEY_BYTES).digest()
        for at in range(0, (request.prompt_len - 1) // self._grain * size, size):
            grain = prompt[at : at + size]
            key = blake2b(grain, key=key, digest_size=KEY_BYTES).digest()
            yield key


def _has(lead: Request, tokens: int) -> bool:
    """Whether the next plan may give others so many of its first tokens: a step before computes
    them."""
    return lead.phase == "running" and lead.projected >= tokens


def _goes_before(lead: Request, request: Request) -> bool:
    return lead.phase in COMING and lead.work.priority <= request.work.priority
