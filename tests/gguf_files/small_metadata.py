"""Small honest metadata of both kinds of tokenizer, and the algorithm of one as it is described."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from pipeinfer.gguf.tokenizer import tokenizer_json

CORPUS = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
CONTROLS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
# As in Gemma's vocabulary, in which the file writes spaces as they are.
USERS = ("\n\n", "\n\n\n", "  ", "   ", "    ", "\t\t", "<think>")
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def build(metadata: dict[str, object]) -> Tokenizer:
    """As a stage would."""
    return Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))


def byte_level(pre: str = "gpt-2") -> dict[str, object]:
    """Like GPT-2's, with two control tokens in front."""
    tokens, merges = _trained_bytes()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<tool>", *tokens],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, USER] + [NORMAL] * len(tokens),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def sentence_piece(prefix: bool) -> dict[str, object]:
    """Like Llama 2's with `prefix`, else like Gemma's."""
    pieces = _trained_pieces()
    special = len(CONTROLS) + len(USERS) + 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            *CONTROLS, *USERS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces,
        ],
        "tokenizer.ggml.token_type": [UNKNOWN] + [CONTROL] * (len(CONTROLS) - 1)
        + [USER] * len(USERS) + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * special + [-float(n) for n in range(len(pieces))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip


@cache
def _trained_bytes() -> tuple[list[str], list[str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return _in_order(tokenizer), [" ".join(merge) for merge in merges]


@cache
def _trained_pieces() -> list[str]:
    """Merged ones first, by rank; SentencePiece puts characters last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    pieces = [piece for piece in _in_order(tokenizer) if piece.strip("▁") or piece == "▁"]
    taken = {*CONTROLS, *USERS}
    return [piece for piece in sorted(pieces, key=lambda piece: len(piece) == 1)
            if piece not in taken]  # fmt: skip


def _in_order(tokenizer: Tokenizer) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


class Described:
    """SentencePiece's BPE, word by word: of all neighbours that together are a token, those with
    the highest score are joined, the leftmost first."""

    def __init__(self, metadata: dict[str, object]) -> None:
        tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        scores = metadata["tokenizer.ggml.scores"]
        assert isinstance(tokens, list) and isinstance(kinds, list) and isinstance(scores, list)
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._prefix = "▁" if metadata["tokenizer.ggml.add_space_prefix"] else ""
        self._scores = {
            token: score for token, kind, score in zip(tokens, kinds, scores, strict=True)
            if kind == NORMAL
        }  # fmt: skip
        added = [
            token for token, kind in zip(tokens, kinds, strict=True)
            if kind in (UNKNOWN, CONTROL, USER)
        ]  # fmt: skip
        self._added = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split(f"({self._added})", text):
            if part in self._ids and re.fullmatch(self._added, part):
                ids.append(self._ids[part])
            elif part:
                ids.extend(self._joined(list(self._prefix + part.replace(" ", "▁"))))
        return ids

    def _joined(self, symbols: list[str]) -> list[int]:
        while True:
            pairs = [
                (-self._scores[left + right], at)
                for at, (left, right) in enumerate(pairwise(symbols))
                if left + right in self._scores
            ]
            if not pairs:
                break
            at = min(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [number for symbol in symbols for number in self._of(symbol)]

    def _of(self, symbol: str) -> list[int]:
        if symbol in self._scores:
            return [self._ids[symbol]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
