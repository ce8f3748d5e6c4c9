"""What the documents say is there: links, flags, settings, metrics, statistics, endpoints, code.

Most pages in docs/reference are made from code, which test_reference.py compares: here is seen that
the code says something of everything, and that pages written by hand do, too.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
import time
import tomllib
from pathlib import Path

import pytest

from docs.http import statistics
from pipeinfer import LLM, SamplingParams
from pipeinfer import topology as topologies
from pipeinfer.cli import chat_model
from pipeinfer.cli.main import COMMANDS
from pipeinfer.engine.profiling import PHASES
from pipeinfer.engine.start import PHASES as START
from pipeinfer.gateway.errors import ALTERNATIVES, CODES, IGNORED_FIELDS, POOLING, REFUSED
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.metrics import Metrics, RollingLatencies
from pipeinfer.gateway.openapi import ENDPOINTS, ERRORS, document
from pipeinfer.messages import CHANNELS
from pipeinfer.other_servers import refused
from pipeinfer.runtime.memory_holder import HOLDER_VARIABLE
from pipeinfer.settings import POLICIES, PREFIX, Settings, settings_help
from pipeinfer.topology import VARIABLES, StageEntry
from servers import STAGES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / n for n in ("README.md", "CHANGELOG.md", "SECURITY.md")]
    + [*ROOT.glob("docs/**/*.md"), *ROOT.glob("stages/**/*.md")]
)
# Pages that name flags of other servers.
OF_OTHERS = ("from-vllm.md", "from-sglang.md", "other-servers.md")


def text(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Without fenced code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
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


def test_internal_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, link)
            assert target.is_relative_to(ROOT), (page, link)
            if anchor:
                assert anchor in anchors(target), (page, link)


def test_python_and_toml_blocks_are_valid():
    for page in PAGES:
        for block in blocks(page, "python"):
            compile(block, str(page), "exec")
        for block in blocks(page, "toml"):
            try:
                tomllib.loads(block)
            except tomllib.TOMLDecodeError as error:
                raise AssertionError(page) from error


def known_flags() -> set[str]:
    settings = {"--" + name.replace("_", "-") for name in Settings.__struct_fields__}
    asked = {
        option
        for a in chat_model.chat_model_parser("x", "", "", ())._actions
        for option in a.option_strings
    }
    sources = [ROOT / "tests/conftest.py"]
    sources += [
        path
        for top in ("tools", "src", "stages", "tests/gpu", "tests/clients")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "other_servers.py"
    ]
    added = re.findall(r'"(--[a-z][a-z0-9-]+)"', "\n".join(p.read_text() for p in sources))
    others = {
        "--build",
        "--force-recreate",
        "--line-buffered",
        "--profile",
        "--scale",
        "--signal",
        "--storage",
        "--version",
        "--wait",
        "--help",
    }  # docker's, grep's, Prometheus' and argparse's own
    return settings | (asked - refused().keys()) | set(added) | others


def test_flags_that_are_named_exist():
    known = known_flags()
    for page in PAGES:
        others = refused().keys() if page.name in OF_OTHERS else set()
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", page.read_text()))
        assert named - known - others == set(), page


def test_environment_variables_that_are_named_exist():
    known = {name.upper() for name in Settings.__struct_fields__} | {"PUBLISH"}
    known |= {name.removeprefix(PREFIX) for name in (*VARIABLES, HOLDER_VARIABLE)}
    for page in PAGES:
        assert set(re.findall(r"PIPEINFER_([A-Z_]+)", page.read_text())) <= known, page


def test_every_setting_is_explained_with_its_default():
    told = settings_help()
    sections = text("docs/reference/settings.md").split("\n### ")[1:]
    shown = {name: rest for name, _, rest in (section.partition("\n") for section in sections)}
    assert set(shown) == {name.replace("_", "-") for name in told}
    for name, said in told.items():
        default = getattr(Settings(), name)
        assert bool(said.unset) == (default in ("", 0)), name  # what nothing means has to be said
        [cell] = re.findall(r"^- Default: (.+)$", shown[name.replace("_", "-")], re.M)
        if default is False:
            assert cell.startswith("off: "), name
        elif default not in ("", 0):
            assert cell == f"`{default}`", name


def test_every_metric_is_documented_and_none_besides():
    exposed = re.findall(
        r"^# TYPE (\w+) (\w+)$", Metrics(Health([])).exposition("")[0].decode(), re.M
    )
    real = {name for name, _ in exposed if not name.endswith("_created")}
    rows = re.findall(r"^- `(pipeinfer_\w+)", text("docs/reference/metrics.md"), re.M)
    assert set(rows) == real
    named = set(re.findall(r"\bpipeinfer_(?!0)\w+", "\n".join(p.read_text() for p in PAGES)))
    series = {f"{name}{end}" for name in real for end in ("", "_count", "_sum", "_bucket")}
    assert {name for name in named if name.startswith(METRIC_STARTS)} - series == set()


METRIC_STARTS = ("pipeinfer_requests", "pipeinfer_p", "pipeinfer_t", "pipeinfer_i", "pipeinfer_g")


def test_every_statistic_of_a_running_pipeline_is_documented_and_none_besides():
    with LLM(kv_pages=100, threads=1, in_process=True) as llm:
        deadline = time.monotonic() + 300
        while not all(llm.stats().values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        heard = {stage.split("-")[0]: set(stats) for stage, stats in llm.stats().items()}
    of_http = RollingLatencies(Metrics(Health([]))).stats(0.0)
    heard["gateway"] |= {"connections", *of_http}  # of a gateway that serves HTTP
    listed = statistics()
    of_each = set(listed["all stages"])
    assert of_each <= set.union(*heard.values())
    for stage, names in heard.items():
        assert set(listed[stage]) == names - of_each, stage
    assert len(listed["engine"]) == len(set(listed["engine"]))


def test_every_phase_of_an_engines_start_and_of_its_steps_is_explained():
    listed = statistics()
    assert [f"start_{one}_seconds" for one in START] == [
        name for name in listed["engine"] if name.startswith("start_") and name != "start_seconds"
    ]
    assert tuple(listed["phases of a step"]) == PHASES


def test_every_channel_and_message_is_documented():
    page = text("docs/architecture.md")
    assert set(CHANNELS) <= set(first_cells(page))
    reference = text("docs/reference/messages.md")
    for channel, kinds in CHANNELS.items():
        assert f"\n## {channel}\n" in reference
        for kind in getattr(kinds, "__args__", (kinds,)):
            assert f"\n### {kind.__name__}\n" in reference
    stages = {name: text(f"stages/{name}.md") for name in STAGES}
    takes = {"requests": "tokenizer", "work": "scheduler", "plan": "engine", "result": "scheduler",
             "tokens": "detokenizer", "stops": "scheduler", "text": "gateway"}  # fmt: skip
    for channel, stage in takes.items():
        kinds = CHANNELS[channel]
        for kind in getattr(kinds, "__args__", (kinds,)):
            assert re.search(rf"\b{kind.__name__}\b", stages[stage]), (stage, kind)
            assert re.search(rf"\b{kind.__name__}\b", page), kind


def test_every_field_of_a_body_is_explained_and_every_other_refused_or_ignored():
    bodies = {one.body for one in ENDPOINTS if one.body is not None}
    schemas = document()["components"]["schemas"]
    page = text("docs/reference/requests.md")
    taken, _, rest = page.partition("\n## Refused\n")
    assert rest
    for body in bodies:
        for name in body.__struct_fields__:
            assert schemas[body.__name__]["properties"][name].get("description"), name
            assert f"`{name}`" in taken, name
        for name in body.unsupported_fields:
            assert f"`{name}`" in page, name
    for name in (*REFUSED, *IGNORED_FIELDS):
        assert f"`{name}`" in rest, name
    fields = {name for body in bodies for name in body.__struct_fields__}
    assert set(ALTERNATIVES) <= {*REFUSED, *POOLING}
    assert {name for names in ALTERNATIVES.values() for name in names} <= fields


def test_every_endpoint_is_explained():
    page = text("docs/reference/endpoints.md")
    for one in ENDPOINTS:
        assert f"\n## {one.method.upper()} {one.path}\n" in page
        assert one.summary and one.details, one.path


def test_every_error_code_is_documented_and_none_besides():
    sources = [
        *ROOT.glob("src/pipeinfer/gateway/**/*.py"),
        *ROOT.glob("src/pipeinfer/tokenizer/*.py"),
    ]
    whole = "\n".join(p.read_text() for p in sources)
    whole, tables = re.subn(r"\nCODES: .*?\n}\n", "\n", whole, flags=re.DOTALL)
    assert tables == 1
    codes = set(re.findall(r'code="([a-z_]+)"', whole))
    codes |= set(re.findall(r'"(invalid_\w+|\w+_not_found|unsupported_parameter)"', whole))
    codes -= {"invalid_request_error"}
    assert codes <= set(CODES)
    page = text("docs/reference/errors.md")
    for code, (statuses, _) in CODES.items():
        assert f'"{code}"' in whole, code
        assert f"`{code}`" in page, code
        assert set(statuses) <= set(ERRORS), code


def test_the_table_of_timeouts_has_the_values_of_the_code():
    """Each constant stands in the file beside it. Where a row has one constant or one flag, and its
    value is a number of seconds, that is the constant's, or the flag's default."""
    section = text("docs/operations.md").split("## All timeouts")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    compared = 0
    for row in rows:
        places = re.findall(
            r"(?:`([A-Z_]{4,})`(?:, `[A-Z_]+`| and `[A-Z_]+`)* in )`([\w/]+\.py)`", row[-1]
        )
        for name, file in places:
            assert name in (ROOT / "src/pipeinfer" / file).read_text(), row
        flags = re.findall(r"^`--([a-z-]+)`", row[2]) if len(row) == 4 else []
        if not re.fullmatch(r"[\d.,]+", value := row[1]):
            continue
        seconds = float(value.replace(",", ""))
        if flags:
            assert getattr(Settings(), flags[0].replace("-", "_")) == seconds, row
        else:
            [(name, file)] = places
            assert constant(file, name) == seconds, row
        compared += 1
    assert compared > 15


def constant(file: str, name: str) -> float:
    """The number that a module of the package gives `name`."""
    [found] = re.findall(rf"^{name} = ([\d_.]+)", text(f"src/pipeinfer/{file}"), re.MULTILINE)
    return float(found)


def test_every_policy_and_command_is_named():
    for name in POLICIES:
        assert f"`{name}`" in text("docs/architecture.md")
        assert f"`{name}`" in text("docs/reference/settings.md")
    for command in COMMANDS:
        assert f"\n## pipeinfer {command}\n" in text("docs/reference/commands.md")


def test_topology_fields_are_documented_and_the_examples_load():
    page = text("docs/topology.md")
    for name in StageEntry.__struct_fields__:
        assert f"`{name}`" in page, name
    assert len(topologies.load(ROOT / "stages/three-hosts.toml").hosts()) == 3
    for name in ("pipeinfer.toml", "container.toml"):
        assert len(topologies.load(ROOT / "stages" / name).entries) == len(STAGES)


def test_every_stage_has_a_page_and_a_script_that_says_how_to_use_it(monkeypatch, capsys):
    for stage in STAGES:
        script = f"stages/{stage}.py"
        assert script in text(f"stages/{stage}.md")
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert "--topology" in capsys.readouterr().out


def test_the_policy_of_the_documentation_serves(tmp_path, monkeypatch):
    """The example of docs/architecture.md, as a user would copy it."""
    [source] = blocks(ROOT / "docs/architecture.md", "python")
    name = re.match(r"# (\w+)\.py", source)
    assert name is not None
    (tmp_path / f"{name[1]}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    [option] = re.findall(r"--policy (\w+:\w+)", text("docs/architecture.md"))
    with LLM(policy=option, kv_pages=100, threads=1, in_process=True) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        assert len(llm.generate(["count"] * 3, params, use_tqdm=False)) == 3


def test_changelog_begins_with_this_version():
    from pipeinfer import __version__

    versions = re.findall(r"^## (\S+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == __version__
