"""The site of the documents builds with strict links, and asks no host but its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import hooks
from docs_site import built

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("site"))


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


def test_a_picture_with_a_dark_twin_is_both_on_the_site():
    text = "![a](images/page-pipeline.png) ![b](images/soak.png)"
    assert hooks.mapped(text, "docs/page.md", "page.md") == (
        "![a](images/page-pipeline.png#only-light) ![a](images/page-pipeline-dark.png#only-dark) "
        "![b](images/soak.png)"
    )


def test_colours_of_drawings_are_named_once_for_each_scheme():
    """A fixed one would stay as it is in the dark."""
    for path in ROOT.glob("docs/images/*.svg"):
        if path.stem in ("pipeline", "overlap"):
            light, dark = re.findall(r"svg\{(--[^}]*)\}", path.read_text())
            named = re.compile(r"(--\w+):(#[0-9a-f]{3,6})")
            assert dict(named.findall(light)).keys() == dict(named.findall(dark)).keys()
            assert re.findall(r"#[0-9a-f]{3,6}\b", named.sub("", path.read_text())) == [], path


def test_links_are_not_called_as_the_file_that_they_lead_to():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("stages/**/*.md")]
    called = {
        str(path): re.findall(r"(?<!`)\[([\w/-]+\.md)\]\(", path.read_text()) for path in pages
    }
    assert {name: links for name, links in called.items() if links} == {}


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
