"""How the pipeline starts, what stops it, and what a vanished client leaves behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from leftovers import statistics
from streams import TRIES

from checkpoints import make_checkpoint
from held_processes import HeldProcesses
from pipeinfer.bus import curve
from pipeinfer.cli.main import main
from pipeinfer.demo import demo_path
from port_rows import port_row
from servers import STAGES, START, Server, alive, environment, fetch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small():
    """No prefix cache, so that idle means every page is free; room for two requests at a time."""
    with Server("--cache", "naive", "--kv-pages", "300", "--max-running", "2") as running:
        yield running


def stream(server: Server, max_tokens: int = 1500):
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
    return api.completions.create(
        model="pipeinfer-demo", prompt="go on " * 20, temperature=1.0, max_tokens=max_tokens,
        stream=True, extra_body={"ignore_eos": True},
    )  # fmt: skip


def all_free(server: Server) -> bool:
    """By what the stages say from now on: what they said before may be of a time before a request
    came."""
    engine, scheduler = (statistics(server, stage) for stage in ("engine-0-0", "scheduler-0"))
    free = engine["pages_free"] == engine["pages_total"] == 300
    return free and not scheduler["running"] and not scheduler["waiting"]


def ended_by_themselves(server: Server) -> float:
    """Requests that were not aborted: without this count, patience would pass for an abort."""
    return statistics(server, "scheduler-0")["finished_total"]


def test_disconnected_stream_frees_its_pages(small):
    for _ in range(TRIES):  # until the stream had not ended when its client left
        before = ended_by_themselves(small)
        running = stream(small)
        for _ in range(3):
            next(running)
        running.response.close()
        small.wait(lambda: all_free(small), "aborted, and pages free again")
        if ended_by_themselves(small) == before:
            return
    raise AssertionError("no stream was aborted")


def test_client_that_disconnects_in_the_queue_is_forgotten(small):
    address = small.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 5}).encode()
    for _ in range(TRIES):  # until both slots were taken when it came
        before = ended_by_themselves(small)
        first = [stream(small), stream(small)]
        for one in first:
            next(one)
        with HeldProcesses(small.pid("engine")):
            taken = ended_by_themselves(small) == before
            if taken:
                with socket.create_connection((address[0], int(address[1]))) as raw:
                    raw.sendall(
                        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                        b"Content-Type: application/json\r\n"
                        + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
                    )  # fmt: skip
                    small.wait(lambda: small.metric("pipeinfer_requests_waiting") == 1, "queued")
                small.wait(lambda: small.metric("pipeinfer_requests_waiting") == 0, "forgotten")
            for one in first:
                one.response.close()
        small.wait(lambda: all_free(small), "pages free again")
        if taken:
            assert ended_by_themselves(small) == before
            return
    raise AssertionError("no two streams were under way at a time")


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(small):
    """The last of this server's tests."""
    pids = [stage["pid"] for stage in small.health()["stages"]]

    def taken() -> bool:
        scheduler = statistics(small, "scheduler-0")
        return scheduler["running"] + scheduler["waiting"] == 1

    with ThreadPoolExecutor(1) as pool:
        with HeldProcesses(
            small.pid("engine")
        ):  # so that the stream goes on until the other is refused
            running = pool.submit(lambda: list(stream(small, 100)))
            small.wait(taken, "the stream is taken")
            small.process.send_signal(signal.SIGTERM)
            small.wait(lambda: small.health()["status"] == "draining", "it drains")
            status, refused = small.post("/v1/completions", {"prompt": "x"})
        chunks = [chunk for chunk in running.result() if chunk.choices]
    assert (status, refused["error"]["code"]) == (503, "draining")
    assert chunks[-1].choices[0].finish_reason == "length"
    assert small.process.wait(START) == 0
    assert not [pid for pid in pids if alive(pid)]


def test_in_process_serves_with_one_process():
    with Server("--in-process") as server:
        stages = server.health()["stages"]
        assert {stage["pid"] for stage in stages} == {server.process.pid}
        status, answer = server.post("/v1/completions", {"prompt": "count", "max_tokens": 4})
        assert status == 200
        assert answer["usage"]["completion_tokens"] <= 4
        assert server.stop() == 0


def test_stages_started_by_hand_form_a_pipeline(tmp_path, short_path):
    """The last one first."""
    port = port_row(1)
    topology = tmp_path / "pipeinfer.toml"
    topology.write_text(
        "".join(f'[[stage]]\nname = "{n}"\naddress = "ipc://{short_path}/{n}"\n' for n in STAGES)
    )
    processes = []
    try:
        for name in STAGES[::-1]:
            more = ["--port", str(port)] if name == "gateway" else []
            command = [sys.executable, f"stages/{name}.py", "--topology", str(topology), *more]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment()))
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            try:
                status, text = fetch(f"{url}/v1/models")
            except OSError:
                status = 0
            if status == 200:
                break
            time.sleep(0.1)
        assert "pipeinfer-demo" in text
        body = json.dumps({"prompt": "count", "max_tokens": 3}).encode()
        assert fetch(f"{url}/v1/completions", body)[0] == 200
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(START) for process in processes] == [0] * 5
    finally:
        for process in processes:
            process.kill()


