"""Which test modules are quick: those that start no process and load no model.

Found out from what a module imports, so that nobody has to mark anything: itself, the helpers of
its folder and of tests/, and the fixtures of its folder's conftest.py that it asks for.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
HEAVY = frozenset(("torch", "transformers", "triton", "subprocess", "multiprocessing", "servers"))
HEAVY_NAMES = frozenset(("LLM", "AsyncLLM", "Ordeal", "Storm"))
QUICK_ANYWAY = frozenset((
    "test_house_rules.py",  # a second of linting that finds much
    "test_engine_core.py", "test_requests.py",  # torch holds a few words for them
))  # fmt: skip


def is_quick(path: Path) -> bool:
    """Whether the test module at `path` is."""
    if path.name in QUICK_ANYWAY:
        return True
    fixtures = _heavy_fixtures(path.parent)
    asked = set(re.findall(r"\w+", path.read_text())) & fixtures
    return not asked and not _is_heavy(path)


@cache
def _is_heavy(path: Path, seen: frozenset[Path] = frozenset()) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names, wanted = {alias.name.split(".")[0] for alias in node.names}, set()
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
            wanted = {alias.name for alias in node.names}
        else:
            continue
        if names & HEAVY or wanted & HEAVY_NAMES:
            return True
        for helper in _helpers(path, names) - seen:
            if _is_heavy(helper, seen | {path}):
                return True
    return False


def _helpers(path: Path, names: set[str]) -> set[Path]:
    paths = [folder / f"{name}.py" for name in names for folder in (path.parent, TESTS)]
    return {path for path in paths if path.exists()}


@cache
def _heavy_fixtures(folder: Path) -> frozenset[str]:
    """Names of all that a heavy conftest.py defines."""
    conftest = folder / "conftest.py"
    if folder == TESTS or not conftest.exists() or not _is_heavy(conftest):
        return frozenset()
    body = ast.parse(conftest.read_text()).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in body if isinstance(node, kinds))
