"""A GGUF file's tokenizer gives the ids that the model's own tokenizer gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile_texts import CONTROLS, hostile_texts
from small_metadata import USER, USERS, Described, build, byte_level, sentence_piece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from gguf_models import gemma, metadata_of, smollm2
from pipeinfer.gguf.tokenizer import load_tokenizer as load_gguf
from pipeinfer.gguf.tokenizer import tokenizer_config, tokenizer_json
from pipeinfer.text import load_tokenizer, read_tokenizer_config, special_tokens
from pipeinfer.tokenizer.chat_templates import load_templates
from pipeinfer.tokenizer.prompts import token_length_bound


def _all_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def test_smollm2_has_the_ids_and_texts_of_its_own_tokenizer() -> None:
    metadata = metadata_of(smollm2())
    tokenizer = build(metadata)
    own = _own_smollm2(metadata)
    texts = hostile_texts(3_000)
    ids = _all_ids(tokenizer, texts)
    assert ids == _all_ids(own, texts)
    assert tokenizer.decode_batch(ids, False) == own.decode_batch(ids, False)
    assert tokenizer.encode("Hi").ids == tokenizer.encode("Hi", add_special_tokens=False).ids


def _own_smollm2(metadata: dict[str, Any]) -> Tokenizer:
    """With the parts that the checkpoint's tokenizer.json names."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    own = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    return own


def test_smollm2_is_found_in_a_folder_of_its_json_files(tmp_path: Path) -> None:
    metadata = metadata_of(smollm2())
    for name, value in (
        ("tokenizer.json", tokenizer_json(metadata)),
        ("tokenizer_config.json", tokenizer_config(metadata)),
    ):
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
    config = read_tokenizer_config(tmp_path)
    tokenizer = load_tokenizer(tmp_path, config)
    assert tokenizer is not None
    texts = hostile_texts(500)
    assert _all_ids(tokenizer, texts) == _all_ids(build(metadata), texts)
    assert special_tokens(config)["eos_token"] == "<|im_end|>"
    templates = load_templates(tmp_path, config, "", lambda _: "")
    prompt = templates.render([{"role": "user", "content": "Hi"}], {})
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_gemma_has_the_ids_that_transformers_finds() -> None:
    path = gemma()
    tokenizer = build(metadata_of(path))
    own = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    # SentencePiece and llama.cpp take the longest run that is a token; transformers halves runs.
    texts = [t for t in hostile_texts(10_000) if " " * 32 not in t.replace("▁", " ")]
    ids = _all_ids(tokenizer, texts)
    assert ids == _all_ids(own, texts)
    assert tokenizer.decode_batch(ids, False) == own.decode_batch(ids, False)
    (runs,) = _all_ids(tokenizer, [" " * 40])
    assert [tokenizer.id_to_token(number) for number in runs] == ["▁" * 31, "▁" * 9]
    assert tokenizer.encode("Hi").tokens == ["<bos>", "Hi"]


def test_what_is_loaded_is_what_the_json_says() -> None:
    for metadata in (metadata_of(smollm2()), sentence_piece(True), sentence_piece(False)):
        loaded = json.loads(load_gguf(metadata).to_str())
        assert loaded == json.loads(build(metadata).to_str())


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_join_as_sentence_piece_describes(prefix: bool) -> None:
    metadata = sentence_piece(prefix)
    texts = [text[:200] for text in hostile_texts(2000) if "▁" not in text[:200]]
    described = Described(metadata)
    ids = _all_ids(build(metadata), texts)
    assert ids == [described.ids(text) for text in texts]


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_of_a_sentence_piece_file_become_the_text_again(prefix: bool) -> None:
    tokenizer = build(sentence_piece(prefix))
    # After a token of its own, a prefix cannot be told from the text's space.
    others = (*CONTROLS, *USERS, "▁") if prefix else ("▁",)
    for text in hostile_texts(1000):
        if not any(other in text for other in others):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_what_spells_a_byte_token_is_text() -> None:
    tokenizer = build(sentence_piece(prefix=False))
    ids = tokenizer.encode("<0x41>", add_special_tokens=False).ids
    assert tokenizer.token_to_id("<0x41>") not in ids
    assert tokenizer.decode(ids) == "<0x41>"


