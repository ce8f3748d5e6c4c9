"""`pipeinfer serve` on a terminal: what it says while it starts, and when it has started."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from terminal import CTRL_C, Terminal

from pipeinfer import topology as topologies
from pipeinfer.settings import Settings
from servers import environment

PROGRAM = [sys.executable, "-m", "pipeinfer"]
OVER = "\r\x1b[K"  # what a line is written over with


def test_a_start_says_what_it_waits_for_then_what_runs_where_and_how_to_use_it():
    with Terminal([*PROGRAM, "serve", "--port", "0", "--kv-pages", "300"], environment()) as shown:
        waited = shown.wait_for("ready http://127.0.0.1:")
        port = shown.wait_for("\r\n").strip()
        shown.type(CTRL_C)
        assert shown.process.wait(60) == 0
    assert re.search(rf"{re.escape(OVER)}starting \(\d+ s\): engine: loading libraries", waited)
    assert waited.endswith(f"{OVER}ready http://127.0.0.1:"), "on a line of its own"
    lines = [line.rpartition(OVER)[2] for line in waited.split("\n")[:-1]]
    [demo, placed, use] = [re.sub(r"^[\d:]+ I [\w-]+ ", "", line) for line in lines]
    assert demo == "no model given: serving the bundled demo model 'pipeinfer-demo'"
    assert re.fullmatch(
        r"pipeinfer-demo runs on the CPU with \d+ threads?, in float32; memory for 4,800 tokens "
        r"\(0\.01 GiB\)",
        placed,
    )
    url = f"http://127.0.0.1:{port}"
    assert use == f"chat in a browser at {url}, send requests to {url}/v1, stop with Ctrl-C"


def test_a_stage_that_is_started_by_hand_says_what_it_waits_for():
    with tempfile.TemporaryDirectory() as folder:  # whose path is short enough for sockets
        file = Path(folder, "pipeinfer.toml")
        file.write_text(topologies.local(Settings(), f"ipc://{folder}/").to_toml())
        starts_by_hand(file)


def starts_by_hand(file: Path) -> None:
    command = [*PROGRAM[:2], "pipeinfer.runtime", "scheduler", "--topology", str(file)]
    with Terminal(command, environment()) as shown:
        shown.wait_for("s): scheduler: waiting (")
        shown.type(CTRL_C)
        assert shown.process.wait(60) == 0


def test_details_are_there_if_asked_for():
    program = (
        "import logging, sys\n"
        "from pipeinfer.runtime.logs import DETAILS, set_up_logging\n"
        "from pipeinfer.settings import Settings\n"
        "for level, form in (('info', 'text'), ('debug', 'text'), ('info', 'json')):\n"
        "    set_up_logging(Settings(log_level=level, log_format=form), 'engine-0-0')\n"
        "    logging.getLogger(DETAILS).info('pages of 16, %s', f'{level} {form}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert re.findall(r"pages of 16, (\w+ \w+)", done.stderr) == ["debug text", "info json"]
