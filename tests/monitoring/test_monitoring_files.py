"""Dashboard and alerts ask for what /metrics has, and are whole. Needs no Prometheus."""

from __future__ import annotations

import re

import pytest
import yaml
from exposition import started
from monitoring_files import (
    ADDED,
    ALERTS,
    DASHBOARD,
    FOLDER,
    OTHERS,
    ROOT,
    expressions,
    labels,
    named,
    panel_expressions,
)
from prometheus_client.parser import text_string_to_metric_families


def exposed() -> dict[str, set[str]]:
    """{series: its labels} of a gateway that has had a request and knows a group."""
    found: dict[str, set[str]] = {}
    for line in started(vllm=False).splitlines():
        if match := re.match(r"(pipeinfer_\w+)(?:\{(.*)\})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_asks_for_series_and_labels_that_are_there(expression):
    known = exposed()
    series = named(expression)
    assert series <= set(known)
    had = ADDED.union(*(known[name] for name in series))
    others = [name for name in OTHERS if re.search(rf"\b{name}\b", expression)]
    assert series or others
    assert labels(expression) <= had.union(*(OTHERS[name] for name in others))


def test_the_dashboard_shows_what_one_looks_for():
    """By its metrics, and not by its titles."""
    shown = set().union(*(named(e) for es in panel_expressions().values() for e in es))
    assert shown >= {
        "pipeinfer_requests_total", "pipeinfer_requests_running", "pipeinfer_requests_waiting",
        "pipeinfer_time_to_first_token_seconds_bucket", "pipeinfer_inter_token_seconds_bucket",
        "pipeinfer_prompt_tokens_total", "pipeinfer_generated_tokens_total",
        "pipeinfer_pages_free", "pipeinfer_pages", "pipeinfer_prefix_cache_hit_ratio",
        "pipeinfer_stage_up", "pipeinfer_stage_restarts_total",
    }  # fmt: skip


def test_panels_have_places_of_their_own_and_the_source_that_is_chosen():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24, "Grafana's grid has 24 columns"
        assert not taken & cells, panel["title"]
        taken |= cells
        assert [t["refId"] for t in panel["targets"]] == list("ABCDEFGH")[: len(panel["targets"])]
        sources = [panel["datasource"], *(t["datasource"] for t in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${source}"}
        assert all('instance=~"$server"' in target["expr"] for target in panel["targets"])
    variables = {one["name"]: one["type"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"source": "datasource", "server": "query"}


def test_an_alert_says_what_to_look_at_and_the_documentation_what_to_do():
    page = (ROOT / "docs/operations.md").read_text()
    rows = re.findall(r"^\| `(Pipeinfer\w+)` \|", page, re.MULTILINE)
    assert rows == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert "$labels.instance" in alert["annotations"]["summary"]
        assert alert["annotations"]["description"].endswith(".")


def test_grafana_finds_prometheus_where_compose_puts_it():
    [source] = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    listens = source["url"].removeprefix("http://")
    assert f"--web.listen-address={listens}" in services["prometheus"]["command"]
    [provider] = yaml.safe_load((FOLDER / "provisioning/dashboards/pipeinfer.yaml").read_text())[
        "providers"
    ]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/grafana.json" in mounted


def test_metrics_are_named_and_explained_as_promtools_linter_asks():
    """Of vLLM's names all but the colon, and the end of one."""
    for family in text_string_to_metric_families(started(vllm=True)):
        name = family.name.removeprefix("vllm:")
        assert family.documentation and re.fullmatch(r"[a-z][a-z0-9_]*", name), family.name
        assert (family.type == "counter") == any(
            sample.name.endswith("_total") for sample in family.samples
        ), family.name
        if name != "iteration_tokens_total":
            assert not name.endswith(("_count", "_sum", "_bucket", "_total")), family.name
        assert not re.search(r"milliseconds|minutes|hours|percent\b|_ms_|gauge|counter", name)
        assert family.type != "histogram" or name.endswith(("_seconds", "_tokens", "_tokens_total"))


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text",
        # Prometheus 2.42, and 3
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,*/*;q=0.1",
        "text/plain;version=1.0.0;escaping=underscores",
    ],
)
def test_series_have_the_same_names_in_every_format(accept):
    def names(text: str) -> set[str]:
        series = {re.split("[ {]", line)[0] for line in text.splitlines() if line[0] != "#"}
        return {name for name in series if not name.endswith("_created")}

    assert names(started(vllm=True, accept=accept)) == names(started(vllm=True))
