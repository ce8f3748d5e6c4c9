"""The site of the documents builds with strict links, and asks no host but its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import hooks
from servers import environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder], cwd=ROOT,
        env={**environment(), "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_of_the_repository_is_one_of_the_site(site):
    inside = {path.relative_to(ROOT / "docs").with_suffix("") for path in ROOT.glob("docs/**/*.md")}
    pages = (page for page in map(Path, hooks.OUTSIDE.values()) if page.suffix == ".md")
    outside = {page.with_suffix("") for page in pages}
    made = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert made - {Path("404")} == inside | outside


def test_no_page_loads_anything_from_elsewhere(site):
    for path in site.rglob("*.html"):
        page = path.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\" >]+)", page)
        loaded += re.findall(r"<link[^>]* href=\"?([^\" >]+)", page)
        assert loaded
        assert [url for url in loaded if re.match(r"(\w+:)?//", url)] == [], path
        assert 'class="mermaid"' not in page, "its script would come from elsewhere"
    for path in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)|@import", path.read_text()) == []


def test_settings_have_anchors_of_their_flags(site):
    page = (site / "reference/settings.html").read_text()
    assert 'id="kv-pages"' in page and 'id="itl-target"' in page


def test_links_of_the_repository_lead_to_pages_of_the_site():
    text = (
        "[a](docs/api.md#x) [b](stages/engine.md) [c](https://x.org/a.md)\n![d](docs/images/i.png)"
    )
    assert hooks.mapped(text, "README.md", "project/about.md") == (
        "[a](../api.md#x) [b](../stages/engine.md) [c](https://x.org/a.md)\n![d](../images/i.png)"
    )
    text = (
        "[a](../CHANGELOG.md) [b](../stages/monitoring/README.md) [c](#here) [d](start/laptop.md)"
    )
    assert hooks.mapped(text, "docs/api.md", "api.md") == (
        "[a](project/changelog.md) [b](stages/monitoring.md) [c](#here) [d](start/laptop.md)"
    )
    text = "```\n[a](../README.md)\n```"
    assert hooks.mapped(text, "docs/api.md", "api.md") == text


def test_a_list_below_a_line_of_text_is_a_list():
    text = "Some:\n- one\n  more\n- two\n\nText\nand\n1. three\n\n```\na\n- b\n```"
    assert hooks.mapped(text, "docs/api.md", "api.md") == (
        "Some:\n\n- one\n  more\n- two\n\nText\nand\n\n1. three\n\n```\na\n- b\n```"
    )


def test_search_finds_how_to_restart_an_engine(site):
    """A section whose title has the words, which weigh most."""
    sections = json.loads((site / "search/search_index.json").read_text())["docs"]
    found = [one["location"] for one in sections if one["title"].lower() == "restart an engine"]
    assert found == ["operations.html#restart-an-engine"]


def test_the_site_has_colours_and_a_logo_of_its_own(site):
    page = (site / "index.html").read_text()
    assert "assets/site.css" in page
    assert re.search(r'<img src="images/logo\.svg" alt="logo"', page)
    assert 'href="images/favicon.svg"' in page


def test_drawings_and_formulas_fit_the_column():
    """At 1280 pixels the column of text holds 96 characters of code."""
    for name in ("architecture", "step-budget"):
        page = (ROOT / f"docs/{name}.md").read_text()
        drawn = page.split("\n```")[1::2]
        assert [line for block in drawn for line in block.splitlines() if len(line) > 96] == []
