"""The request classes of another server's HTTP API: by class the names of its fields, as JSON.

`python tools/request_classes.py WHEEL` writes tests/gateway/request_classes/vllm.json or
sglang.json. Reads Python files without running them. Starts at the classes that are bodies, and
follows their annotations to those within them.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

LISTS = Path(__file__).parents[1] / "tests/gateway/request_classes"
# By distribution: files that define bodies, and the classes of them to start at.
BODIES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "vllm/entrypoints/openai/chat_completion/protocol.py": ("ChatCompletionRequest",),
        "vllm/entrypoints/openai/completion/protocol.py": ("CompletionRequest",),
        "vllm/entrypoints/openai/responses/protocol.py": ("ResponsesRequest",),
        "vllm/entrypoints/anthropic/protocol.py": (
            "AnthropicMessagesRequest",
            "AnthropicCountTokensRequest",
        ),
        "vllm/entrypoints/serve/tokenize/protocol.py": (
            "TokenizeCompletionRequest",
            "TokenizeChatRequest",
            "DetokenizeRequest",
        ),
        "vllm/entrypoints/generate/base/protocol.py": (),
        "vllm/entrypoints/serve/engine/protocol.py": (),
        "vllm/renderers/chat_utils/types.py": ("CustomChatCompletionMessageParam",),
        "vllm/sampling_params.py": ("SamplingParams",),
    },
    "sglang": {
        "sglang/srt/entrypoints/openai/protocol.py": (
            "ChatCompletionRequest",
            "CompletionRequest",
            "ResponsesRequest",
            "TokenizeRequest",
            "DetokenizeRequest",
        ),
        "sglang/srt/entrypoints/anthropic/protocol.py": (
            "AnthropicMessagesRequest",
            "AnthropicCountTokensRequest",
        ),
        "sglang/srt/managers/io_struct.py": ("GenerateReqInput",),
        "sglang/srt/sampling/sampling_params.py": ("SamplingParams",),
    },
}


class Found:
    """Classes of some files, by name; of two with one name the one read first counts."""

    def __init__(self) -> None:
        self._classes: dict[str, ast.ClassDef] = {}
        self._aliases: dict[str, ast.expr] = {}  # names of types: `Tool = A | B`

    def add(self, source: str) -> None:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                self._classes.setdefault(node.name, node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._aliases.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self._aliases.setdefault(node.target.id, node.value or node.annotation)

    def fields(self, name: str) -> dict[str, ast.expr]:
        """Annotation by field, those of bases first. Names are those that JSON has."""
        node = self._classes[name]
        fields: dict[str, ast.expr] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self._classes:
                fields |= self.fields(base.id)
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            private = line.target.id.startswith("_") or line.target.id == "model_config"
            if not private and "ClassVar" not in ast.unparse(line.annotation):
                fields[_alias(line.value) or line.target.id] = line.annotation
        return fields

    def within(self, annotation: ast.expr) -> Iterator[str]:
        """Names of classes that an annotation names, through names of types too."""
        for node in ast.walk(annotation):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node.value in self._classes:
                    yield node.value
            elif isinstance(node, ast.Name):
                if node.id in self._classes:
                    yield node.id
                elif node.id in self._aliases:
                    yield from self.within(self._aliases[node.id])


def _alias(value: ast.expr | None) -> str | None:
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return None


def request_classes(wheel: Path) -> dict[str, object]:
    """`version` of the distribution, and `classes`: fields by name of class."""
    distribution, version = wheel.name.split("-")[:2]
    found, ahead = Found(), []
    with zipfile.ZipFile(wheel) as files:
        for path, roots in BODIES[distribution].items():
            found.add(files.read(path).decode())
            ahead += roots
    classes: dict[str, str] = {}
    while ahead:
        name = ahead.pop()
        if name in classes:
            continue
        fields = found.fields(name)
        classes[name] = " ".join(sorted(fields))
        ahead += [inner for field in fields.values() for inner in found.within(field)]
    return {"version": version, "classes": dict(sorted(classes.items()))}


if __name__ == "__main__":
    wheel = Path(sys.argv[1])
    name = f"{wheel.name.split('-')[0]}.json"
    (LISTS / name).write_text(json.dumps(request_classes(wheel), indent=1) + "\n")
