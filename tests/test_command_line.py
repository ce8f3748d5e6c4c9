"""Command lines: errors of one line that say what was meant, and help that fits a screen."""

from __future__ import annotations

import pytest

from pipeinfer.command_line import CommandLine, counted, did_you_mean, none_of


def made() -> CommandLine:
    line = CommandLine("tool", "Does it.", essential=("--kv-pages",))
    line.add_argument("words", nargs="+", metavar="WORD")
    line.add_argument("--kv-pages", type=int, help="how many")
    line.add_argument("--dtype", choices=("auto", "float32"), help="in what")
    either = line.add_mutually_exclusive_group()
    either.add_argument("--json", action="store_true")
    either.add_argument("--stream", action="store_true")
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-page", "3"], "unknown flag --kv-page; did you mean --kv-pages?"),
        (["--kv-page=3", "a"], "unknown flag --kv-page; did you mean --kv-pages?"),
        (["--KV-PAGES", "3"], "unknown flag --KV-PAGES; did you mean --kv-pages?"),
        (["a", "--xyz"], "unknown flag --xyz (`tool --help` says more)"),
        (["a", "--kv-pages"], "--kv-pages: expected one argument (`tool --help` says more)"),
        (["a", "-x"], "unexpected argument '-x' (`tool --help` says more)"),
        (["a", "-kv-pages"], "unexpected argument '-kv-pages'; did you mean --kv-pages?"),
        ([], "WORD is missing (`tool --help` says more)"),
        (
            ["a", "--dtype", "flot32"],
            "--dtype: 'flot32' is none of auto, float32; did you mean 'float32'?",
        ),
        (
            ["a", "--json", "--stream"],
            "--stream: not allowed with --json (`tool --help` says more)",
        ),
    ],
)
def test_an_error_is_one_line_that_says_what_was_meant(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        made().parse_args(words)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_words_may_stand_before_and_behind_flags():
    assert made().parse_args(["a", "--kv-pages", "3", "b", "c"]).words == ["a", "b", "c"]
    assert made().parse_args(["a", "--", "--kv-page"]).words == ["a", "--kv-page"]


def test_help_shows_the_flags_that_matter_and_names_the_one_that_shows_all(capsys):
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            made().parse_args([flag])
        assert end.value.code == 0
        shown[flag] = capsys.readouterr().out
    assert "usage: tool WORD [WORD ...] [FLAG ...]" in shown["--help"]
    assert "--kv-pages" in shown["--help"] and "--dtype" not in shown["--help"]
    assert "`tool --help-all` shows all 6 flags." in shown["--help"]
    assert "usage: tool WORD [WORD ...] [FLAG ...]" in shown["--help-all"]
    assert "--kv-pages" in shown["--help-all"] and "--dtype" in shown["--help-all"]


def test_only_a_name_that_is_close_is_proposed():
    assert did_you_mean("srve", ["serve", "swap"]) == "; did you mean 'serve'?"
    assert did_you_mean("sw", ["serve", "swap"]) == "; did you mean 'swap'?"
    assert did_you_mean("s", ["serve", "swap"]) == did_you_mean("", ["serve"]) == ""
    assert did_you_mean("frobnicate", ["serve", "swap"]) == ""
    assert none_of("mixd", ["mixed", "fcfs"]) == (
        "'mixd' is none of mixed, fcfs; did you mean 'mixed'?"
    )


def test_one_thing_is_not_said_in_the_plural():
    assert [counted(count, "group") for count in (0, 1, 1.0, 2, 1024)] == [
        "0 groups", "1 group", "1 group", "2 groups", "1,024 groups",
    ]  # fmt: skip
