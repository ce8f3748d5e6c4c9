"""Small real tokenizers of the kinds that checkpoints have, trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from tokenizer_folders import make_tokenizer
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

import pipeinfer.demo
from pipeinfer.text import load_tokenizer, read_tokenizer_config

LIKE_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CORPUS = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]


def _with_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


@cache
def demo() -> Tokenizer:
    """The demo model's: bytes."""
    folder = Path(pipeinfer.demo.__file__).parent
    tokenizer = load_tokenizer(folder, read_tokenizer_config(folder))
    assert tokenizer is not None
    return tokenizer


@cache
def byte_level(nfc: bool = False) -> Tokenizer:
    """As Llama 3's, with NFC as Qwen 2's."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LIKE_LLAMA3), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_specials(tokenizer)


@cache
def byte_fallback(metaspace: bool) -> Tokenizer:
    """As Llama 2's: what is unknown becomes bytes. White space by a normalizer, or by Metaspace in
    front of the first word alone."""
    seed = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    seed.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    seed.train_from_iterator(CORPUS, trainer)
    state = seed.get_vocab(with_added_tokens=False)
    merges = [tuple(merge) for merge in json.loads(seed.to_str())["model"]["merges"]]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for token in sorted(state, key=state.__getitem__):
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return _with_specials(tokenizer)


# Those whose parts keep every byte, by name: made when asked for, since every worker collects.
CERTAIN: dict[str, Callable[[], Tokenizer]] = {
    "demo": demo,
    "bytes": make_tokenizer,
    "byte-level": byte_level,
    "byte-level, NFC": partial(byte_level, nfc=True),
    "byte fallback": partial(byte_fallback, metaspace=False),
    "byte fallback, Metaspace": partial(byte_fallback, metaspace=True),
}
