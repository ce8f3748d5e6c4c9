"""A folder's tokenizer gives the ids that transformers gets from the same folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import SPECIALS, make_tokenizer, write_json
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer

from pipeinfer.settings import ConfigurationError
from pipeinfer.text import added_tokens, load_tokenizer, read_tokenizer_config, special_tokens

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


BARE = {"content": "<t>", "lstrip": True}
TAGGED = "a <t> b<t>c <T> d <u> e"
FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "other flags": {"added_tokens_decoder": {"260": {"content": "<t>", "rstrip": True}}},
    "a special token": {"added_tokens_decoder": {"260": {"content": "<t>", "special": True}}},
    "a whole word": {"added_tokens_decoder": {"260": {"content": "<t>", "single_word": True}}},
    "normalized": {"added_tokens_decoder": {"260": {"content": "<t>", "normalized": True}}},
    "not normalized": {"added_tokens_decoder": {"260": {"content": "<t>", "normalized": False}}},
    "a name, and flags": {
        "added_tokens_decoder": {"260": {"content": "<t>", "rstrip": True}}, "pad_token": "<t>"
    },
    "a name": {"pad_token": "<t>"},
    "a name of the model's own": {"image_token": "<t>"},
    "a name for another": {
        "added_tokens_decoder": {"261": {"content": "<u>", "lstrip": True}}, "pad_token": "<t>"
    },
    "another's name with flags": {
        "pad_token": {"__type": "AddedToken", "content": "<u>", "lstrip": True}
    },
    "one of a list": {"extra_special_tokens": ["<t>", "<u>"]},
}  # fmt: skip
OTHER_FILES: dict[str, dict[str, Any]] = {
    "none": {},
    "added": {"added_tokens.json": {"<u>": 261}},
    "added, and known": {"added_tokens.json": {"<t>": 260}},
    "added elsewhere": {"added_tokens.json": {"<t>": 261, "<u>": 262}},
    "named": {"special_tokens_map.json": {"mask_token": "<u>", "sep_token": "<t>"}},
    "named with flags": {
        "special_tokens_map.json": {"mask_token": {"content": "<u>", "rstrip": True}}
    },
    "named and added": {
        "special_tokens_map.json": {"mask_token": "<u>"}, "added_tokens.json": {"<u>": 261}
    },
}  # fmt: skip


@pytest.mark.parametrize("others", OTHER_FILES)
@pytest.mark.parametrize("flags", FLAGS)
def test_flags_of_known_tokens_are_those_of_transformers(
    checkpoint: Callable[..., Path], flags: str, others: str
) -> None:
    folder = checkpoint(**FLAGS[flags])
    made = make_tokenizer()
    made.normalizer = normalizers.Lowercase()
    made.add_tokens([AddedToken(**BARE)])
    made.save(str(folder / "tokenizer.json"))
    for name, content in OTHER_FILES[others].items():
        write_json(folder / name, content)
    config = read_tokenizer_config(folder)
    tokenizer = load_tokenizer(folder, config)
    assert tokenizer is not None
    reference = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(TAGGED, add_special_tokens=False).ids
    assert ids == reference.encode(TAGGED, add_special_tokens=False)
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    wanted = {str(token): token.special for token in reference.added_tokens_decoder.values()}
    told = {text: token.special for text, token in added_tokens(folder, config).items()}
    assert told == {text: wanted[text] for text in told} and {"<t>", *SPECIALS} <= told.keys()
    assert special_tokens(config) == {
        name: str(token) for name, token in reference.special_tokens_map.items()
        if not isinstance(token, list)
    }  # fmt: skip


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
