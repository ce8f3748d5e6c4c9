"""A real browser for the page: Debian's Chromium, driven by playwright.

Whatever a page says on its console, or throws, fails the test that had it open.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

EVIL = "evil.example.org"
PATIENCE = 60_000  # milliseconds for what must come, on a machine that others use, too
DESK = {"width": 1280, "height": 720}
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


@pytest.fixture(scope="session")
def browser(shared):
    """One for all files of this folder: a browser takes two seconds of processor time to start."""
    if not CHROMIUM:
        pytest.skip("the program chromium is not installed (Debian's package chromium)")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the package playwright is not installed"
    )
    try:
        playwright = shared.enter_context(sync_api.sync_playwright())
    except FileNotFoundError as error:
        pytest.skip(f"the package playwright came without its driver: {error}")
    sync_api.expect.set_options(timeout=PATIENCE)
    launched = playwright.chromium.launch(
        executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE
    )
    shared.callback(launched.close)
    return launched


@pytest.fixture
def evil() -> str:
    """A name of the web whose owner lets it lead to this host."""
    return EVIL


@pytest.fixture(scope="module")
def reused(browser):
    """The page that tests have one after another: a new one costs more than most of them do."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def open_page(browser, reused):
    """open_page(url, **options of the context): a page; tests share nothing, nor do those of one
    test. cuts: its connections are lost on purpose."""
    wrong, opened = [], []

    def heard(message):
        told = "Failed to load resource: the server responded with a status of "
        refused = (f"{told}40", f"{told}501")
        if message.type in ("error", "warning") and not message.text.startswith(refused):
            wrong.append(f"{message.type}: {message.text}")

    def open_one(
        url,
        init="",
        cuts=False,
        viewport=DESK,
        color_scheme="light",
        reduced_motion="no-preference",
        **options,
    ):
        new = init or options or opened
        page = browser.new_context(**options).new_page() if new else reused
        lost = "Failed to load resource: net::ERR_"
        hears = {
            "console": lambda m: (cuts and m.text.startswith(lost)) or heard(m),
            "pageerror": lambda error: wrong.append(f"{error}\n{error.stack}"),
        }
        opened.append((page, hears))
        page.set_default_timeout(PATIENCE)
        for event, hear in hears.items():
            page.on(event, hear)
        if init:
            page.add_init_script(init)
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        page.goto(url)
        return page

    yield open_one
    for page, hears in opened:
        if page is reused:
            forget(page, hears)
        else:
            page.context.close()
    assert wrong == []


def forget(page, hears) -> None:
    """All that a test left in it."""
    for event, hear in hears.items():
        page.remove_listener(event, hear)
    page.unroute_all()
    origin = page.evaluate("() => origin")
    page.goto("about:blank")  # closes its databases
    session = page.context.new_cdp_session(page)
    session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
    session.detach()


@pytest.fixture
def no_violations(browser):
    """no_violations(page, *selectors): nothing that axe finds, of all or in these, is serious or
    critical."""
    axe = pytest.importorskip(
        "axe_playwright_python.base", reason="the package axe-playwright-python is not installed"
    )
    source = Path(axe.__file__).with_name("axe.min.js").read_text()

    run = "(within) => axe.run(within, { resultTypes: ['violations'] })"

    def check(page, *selectors):
        page.evaluate(source)
        found = page.evaluate(run, {"include": list(selectors) or ["html"]})["violations"]
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
