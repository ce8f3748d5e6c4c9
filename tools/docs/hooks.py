"""What the site's build does beside mkdocs: pages from outside of docs/, links as on GitHub.

mkdocs loads this file by itself, so it imports nothing of the tool. The same Markdown works in the
repository and in the site: a link to a file of the repository becomes one to its page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Files outside of docs/ that pages link: where they stand in the repository, and in the site.
OUTSIDE = {
    "README.md": "project/about.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "LICENSE": "project/license.txt",
    "stages/monitoring/README.md": "stages/monitoring.md",
    **{f"stages/{path.name}": f"stages/{path.name}" for path in ROOT.glob("stages/*.md")},
}
INSIDE = {page: path for path, page in OUTSIDE.items()}
FENCE = re.compile(r"^(```|~~~)")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s#]+)(\.png)\)")
ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files from outside of docs/."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between the repository's files become links between pages. The first page needs no list
    of pages beside it: its own text is one."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    here = page.file.src_uri
    return mapped(markdown, INSIDE.get(here, f"docs/{here}"), here)


def mapped(markdown: str, path: str, page: str) -> str:
    """`markdown` of the repository's file `path`, as the site's page `page`."""
    found: list[str] = []
    fenced = listed = False
    for line in markdown.splitlines():
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            line = PICTURE.sub(lambda picture: _schemes(picture, path), line)
            line = LINK.sub(lambda link: _target(link[1], path, page), line)
            # GitHub begins a list below a line of text, Python-Markdown only below a blank one.
            begins = ITEM.match(line) is not None and not listed
            if begins and found and found[-1].strip():
                found.append("")
            listed = bool(line.strip()) and (listed or begins)
        found.append(line)
    return "\n".join(found)


def _schemes(picture: re.Match[str], path: str) -> str:
    """A picture of the file `path`; if it has a dark twin both, of which the theme shows one."""
    whole, (name, kind) = picture[0], picture.groups()
    if not (ROOT / path).parent.joinpath(f"{name}-dark{kind}").exists():
        return whole
    file = f"({name}{kind})"
    light = whole.replace(file, f"({name}{kind}#only-light)")
    return f"{light} {whole.replace(file, f'({name}-dark{kind}#only-dark)')}"


def _target(link: str, path: str, page: str) -> str:
    """Where `link` of the repository's file `path` leads in the site, seen from `page`."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    there = OUTSIDE.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(there, posixpath.dirname(page) or ".")
