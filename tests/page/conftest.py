"""A real browser for the page: Debian's Chromium, driven by playwright.

Whatever a page says on its console, or throws, fails the test that had it open.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

EVIL = "evil.example.org"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""

BROKEN_WORDS = r"""(selector) => [...document.querySelectorAll(selector)].flatMap((cell) => {
  const words = [], texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode());) {
    for (const { 0: word, index } of text.data.matchAll(/\S+/g)) {
      const range = new Range();
      range.setStart(text, index);
      range.setEnd(text, index + word.length);
      if (new Set([...range.getClientRects()].map(({ top }) => top)).size > 1) words.push(word);
    }
  }
  return words;
})"""
ARGUMENTS = ["--no-sandbox", f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"]


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        pytest.skip("the program chromium is not installed (Debian's package chromium)")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the package playwright is not installed"
    )
    try:
        playwright = sync_api.sync_playwright().start()
    except FileNotFoundError as error:
        pytest.skip(f"the package playwright came without its driver: {error}")
    try:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()
    finally:
        playwright.stop()


@pytest.fixture
def evil() -> str:
    """A name of the web whose owner lets it lead to this host."""
    return EVIL


@pytest.fixture
def open_page(browser):
    """open_page(url, **options of the context): a page; those of a test share nothing."""
    contexts, wrong = [], []

    def heard(message):
        told = "Failed to load resource: the server responded with a status of "
        refused = (f"{told}40", f"{told}501")
        if message.type in ("error", "warning") and not message.text.startswith(refused):
            wrong.append(f"{message.type}: {message.text}")

    def opened(url, init="", **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("console", heard)
        page.on("pageerror", lambda error: wrong.append(f"{error}\n{error.stack}"))
        if init:
            page.add_init_script(init)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def no_violations(browser):
    """no_violations(page): nothing that axe finds is serious or critical."""
    axe = pytest.importorskip(
        "axe_playwright_python.base", reason="the package axe-playwright-python is not installed"
    )
    source = Path(axe.__file__).with_name("axe.min.js").read_text()

    def check(page):
        page.evaluate(source)
        found = page.evaluate("() => axe.run({ resultTypes: ['violations'] })")["violations"]
        bad = [
            f"{one['id']}: {one['help']}: {node['target']} {node['failureSummary']}"
            for one in found
            for node in one["nodes"]
            if one["impact"] in ("serious", "critical")
        ]
        assert bad == []

    return check


@pytest.fixture
def broken_words():
    """broken_words(page, selector): words that stand in more than one line of such elements."""
    return lambda page, selector: page.evaluate(BROKEN_WORDS, selector)
