"""Whoever tries the documentation's commands in a checkout finds it clean afterwards."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
WRITES = {
    "--out", "--json", "--plot", "--record", "--samples", "--html", "--profile-dir", ">", ">>",
}  # fmt: skip
needs_git = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a checkout"
)


def words(line: str) -> list[str]:
    """As a shell reads it; nothing of a line that is none, such as output with one quote."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def written() -> set[str]:
    """What the commands of all pages write below the folder where they are called."""
    found = set()
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in map(words, block.replace("\\\n", " ").splitlines()):
                found |= {after for word, after in pairwise(line) if word in WRITES}
                if line[:1] == ["cp"]:
                    found.add(line[-1])
    return {name for name in found if re.fullmatch(r"[a-z][\w./-]*", name)}


def git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.split()


@needs_git
def test_what_the_documentation_writes_is_ignored():
    names = sorted(written())
    assert {"traces", "mutants.json", "soak.jsonl", "slow.html", "keys.txt"} <= {
        name.rstrip("/") for name in names
    }
    # A folder's pattern holds for what is in it, whether or not it is there already.
    asked = {name if Path(name).suffix else f"{name.rstrip('/')}/x" for name in names}
    assert asked - set(git("check-ignore", "--no-index", *sorted(asked))) == set()


@needs_git
def test_nothing_is_ignored_that_belongs_to_the_checkout():
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []
