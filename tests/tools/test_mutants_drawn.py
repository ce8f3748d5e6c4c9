"""Mutants are small changes that a program may notice, drawn from a seed; nothing else is."""

from __future__ import annotations

import ast

import pytest

pytest.importorskip("cosmic_ray", reason="of the extra `mutants`")

from mutants import mutations
from mutants.areas import AREAS, ROOT

KNOWN = mutations.operators()
EXCLUDED = '''\
"""1 + 1"""

from dataclasses import dataclass

__all__ = ("thing",)
LIMIT = 100


@dataclass(frozen=True, slots=True)
class Thing:
    size: int | None


def thing(x: int | None) -> int | None:
    """x == 1"""
    log.error("%s", x + 1)
'''
INCLUDED = """\
FEW = 3


def thing(box, x=0):
    box.x = 5 if x else False
    box.go()
    while box.x == x:
        return x + 1
"""


def all_of(text: str) -> list[str]:
    found = mutations.changes(text, KNOWN)
    new = (mutations.changed(text, c, KNOWN) for changes in found.values() for c in changes)
    return [one for one in new if one is not None]


def test_where_nothing_can_be_noticed_nothing_is_changed():
    """Only a decorator can go here, and a call."""
    made = all_of(EXCLUDED.replace("log.error", "tell"))
    assert {mutations.diff(EXCLUDED.replace("log.error", "tell"), new, "") for new in made}
    kept = [new for new in all_of(EXCLUDED) if "@dataclass" in new]
    assert kept == []


@pytest.mark.parametrize(
    "new",
    [
        "FEW = 4",
        "5 if not x else False",
        "5 if x else True",
        "    pass\n    box.go()",
        "    pass\n    while",
        "while box.x <= x",
        "return x // 1",
        "return x + 2",
        "x= 1",
    ],
)
def test_what_matters_is_changed(new):
    assert any(new in text for text in all_of(INCLUDED))


def test_every_change_is_python_and_another_program():
    made = all_of(INCLUDED)
    assert len(made) > 20
    dumps = {ast.dump(ast.parse(text)) for text in made}
    assert ast.dump(ast.parse(INCLUDED)) not in dumps


def test_a_seed_draws_the_same_and_more_of_them_begin_with_the_same():
    few, many, other = (
        mutations.draw(*a) for a in ((0, "recovery", 5), (0, "recovery", 9), (1, "recovery", 9))
    )
    assert many[:5] == few
    assert {(m.path, m.change) for m in many} != {(m.path, m.change) for m in other}


def test_an_edit_elsewhere_draws_the_same_changes(tmp_path):
    for file in AREAS["recovery"].files():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / file).read_text()
        (tmp_path / file).write_text(
            f"{text}\n\nMORE: tuple[()] = ()\n".replace('"""\n', '"""\n\n', 1)
        )
    before = mutations.draw(0, "recovery", 9)
    after = mutations.draw(0, "recovery", 9, tmp_path)
    assert [(m.path, m.change.operator, m.change.line + 1) for m in before] == [
        (m.path, m.change.operator, m.change.line) for m in after
    ]
