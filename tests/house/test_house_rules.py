"""The rules of the house that a machine can check, over every module of src/ and tools/."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from pipeinfer.settings import Settings

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path for folder in ("src", "tools", "stages") for path in (ROOT / folder).rglob("*.py")
)
NAMES = [str(path.relative_to(ROOT)) for path in MODULES]

FILE_LINES, FUNCTION_LINES, DOCSTRING_LINES = 400, 40, range(2, 7)
# Exceptions stand here with their reason, or not at all.
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
ONE_LINE_IS_ENOUGH = {"__main__.py", "__init__.py"}  # a name in front of another module
LIGHT_STAGES = ("gateway", "tokenizer", "scheduler", "detokenizer")
IMPORT_SECONDS = 2.0  # of processor time, all that a stage without a model may take to import

FLAGS = {
    "host", "port", "served_model_name", "api_key", "chat_template", "revision", "device",
    "dtype", "load_format", "tp", "dp", "routing", "max_model_len", "max_running",
    "max_step_tokens", "policy", "overlap_depth", "cache", "page_size", "kv_pages",
    "memory_fraction", "attention", "cuda_graph_max_batch", "no_cuda_graph", "seed",
    "record", "topology", "in_process", "log_level",
}  # fmt: skip


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree(path)) if isinstance(node, kinds)]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def imported_modules(path: Path) -> set[str]:
    """With the names that are taken from packages, which may be modules."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def swallows(handler: ast.ExceptHandler) -> bool:
    body = handler.body[0]
    empty = isinstance(body, ast.Pass) or (
        isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant)
    )
    return len(handler.body) == 1 and empty


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_module_opens_with_what_it_is_for(path):
    if not path.read_text().strip():
        assert path.name == "__init__.py", "only a package may be empty"
        return
    docstring = ast.get_docstring(tree(path)) or ""
    if path.name in ONE_LINE_IS_ENOUGH or path.parent.name == "stages":
        assert docstring
        return
    lines = len(inspect.cleandoc(docstring).splitlines())
    assert lines in DOCSTRING_LINES, f"a docstring of {lines} lines"


def test_files_are_short():
    lengths = {n: len(p.read_text().splitlines()) for n, p in zip(NAMES, MODULES, strict=True)}
    long = {name: length for name, length in lengths.items() if length >= FILE_LINES}
    assert {n: length for n, length in long.items() if n not in LONG_FILES} == {}
    assert set(long) == LONG_FILES, "an exception that is not needed any more"


def test_functions_are_short():
    long = {}
    for name, path in zip(NAMES, MODULES, strict=True):
        for node in functions(path):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= FUNCTION_LINES:
                long[f"{name}:{node.name}"] = length
    assert {name: length for name, length in long.items() if name not in LONG_FUNCTIONS} == {}
    assert set(long) == LONG_FUNCTIONS, "an exception that is not needed any more"


def test_nothing_imports_pickle():
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    guilty = {n: imported(p) & banned for n, p in zip(NAMES, MODULES, strict=True)}
    assert {name: names for name, names in guilty.items() if names} == {}


def test_no_error_is_swallowed_in_silence():
    """What may be ignored is said with contextlib.suppress, by name; a bare except never is."""
    found = []
    for name, path in zip(NAMES, MODULES, strict=True):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or swallows(node)):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def test_cores_read_no_clock_and_draw_no_entropy():
    banned = {"time", "datetime", "secrets", "uuid", "threading", "socket", "zmq", "asyncio"}
    cores = [p for p in MODULES if p.name == "core.py" or p.parent.name in ("memory", "policies")]
    cores += [p for p in (ROOT / "src/pipeinfer/scheduler").glob("*.py") if p.name != "stage.py"]
    assert len(cores) > 20
    guilty = {str(path.relative_to(ROOT)): imported(path) & banned for path in cores}
    assert {name: names for name, names in guilty.items() if names} == {}


def test_no_module_is_a_drawer_for_odds_and_ends():
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [name for name, path in zip(NAMES, MODULES, strict=True) if path.name in drawers] == []


@pytest.mark.parametrize("stage", LIGHT_STAGES)
def test_stage_without_a_model_starts_light(stage):
    program = (
        "import sys, time\n"
        f"import pipeinfer.runtime.entry, pipeinfer.{stage}.stage\n"
        "heavy = [n for n in ('torch', 'transformers', 'pipeinfer.engine') if n in sys.modules]\n"
        "print(time.process_time(), *heavy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, *heavy = done.stdout.split()
    assert heavy == []
    assert float(seconds) < IMPORT_SECONDS


def test_dependencies_point_one_way():
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert command is not None, "import-linter is not installed"
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_tools_import_each_other_in_no_circle():
    """The contracts of pyproject.toml see the package alone."""
    tools = {
        ".".join(path.relative_to(ROOT / "tools").with_suffix("").parts): path
        for path in (ROOT / "tools").rglob("*.py")
    }
    graph = {name: imported_modules(path) & tools.keys() for name, path in tools.items()}
    assert any(graph.values())
    assert list(TopologicalSorter(graph).static_order())


def test_promised_flags_are_there():
    fields = set(Settings.__struct_fields__)
    assert FLAGS - fields == set()


def test_promised_names_are_exported():
    import pipeinfer

    assert {"LLM", "AsyncLLM", "SamplingParams"} <= set(pipeinfer.__all__)
