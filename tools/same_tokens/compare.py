"""`compare`: where two runs differ: which requests, from which token on, and what else.

Knows results only, as `run` writes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.command_line import read_report
from same_tokens import TOOL

AROUND = 3  # ids shown of both, from where they part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path)


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison.

    "same", "differ": requests in both. "alone": parts or requests of one run only.
    "other_rounding": what else was not the same, and may change the last bits of logits and with
    them an id. "broken": a line for each difference, also where checkpoints are not the same.
    """
    one, other = (read_report(path, TOOL.schema) for path in (options.one, options.other))
    mine, theirs = one["metrics"]["parts"], other["metrics"]["parts"]
    found: dict[str, Any] = {"same": 0, "differ": 0, "alone": sorted(set(mine) ^ set(theirs))}
    lines = []
    for name in sorted(set(mine) & set(theirs)):
        if mine[name]["weights"] != theirs[name]["weights"]:
            lines.append(f"{name}: the checkpoints are not the same")
        asked, answered = mine[name]["requests"], theirs[name]["requests"]
        found["alone"] += [f"{name}/{request}" for request in sorted(set(asked) ^ set(answered))]
        for request in (request for request in asked if request in answered):
            said = _difference(asked[request], answered[request])
            found["differ" if said else "same"] += 1
            lines += [f"{name}/{request}: {said}"] if said else []
    found["other_rounding"] = _reasons(one, other)
    found["broken"] = lines
    return found


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """ "" where they are equal."""
    mine, theirs = one["ids"], other["ids"]
    if mine != theirs:
        pairs = zip(mine, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))
        return f"from token {at} on, {mine[at : at + AROUND]} and {theirs[at : at + AROUND]}"
    if one["finish"] != other["finish"]:
        return f"ends by {one['finish']} and {other['finish']}"
    return ""


def _reasons(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    versions = (one["metrics"]["versions"], other["metrics"]["versions"])
    found = [name for name in versions[0] if versions[0][name] != versions[1].get(name)]
    return found + ["cpu"] * (one["hardware"]["cpu"] != other["hardware"]["cpu"])
