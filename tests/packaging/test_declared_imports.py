"""Every package that the code, its tests or its tools import is one that pyproject.toml names.

A package that only another package brings along goes away with that other one: on a fresh machine
alone, since an environment that exists keeps it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Run with environments of their own: clients of many kinds, GPU machines, servers to compare with.
ELSEWHERE = ("tests/clients/", "tests/gpu/", "tools/mutants/", "tools/bench/llama_generate.py")
MADE_BY_THEIR_TOOL = {"tests/grammars/tool_schemas.py"}  # its imports name what to install first


def normal(name: str) -> str:
    return re.split(r"[\[<>=!; ]", name)[0].lower().replace("_", "-")


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    return {normal(name) for name in [*project["dependencies"], *groups["dev"], *groups["docs"]]}


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_imported_packages_are_declared():
    distributions = packages_distributions()
    names = declared()
    files = [path for folder in ("src", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    own = {part for path in files for part in path.relative_to(ROOT).with_suffix("").parts}
    undeclared = {}
    for path in files:
        place = str(path.relative_to(ROOT))
        if place.startswith(ELSEWHERE) or place in MADE_BY_THEIR_TOOL:
            continue
        for module in imports(ast.parse(path.read_text())):
            top = module.partition(".")[0]
            brought_by = {normal(name) for name in distributions.get(top, ())}
            # Optional packages, which this environment may lack, are imported under conditions.
            if top in sys.stdlib_module_names or top in own or not brought_by:
                continue
            if not brought_by & names:
                undeclared[module] = place
    assert not undeclared


def test_a_package_that_another_one_brings_would_be_noticed():
    assert "idna" not in declared()  # comes with aiohttp
    source = "import idna.core\nfrom idna import encode"
    assert list(imports(ast.parse(source))) == ["idna.core", "idna"]
