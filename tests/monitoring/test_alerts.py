"""The alerts by Prometheus' own checker, and its tests of them on series that were made up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from exposition import started
from monitoring_files import ALERTS, FOLDER, RULES, missing

WHY_NOT = missing("promtool")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
TESTS = Path(__file__).with_name("alerts_test.yaml")


def promtool(*words: object) -> tuple[int, str]:
    command = ["promtool", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_the_files_are_valid():
    code, said = promtool("check", "rules", FOLDER / "alerts.yaml")
    assert code == 0 and f"{len(ALERTS)} rules found" in said, said
    code, said = promtool("check", "config", FOLDER / "prometheus.yaml")
    assert code == 0, said


def test_alerts_fire_when_they_are_due_and_not_before():
    code, said = promtool("test", "rules", TESTS)
    assert code == 0, said


def test_each_alert_is_seen_both_silent_and_firing():
    checks = [
        c for one in yaml.safe_load(TESTS.read_text())["tests"] for c in one["alert_rule_test"]
    ]
    seen = {(check["alertname"], bool(check.get("exp_alerts"))) for check in checks}
    names = [alert["alert"] for alert in ALERTS]
    assert seen == {(name, fires) for name in names for fires in (True, False)}


@pytest.mark.parametrize("changed", ["vector(1) > 2", "vector(1)"], ids=["never", "always"])
def test_alerts_that_are_wrong_would_be_noticed(changed, tmp_path):
    """One of each kind alone, so that each has tests that hold it."""
    tests, files = yaml.safe_load(TESTS.read_text()), []
    for alert in ALERTS:
        rules = [{**one, "expr": changed} if one is alert else one for one in ALERTS]
        groups = [{**RULES["groups"][0], "rules": rules}]
        name = alert["alert"]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"groups": groups}))
        files.append(tmp_path / f"tests-{name}.yaml")
        files[-1].write_text(yaml.safe_dump({**tests, "rule_files": [f"{name}.yaml"]}))
    _, said = promtool("test", "rules", *files)
    assert said.count("Unit Testing:") == said.count("FAILED:\n") == len(ALERTS), said


def test_promtool_finds_nothing_to_complain_of_in_metrics_but_vllms_own_names():
    theirs = (
        " metric names should not contain ':'",
        'iteration_tokens_total non-counter metrics should not have "_total" suffix',
    )
    for vllm in (False, True):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=started(vllm), capture_output=True, text=True
        )
        said = done.stderr.splitlines()
        left = [line for line in said if not line.endswith(theirs)]
        assert left == [] and all(line.startswith("vllm:") for line in said)
        assert done.returncode == (3 if vllm else 0)
