"""The demo model as one that thinks: tokens and a chat template of other families.

It answers sums; amid "thoughts" it goes on with the same answer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pipeinfer.demo import demo_path

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
# What families write behind the last turn.
TAILS = {
    "opens or closes": "{% if enable_thinking is false %}</think>{% else %}<think>{% endif %}",
    "opens or empties": "<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}",
    "opens or is silent": "{% if enable_thinking is not false %}<think>\n{% endif %}",
    "empties or is silent": "{% if enable_thinking is false %}<think></think>\n{% endif %}",
    "history alone": "",
}
TEMPLATES = {name: TURNS + tail + "{% endif %}" for name, tail in TAILS.items()}
QUESTION = [{"role": "user", "content": "What is 7 + 15?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"enum": [20, 21, 22]}},
    "required": ["sum"],
    "additionalProperties": False,
}


def make_thinking(folder: Path, template: str, *tokens: str, special: bool = False) -> Path:
    """The demo model in `folder`, in whose vocabulary `tokens` stand."""
    shutil.copytree(demo_path(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    spare = [t for t in tokenizer["added_tokens"] if "reserved" in t["content"]]
    for token, text in zip(spare, tokens, strict=False):
        token["content"], token["special"] = text, special
    path.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    return folder
