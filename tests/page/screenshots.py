"""Makes the pictures of docs/page.md: `PYTHONPATH=tests python tests/page/screenshots.py [FOLDER]`.

The chat is with the demo model; the pipeline's minute is made up (scripted_minute.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright
from scripted_feed import MODELS, ScriptedFeed, event, stages
from scripted_minute import prefixes, requests, steps, timeline

ROOT = Path(__file__).parents[2]
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
EARLIER = ("Remember: kiv=4821, dol=1390, sazu=0077. What is dol?", "What is pipeinfer?",
           "What is 12 + 9?", "Count from 2 to 14.")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs/images")
    folder = parser.parse_args().folder
    from servers import Server

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        with Server("--threads", "1") as server:
            chat(browser, server.url, folder)
        pipeline(browser, folder)
        browser.close()


def chat(browser: Browser, url: str, folder: Path) -> None:
    page = browser.new_page(viewport=DESK)
    page.goto(url)
    expect(page.locator(".examples button")).to_have_count(3)
    for text in EARLIER:
        page.get_by_role("button", name="New conversation").click()
        ask(page, text, 1)
    page.get_by_role("button", name="New conversation").click()
    ask(page, "What are the stages?", 1)
    ask(page, "Count from 3 to 12.", 2)
    page.get_by_role("button", name="Options", exact=True).click()
    page.get_by_label("Show how likely each token was").check()
    page.get_by_label("Temperature").fill("1.3")
    page.get_by_label("Seed").fill("7")
    page.locator("#options").evaluate("(panel) => panel.scrollTo(0, 0)")
    ask(page, "What is 7 + 15?", 3)
    page.locator(".tokens span").nth(10).focus()
    keep(page, folder, "page-chat", dark=True)
    page.get_by_role("button", name="Close the options").click()
    page.set_viewport_size(PHONE)
    moved = "(side) => Promise.all(side.getAnimations().map((one) => one.finished))"
    page.locator("#side").evaluate(moved)
    page.locator("#thread .message").last.scroll_into_view_if_needed()
    keep(page, folder, "page-chat-phone")


def ask(page: Page, text: str, answers: int) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".answer:has(.foot)")).to_have_count(answers)


def pipeline(browser: Browser, folder: Path) -> None:
    now = time.time()
    listed = requests(now)
    name = listed[-9]["id"]
    answers = {**MODELS, "monitor/prefixes": prefixes(),
               f"monitor/requests/{name}": timeline(str(name), now - 3)}  # fmt: skip
    with ScriptedFeed(answers) as feed:
        feed.say(event(stages(), time=now, steps=steps(now), requests=listed))
        page = browser.new_page(viewport={**DESK, "height": 1240})
        page.goto(feed.url + "/#pipeline")
        expect(page.locator(".requests tbody tr")).to_have_count(len(listed))
        keep(page, folder, "page-pipeline", dark=True)
        page.set_viewport_size(DESK)
        page.locator(f"button[title={name}]").click()
        expect(page.locator("dialog.timeline tbody tr")).to_have_count(5)
        keep(page, folder, "page-timeline", dark=True)
        page.keyboard.press("Escape")
        page.set_viewport_size(PHONE)
        page.locator("#pipeline").evaluate("(view) => view.scrollTo(0, 0)")
        keep(page, folder, "page-pipeline-phone")


def keep(page: Page, folder: Path, name: str, dark: bool = False) -> None:
    """dark: also its dark twin, which the site shows in the dark."""
    page.screenshot(path=folder / f"{name}.png")
    if dark:
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=folder / f"{name}-dark.png")
        page.emulate_media(color_scheme="light")


if __name__ == "__main__":
    sys.exit(main())
