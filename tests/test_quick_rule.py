"""Which modules are quick is found out from what they import, and from what that imports."""

from __future__ import annotations

import pytest

from quick_rule import TESTS, is_quick


@pytest.mark.parametrize(
    "path",
    [
        "chaos/test_storm.py",  # a tool starts its server
        "tools/test_mutants.py",  # and another one pytest
        "page/test_page_scripted.py",  # a browser, which the folder's conftest.py starts
        "page/test_markdown.py",  # by that alone
        "engine/test_short_soak.py",  # a program of another folder, by its path
        "engine/test_masks_in_steps.py",  # a model, by a helper of another folder
        "grammars/test_validation_process.py",  # a process of pipeinfer's own
        "cli/test_top_command.py",
    ],
)
def test_what_starts_a_process_or_loads_a_model_is_not(path: str):
    assert (TESTS / path).exists() and not is_quick(TESTS / path)


@pytest.mark.parametrize(
    "path",
    [
        "chaos/test_links.py",  # of a tool, too
        "grammars/test_masks.py",
        "memory/test_memory_machine.py",
        "pipeline/test_stories.py",
        "test_quick_rule.py",
    ],
)
def test_others_are(path: str):
    assert is_quick(TESTS / path)
