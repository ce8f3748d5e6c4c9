"""The tokenizer of a checkpoint for a caller's own use, as transformers has it.

Imports transformers, which takes seconds, and only here; no stage uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeinfer.gguf.header import is_gguf
from pipeinfer.text.files import read_tokenizer_config, template_sources
from pipeinfer.text.loading import load_tokenizer, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """`folder`: of a checkpoint, or a GGUF file."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not is_gguf(folder):
        return AutoTokenizer.from_pretrained(str(folder))
    config = read_tokenizer_config(folder)
    named = special_tokens(config)
    made = PreTrainedTokenizerFast(
        tokenizer_object=load_tokenizer(folder, config),
        **{name: text for name, text in named.items() if text is not None},
    )
    made.chat_template = template_sources(folder, config, "").get("default")
    return made
