"""The `loss` job of tensor_parallel.py: ranks killed and stopped under streams of a real server.

How long a token takes comes first, so that streams are made to last long enough. What is known so
far is printed after each part, and in an error's place stands the server's log.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "distributed"))

import aiohttp
from chat_streams import hurt, questions

from servers import Server

STREAMS = 8
FEW = 30  # tokens, to see how long one takes
LASTING = 4.0  # seconds that undisturbed streams should last
MOST = 1500  # tokens: what contexts of 2,048 have room for
SHUT_UP = 30.0  # seconds without a chunk after which a stream counts as hanging
WATCHDOG = "6"
LOG_LINES = 40
WIDER = {"max_position_embeddings": 2048, "vocab_size": 264}
BYTES = 256  # ids from here on are not text
SETTINGS = {
    "demo": ("--attention", "torch", "--dtype", "float32", "--max-running", "16"),
    "graphs": ("--max-running", "16", "--cuda-graph-max-batch", "16"),
}


@dataclass
class Stream:
    """What one stream has given.

    gap: the longest time between two chunks, in seconds. undisturbed: characters that it had when
    it was disturbed.
    """

    text: str = ""
    undisturbed: int = 0
    chunks: int = 0
    gap: float = 0.0
    finish: str = ""
    last: float = field(default_factory=time.monotonic)


class Streams:
    """Chats of `tokens` tokens each, at the same time; `all` is filled as chunks come."""

    def __init__(self, server: Server, tokens: int) -> None:
        self._server, self._tokens = server, tokens
        self._asked = questions(STREAMS)
        self.all = [Stream() for _ in self._asked]
        self.seconds = 0.0

    def run(self, disturb: Callable[[], None] | None = None) -> Streams:
        """Until all have ended; `disturb()` in a thread when all have begun. Raises RuntimeError
        if a stream ends early, hangs, or if most are over before they can be disturbed.
        """
        began = time.monotonic()
        asyncio.run(self._run(disturb))
        self.seconds = time.monotonic() - began
        return self

    def where(self) -> list[str]:
        """Of each stream: chunks, characters, how it ended, the longest gap."""
        return [f"{s.chunks}/{len(s.text)} {s.finish or 'open'} {s.gap:.1f} s" for s in self.all]

    async def _run(self, disturb: Callable[[], None] | None) -> None:
        patience = aiohttp.ClientTimeout(total=None, sock_read=SHUT_UP)
        async with aiohttp.ClientSession(self._server.url, timeout=patience) as client:
            tasks = [asyncio.create_task(self._ask(client, i)) for i in range(STREAMS)]
            try:
                if disturb is not None:
                    while not all(s.chunks for s in self.all) and not any(t.done() for t in tasks):
                        await asyncio.sleep(0.005)
                    if sum(task.done() for task in tasks) > STREAMS // 2:
                        raise RuntimeError("most streams were over before they were disturbed")
                    for stream in self.all:
                        stream.undisturbed = len(stream.text)
                    await asyncio.to_thread(disturb)
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _ask(self, client: aiohttp.ClientSession, index: int) -> None:
        stream = self.all[index]
        body = {
            "model": "pipeinfer-demo", "stream": True, "ignore_eos": True, "seed": index,
            "messages": [{"role": "user", "content": self._asked[index]}],
            "temperature": 0.0 if index % 2 else 0.8, "top_p": 1, "max_tokens": self._tokens,
        }  # fmt: skip
        async with client.post("/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self._take(stream, json.loads(line[len("data: ") :]))
        if stream.finish != "length":
            raise RuntimeError(f"stream {index} ended with {stream.finish!r}")

    def _take(self, stream: Stream, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        now = time.monotonic()
        if stream.chunks:
            stream.gap = max(stream.gap, now - stream.last)
        stream.last, stream.chunks = now, stream.chunks + 1
        stream.text += event["choices"][0]["delta"].get("content") or ""
        stream.finish = event["choices"][0]["finish_reason"] or stream.finish


def loss(what: str, device: str) -> dict[str, Any]:
    """`what`: the demo model in float32, or a random one in bfloat16 with all that is fast.

    "ms_per_token", and for a rank killed and a rank stopped: seconds until all ranks are others and
    ready, the longest gap in a stream, equal texts. With "error", where each stream stood.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = () if what == "demo" else (str(checkpoint(Path(folder), device)),)
        settings = SETTINGS[what] if device == "cuda" or what == "demo" else ()
        server = Server(
            *model, "--served-model-name", "pipeinfer-demo", "--tp", "2", "--device", device,
            "--kv-pages", "1200", "--watchdog", WATCHDOG, *settings,
        )  # fmt: skip
        began = time.monotonic()
        found: dict[str, Any] = {}
        try:
            with server:
                found["start"] = round(time.monotonic() - began, 1)
                lose(server, found)
        except Exception as error:  # the result says what is known, and the log why
            found["error"] = f"{type(error).__name__}: {error}"[:300]
        found["log"] = server.log[-LOG_LINES if "error" in found else -12 :]
    return found


