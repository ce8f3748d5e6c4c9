"""The merges of a GGUF file's tokenizer: those that it lists, or those that its scores imply.

A merge joins two tokens to a third. Earlier merges go before later ones.
"""

from __future__ import annotations

from pipeinfer.gguf.values import Metadata, metadata_error, quote, read_numbers, read_texts
from pipeinfer.gguf.vocabulary import ORDINARY, TOKENS, Vocabulary

MERGES = "tokenizer.ggml.merges"
SCORES = "tokenizer.ggml.scores"
# Bounds the memory that a lying file can ask for; the known vocabularies have two merges a token.
MERGES_A_TOKEN = 32

Merge = tuple[str, str]


def listed_merges(metadata: Metadata, vocabulary: Vocabulary) -> list[Merge]:
    """The pairs in the file's list, which spells each as two tokens with a space between.

    Raises ConfigurationError where a part or what they become is no token.
    """
    tokens, ids = vocabulary.tokens, vocabulary.ids
    merges: dict[Merge, None] = {}
    for number, merge in enumerate(read_texts(metadata, MERGES)):
        # The space that divides is never the first character: that one belongs to a token.
        cut = merge.find(" ", 1)
        if cut < 0:
            raise metadata_error(MERGES, f"entry {number} is not two tokens: {quote(merge)}")
        left, right = ids.get(merge[:cut]), ids.get(merge[cut + 1 :])
        if left is None or right is None or tokens[left] + tokens[right] not in ids:
            raise metadata_error(MERGES, f"entry {number} names an unknown token: {quote(merge)}")
        # Of equal ones the first counts. The vocabulary's own texts take no further memory.
        merges.setdefault((tokens[left], tokens[right]))
    return list(merges)


def scored_merges(metadata: Metadata, vocabulary: Vocabulary) -> list[Merge]:
    """All pairs that make a token, in the order in which SentencePiece would join them: higher
    scores first, then lower ids; among the pairs of a token, those with the longer left part.

    Source: SentencePiece's BPE (https://aclanthology.org/D18-2012/), which takes the pair that
    makes the token with the highest score. Only ordinary tokens take part: text cannot become a
    control or byte token by merging. Time: linear in the characters of the vocabulary, each
    copied at most vocabulary.LONGEST times. Raises ConfigurationError.
    """
    scores = read_numbers(metadata, SCORES, len(vocabulary.tokens))
    order = vocabulary.of_kinds(ORDINARY)
    order.sort(key=scores.__getitem__, reverse=True)
    # Each text by itself: a part that was cut out is exchanged for the vocabulary's own.
    known = {vocabulary.tokens[number]: vocabulary.tokens[number] for number in order}
    most = MERGES_A_TOKEN * len(vocabulary.tokens)
    merges: list[Merge] = []
    for number, token in zip(order, known, strict=True):
        vocabulary.check_length(number)
        for cut in range(len(token) - 1, 0, -1):
            left = known.get(token[:cut])
            if left is not None:
                right = known.get(token[cut:])
                if right is not None:
                    merges.append((left, right))
        if len(merges) > most:
            raise metadata_error(TOKENS, f"more than {most} pairs of tokens make another token")
    return merges
