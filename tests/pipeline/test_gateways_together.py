"""Three gateways of one server: any of them answers for all."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from leftovers import leftovers
from prometheus_client.parser import text_string_to_metric_families
from streams import TRIES

from adapter_files import write_adapter
from checkpoints import load_reference, make_checkpoint
from held_processes import HeldProcesses
from servers import START, Server
from waiting import until

GATEWAYS = ("gateway-0", "gateway-1", "gateway-2")
LIMITS = {
    "admin": "admin",
    "few": "concurrent=3",
    "slow": "requests=7",
    "short": "tokens=60",
    "free": "",
}
REFUSED = 9  # of twelve requests of the key `few`
ROUNDS = 12  # at most, until one of them was as it is where nobody waits for a busy machine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, two adapters of it, and a file of keys."""
    root = tmp_path_factory.mktemp("together")
    model = make_checkpoint(root / "model", "LlamaForCausalLM")
    reference = load_reference(model)
    for seed, name in enumerate(("one", "two")):
        write_adapter(root / name, reference, seed, r=4)
    lines = (
        f"{key} sha256:{sha256(key.encode()).hexdigest()} {has}" for key, has in LIMITS.items()
    )
    (root / "keys").write_text("\n".join(lines))
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    flags = (
        *("--served-model-name", "base", "--dtype", "float32", "--threads", "1"),
        *("--kv-pages", "256", "--gateways", "3", "--tokenizers", "2", "--detokenizers", "2"),
        *("--api-key-file", str(folders["keys"]), "--enable-lora", "--vllm-metrics"),
    )
    with Server(str(folders["model"]), *flags) as server:
        yield server


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def gateway_of(server: Server, port: int) -> str:
    """The gateway that has the connection of this client's `port`."""
    sockets = set[str]()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port:
            sockets.add(f"socket:[{fields[9]}]")
    for stage in GATEWAYS:
        with suppress(FileNotFoundError):  # it closes files, or was killed
            for file in Path(f"/proc/{server.pid(stage)}/fd").iterdir():
                if str(file.readlink()) in sockets:
                    return stage
    return ""


@pytest.fixture
def clients(server: Server) -> Iterator[dict[str, httpx.Client]]:
    """A client with a connection to each gateway. While one gateway stands still, the others take
    all connections."""
    found = dict[str, httpx.Client]()
    with ExitStack() as opened:
        deadline = time.monotonic() + START
        while not set(GATEWAYS) <= found.keys():
            assert time.monotonic() < deadline, sorted(found)
            client = opened.enter_context(httpx.Client(base_url=server.url, timeout=120))
            with client.stream("GET", "/health/live") as answer:
                stream = answer.extensions["network_stream"]
                port = stream.get_extra_info("socket").getsockname()[1]
                answer.read()  # else the connection is closed
                found.setdefault(gateway_of(server, port), client)
            time.sleep(0.02)
        yield {stage: found[stage] for stage in GATEWAYS}


def complete(client: httpx.Client, key: str = "free", **fields: Any) -> httpx.Response:
    body = {"prompt": [40, 41, 42], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json={**body, **fields}, headers=headers(key))


