"""A real Prometheus beside a real server: what it scrapes, and alerts when a stage is lost."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
import urllib.parse
from pathlib import Path

import pytest
import yaml
from monitoring_files import ALERTS, FOLDER, RULES, missing, panel_expressions

from servers import Server, fetch

WHY_NOT = missing("prometheus")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
VICTIM, RESTARTS = "detokenizer-0", "pipeinfer_stage_restarts_total"


class Prometheus:
    """One with the files of stages/monitoring/, quicker: it scrapes and evaluates each second, and
    no alert waits longer than that."""

    def __init__(self, folder: Path, address: str) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        [job] = config["scrape_configs"]
        job["static_configs"] = [{"targets": [address]}]
        rules = [{**rule, "for": "1s"} if "for" in rule else rule for rule in ALERTS]
        groups = [{**RULES["groups"][0], "rules": rules}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yaml").write_text(yaml.safe_dump({"groups": groups}))
        self.log: list[str] = []
        self._address: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yaml",
             f"--storage.tsdb.path={folder}/series", "--web.listen-address=127.0.0.1:0"],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = "http://" + self._address.get(timeout=60)
        self.wait(lambda: fetch(f"{self.url}/-/ready")[0] == 200, "Prometheus is not ready")

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)
            if found := re.search(r"Listening on.*address=(127\.0\.0\.1:\d+)", line):
                self._address.put(found[1])

    def api(self, path: str, **query: str):
        _, text = fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}")
        answer = json.loads(text)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> dict[str, float]:
        """{stage or "": value} of all series that there are now."""
        found = self.api("query", query=expression)["result"]
        return {one["metric"].get("stage", ""): float(one["value"][1]) for one in found}

    def firing(self) -> set[tuple[str, str]]:
        """(alert, stage or "") of those that fire."""
        alerts = [one for one in self.api("alerts")["alerts"] if one["state"] == "firing"]
        return {(one["labels"]["alertname"], one["labels"].get("stage", "")) for one in alerts}

    def wait(self, condition, what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "\n".join([what, *self.log[-5:]])
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0
        self._reader.join(10)


@pytest.fixture(scope="module")
def server():
    with Server("--threads", "1", "--kv-pages", "200", "--vllm-metrics") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory):
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), server.url.removeprefix("http://"))
    try:
        running.wait(lambda: running.values("up") == {"": 1}, "no scrape")
        yield running
    finally:
        running.stop()


def ask(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "count from 3 to 12"}]}
    assert server.post("/v1/chat/completions", body)[0] == 200


def test_every_panel_of_the_dashboard_has_something_to_show(server, prometheus):
    """With what Grafana would fill in. Where tokens are counted, a rate needs two scrapes that see
    requests between them."""
    empty = dict(panel_expressions())

    def all_shown() -> bool:
        ask(server)
        for title, expressions in list(empty.items()):
            filled = [
                one.replace("$server", ".*").replace("$__rate_interval", "30s")
                for one in expressions
            ]
            shown = [prometheus.api("query", query=one)["result"] for one in filled]
            numbers = [float(one["value"][1]) for each in shown for one in each]
            if all(shown) and all(number == number for number in numbers):  # NaN equals nothing
                del empty[title]
        return not empty

    try:
        prometheus.wait(all_shown, "a panel has no data")
    finally:
        assert sorted(empty) == []
    answered = 'sum(pipeinfer_requests_total{outcome="stop"}) > 0'
    prometheus.wait(lambda: prometheus.values(answered) != {}, "no answer was counted")
    prometheus.wait(lambda: prometheus.firing() == set(), "an alert goes on")


def test_dashboards_of_vllm_find_its_names(server, prometheus):
    ask(server)
    for name in ("iteration_tokens_total_count", "request_success_total", "cache_config_info"):
        wanted = f"sum(vllm:{name}) > 0"
        prometheus.wait(lambda of=wanted: prometheus.values(of) != {}, f"no vllm:{name}")


def test_a_stage_that_hangs_and_one_that_is_killed_again_and_again_raise_alerts(server, prometheus):
    pid = server.pid("detokenizer")
    os.kill(pid, signal.SIGSTOP)  # it says nothing, and nobody starts it again
    down = {("PipeinferStageDown", VICTIM), ("PipeinferNotReady", "")}
    try:
        prometheus.wait(lambda: prometheus.firing() >= down, "the stage is not missed")
        assert ("PipeinferStageDown", "tokenizer-0") not in prometheus.firing()
        assert prometheus.values("pipeinfer_stage_up")[VICTIM] == 0
    finally:
        os.kill(pid, signal.SIGKILL)
    for killed in range(1, 4):
        prometheus.wait(lambda n=killed: prometheus.values(RESTARTS)[VICTIM] == n, "no restart")
        server.wait(lambda: server.get("/health/ready")[0] == 200, "never ready again")
        if killed < 3:
            assert not {a for a in prometheus.firing() if a[0] == "PipeinferStageRestarts"}
            os.kill(server.pid("detokenizer"), signal.SIGKILL)
    often = {("PipeinferStageRestarts", VICTIM)}
    prometheus.wait(lambda: prometheus.firing() == often, "restarts alone are left to be told")
    expected = {VICTIM: 3, "tokenizer-0": 0, "scheduler-0": 0, "engine-0-0": 0}
    counts = prometheus.values(RESTARTS)
    assert {stage: counts[stage] for stage in expected} == expected
    ask(server)


def test_a_server_that_ends_is_told_as_down(server, prometheus):
    """The last of this file: it stops the server."""
    assert server.stop() == 0
    prometheus.wait(lambda: ("PipeinferServerDown", "") in prometheus.firing(), "nobody misses it")