def lose(server: Server, found: dict[str, Any]) -> None:
    """The parts one after another; `found` has what each gave, also of the one that failed."""
    few = watched(found, Streams(server, FEW))
    warm = watched(found, Streams(server, FEW)).seconds  # the first time, kernels are compiled
    found["ms_per_token"] = [round(s * 1e3 / FEW, 2) for s in (few.seconds, warm)]
    tokens = max(FEW, min(MOST, int(LASTING / warm * FEW)))
    expected = watched(found, Streams(server, tokens))
    # Undisturbed streams may differ, too, where rounding depends on who is computed beside them.
    again = watched(found, Streams(server, tokens))
    found["undisturbed"] = {
        "tokens": tokens,
        "seconds": round(expected.seconds, 1),
    } | compared(again, expected)
    for name, how in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        away: list[float] = []

        def disturb(how: signal.Signals = how, away: list[float] = away) -> None:
            begin = time.monotonic()
            hurt(server, 1, how)
            away.append(round(time.monotonic() - begin, 1))

        streams = watched(found, Streams(server, tokens), disturb)
        found[name] = {
            "seconds_away": away[0],
            "longest_gap": round(max(s.gap for s in streams.all), 1),
            "finished": sum(s.finish == "length" for s in streams.all),
        } | compared(streams, expected)


def compared(streams: Streams, others: Streams) -> dict[str, Any]:
    """How many texts are equal, and of the others where they differ first: in characters, with how
    many there were at the disturbance, and whether ids were drawn. Before it, rounding depends on
    who was computed beside them; behind it, also on what was computed again as a prompt.
    """
    apart = []
    for index, (one, other) in enumerate(zip(streams.all, others.all, strict=True)):
        if one.text != other.text:
            pairs = zip(one.text, other.text, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            kind = "greedy" if index % 2 else "drawn"
            apart.append(f"{kind} at {at}, had {one.undisturbed}")
    return {"equal_texts": STREAMS - len(apart), "of": STREAMS, "apart": apart}


def watched(
    found: dict[str, Any], streams: Streams, disturb: Callable[[], None] | None = None
) -> Streams:
    """Runs them; "streams" tells where they stand if that fails or the job is ended."""
    print("SO FAR " + json.dumps(found), flush=True)
    try:
        streams.run(disturb)
    except BaseException:
        found["streams"] = streams.where()
        raise
    return streams


def checkpoint(folder: Path, device: str) -> Path:
    """A random one whose output is bytes: head_dim 128 on a GPU, small and float32 on a CPU."""
    import torch
    from safetensors.torch import load_file, save_file
    from tensor_parallel_jobs import SMALL

    from checkpoints import make_checkpoint
    from pipeinfer.demo import demo_path

    sizes: dict[str, Any] = SMALL | WIDER if device == "cuda" else WIDER
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = make_checkpoint(folder / "model", "Qwen3ForCausalLM", dtype=dtype, **sizes)
    weights = load_file(made / "model.safetensors")
    weights["lm_head.weight"][BYTES:] = 0  # never the best, and hardly ever drawn
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_path() / name, made / name)
    return made


if __name__ == "__main__":
    print(json.dumps(loss(sys.argv[1], os.environ.get("PIPEINFER_DEVICE", "cuda")), indent=1))
