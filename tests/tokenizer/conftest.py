"""Fixtures over the templates and folders of tokenizer_folders.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import MODEL, TEMPLATES, TOKENIZER_CONFIG, make_tokenizer, write_json


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes config.json, tokenizer.json and tokenizer_config.json (with `fields` changed)."""

    def make(**fields: Any) -> Path:
        write_json(tmp_path / "config.json", MODEL)
        make_tokenizer().save(str(tmp_path / "tokenizer.json"))
        write_json(tmp_path / "tokenizer_config.json", TOKENIZER_CONFIG | fields)
        return tmp_path

    return make


@pytest.fixture(params=sorted(TEMPLATES))
def template(request: pytest.FixtureRequest) -> str:
    return TEMPLATES[request.param]
