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

    def __init__(self) -> None:
        self._grain = 0  # tokens: whole pages
        self._leads: dict[bytes, Request] = {}  # by a beginning's key
        self._keys: dict[str, tuple[bytes, ...]] = {}  # of a request's beginnings, shortest first
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
        return True

    def hold(self, request: Request) -> bool:
        """Whether `request`, which wants to run, has to wait for a beginning that another computes;
        then it is held. Else `behind` says in whose pages it will find `common` tokens, if in
        anybody's: those that have been planned."""
        request.common = 0
        if not self._grain or request.behind is not None or request.prompt_score_size:
            return False
        keys = self._keys.get(request.id)
        if keys is None:
            keys = self._keys[request.id] = tuple(self._beginnings(request))
        lead, grains = None, 0
        for key in keys:
            other = self._leads.get(key)
            if other is None or other is request or not _goes_before(other, request):
                break
            lead, grains = other, grains + 1
        for key in keys[grains:]:
            self._leads.setdefault(key, request)
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
        for key in self._keys.pop(request.id, ()):
            if self._leads.get(key) is request:
                del self._leads[key]
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

    def _beginnings(self, request: Request) -> Iterator[bytes]:
        """A key for each whole grain that a cache may give it: all but the last token. The same in
        every process, since a recorded scheduler goes on in another."""
        prompt, size = request.work.prompt_ids, self._grain * TOKEN_BYTES
        reusable = min(request.prompt_len, request.length - 1) // self._grain
        key = blake2b(request.work.cache_salt.encode(), digest_size=KEY_BYTES).digest()
        for at in range(0, reusable * size, size):
            key = blake2b(prompt[at : at + size], key=key, digest_size=KEY_BYTES).digest()
            yield key


def _has(lead: Request, tokens: int) -> bool:
    """Whether the next plan may give others so many of its first tokens: a step before computes
    them."""
    return lead.phase == "running" and lead.projected >= tokens


def _goes_before(lead: Request, request: Request) -> bool:
    return lead.phase in COMING and lead.work.priority <= request.work.priority
