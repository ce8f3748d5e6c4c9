"""Pages of a server in a real browser, open and looked at while something is measured.

Knows playwright and Debian's Chromium; nothing of what is measured.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pipeinfer.settings import ConfigurationError

PATIENCE = 120.0  # seconds until all are open; as many again for their end
# From when a page is open: how often something on it changes, at most once for each event.
COUNT = """() => {
  window.changes = 0;
  window.since = performance.now();
  new MutationObserver(() => { window.changes += 1; }).observe(document.querySelector(".board"),
    { subtree: true, childList: true, characterData: true, attributes: true });
}"""
# At its end.
SEEN = """() => ({
  followed: !document.hidden && document.querySelector(".feed-note").hidden
    && !document.querySelector(".board").classList.contains("stale"),
  requests: document.querySelectorAll(".requests tbody tr").length,
  changes_per_s: 1000 * window.changes / (performance.now() - window.since),
})"""


class NotShown(RuntimeError):
    """A page could not be opened, or did not follow the server to the end."""


def check() -> str:
    """The path of Chromium. ConfigurationError if it, or playwright, is missing."""
    if importlib.util.find_spec("playwright") is None:
        raise ConfigurationError("--browsers needs playwright: pip install 'pipeinfer[dev]'")
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        raise ConfigurationError("--browsers needs the program chromium: Debian's package chromium")
    return found


class _Pages(threading.Thread):
    """So many pages of one browser process, each a context of its own, on the view of the
    pipeline. A thread: playwright's plain interface takes the event loop of the one it is in. The
    browser gets the upper half of the cores, as that thread has them, so that the server is not
    starved. (Priorities it would set itself.)"""

    def __init__(self, url: str, count: int) -> None:
        super().__init__(name="browsers", daemon=True)
        self._url, self._count, self._chromium = url, count, check()
        self._over = threading.Event()
        self.opened = threading.Event()
        self.seen: list[dict[str, float]] = []  # by each page, at the end
        self.failure: BaseException | None = None

    def run(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[len(cores) // 2 :])  # of this thread, and what it starts
        try:
            self._show()
        except BaseException as error:
            self.failure = error
        finally:
            self.opened.set()

    def finish(self) -> None:
        """Closes them. Raises NotShown."""
        self._over.set()
        self.join(PATIENCE)
        self.look()
        if self.is_alive():
            raise NotShown("the browser does not end")

    def look(self) -> None:
        """Raises NotShown if something went wrong so far."""
        if self.failure is not None:
            raise NotShown(f"the browser: {self.failure}") from self.failure

    def _show(self) -> None:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=self._chromium, args=sandbox)
            pages = [browser.new_context().new_page() for _ in range(self._count)]
            for page in pages:
                page.goto(f"{self._url}/#pipeline")
            for page in pages:
                page.locator(".board").wait_for(timeout=PATIENCE * 1e3)
                page.evaluate(COUNT)
            self.opened.set()
            self._over.wait()
            for page in pages:
                seen = page.evaluate(SEEN)
                if not seen.pop("followed"):
                    raise NotShown("a page was hidden, or has lost the server")
                self.seen.append(seen)
            browser.close()


@contextmanager
def opened(url: str, count: int) -> Iterator[list[dict[str, float]]]:
    """They are open inside. The list is filled at the end: of each page, how many `requests` it had
    listed, and its `changes_per_s`.

    Raises ConfigurationError as `check`, NotShown if a page did not follow the server throughout.
    """
    pages = _Pages(url, count)
    pages.start()
    if not pages.opened.wait(PATIENCE):
        raise NotShown(f"{count} pages are not open after {PATIENCE:.0f} s")
    pages.look()
    try:
        yield pages.seen
    finally:
        pages.finish()
