"""The site of the documents in a browser: on a phone, on a desk, light and dark."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from docs_site import built

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def site(browser, tmp_path_factory) -> Iterator[str]:
    handler = partial(Quiet, directory=built(tmp_path_factory.mktemp("site")))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def expect(thing):
    from playwright.sync_api import expect

    return expect(thing)


@pytest.mark.parametrize("path, head", [("operations", "alert"), ("architecture", "hop")])
def test_a_wide_table_says_that_it_goes_on_beside_a_phones_screen(site, open_page, path, head):
    page = open_page(f"{site}/{path}.html", viewport=PHONE)
    box = page.locator(".md-typeset__scrollwrap", has=page.locator(f"th:text-is('{head}')"))
    assert box.evaluate("(one) => one.scrollWidth > one.clientWidth")
    box.evaluate("(one) => scrollTo(0, one.getBoundingClientRect().top + scrollY - 200)")
    place = box.bounding_box()
    assert place["x"] > 8 and place["x"] + place["width"] < PHONE["width"] - 8

    def edge(left: float) -> bytes:
        """What is seen above the words of its head, near one of its ends."""
        clip = {"x": left, "y": place["y"] + 4, "width": 4, "height": 6}
        return page.screenshot(clip=clip)

    right, left = place["x"] + place["width"] - 6, place["x"] + 2
    at_begin = edge(left), edge(right)
    box.evaluate("(one) => one.scrollTo(one.scrollWidth, 0)")
    at_end = edge(left), edge(right)
    assert at_begin[0] != at_end[0] and at_begin[1] != at_end[1]
    assert at_begin[0] == at_end[1], "nothing is said where nothing goes on"


def test_pictures_follow_the_scheme_that_was_chosen(site, open_page):
    page = open_page(f"{site}/index.html", viewport=DESK, color_scheme="light")
    drawing = page.locator("img[src*='pipeline.svg']")
    light, dark = (page.locator(f"img[src$='#only-{one}']") for one in ("light", "dark"))
    expect(light).to_be_visible()
    expect(dark).to_be_hidden()
    in_light = drawing.screenshot()
    toggle = page.locator("[data-md-component=palette] label:visible")
    mode = page.locator("body").get_attribute("data-md-color-media")
    toggle.click()  # from the system's mode to light, to dark
    expect(page.locator("body")).not_to_have_attribute("data-md-color-media", mode)
    toggle.click()
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    expect(light).to_be_hidden()
    expect(dark).to_be_visible()
    assert drawing.screenshot() != in_light


def test_the_first_page_has_no_column_for_its_own_name(site, open_page):
    page = open_page(f"{site}/index.html", viewport=DESK)
    expect(page.locator(".md-sidebar--primary")).to_be_hidden()
    page.set_viewport_size(PHONE)
    page.locator("label[for=__drawer]:visible").first.click()
    expect(
        page.locator(".md-sidebar--primary >> text=Operate >> visible=true").first
    ).to_be_visible()
