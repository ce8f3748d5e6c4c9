"""Small tokenizers of the three kinds that real checkpoints have, built here, without files."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]
WORDS += ["hello", "world", "stop", "end", "is", "not"]
SPECIALS = ("<|begin|>", "<|end|>")


def _grow(vocabulary: dict[str, int], space: str) -> list[tuple[str, str]]:
    """Merges that build WORDS from left to right, then with `space` before them."""
    merges = [(word[:n], word[n]) for word in WORDS for n in range(1, len(word))]
    merges += [(space, word) for word in WORDS]
    merges = list(dict.fromkeys(merges))
    vocabulary.update({a + b: len(vocabulary) + n for n, (a, b) in enumerate(merges)})
    return merges


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every byte is a character of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    merges = _grow(vocabulary, "Ġ")
    merges += [("ð", "Ł"), ("â", "Ģ")]  # tokens that are a part of a character
    vocabulary.update({token: len(vocabulary) + n for n, token in enumerate(("ðŁ", "âĢ"))})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def byte_fallback() -> Tokenizer:
    """As Llama 2: spaces are U+2581, unknown characters are one <0xNN> token for each byte."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    letters = {char for word in WORDS for char in word} | set("▁ABC.,!é")
    vocabulary |= {char: 257 + n for n, char in enumerate(sorted(letters))}
    merges = _grow(vocabulary, "▁")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_added(tokenizer)


def metaspace() -> Tokenizer:
    """As T5 and Mistral's later tokenizers: unigrams, and a decoder that owns the spaces."""
    letters = sorted({char for word in WORDS for char in word} | set("ABC.,!é你好🙂"))
    pieces = [("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(word, -4.0) for word in WORDS] + [("▁" + word, -3.0) for word in WORDS]
    seen = {piece for piece, _ in pieces}
    pieces += [(char, -8.0) for char in letters if char not in seen]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_added(tokenizer)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("né")])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizers_by_kind() -> dict[str, Tokenizer]:
    return {
        "byte-level": byte_level(),
        "byte-fallback": byte_fallback(),
        "metaspace": metaspace(),
    }


@pytest.fixture(scope="session")
def tokenizer(tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    """The byte-level one."""
    return tokenizers_by_kind["byte-level"]
