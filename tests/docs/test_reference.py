"""The pages of docs/reference that are made from code are what the code makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import cli
from docs.markdown import kind, prose, sentence

FOLDER = Path(__file__).parents[2] / "docs/reference"


@pytest.mark.parametrize("name", cli.PAGES)
def test_a_page_is_what_the_code_makes(name):
    assert (FOLDER / f"{name}.md").read_text() == cli.PAGES[name](), "python tools/docs reference"


def test_there_is_no_other_page():
    by_hand = {"other-servers", "statistics"}
    assert {path.stem for path in FOLDER.iterdir()} == set(cli.PAGES) | by_hand


def test_a_page_that_differs_is_named_and_then_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "FOLDER", tmp_path)
    monkeypatch.setattr(cli, "PAGES", {"one": lambda: "# One\n", "two": lambda: "# Two\n"})
    (tmp_path / "one.md").write_text("# One\n")
    assert cli.main(["reference", "--check"]) == 1
    assert capsys.readouterr().err == "docs/reference/two.md differs from the code\n"
    assert not (tmp_path / "two.md").exists()
    assert cli.main(["reference"]) == 0
    assert (tmp_path / "two.md").read_text() == "# Two\n"
    assert cli.main(["reference", "--check"]) == 0


def test_a_docstring_becomes_prose_and_a_list():
    said = prose(
        "What it is, in <one>\nline.\n\nMore.\n\n"
        "Attributes:\n- one: a, `b<c`\n- two, three:\n  both: so"
    )
    assert said == (
        "What it is, in &lt;one> line.\n\nMore.\n\n- `one`: a, `b<c`\n- `two`, `three`: both: so"
    )


def test_sentences_and_kinds():
    assert [sentence(text) for text in ("a b", "`a`: b", "It is.", "")] == [
        "A b.", "`a`: b.", "It is.", "",
    ]  # fmt: skip
    integers = {"type": "array", "items": {"type": "integer"}}
    assert kind({"anyOf": [integers, {"type": "string"}, {"type": "null"}]}) == (
        "list of integer or string"
    )
    assert kind({"enum": ["a", "b", None]}) == "`a` or `b`"
