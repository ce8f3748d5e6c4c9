"""Does harm to the processes of a server, and says when it is well again.

Whoever was not hurt must be the same process afterwards. Raises Broken where that, or the way back,
did not hold.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from chaos.serving import Serving, Stage
from chaos.stream_client import Broken


def kill(server: Serving, victims: Sequence[Stage]) -> None:
    """-9 of all of them; returns when others are in their places and the server is well."""
    before = server.pids()
    _signal((before[victim] for victim in victims), signal.SIGKILL)
    _well(server, before, victims)


def stop(server: Serving, victims: Sequence[Stage], seconds: float) -> None:
    """Nobody is told that they stand still, and that they go on."""
    before = server.pids()
    processes = [before[victim] for victim in victims]
    _signal(processes, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        _signal(processes, signal.SIGCONT)
    _well(server, before, ())


def unhurt(server: Serving, harm: Callable[[], None]) -> None:
    """Something that must cost no process."""
    before = server.pids()
    harm()
    _well(server, before, ())


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)


def _well(server: Serving, before: dict[Stage, int], killed: Sequence[Stage]) -> None:
    """Waits until it is; of a group with a killed engine, all ranks may be others now."""
    now: dict[Stage, int] = {}

    def back() -> bool:
        nonlocal now
        health = server.health()
        now = {(s["name"], s["group"], s["rank"]): s["pid"] for s in health["stages"]}
        replaced = all(now.get(victim) not in (None, before[victim]) for victim in killed)
        return replaced and health["status"] == "ready"

    try:
        server.wait(back, f"{' and '.join(map(str, killed)) or 'the server'} came back")
    except TimeoutError as error:
        raise Broken(str(error)) from None
    groups = {group for name, group, _ in killed if name == "engine"}
    lost = [
        stage
        for stage, process in before.items()
        if now.get(stage) != process
        and stage not in killed
        and not (stage[0] == "engine" and stage[1] in groups)
    ]
    if lost:
        raise Broken(f"nobody hurt {lost}, and they are other processes now")
