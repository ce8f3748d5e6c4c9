"""Lines of code are counted as the words say: no blanks, no comments, no docstrings."""

from __future__ import annotations

import json

import pytest

from lines import cli
from lines.counting import code_lines

# Lines that count end with "# 1", beside those that MORE is for.
KNOWN = '''\
#!/usr/bin/env python
"""A module
and what it is for.
"""

import os  # 1


class Thing:  # 1
    """Says what it is"""

    size = 3  # 1
    """No docstring: it is not the first."""

    def area(self):  # 1
        "In one line"
        # a comment

        text = """a string

        # no comment"""
        return (
            self.size,
            text,
        )


async def wait(é="ä"): "told beside é"  # 1


async def more():  # 1
    """In two parts, """ \\
    "one after another"
    f"{os}"  # 1


def number():  # 1
    3  # 1
'''
MORE = 1 + 3 + 4  # the string in the class; one on three lines; a statement on four


def test_a_file_whose_count_is_known():
    expected = sum(line.endswith("# 1") for line in KNOWN.splitlines()) + MORE
    assert code_lines(KNOWN) == expected == 17


@pytest.mark.parametrize("text", ["", "\n\n", "# a\n# b", '"""Only a docstring."""\n', "'a' 'b'"])
def test_nothing_that_runs_counts_nothing(text):
    assert code_lines(text) == 0


def test_rooms_of_any_checkout_largest_first(tmp_path, capsys):
    for name, text in {
        "package/__init__.py": '"""A name."""\n\nx = 1\n',
        "package/hall/a.py": "x = 1\n# nothing\n",
        "package/hall/deep/b.py": "x = 1\ny = 2\n",
        "package/empty/__init__.py": "",
    }.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    out = tmp_path / "lines.json"
    assert cli.main([str(tmp_path), "--json", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"total": 4, "files": 4, "rooms": {"hall": 3, ".": 1, "empty": 0}}
    assert list(said["rooms"]) == ["hall", ".", "empty"]
    assert json.loads(out.read_text())["metrics"] == said


def test_a_folder_without_code_is_an_error(tmp_path, capsys):
    assert cli.main([str(tmp_path)]) == 2
    assert "no Python files" in capsys.readouterr().err


def test_a_folder_without_src_is_counted_itself(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/one.py").write_text('"""No code."""\nx = 1\n')
    assert cli.main([str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == 1
