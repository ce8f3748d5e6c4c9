"""`pipeinfer` and its subcommands: what --help shows and imports, and what mistyped words give."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeinfer.cli.main import COMMANDS, main
from servers import environment

# Each costs a command's --help more than all that it needs.
HEAVY = {
    "torch", "numpy", "transformers", "aiohttp", "uvloop", "tokenizers", "jinja2", "tqdm",
    "huggingface_hub", "llguidance", "gguf", "pipeinfer.llm", "pipeinfer.gateway.app",
}  # fmt: skip
IMPORTED = """
import contextlib, io, sys
from pipeinfer.cli.main import main
for command in sys.argv[1:]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([*command.split(), "--help"])
    print(command, *sys.modules)
"""


def test_help_imports_no_heavy_module():
    commands = [*COMMANDS, ""]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *commands], env=environment(), capture_output=True,
        text=True, check=True, timeout=300,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands), done.stderr
    loaded = {line.split()[0]: HEAVY & set(line.split()[1:]) for line in lines}
    assert not any(loaded.values()), loaded


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_fits_a_screen_and_help_all_shows_the_rest(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            main([*command.split(), flag])
        assert end.value.code == 0
        shown[flag] = capsys.readouterr().out
    flags = {name: set(re.findall(r"^  (--[\w-]+)", text, re.M)) for name, text in shown.items()}
    assert "--help-all" in shown["--help"]
    assert len(flags["--help"]) <= 13 and shown["--help"].count("\n") <= 50
    assert flags["--help"] <= flags["--help-all"] | {"--help-all"}
    assert max(map(len, shown["--help"].splitlines())) <= 80
    if command in ("serve", "generate", "chat", "doctor"):
        assert {"--kv-pages", "--watchdog"} <= flags["--help-all"] - flags["--help"]


def test_help_all_of_the_whole_command_has_the_flags_of_all_subcommands(capsys):
    with pytest.raises(SystemExit):
        main(["--help-all"])
    shown = capsys.readouterr().out
    assert all(f"usage: pipeinfer {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("srve", "unknown command 'srve'; did you mean 'serve'?"),
        ("gen hello", "unknown command 'gen'; did you mean 'generate'?"),
        ("serve --kv-p 3", "unknown flag --kv-p; did you mean --kv-pages?"),
        ("--versoin", "unknown flag --versoin; did you mean --version?"),
        ("serve --prot 3", "unknown flag --prot; did you mean --port?"),
        ("serve --tensor-paralel-size 3",
         "unknown flag --tensor-paralel-size; did you mean --tensor-parallel-size?"),
        ("serve --dtype flot32", "--dtype: 'flot32' is none of auto, float32, bfloat16, float16; "
         "did you mean 'float32'?"),
        ("chat --temprature 1", "unknown flag --temprature; did you mean --temperature?"),
        ("bench http://x --endpoint cha",
         "--endpoint: 'cha' is none of chat, completions; did you mean 'chat'?"),
        ("top --onc", "unknown flag --onc; did you mean --once?"),
        ("help", "unknown command 'help'; did you mean '--help'?"),
        ("version", "unknown command 'version'; did you mean '--version'?"),
        ("serve --kv-pages many", "--kv-pages: 'many' is no whole number"),
        ("serve --port 99999", "--port: must be at most 65535, not 99999"),
        ("serve --dp 100000", "--dp: must be at most 1024, not 100000"),
        ("serve --watchdog inf", "--watchdog: must be at most 86400.0, not inf"),
        ("serve --memory-fraction half", "--memory-fraction: 'half' is no number"),
        ("top --seconds soon", "--seconds: 'soon' is no number (`pipeinfer top --help` says more)"),
        ("top --port x", "--port: 'x' is no whole number (`pipeinfer top --help` says more)"),
        ("topology", "action is missing: check (`pipeinfer topology --help` says more)"),
        ("serve a b", "unexpected argument 'b' (`pipeinfer serve --help` says more)"),
    ],
)  # fmt: skip
def test_a_mistyped_word_is_one_line_that_says_what_was_meant(words, said, capsys):
    try:
        code = main(words.split())
    except SystemExit as end:
        code = end.code
    assert code == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {said}\n")


def test_an_unknown_command_that_resembles_none_is_told_all(capsys):
    assert main(["frobnicate"]) == 2
    assert "there are serve, generate, chat" in capsys.readouterr().err


def test_without_a_command_help_is_shown_and_the_exit_code_is_2(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "serve a model over HTTP" in err


def test_make_help_has_a_line_for_each_target():
    root = Path(__file__).parents[2]
    targets = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.M)
    assert targets is not None
    kept = {k: v for k, v in os.environ.items() if k != "MAKEFLAGS"}
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=root, env=kept, capture_output=True,
        text=True, check=True, timeout=300,
    )  # fmt: skip
    lines = dict(re.findall(r"^  make (\S+) +(\S.*)$", done.stdout, re.M))
    assert set(lines) == set(targets[1].split())
