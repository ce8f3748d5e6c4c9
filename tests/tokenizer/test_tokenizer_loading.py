"""A folder's tokenizer gives the ids that transformers gets from the same folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import make_tokenizer, write_json
from transformers import AutoTokenizer

from pipeinfer.settings import ConfigurationError
from pipeinfer.text.loading import load_tokenizer, special_tokens
from pipeinfer.text.template_sources import read_tokenizer_config

TEXT = "Hello <|im_start|> wörld 🙂 <new token> <other></s> [named] end"
ADDED = {
    "258": {"content": "<|im_start|>", "special": True},
    "260": {"content": "<new token>", "lstrip": True, "special": False},
    "261": {"content": "<other>", "rstrip": True, "special": True},
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
        {"added_tokens_decoder": ADDED},
        {"pad_token": "[named]", "extra_special_tokens": ["<other>"]},
        {"additional_special_tokens": ["<other>", "<new token>"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("special", [True, False])
def test_ids_equal_those_of_transformers(
    checkpoint: Callable[..., Path], fields: dict[str, Any], special: bool
) -> None:
    folder = checkpoint(**fields)
    tokenizer = load_tokenizer(folder, read_tokenizer_config(folder))
    assert tokenizer is not None
    reference = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=special).ids
    assert ids == reference.encode(TEXT, add_special_tokens=special)
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint()
    baked = make_tokenizer()
    baked.enable_truncation(4)
    baked.enable_padding(length=300)
    baked.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder, read_tokenizer_config(folder))
    assert tokenizer is not None
    assert len(tokenizer.encode("abcdefgh", add_special_tokens=False).ids) == 8


def test_tokens_that_only_the_older_file_names_are_known(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    write_json(folder / "special_tokens_map.json", {"unk_token": "<u>", "bos_token": "<wrong>"})
    named = special_tokens(read_tokenizer_config(folder))
    assert named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>"}


def test_a_folder_without_tokenizer_has_none_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, read_tokenizer_config(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json is not a JSON object"):
        read_tokenizer_config(tmp_path)
