"""What the build adds to pyproject.toml: README.md as the package's description.

Beside the repository its links would lead nowhere, so they become addresses of the repository.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


class Description(MetadataHookInterface):
    """Sets `readme`, from README.md and the address `Source` of [project.urls]."""

    def update(self, metadata: dict) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        said = absolute(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": said}


def absolute(markdown: str, repository: str) -> str:
    """Pictures come as they are, all else as the repository's page of it."""

    def link(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/HEAD/{path})"

    return LINK.sub(link, markdown)
