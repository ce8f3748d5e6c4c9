"""A group that falls silent for good, of real processes: its streams go on at another one."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request

from servers import Server

BODY = {"ignore_eos": True, "temperature": 0, "stream": True}
LONG, SHORT = 600, 100  # tokens: amid the first a group is lost


class Stream(threading.Thread):
    """A streamed completion, read as it comes."""

    def __init__(self, server: Server, prompt: str, tokens: int) -> None:
        super().__init__(daemon=True)
        data = json.dumps({**BODY, "prompt": prompt, "max_tokens": tokens}).encode()
        self._request = urllib.request.Request(
            server.url + "/v1/completions", data, {"content-type": "application/json"}
        )
        self.text, self.pieces, self.finish = "", 0, ""
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    self.text, self.pieces = self.text + choice["text"], self.pieces + 1
                    self.finish = choice["finish_reason"] or self.finish


PROMPTS = [f"{number}, two, " * 3 for number in range(4)]


def test_streams_of_a_lost_host_go_on_at_another_and_its_late_words_do_no_harm():
    """A group falls silent, and the detokenizer dies with it: the one that is started elsewhere has
    never heard what that group said."""
    settings = ("--dp", "2", "--routing", "round-robin", "--host-loss", "1", "--kv-pages", "1000")
    with Server(*settings, "--threads", "1", "--no-page") as server:
        streams = [Stream(server, prompt, LONG) for prompt in PROMPTS]
        server.wait(lambda: all(stream.pieces > 5 for stream in streams), "no tokens")
        stages = server.health()["stages"]
        hit = ("scheduler", "engine")
        pids = [s["pid"] for s in stages if s["group"] == 1 and s["name"] in hit]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        os.kill(server.pid("detokenizer"), signal.SIGKILL)
        try:
            server.wait(lambda: all(s.finish for s in streams), "they wait for the lost host")
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        server.wait(lambda: server.health()["status"] == "ready", "not well again")
        assert {stream.finish for stream in streams} == {"length"}
        again = [Stream(server, prompt, SHORT) for prompt in PROMPTS]
        server.wait(lambda: all(stream.finish for stream in again), "late words do harm")
        for short, long in zip(again, streams, strict=True):
            assert short.finish == "length" and long.text.startswith(short.text) and short.text
