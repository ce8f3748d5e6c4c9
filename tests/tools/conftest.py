"""Makes the packages in tools/ importable, as their entry points do; and runs their commands."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeinfer.memory import pages

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))


class ToolRun(NamedTuple):
    """What a command gave: its exit code, the metrics of its result file ({} if it wrote none),
    and what it wrote to stdout and stderr."""

    code: int
    metrics: dict
    out: str
    err: str


@pytest.fixture(autouse=True)
def own_process(monkeypatch) -> Iterator[None]:
    """What commands change of the process that they have for themselves is undone."""
    monkeypatch.setattr(pages, "MIN_SHARED_TOKENS", pages.MIN_SHARED_TOKENS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    loggers = [logging.getLogger(name) for name in (None, "pipeinfer")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def tool_run(tmp_path, capsys) -> Callable[..., ToolRun]:
    """Runs `python tools/TOOL COMMAND ...`, or rather in this process what it calls."""

    def run(tool: str, *words: str) -> ToolRun:
        file = tmp_path / "result.json"
        file.unlink(missing_ok=True)
        try:
            code = importlib.import_module(tool).TOOL.main([*words, "--json", str(file)])
        except SystemExit as end:
            code = end.code
        metrics = {}
        if file.exists():
            result = json.loads(file.read_text())
            assert set(result) == {"schema", "command", "commit", "hardware", "date", "metrics"}
            assert result["command"].startswith(f"python tools/{tool} {words[0]}")
            metrics = result["metrics"]
        return ToolRun(code, metrics, *capsys.readouterr())

    return run
