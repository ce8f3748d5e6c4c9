"""A tokenizer beside the checkpoint's own, in which control tokens are written otherwise.

It shares the vocabulary. Every special token is one private-use character there, so a text that
spells `<|im_end|>` is text, and what stands for the token is the token. Knows no request.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer

from pipeinfer.tokenizer.bounds import components

# One character for each special token, from the ends of the private-use planes, where nobody has
# put icons. The second is for texts that use the first.
PLACEHOLDER_PLANES = (0xFFFFE, 0x10FFFE)


class AmbiguousControlTokens(ValueError):
    """The text uses the stand-ins' own characters; the words are for the client."""


class _PlaneTokenizer(NamedTuple):
    """`names`: the checkpoint's id [n] of each id of `tokenizer`; `controls`: bool [n], which of
    them are stand-ins."""

    tokenizer: Tokenizer
    checkpoint_ids: np.ndarray
    is_placeholder: np.ndarray


class PlaceholderTokens:
    """`encode` recognises the tokens that `write` wrote, and no others."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = [(i, token) for i, token in sorted(added.items()) if token.special]
        self._others = [(i, token) for i, token in sorted(added.items()) if not token.special]
        contents = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, contents)))
        self._by_plane: dict[int, _PlaneTokenizer] = {}

    def insert_placeholders(self, text: str) -> tuple[str, int]:
        """(`text` with stand-ins for the special tokens in it, the first character of the plane
        that they are from). Raises CannotTell."""
        for end in PLACEHOLDER_PLANES:
            first = end - len(self._special)
            if self._placeholder_pattern(first).search(text) is None:
                names = enumerate(token.content for _, token in self._special)
                table = {content: chr(first + k) for k, content in names}
                return self._replaced(text, table), first
        raise AmbiguousControlTokens(
            "control tokens' texts cannot be told from its private-use characters"
        )

    def encode(self, text: str, first: int, own_process: bool) -> np.ndarray:
        """The ids, int32 [n], of a text with the stand-ins that `write` chose. Raises CannotTell.

        `alone`: as for PromptEncoder.
        """
        if first not in self._by_plane:
            self._by_plane[first] = self._make_tokenizer(first)
        made = self._by_plane[first]
        if own_process:
            (encoding,) = made.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        else:
            encoding = made.tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype="<i4")
        if int(made.is_placeholder[ids].sum()) != len(
            self._placeholder_pattern(first).findall(text)
        ):
            raise AmbiguousControlTokens(
                "the tokenizer does not keep control tokens and their texts apart"
            )
        return made.checkpoint_ids[ids]

    def _replaced(self, text: str, table: dict[str, str]) -> str:
        return self._added_pattern.sub(lambda found: table.get(found[0], found[0]), text)

    def _placeholder_pattern(self, first: int) -> re.Pattern[str]:
        return re.compile(f"[{chr(first)}-{chr(first + len(self._special) - 1)}]")

    def _make_tokenizer(self, first: int) -> _PlaneTokenizer:
        made = Tokenizer(self._tokenizer.model)  # shared, not copied
        if self._tokenizer.normalizer is not None:
            made.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            made.pre_tokenizer = self._tokenizer.pre_tokenizer
        tokens = [
            AddedToken(
                chr(first + k), special=True, lstrip=token.lstrip, rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for k, (_, token) in enumerate(self._special)
        ]  # fmt: skip
        tokens += [token for _, token in self._others]
        # A bare list in the library's stub.
        made.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]
        ids = {token.content: i for i, token in made.get_added_tokens_decoder().items()}
        size = max([*ids.values(), made.get_vocab_size()]) + 1
        names, controls = np.arange(size, dtype="<i4"), np.zeros(size, dtype=bool)
        for k, (own, _) in enumerate(self._special):
            names[ids[chr(first + k)]], controls[ids[chr(first + k)]] = own, True
        for own, token in self._others:
            names[ids[token.content]] = own
        return _PlaneTokenizer(made, names, controls)


def may_fold_into_special(tokenizer: Tokenizer) -> bool:
    """Whether other texts than a special token's own may become it: it is looked for in normalized
    text, and more than white space is normalized."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.normalized for token in added):
        return False
    return any(
        one.type != "Prepend" and one.pattern != {"String": " "}
        for one in components(tokenizer.normalizer)
    )
