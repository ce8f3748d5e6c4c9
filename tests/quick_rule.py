"""Which test modules are quick: those that start no process and load no model.

Found out from what a module imports, so that nobody has to mark anything: itself, the helpers of
its folder and of tests/, the tools, and the fixtures of its folder's conftest.py that it asks for.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
TOOLS = TESTS.parent / "tools"
HEAVY = frozenset((
    "torch", "transformers", "triton", "subprocess", "multiprocessing", "servers", "playwright",
    "importlib.util",  # a file by its path, which may import anything
    # What starts processes itself:
    "pipeinfer.grammars.validation.ValidationProcess",
    "pipeinfer.tokenizer.workers.GrammarValidation",
    "pipeinfer.runtime.supervisor.Supervisor", "pipeinfer.trace.snapshot.StateCopier",
))  # fmt: skip
HEAVY_NAMES = frozenset(("LLM", "AsyncLLM", "FaultRun", "Storm"))
QUICK_ANYWAY = frozenset((
    "test_house_rules.py",  # a second of linting that finds much
    "test_engine_core.py", "test_requests.py",  # torch holds a few words for them
))  # fmt: skip

# (module or "", names) of statements that import; read as Python, a file takes ten times as long.
IMPORT = re.compile(
    r"^[ \t]*(?:from ([\w.]+) )?import (\([^)]*\)|\w[\w., ]*)(?:[ \t]*#.*)?$", re.MULTILINE
)
SKIPPED_WITHOUT = re.compile(r"""importorskip\(\s*["']([\w.]+)""")  # imports, where they are there


@cache
def is_quick(path: Path) -> bool:
    """Whether the test module at `path` is."""
    if path.name in QUICK_ANYWAY:
        return True
    fixtures = _heavy_fixtures(path.parent)
    asked = fixtures and set(re.findall(r"\w+", path.read_text())) & fixtures
    return not asked and not _is_heavy(path)


@cache
def _is_heavy(path: Path) -> bool:
    """Whether it, or a helper that it imports, directly or not, imports what is heavy."""
    todo, seen = [path], {path}
    while todo:
        heavy, helpers = _imports(todo.pop())
        if heavy:
            return True
        todo += helpers - seen
        seen |= helpers
    return False


@cache
def _imports(path: Path) -> tuple[bool, frozenset[Path]]:
    """Whether the module itself imports what is heavy; and the helpers that it imports."""
    helpers: set[Path] = set()
    text = path.read_text()
    if any(map(_starts_heavy, SKIPPED_WITHOUT.findall(text))):
        return True, frozenset()
    for module, listed in IMPORT.findall(text):
        wanted = {name.split()[0] for name in listed.strip("()").split(",") if name.strip()}
        names = {module, *(f"{module}.{name}" for name in wanted)} if module else wanted
        if any(map(_starts_heavy, names)) or wanted & HEAVY_NAMES:
            return True, frozenset()
        helpers |= _helpers(path, names)
    return False, frozenset(helpers)


def _starts_heavy(name: str) -> bool:
    """Whether a module of this dotted name, or what it is part of, is heavy."""
    parts = name.split(".")
    return any(".".join(parts[: end + 1]) in HEAVY for end in range(len(parts)))


def _helpers(path: Path, names: set[str]) -> set[Path]:
    """Files of those modules of these names that are the tests' own, or tools."""
    files = {f"{name.replace('.', '/')}.py" for name in names}
    folders = (path.parent, TESTS, TOOLS)
    return {folder / file for folder in folders for file in files if _is_there(folder, file)}


@cache
def _is_there(folder: Path, file: str) -> bool:
    return (folder / file).exists()


@cache
def _heavy_fixtures(folder: Path) -> frozenset[str]:
    """Names of all that a heavy conftest.py defines."""
    conftest = folder / "conftest.py"
    if folder == TESTS or not conftest.exists() or not _is_heavy(conftest):
        return frozenset()
    body = ast.parse(conftest.read_text()).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in body if isinstance(node, kinds))
