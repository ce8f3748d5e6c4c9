"""The least number of tokens that a text can have, by its length: a text that cannot fit into the
context is refused without being encoded.

The bound is certain. For some tokenizers there is none: if one drops white space, folds characters
or swallows the text around a token, a text of any length may fit.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

# NFC composes: the longest spelling of a character has 3.5 times the bytes of its composed form
# (U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes). The library's table of Unicode may be
# newer than Python's, in which that was counted.
NFC_SHRINK = 4
KEEPING_BEHAVIORS = frozenset(("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"))
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class TokenLengthBound(NamedTuple):
    """A bound for one tokenizer.

    max_token_bytes: bytes of normalized text that one token covers at most.
    normalized_shrink: so many bytes of a text become at least one byte of normalized text. ASCII
      never shrinks.
    """

    max_token_bytes: int
    normalized_shrink: int

    def min_token_count(self, text: str) -> int:
        """Every encoding of `text` has at least so many tokens."""
        if text.isascii():
            return -(-len(text) // self.max_token_bytes)
        size = len(text.encode("utf-8", "surrogatepass"))
        return -(-size // (self.max_token_bytes * self.normalized_shrink))


def token_length_bound(tokenizer: Tokenizer) -> TokenLengthBound | None:
    """None if a component of the tokenizer is not known to keep every byte of a text."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it takes all white space around it, however much there is
    shrinks = 1
    for one in components(tokenizer.normalizer):
        shrinks *= _shrink_of(one)
    splitters = components(tokenizer.pre_tokenizer)
    if not shrinks or not all(_preserves_text(one) for one in splitters):
        return None
    spelled = any(one.type == "ByteLevel" for one in splitters)
    longest = _max_token_bytes(tokenizer, spelled)
    if not longest:
        return None
    for token in added:
        texts = [token.content]
        if tokenizer.normalizer is not None:
            texts.append(tokenizer.normalizer.normalize_str(token.content))
        longest = max(longest, *(len(text.encode()) for text in texts))
    return TokenLengthBound(longest, shrinks)


class Component(msgspec.Struct, frozen=True):
    """A normalizer or pre-tokenizer, with those fields of tokenizer.json that matter here."""

    type: str
    pattern: dict[str, str] = {}
    content: str = ""
    behavior: str = ""
    normalizers: list[Component] = []  # of a sequence, as the next one
    pretokenizers: list[Component] = []


def components(component: Normalizer | PreTokenizer | None) -> list[Component]:
    """Its parts, with sequences flattened."""
    if component is None:
        return []
    waiting = [msgspec.json.decode(component.__getstate__(), type=Component)]
    components: list[Component] = []
    while waiting:
        one = waiting.pop(0)
        if one.type == "Sequence":
            waiting = [*one.normalizers, *one.pretokenizers, *waiting]
        else:
            components.append(one)
    return components


def _shrink_of(one: Component) -> int:
    """So many bytes become at least one; 0: any number may vanish."""
    kind = one.type
    if kind == "NFC":
        return NFC_SHRINK
    if kind == "Prepend":
        return 1
    if kind == "Replace":
        old, new = one.pattern.get("String", ""), one.content
        return int(bool(old) and len(new.encode()) >= len(old.encode()))
    return 0


def _preserves_text(one: Component) -> bool:
    """Whether a pre-tokenizer passes on every character."""
    if one.type in ("Split", "Punctuation"):
        return one.behavior in KEEPING_BEHAVIORS
    return one.type in ("ByteLevel", "Metaspace", "Digits")


def _max_token_bytes(tokenizer: Tokenizer, spelled: bool) -> int:
    """Bytes of the longest token of a vocabulary that has every byte; 0 if it has not.

    `spelled`: a character of a token stands for one byte.
    """
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return 0  # others make one token of any run of unknown characters
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return 0
    tokens = tokenizer.get_vocab(with_added_tokens=False)
    if spelled:
        complete = all(character in tokens for character in pre_tokenizers.ByteLevel.alphabet())
        return max(map(len, tokens)) if complete else 0
    if not model.byte_fallback or any(token not in tokens for token in BYTE_TOKENS):
        return 0
    return max(len(token.encode()) for token in tokens)
