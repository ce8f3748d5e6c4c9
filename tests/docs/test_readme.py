"""The commands of README.md and of the quick starts, run as a new user would; only ports differ,
and how long an answer may be."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipeinfer.cli.main import COMMANDS
from pipeinfer.demo import ABOUT
from servers import Server, environment

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
LINES = SHELL.replace("\\\n", " ").splitlines()
ADDRESS = "http://127.0.0.1:8000"
STARTS = [ROOT / "docs/start" / f"{name}.md" for name in ("laptop", "one-gpu", "debug-a-stage")]
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def server():
    """Commands find this one, and no server of another test."""
    with (
        tempfile.TemporaryDirectory(prefix="pi-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        with Server("--threads", "1") as running:
            yield running


def run(command: list[str], **more) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300,
        check=False, **more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def line(start: str) -> list[str]:
    """The one command of the README that begins so, with this interpreter's scripts."""
    [found] = [found for found in LINES if found.startswith(start)]
    scripts = str(Path(sys.executable).parent)
    return [word.replace(".venv/bin", scripts) for word in shlex.split(found)]


def example(imported: str) -> str:
    [found] = [block for block in PYTHON if imported in block]
    return found


@needs_curl
def test_curl_line_gets_an_answer(server):
    command = [word.replace(ADDRESS, server.url) for word in line("curl")]
    answer = json.loads(run([*command, "-sS"]))
    assert answer["choices"][0]["message"]["content"] == ABOUT["What is pipeinfer?"]


def curls(page: Path) -> list[str]:
    """Commands that ask, of one page, each as the shell gets it."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if block.startswith("curl")]


@needs_curl
@pytest.mark.parametrize("page", STARTS, ids=[page.stem for page in STARTS])
def test_curl_lines_of_a_quick_start_get_answers(server, page):
    asked = curls(page)
    assert asked
    for block in asked:
        command = block.replace(ADDRESS, server.url).replace("curl ", "curl -sS --fail ", 1)
        command = command.replace('"max_tokens": 1500', '"max_tokens": 50')
        assert '"content":"' in run(["sh", "-c", command])


@needs_curl
def test_the_schema_of_the_tutorial_gives_what_its_page_says(server):
    page = ROOT / "docs/start/debug-a-stage.md"
    [block] = [block for block in curls(page) if "response_format" in block]
    command = block.replace(ADDRESS, server.url).replace("curl ", "curl -sS ", 1)
    answer = json.loads(run(["sh", "-c", command]))
    said = answer["choices"][0]["message"]["content"]
    assert said == '{"sum": 22}' and f"`{said}`" in page.read_text()


def test_openai_example_streams_an_answer(server):
    program = example("from openai")
    assert ADDRESS in program
    out = run([sys.executable, "-c", program.replace(ADDRESS, server.url)])
    assert out.split()[:5] == ["3", "4", "5", "6", "7"]


def test_offline_example_prints_two_answers():
    about, count = run([sys.executable, "-c", example("import LLM")]).splitlines()
    assert about == f"{ABOUT['What is pipeinfer?']!r} stop"
    assert count == "'3 4 5 6 7 8 9 10 11 12' stop"


def test_generate_line_counts(server):
    assert run(line(".venv/bin/pipeinfer generate")).split()[:5] == ["3", "4", "5", "6", "7"]


def test_chat_line_answers(server):
    out = run(line(".venv/bin/pipeinfer chat"), input="What is pipeinfer?\n/exit\n")
    assert ABOUT["What is pipeinfer?"] in out


def test_targets_of_make_that_are_named_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make (\w+)", SHELL, re.MULTILINE))
    assert {"serve", "test"} <= named <= targets


def test_it_is_read_from_the_first_answer_to_the_links():
    order = [
        *("docs/images/", "make serve", "curl http", "make test", "OpenAI(", "LLM()"),
        *("pipeinfer chat", "| Qwen3-0.6B, tokens/s |", "| command | does |", "## Read on"),
    ]
    found = [README.index(mark) for mark in order]
    assert found == sorted(found)


def test_every_command_is_in_the_table_of_commands():
    table = README.split("## All commands")[1].split("\n## ")[0]
    assert set(re.findall(r"`pipeinfer ([\w-]+)`", table)) == set(COMMANDS)


def test_the_readme_alone_compares_and_the_home_page_leads_there():
    home = (ROOT / "docs/index.md").read_text()
    assert README.split("## Beside other servers\n\n")[1].startswith("| | pipeinfer |")
    assert "](../README.md#beside-other-servers)" in home
    assert "| | pipeinfer |" not in home