def samples(client: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """{(name, labels): value} of a scrape, in which no sample stands twice."""
    found = dict[tuple[str, tuple[tuple[str, str], ...]], float]()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for one in family.samples:
            name = one.name, tuple(sorted(one.labels.items()))
            assert name not in found
            found[name] = one.value
    return found


def test_a_scrape_of_any_gateway_has_the_figures_of_all(server, clients):
    for number, client in enumerate(clients.values(), 1):
        for _ in range(number):
            assert complete(client).status_code == 200

    def same_everywhere() -> list[dict[Any, float]] | None:
        """None while a gateway did not say in time what it has counted."""
        scraped = [samples(client) for client in clients.values()]
        own = [
            {name: value for name, value in found.items() if "gateway" in dict(name[1])}
            for found in scraped
        ]
        whole = {dict(labels)["gateway"] for _, labels in own[0]} == set(GATEWAYS)
        return scraped if own[0] == own[1] == own[2] and whole and len(own[0]) > 300 else None

    for found in server.wait(same_everywhere, "all say the same of all"):
        for number, stage in enumerate(GATEWAYS, 1):
            ended = "pipeinfer_requests_total", (("gateway", stage), ("outcome", "length"))
            assert found[ended] >= number
            labels = ("engine", "0"), ("gateway", stage), ("model_name", "base")
            assert found["vllm:generation_tokens_total", labels] >= 4 * number
        assert found["pipeinfer_stage_up", (("stage", "gateway-2"),)] == 1


def test_the_answers_of_a_key_are_those_that_one_gateway_would_make_at_a_time(server):
    """Twelve connections at once, and three answers may be made: three are, whoever has them. On a
    busy machine a gateway may wait in vain for what another one had left, which is fewer then."""
    engine = server.pid("engine")

    async def ask(number: int, statuses: list[int]) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            body = {"prompt": [40 + number], "max_tokens": 120, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body, headers=headers("few"))
            statuses.append(answer.status_code)

    async def all_at_once() -> Counter[int]:
        """No answer ends before the others are refused."""
        statuses = list[int]()
        with HeldProcesses(engine):
            asked = [asyncio.create_task(ask(number, statuses)) for number in range(12)]
            await until(lambda: statuses.count(429) >= REFUSED, START)
        await asyncio.gather(*asked)
        return Counter(statuses)

    rounds = list[Counter[int]]()
    while len(rounds) < 4 or (Counter({200: 3, 429: 9}) not in rounds and len(rounds) < ROUNDS):
        rounds.append(asyncio.run(all_at_once()))
    assert all(made[200] + made[429] == 12 and 1 <= made[200] <= 3 for made in rounds), rounds
    assert {200: 3, 429: 9} in rounds, rounds


def made_at_last(client: httpx.Client, **fields: Any) -> httpx.Response:
    """The answer to a request of the key `few`, asked for again where it was refused: a gateway
    that stands still has lent nothing within BORROW_SECONDS."""
    for _ in range(TRIES):
        answer = complete(client, "few", **fields)
        if answer.status_code != 429:
            break
    return answer


def test_one_gateway_may_make_all_answers_of_a_key(server, clients):
    """The others give their shares, and get them back when they need them."""
    for client in clients.values():
        for _ in range(2):
            assert made_at_last(client, n=3).status_code == 200
            refused = complete(client, "few", n=4)
            assert refused.status_code == 429 and "4 choices" in refused.text


def until_refused(clients: Iterable[httpx.Client], key: str) -> tuple[list[httpx.Response], float]:
    """The answers of gateways that are asked in turn, the last ones refused by each of them: one of
    them alone may have waited in vain for a share. And for how many seconds they were asked."""
    each = list(clients)
    answers = list[httpx.Response]()
    begun = time.monotonic()
    while {one.status_code for one in answers[-len(each) :]} != {429}:
        answers.append(complete(each[len(answers) % len(each)], key))
        assert answers[-1].status_code in (200, 429), answers[-1].text
        assert len(answers) < 60
    return answers, time.monotonic() - begun


def test_requests_and_tokens_a_minute_are_those_of_one_gateway(server, clients):
    answers, seconds = until_refused(clients.values(), "slow")
    given = [one for one in answers if one.status_code == 200]
    refilled = seconds * 7 / 60
    assert 7 <= len(given) <= 7 + refilled
    assert answers[0].headers["x-ratelimit-limit-requests"] == "7"
    left = [int(one.headers["x-ratelimit-remaining-requests"]) for one in given]
    # What the others have left is known half a second late.
    assert left[0] == 6 and min(left) <= 4 + refilled
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 9
    answers, seconds = until_refused(clients.values(), "short")
    given = [one for one in answers if one.status_code == 200]
    spent = sum(one.json()["usage"]["total_tokens"] for one in given)
    assert 60 <= spent <= 60 + 3 * 7 + seconds


def text(client: httpx.Client, model: str) -> str:
    return complete(client, model=model, max_tokens=16).json()["choices"][0]["text"]


def names(client: httpx.Client) -> set[str]:
    return {card["id"] for card in client.get("/v1/models", headers=headers("free")).json()["data"]}


def change(
    server: Server,
    client: httpx.Client,
    path: str,
    body: dict[str, Any],
    known: Callable[[], bool],
) -> None:
    """Of adapters: `known()` is whether all gateways have it, as they do when the answer comes; or
    later, where it says that one of them did not answer."""  # fmt: skip
    answer = client.post(f"/v1/{path}_lora_adapter", json=body, headers=headers("admin"))
    if answer.status_code == 503 and answer.json()["error"]["code"] == "gateway_unanswered":
        server.wait(known, "the others hear of it")
    else:
        assert answer.status_code == 200, answer.text
        assert known()


def test_an_adapter_that_one_gateway_loads_is_known_to_all(server, clients, folders):
    load = {"lora_name": "mine", "lora_path": str(folders["one"])}
    first, *others = clients.values()

    def all_have(*named: str) -> bool:
        return all(names(client) == {"base", *named} for client in clients.values())

    change(server, first, "load", load, lambda: all_have("mine"))
    before = {text(client, "mine") for client in clients.values()}
    assert len(before) == 1
    taken = others[0].post("/v1/load_lora_adapter", json=load, headers=headers("admin"))
    assert taken.status_code == 400 and "is taken" in taken.text
    again = load | {"lora_path": str(folders["two"]), "load_inplace": True}

    def all_have_the_other() -> bool:
        after = {text(client, "mine") for client in clients.values()}
        return len(after) == 1 and after != before

    change(server, others[1], "load", again, all_have_the_other)
    change(server, others[0], "unload", {"lora_name": "mine"}, all_have)
    for client in clients.values():
        assert complete(client, model="mine").status_code == 404


def test_a_gateway_that_is_started_again_knows_what_the_others_know(server, clients, folders):
    load = {"lora_name": "kept", "lora_path": str(folders["one"])}
    known = {"base", "kept"}
    change(
        server, clients["gateway-1"], "load", load,
        lambda: all(names(client) == known for client in clients.values()),
    )  # fmt: skip
    # Its share of the key's answers is with another gateway when it dies.
    assert made_at_last(clients["gateway-0"], n=3).status_code == 200
    killed = server.pid("gateway-1")
    os.kill(killed, signal.SIGKILL)

    def back() -> bool:
        rows = {row["stage"]: row for row in server.health()["stages"]}
        return rows["gateway-1"]["pid"] != killed and rows["gateway-1"]["state"] == "ready"

    server.wait(back, "it was started again")
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for _ in range(20):  # most of these connections are its
            with httpx.Client(base_url=server.url, timeout=120) as one:
                assert names(one) == known
                assert made_at_last(one, n=3).status_code == 200
                assert complete(one, "few", n=4).status_code == 429
        server.wait(lambda: client.get("/health").json()["status"] == "ready", "all have heard it")


def test_all_hear_of_sleep_and_of_resets_at_any_gateway(server, clients):
    for first, second in (("gateway-0", "gateway-2"), ("gateway-2", "gateway-1")):
        reset = clients[first].post("/reset_prefix_cache", headers=headers("admin"))
        assert reset.status_code == 200
        asleep = clients[first].post("/sleep?level=1", headers=headers("admin"))
        assert asleep.status_code == 200, asleep.text
        server.wait(
            lambda stage=second: (
                clients[stage].get("/is_sleeping", headers=headers("free")).json()["is_sleeping"]
            ),
            "the other one has heard it",
        )
        assert clients[second].post("/wake_up", headers=headers("admin")).status_code == 200
        assert complete(clients[first]).status_code == 200
    assert leftovers(server) == {}
