"""What the documents say is there: links, flags, settings, metrics, statistics, endpoints, code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from pipeinfer import LLM
from pipeinfer.channels import CHANNELS
from pipeinfer.cli import flags
from pipeinfer.cli.main import COMMANDS
from pipeinfer.gateway.dialects.messages_body import MessagesRequest
from pipeinfer.gateway.dialects.responses_body import ResponsesRequest
from pipeinfer.gateway.foreign_fields import REFUSED
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.lately import Latencies
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.schema import ChatRequest, CompletionRequest
from pipeinfer.runtime.deployment import BIND, KEYS, SECRET
from pipeinfer.runtime.deployment import STAGES as STAGES_VARIABLE
from pipeinfer.scheduler.policies import POLICIES
from pipeinfer.settings import PREFIX, Settings
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.topology import Entry
from servers import STAGES, environment

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / n for n in ("README.md", "CHANGELOG.md", "SECURITY.md")]
    + [*ROOT.glob("docs/*.md"), *ROOT.glob("stages/*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def text(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def first_cells(table_of: str) -> list[str]:
    """The first column of all tables of a page, without headings."""
    return re.findall(r"^\| ([^|]+?) \|", table_of, re.MULTILINE)


def test_every_hop_of_a_requests_way_is_a_function_that_is_there():
    """`Class.method`, `function` and `file.py` of the table, in the one section that has them."""
    section = text("docs/architecture.md").split("## A request's way")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    source = ROOT / "src/pipeinfer"
    defined = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined |= {node.name}
                defined |= {f"{node.name}.{n.name}" for n in node.body if hasattr(n, "name")}
            elif isinstance(node, ast.FunctionDef):
                defined.add(node.name)
    for row in rows:
        named = re.findall(r"`([\w./]+)`", row.split("|")[2])
        assert named
        for name in named:
            there = (source / name).exists() if name.endswith(".py") else name in defined
            assert there, f"{name}: {row}"


@every_page
def test_internal_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@every_page
def test_python_and_toml_blocks_are_valid(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
    for block in blocks(page, "toml"):
        tomllib.loads(block)


def known_flags() -> set[str]:
    settings = {"--" + name.replace("_", "-") for name in Settings.__struct_fields__}
    asked = {option for a in flags.parser("x", "")._actions for option in a.option_strings}
    sources = [
        path
        for top in ("tools", "src", "stages", "tests/gpu", "tests/clients")
        for path in (ROOT / top).rglob("*.py")
    ]
    added = re.findall(r'"(--[a-z][a-z-]+)"', "\n".join(p.read_text() for p in sources))
    others = {
        "--build",
        "--profile",
        "--scale",
        "--storage",
        "--version",
        "--help",
    }  # docker's, Prometheus' and argparse's own
    return settings | asked | set(added) | others


@every_page
def test_flags_that_are_named_exist(page):
    words = page.read_text()
    if page.name == "migrating.md":  # what stands before "here" is another server's
        words = "\n".join(re.findall(r"^\|[^|]*\|([^|]*)\|", words, re.M))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", words))
    assert named - known_flags() == set()


@every_page
def test_environment_variables_that_are_named_exist(page):
    named = set(re.findall(r"PIPEINFER_([A-Z_]+)", page.read_text()))
    known = {name.upper() for name in Settings.__struct_fields__} | {"PUBLISH"}
    known |= {name.removeprefix(PREFIX) for name in (STAGES_VARIABLE, KEYS, SECRET, BIND)}
    assert named - known == set()


def test_every_setting_is_documented_with_its_default():
    rows = re.findall(r"^\| `(--[a-z-]+|MODEL)`[^|]*\| ([^|]+) \|", text("docs/settings.md"), re.M)
    documented = {flag.lstrip("-").replace("-", "_").lower(): cell for flag, cell in rows}
    assert set(documented) == set(Settings.__struct_fields__)
    for name, cell in documented.items():
        default = getattr(Settings(), name)
        if isinstance(default, bool):
            assert not default and cell == "off", name
        elif default not in ("",) and default != 0:
            assert cell.startswith(f"`{default}`"), (name, cell)
        elif default == 0:
            assert cell.startswith(("0", "`0`")), (name, cell)


def test_every_metric_is_documented_and_none_besides():
    exposed = re.findall(
        r"^# TYPE (\w+) (\w+)$", Metrics(Health([])).exposition("")[0].decode(), re.M
    )
    real = {name for name, _ in exposed if not name.endswith("_created")}
    rows = re.findall(r"^\| `(pipeinfer_\w+)", text("docs/telemetry.md"), re.M)
    assert set(rows) == real
    named = set(re.findall(r"\bpipeinfer_(?!0)\w+", "\n".join(p.read_text() for p in PAGES)))
    series = {f"{name}{end}" for name in real for end in ("", "_count", "_sum", "_bucket")}
    assert {name for name in named if name.startswith(METRIC_STARTS)} - series == set()


METRIC_STARTS = ("pipeinfer_requests", "pipeinfer_p", "pipeinfer_t", "pipeinfer_i", "pipeinfer_g")


def documented_statistics() -> dict[str, set[str]]:
    section = text("docs/telemetry.md").split("## Statistics")[1].split("\n## ")[0]
    found: dict[str, set[str]] = {}
    stage = ""
    for first, names in re.findall(r"^\| ([^|]*)\| ([^|]+) \|", section, re.M):
        stage = first.strip() or stage
        found.setdefault(stage, set()).update(re.findall(r"`(\w+)`", names))
    return {stage: names for stage, names in found.items() if stage in STAGES}


OF_EVERY_STAGE = {
    "bad_frames", "fenced", "recordings", "recorded_bytes_total", "recorded_lost_total",
    "flight_bytes", "refused_handshakes_total", "repeated_frames_total", "unsent_total",
}  # fmt: skip


def test_every_statistic_of_a_running_pipeline_is_documented_and_none_besides():
    with LLM(kv_pages=100, threads=1) as llm:
        deadline = time.monotonic() + 30
        while not all(llm.stats().values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        heard = {stage.split("-")[0]: set(stats) for stage, stats in llm.stats().items()}
    heard["gateway"] |= set(Latencies(Metrics(Health([]))).stats(0.0))  # which serves HTTP
    for names in heard.values():
        names -= OF_EVERY_STAGE  # the page names them once
    assert documented_statistics() == heard


def test_every_channel_and_message_is_documented():
    page = text("docs/architecture.md")
    assert set(CHANNELS) <= set(first_cells(page))
    stages = {name: text(f"stages/{name}.md") for name in STAGES}
    takes = {"requests": "tokenizer", "work": "scheduler", "plan": "engine", "result": "scheduler",
             "tokens": "detokenizer", "stops": "scheduler", "text": "gateway"}  # fmt: skip
    for channel, stage in takes.items():
        kinds = CHANNELS[channel]
        for kind in getattr(kinds, "__args__", (kinds,)):
            assert re.search(rf"\b{kind.__name__}\b", stages[stage]), (stage, kind)
            assert re.search(rf"\b{kind.__name__}\b", page), kind


def test_every_parameter_is_documented_as_supported_or_refused():
    page = text("docs/api.md")
    supported, refused = page.split("### Refused")
    refused = refused.split("\n## ")[0]
    built = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    for name in built:
        assert f"`{name}`" in supported, name
    for heading, kind in (("Responses", ResponsesRequest), ("Messages", MessagesRequest)):
        section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        for name in {*kind.__struct_fields__, *kind.refused} - set(REFUSED):
            assert f"`{name}`" in section, name
    for name in REFUSED:
        assert f"`{name}`" in refused, name
        assert f"| `{name}`" not in supported or name in built, name  # of the other kind of body


def test_every_error_code_is_documented():
    sources = [
        *ROOT.glob("src/pipeinfer/gateway/**/*.py"),
        *ROOT.glob("src/pipeinfer/tokenizer/*.py"),
    ]
    whole = "\n".join(p.read_text() for p in sources)
    codes = set(re.findall(r'code="([a-z_]+)"', whole))
    codes |= set(re.findall(r'"(invalid_\w+|\w+_not_found|unsupported_parameter)"', whole))
    codes -= {"invalid_request_error"}
    assert {code for code in codes if f"`{code}`" not in text("docs/api.md")} == set()


def test_every_policy_and_command_is_named():
    for name in POLICIES:
        assert f"`{name}`" in text("docs/architecture.md")
        assert f"`{name}`" in text("docs/settings.md")
    for command in COMMANDS:
        assert f"pipeinfer {command}" in text("README.md")


def test_topology_fields_are_documented_and_the_examples_load():
    page = text("docs/topology.md")
    for name in Entry.__struct_fields__:
        assert f"`{name}`" in page, name
    assert len(topologies.load(ROOT / "stages/three-hosts.toml").hosts()) == 3
    for name in ("pipeinfer.toml", "container.toml"):
        assert len(topologies.load(ROOT / "stages" / name).entries) == len(STAGES)


def test_every_stage_has_a_page_and_a_script_that_says_how_to_use_it():
    for stage in STAGES:
        assert f"stages/{stage}.py" in text(f"stages/{stage}.md")
        done = subprocess.run(
            [sys.executable, f"stages/{stage}.py", "--help"], cwd=ROOT, env=environment(),
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert "--topology" in done.stdout


def test_the_policy_of_the_documentation_serves(tmp_path):
    """The example of docs/architecture.md, as a user would copy it."""
    [source] = blocks(ROOT / "docs/architecture.md", "python")
    name = re.match(r"# (\w+)\.py", source)
    assert name is not None
    (tmp_path / f"{name[1]}.py").write_text(source)
    [option] = re.findall(r"--policy (\w+:\w+)", text("docs/architecture.md"))
    program = (
        "from pipeinfer import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    with LLM(policy='{option}', kv_pages=100, threads=1) as llm:\n"
        "        params = SamplingParams(max_tokens=4, ignore_eos=True)\n"
        "        print(len(llm.generate(['count'] * 3, params, use_tqdm=False)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["3"], done.stderr


def test_changelog_begins_with_this_version():
    from pipeinfer import __version__

    versions = re.findall(r"^## (\S+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == __version__