def test_spaces_of_users_tokens_match_in_runs_and_as_marks() -> None:
    tokenizer = build(sentence_piece(prefix=False))
    for text in ("x    y", "x▁▁▁▁y", "x ▁ ▁y"):
        assert tokenizer.encode(text, add_special_tokens=False).tokens[1] == "▁▁▁▁"


def test_extra_white_space_is_removed_where_the_file_says_so() -> None:
    metadata: dict[str, Any] = sentence_piece(prefix=True)
    kinds = metadata["tokenizer.ggml.token_type"]  # no tokens of users: some are white space
    metadata["tokenizer.ggml.token_type"] = [5 if kind == USER else kind for kind in kinds]
    assert build(metadata).encode("  a   b ").ids != build(metadata).encode("a b").ids
    metadata["tokenizer.ggml.remove_extra_whitespaces"] = True
    assert build(metadata).encode("  a   b ").ids == build(metadata).encode("a b").ids


@pytest.mark.parametrize(
    ("metadata", "flags", "expected"),
    [
        (sentence_piece(True), {}, ["<s>", "a"]),
        (sentence_piece(True), {"bos": False, "eos": True}, ["a", "</s>"]),
        (sentence_piece(True), {"eos": True}, ["<s>", "a", "</s>"]),
        (byte_level(), {}, ["a"]),
        (byte_level(), {"bos": True, "eos": True}, ["<s>", "a", "</s>"]),
        (byte_level("llama-bpe"), {}, ["<s>", "a"]),
        (byte_level("llama-bpe"), {"bos": False}, ["a"]),
    ],
)
def test_prompts_begin_and_end_as_the_file_says(
    metadata: dict[str, object], flags: dict[str, bool], expected: list[str]
) -> None:
    keys = {f"tokenizer.ggml.add_{name}_token": value for name, value in flags.items()}
    tokenizer = build({**metadata, **keys})
    tokens = [token.strip("▁") for token in tokenizer.encode("a").tokens]
    assert tokens == expected
    assert tokenizer.encode("a", "b").tokens[: len(tokens)] == tokenizer.encode("a").tokens


def test_bos_needs_an_id_only_where_the_file_asks_for_it() -> None:
    metadata = byte_level("llama-bpe")
    del metadata["tokenizer.ggml.bos_token_id"]
    assert build(metadata).encode("a").tokens == ["a"]


def test_control_tokens_are_special_and_those_of_users_are_shown() -> None:
    tokenizer = build(byte_level())
    added = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    assert added == {"<s>": True, "</s>": True, "<tool>": False}
    ids = tokenizer.encode("a<s><tool>b</s>").ids
    assert tokenizer.decode(ids) == "a<tool>b"


def test_lengths_of_both_kinds_can_be_bounded() -> None:
    for metadata in (byte_level(), sentence_piece(True), sentence_piece(False)):
        assert token_length_bound(build(metadata)) is not None


def test_named_tokens_and_templates_are_those_of_the_file() -> None:
    metadata = byte_level() | {"tokenizer.ggml.padding_token_id": 2}
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<tool>"}
    assert tokenizer_config(metadata) == named | {"chat_template": "{{ messages }}"}
    metadata |= {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert tokenizer_config(metadata)["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    del metadata["tokenizer.chat_template"], metadata["tokenizer.chat_template.tool_use"]
    assert tokenizer_config(metadata) == named


def test_a_sentence_piece_file_without_ids_has_the_usual_ones() -> None:
    metadata = sentence_piece(True)
    for name in ("bos", "eos", "unknown"):
        del metadata[f"tokenizer.ggml.{name}_token_id"]
    expected = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer_config(metadata) == expected
