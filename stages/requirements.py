"""Writes what the images install: lists of packages, from the dependencies of pyproject.toml.

`python requirements.py pyproject.toml FOLDER` writes slim.txt (of all stages but the engine),
torch.txt, cpu.txt (all) and cuda.txt (all, and what GPUs need). Needs nothing but Python.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ENGINE_ONLY = ("torch", "transformers", "safetensors")


def lists(project: dict) -> dict[str, list[str]]:
    """{file: its lines}, of the table [project]."""
    every: list[str] = project["dependencies"]
    return {
        "slim.txt": [one for one in every if not one.startswith(ENGINE_ONLY)],
        "torch.txt": [one for one in every if one.startswith("torch")],
        "cpu.txt": every,
        "cuda.txt": [*every, *project["optional-dependencies"]["cuda"]],
    }


if __name__ == "__main__":
    source, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in lists(tomllib.loads(source.read_text())["project"]).items():
        (folder / name).write_text("\n".join(lines) + "\n")