def demo_copy(folder: Path) -> Path:
    shutil.copytree(demo_path(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def unknown_architecture(folder: Path) -> Path:
    file = demo_copy(folder) / "config.json"
    file.write_text(file.read_text().replace("Qwen3ForCausalLM", "GPT2LMHeadModel"))
    return folder


def missing_tensor(folder: Path) -> Path:
    make_checkpoint(folder, "Qwen3ForCausalLM", num_hidden_layers=2)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    file.write_text(json.dumps(config))
    return folder


def no_config(folder: Path) -> Path:
    (demo_copy(folder) / "config.json").unlink()
    return folder


def junk(folder: Path) -> Path:
    folder.mkdir()
    file = folder / "junk.gguf"
    file.write_bytes(b"no GGUF " * 1000)
    return file


@pytest.mark.parametrize(
    ("damage", "named", "how"),
    [
        (missing_tensor, "model.layers.2.", []),
        (demo_copy, "policy 'no.such:Policy'", ["--policy", "no.such:Policy", "--in-process"]),
    ],
)
def test_what_a_stage_finds_is_one_clear_error_before_the_server_listens(
    tmp_path, damage, named, how
):
    server = Server(str(damage(tmp_path / "model")), *how)
    assert server.process.wait(START) == 2
    for thread in server._threads:
        thread.join(START)
    errors = [line for line in server.log if line.startswith("error: ")]
    assert len(errors) == 1 and named in errors[0]
    assert [line for line in server.log if named in line] == errors, "it is said once"
    assert "Traceback" not in "\n".join(server.log)
    assert server.lines.empty(), "it never said ready"


@pytest.fixture
def refused(capsys):
    """refused(*words): the line on stderr of a command that this process runs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # else they are closed

    def refused(*words: str) -> str:
        assert main(words) == 2, words
        [line] = [one for one in capsys.readouterr().err.splitlines() if "bundled demo" not in one]
        assert line.startswith("error: "), words
        return line

    yield refused
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("damage", "named", "how"),
    [
        (unknown_architecture, "GPT2LMHeadModel", ["--model-impl", "pipeinfer"]),
        (no_config, "config.json", []),
        (junk, "is a broken GGUF file", []),
    ],
)
def test_a_checkpoint_that_no_stage_could_load_is_refused_before_any_is_started(
    tmp_path, damage, named, how, refused
):
    assert named in refused("serve", str(damage(tmp_path / "model")), "--port", "0", *how)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--policy", "mixd"), "did you mean 'mixed'?"),
        (("--attention", "flashinfr"), "did you mean 'flashinfer'?"),
        (("--page-size", "16", "--attention", "nothing"), "--attention"),
        (("--max-model-len", "1000000"), "--max-model-len: 1000000 is more than"),
        (("--chat-template", "/no/such/file"), "--chat-template: cannot read /no/such/file"),
        (("--tp", "0"), "--tp"),
        (("--kv-pages", "many"), "--kv-pages"),
        (("/no/such/folder",), "/no/such/folder"),
    ],
)
def test_what_can_be_known_is_refused_before_any_stage_is_started(words, named, refused):
    assert named in refused("serve", "--port", "0", *words)


def test_wrong_usage_ends_with_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer", "serve", "--no-such-flag"],
        capture_output=True, text=True, env=environment(), timeout=START, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "error: unknown flag --no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said_after_what_is_wrong_anyway_and_before_a_download(refused):
    taken_by = f"is taken by process {os.getpid()} "
    elsewhere = ["--topology", str(ROOT / "stages/three-hosts.toml"), "--on", "gpu-a"]
    cases = [
        (["/no/such/folder"], "/no/such/folder"),
        (["/no/such/folder", *elsewhere], "/no/such/folder"),
        ([str(ROOT / "README.md")], "is a file"),
        (["--policy", "fast"], "--policy"),
        ([], taken_by),
        (["someone/some-model"], taken_by),
    ]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, named in cases:
            assert named in refused("serve", "--port", port, *words)


def test_a_host_with_gateways_alone_listens(tmp_path):
    """No engine here says that it can start, and none is waited for."""
    curve.create_key_pair(tmp_path, curve.DEFAULT_KEY)
    port = port_row(5)
    entries = [
        f'[[stage]]\nname = "{name}"\nhost = "engines"\naddress = "tcp://192.0.2.1:{7000 + 10 * n}"'
        for n, name in enumerate(STAGES[1:])
    ]
    entries += [
        '[[stage]]\nname = "gateway"\nhost = "edge"\nbind = "127.0.0.1"',
        f'address = "tcp://192.0.2.2:{port + 1}"',
    ]
    (tmp_path / "hosts.toml").write_text("\n".join(['keys = "."', *entries]))
    server = Server("--topology", str(tmp_path / "hosts.toml"), "--on", "edge", port=port)
    server.url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return server.get("/health")[0] == 503
        return False

    try:
        server.wait(answers, "it listens", START)
    finally:
        server.kill()


def child(server: Server, name: str) -> int:
    """The process id of a stage as soon as it runs, ready or not; 0 if it does not yet."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(file.read_text().rsplit(")", 1)[1].split()[1])
            words = file.with_name("cmdline").read_text().split("\0")
            if parent == server.process.pid and "pipeinfer.runtime" in words and name in words:
                return int(file.parent.name)
    return 0


def test_stages_killed_while_they_start_are_started_again_and_go_with_their_parent():
    server, stages = Server(), ("gateway", "tokenizer")
    try:
        for stage in stages:
            os.kill(server.wait(lambda: child(server, stage), f"{stage} runs"), signal.SIGKILL)  # noqa: B023
        server.wait_ready()
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        for stage in stages:
            said = f"{stage}-0 ended (SIGKILL)"
            server.wait(lambda: any(said in line for line in server.log), said)  # noqa: B023
        pids = [stage["pid"] for stage in server.health()["stages"]]
        server.kill()
        server.wait(lambda: not any(alive(pid) for pid in pids), "children gone")
    finally:
        server.kill()
