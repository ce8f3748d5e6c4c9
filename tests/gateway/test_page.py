"""The files of the web page as browsers get them; what the page does is tested in tests/page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.gateway.app import PAGE_FOLDER, PAGE_HEADERS, VENDOR_FOLDER, VENDOR_HEADERS

NAMES = sorted(path.name for path in PAGE_FOLDER.iterdir() if path.is_file())
VENDORED = sorted(path.name for path in (PAGE_FOLDER / VENDOR_FOLDER).iterdir())
FONT = f"{VENDOR_FOLDER}/{next(name for name in VENDORED if name.endswith('.woff2'))}"
LIBRARIES = Path(__file__).parents[2] / "tools/page"


async def test_the_page_and_all_its_files_are_served_under_a_strict_policy(
    gateway: Gateway,
) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for path in ("/", *(f"/page/{name}" for name in NAMES)):
            answer = await http.get(path)
            assert answer.status_code == 200, path
            for name, value in PAGE_HEADERS.items():
                assert answer.headers[name] == value
        for name in VENDORED:
            answer = await http.get(f"/page/{VENDOR_FOLDER}/{name}")
            assert answer.content == (PAGE_FOLDER / VENDOR_FOLDER / name).read_bytes()
            for header, value in VENDOR_HEADERS.items():
                assert answer.headers[header] == value
    assert "immutable" in VENDOR_HEADERS["Cache-Control"]
    policy = PAGE_HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy


async def test_files_are_of_the_kinds_that_browsers_insist_on(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        kinds = {
            name: (await http.get(f"/page/{name}")).headers["content-type"].partition(";")[0]
            for name in ("index.html", "style.css", "main.js", "icon.svg", FONT)
        }
    expected = ["text/html", "text/css", "text/javascript", "image/svg+xml", "font/woff2"]
    assert list(kinds.values()) == expected


async def test_the_page_loads_nothing_from_elsewhere(gateway: Gateway) -> None:
    """No address but the namespace of SVG, and no file that is not there."""
    for name in NAMES:
        path = PAGE_FOLDER / name
        text = path.read_text()
        assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}, path
        for name in re.findall(r'(?:from|src=|href=) ?"(?:\./|page/)([\w.]+)"', text):
            assert name in NAMES, (path, name)
    sheet = next((PAGE_FOLDER / VENDOR_FOLDER).glob("*.css")).read_text()
    assert set(re.findall(r"url\(([^)]*)\)", sheet)) == {
        name for name in VENDORED if name.endswith(".woff2")
    }


async def test_libraries_by_others_are_pinned_and_come_with_their_licences() -> None:
    """tools/page builds them; names have a hash of what is in them, and libraries.js has all."""
    wanted = json.loads((LIBRARIES / "package.json").read_text())["devDependencies"]
    locked = json.loads((LIBRARIES / "package-lock.json").read_text())["packages"]
    text = (PAGE_FOLDER / VENDOR_FOLDER / "LICENSES.txt").read_text()
    said = dict(re.findall(r"^([\w.@/-]+) (\d+\.\d+\.\d+) \(", text, re.MULTILINE))
    for name in wanted.keys() - {"esbuild"}:
        assert said[name] == wanted[name] == locked[f"node_modules/{name}"]["version"]
    assert all(locked[f"node_modules/{name}"]["version"] == said[name] for name in said)
    named = set(re.findall(r"[\w]+-\w+\.(?:js|css)", (PAGE_FOLDER / "libraries.js").read_text()))
    assert named == {name for name in VENDORED if name.endswith((".js", ".css"))}
    size = sum(path.stat().st_size for path in (PAGE_FOLDER / VENDOR_FOLDER).iterdir())
    assert size < 1_000_000, "all of it is in each wheel"


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/x",
        "/page/",
        "/page",
        "/page/a/b",
        "/page/vendor",
        "/page/vendor/",
        "/page/vendor/x",
        "/page/vendor/..%2fmain.js",
    ],
)
async def test_there_is_nothing_beside_its_files(gateway: Gateway, path: str) -> None:
    async with httpx.AsyncClient() as http:
        raw = httpx.URL(gateway.url).copy_with(raw_path=path.encode())
        assert (await http.get(raw)).status_code == 404


async def test_what_a_browser_has_is_not_sent_again(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        first = await http.get("/page/main.js")
        again = await http.get("/page/main.js", headers={"If-None-Match": first.headers["etag"]})
        other = await http.get("/page/main.js", headers={"If-None-Match": '"another"'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert (other.status_code, other.content) == (200, first.content)


async def test_head_has_no_body_and_several_slashes_lead_to_one(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        head, whole = await http.head("/"), await http.get("/")
        slashes = await http.get(httpx.URL(gateway.url).copy_with(raw_path=b"//"))
        assert (await http.post("/")).status_code == 405
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))
    assert (slashes.status_code, slashes.headers["location"]) == (308, "/")


async def test_the_page_needs_no_key_and_what_it_asks_for_does(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="secret")
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/page/main.js")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401


async def test_without_the_page_its_paths_are_no_paths(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(no_page=True)
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for path in ("/", "/page/main.js", "//"):
            answer = await http.get(httpx.URL(gateway.url).copy_with(raw_path=path.encode()))
            assert answer.status_code == 404, path
        assert (await http.get("/v1/models")).status_code == 200
