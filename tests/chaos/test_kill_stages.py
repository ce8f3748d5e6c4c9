"""The storm of kill_stages.py, in short: ranks of two groups die, and no text is another one."""

from __future__ import annotations

from kill_stages import run


def test_no_text_changes_while_ranks_of_two_groups_are_killed():
    done = run(8, 2, 60, 5, "engine", "--tp", "2", "--dp", "2")
    assert sum(map(len, done["pauses"].values())) == 2, "both kills hit streams under way"
    assert done["answers"] >= 8
