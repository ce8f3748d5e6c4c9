"""What /tokenizer_info tells of a tokenizer: its configuration, for clients without a copy of it.

Knows the texts of files; no tokenizer and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pipeinfer.json_values import JsonObject
from pipeinfer.text.added import NAMED_TOKENS, special_tokens

# Names of files and folders, of which some are paths on the machine that saved the checkpoint.
OF_FILES = (
    "auto_map",
    "merges_file",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "vocab_file",
)
LONGEST = 2**53  # tokens; files say 10**30 where a tokenizer has no bound of its own


def tokenizer_info(config: JsonObject, templates: Mapping[str, str], context_length: int) -> bytes:
    """As JSON. `config`: what read_tokenizer_config gave, `templates`: what template_sources gave;
    `context_length`: tokens, 0 if not known. Named tokens are texts, null where there is none."""
    told: JsonObject = {name: value for name, value in config.items() if name not in OF_FILES}
    told |= dict.fromkeys(NAMED_TOKENS) | special_tokens(config)
    told["tokenizer_class"] = config.get("tokenizer_class") or "PreTrainedTokenizerFast"
    told["chat_template"] = templates.get("default")
    most = config.get("model_max_length")
    if not isinstance(most, int) or not 0 < most <= LONGEST:
        told["model_max_length"] = context_length or None
    return json.dumps(told).encode()
