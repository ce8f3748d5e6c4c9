"""The files of stages/monitoring/, and the expressions in them. Runs nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "stages/monitoring"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
OTHERS = {"up": {"job"}}  # what Prometheus itself knows, with its labels
ADDED = {"instance", "job"}  # labels that Prometheus adds


def missing(program: str) -> str:
    """Why a program of Prometheus cannot be run here, or nothing."""
    return "" if shutil.which(program) else f"needs {program}, of Debian's package `prometheus`"


def panel_expressions() -> dict[str, list[str]]:
    """Of each panel of the dashboard."""
    return {p["title"]: [t["expr"] for t in p["targets"]] for p in DASHBOARD["panels"]}


def expressions() -> list[str]:
    """All that are asked of Prometheus, but for its own series of alerts."""
    shown = [one for many in panel_expressions().values() for one in many]
    return shown + [alert["expr"] for alert in ALERTS]


def named(expression: str) -> set[str]:
    """The series of ours that it names."""
    return set(re.findall(r"\bpipeinfer_\w+", expression))


def labels(expression: str) -> set[str]:
    """The labels that it chooses or sums by."""
    chosen = re.findall(r"[{,]\s*(\w+)\s*(?:=~?|!~|!=)", expression)
    sums = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    return set(chosen) | {one.strip() for group in sums for one in group.split(",")}
