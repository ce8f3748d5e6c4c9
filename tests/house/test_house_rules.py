"""The rules of the house that a machine can check, over every module of src/ and tools/."""

from __future__ import annotations

import ast
import gc
import shutil
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from pipeinfer.settings import Settings

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path
    for folder in ("src", "tools", "stages")
    for path in (ROOT / folder).rglob("*.py")
    if "node_modules" not in path.parts  # of others, fetched to build the page's libraries
)
NAMES = [str(path.relative_to(ROOT)) for path in MODULES]

FEW_FIELDS = 4
OWN_KINDS = {
    "PartialSum": "what a product hands on is a tensor, which has no methods of ours, or this",
    "SamplingParams": "a caller of LLM gives one, or a list of them",
    "RequestParams": "so may a caller of LLM, who has one of a recording or a test",
    "LoRARequest": "a caller of LLM gives one, or a list of them",
}
LIGHT_STAGES = ("gateway", "tokenizer", "scheduler", "detokenizer")
IMPORT_SECONDS = 2.0  # of processor time, all that a stage without a model may take to import

FLAGS = {
    "host", "port", "served_model_name", "api_key", "chat_template", "revision", "device",
    "dtype", "load_format", "tp", "dp", "routing", "max_model_len", "max_running",
    "max_step_tokens", "policy", "overlap_depth", "cache", "page_size", "kv_pages",
    "memory_fraction", "attention", "cuda_graph_max_batch", "no_cuda_graph", "seed",
    "record", "topology", "in_process", "log_level",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def trees_are_no_garbage():
    """A million objects, which nobody need look through, now or in later tests."""
    gc.disable()
    yield
    for cached in (tree, walked, classes):
        cached.cache_clear()
    gc.enable()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def walked(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imported(path: Path) -> set[str]:
    names = set()
    for node in walked(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def imported_modules(path: Path) -> set[str]:
    """With the names that are taken from packages, which may be modules."""
    names = set()
    for node in walked(path):
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


def test_each_module_opens_with_what_it_is_for():
    for path in MODULES:
        if path.name != "__init__.py" or path.read_text().strip():  # a package may be empty
            assert ast.get_docstring(tree(path)), path


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """(file, class) of all that src/ has."""
    own = [p for p in MODULES if p.is_relative_to(ROOT / "src")]
    nodes = [(str(path.relative_to(ROOT)), node) for path in own for node in walked(path)]
    return [(name, node) for name, node in nodes if isinstance(node, ast.ClassDef)]


def test_no_two_public_classes_have_one_name():
    files: dict[str, list[str]] = {}
    for file, node in classes():
        files.setdefault(node.name, []).append(file)
    assert files
    public = {name: at for name, at in files.items() if not name.startswith("_")}
    assert {name: at for name, at in public.items() if len(at) > 1} == {}


def named(node: ast.expr | None) -> str:
    """The last word of a name: `Message` of `messages.Message`; "" if it is none."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return getattr(node, "attr", getattr(node, "id", ""))


def heirs(first: set[str]) -> set[str]:
    """Names of classes that come from one of those named, by whatever steps."""
    found = set(first)
    while True:
        more = {n.name for _, n in classes() if found & set(map(named, n.bases))} - found
        if not more:
            return found
        found |= more


def public(path: Path):
    """Functions and methods that others may call, and those that Python calls."""
    waiting: list[ast.AST] = [tree(path)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            name = getattr(node, "name", "_")
            if name.startswith("_") and not name.endswith("__"):
                continue
            if isinstance(node, ast.ClassDef):
                waiting.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def test_no_public_signature_says_any():
    """JSON has types of its own, in params.py; what may be anything is an object."""
    found = []
    for path in [p for p in MODULES if p.is_relative_to(ROOT / "src")]:
        for node in public(path):
            every = [node.args, node.returns] if node.returns is not None else [node.args]
            if "Any" in {named(part) for one in every for part in ast.walk(one)}:
                found.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert found == []


def test_isinstance_chooses_no_behaviour():
    """It may tell what comes from outside: plain values, other libraries' objects, errors, and
    messages where they arrive. Kinds of our own are told apart by what they do."""
    errors = heirs({"Exception", "ValueError", "RuntimeError"})
    own = {node.name for _, node in classes()} - heirs({"Message"}) - errors
    asked = set()
    for path in [p for p in MODULES if p.is_relative_to(ROOT / "src")]:
        for node in walked(path):
            if isinstance(node, ast.Call) and named(node.func) == "isinstance":
                asked |= {named(part) for part in ast.walk(node.args[1])}
            elif isinstance(node, ast.MatchClass):
                asked.add(named(node.cls))
    assert asked & own == set(OWN_KINDS)


def test_messages_are_built_by_keyword():
    """Those of more than a few fields: of many in a row, two are soon mixed up."""
    path = ROOT / "src/pipeinfer/messages.py"
    kinds = [node for node in tree(path).body if isinstance(node, ast.ClassDef)]
    large = {
        node.name
        for node in kinds
        if sum(isinstance(part, ast.AnnAssign) for part in node.body) > FEW_FIELDS
    }
    assert {"Plan", "TokenizedRequest", "Heartbeat"} <= large
    found = []
    for name, path in zip(NAMES, MODULES, strict=True):
        nodes = walked(path)
        known = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "pipeinfer.messages"
            for alias in node.names
            if alias.name in large
        }
        for node in nodes:
            if isinstance(node, ast.Call) and node.args and named(node.func) in known:
                found.append(f"{name}:{node.lineno}")
    assert found == []


def test_no_two_files_of_tests_have_one_name():
    """Tests stand in no packages, so pytest knows each file by its last name alone: a second
    file of a name is not collected, if both fall to one worker."""
    names = [p.name for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py"]
    assert names
    assert {name for name in names if names.count(name) > 1} == set()


def test_nothing_imports_pickle():
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    guilty = {n: imported(p) & banned for n, p in zip(NAMES, MODULES, strict=True)}
    assert {name: names for name, names in guilty.items() if names} == {}


def test_no_error_is_swallowed_in_silence():
    """What may be ignored is said with contextlib.suppress, by name; a bare except never is."""
    found = []
    for name, path in zip(NAMES, MODULES, strict=True):
        for node in walked(path):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or swallows(node)):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def test_cores_read_no_clock_and_draw_no_entropy():
    banned = {"time", "datetime", "secrets", "uuid", "threading", "socket", "zmq", "asyncio"}
    cores = [p for p in MODULES if p.name == "core.py" or p.parent.name in ("memory", "policies")]
    cores += [p for p in (ROOT / "src/pipeinfer/scheduler").glob("*.py") if p.name != "stage.py"]
    assert cores
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


def test_an_engine_without_a_model_starts_without_torch():
    """That of benchmarks and simulations: it has a core and a driver, and computes nothing."""
    program = (
        "import sys, pipeinfer.engine.core, pipeinfer.engine.executor\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


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
