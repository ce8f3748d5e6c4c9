"""Sampling noise as a function of (seed, position, vocabulary index) and nothing else.

The reference: a kernel for another device must give the same 32-bit words. Knows no logits and no
request. Generator: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

import numpy as np

# Definition. Key: (low, high) word of the seed. Counter: (id // 4, low word of the position, high
# word of the position, 0). Word id % 4 of the output, w, becomes the uniform
#   v = min(float32(w) * 2^-32 + 2^-33, 1 - 2^-24)          float32, round to nearest even
# and the Gumbel variate -log(-log1p(-v)). Words and uniforms are exact on every device; logarithms
# may differ in the last bit. Small v, the upper tail of the Gumbel, keep 24 significant bits.

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
ROUNDS = 10
LARGEST_UNIFORM = np.float32(1 - 2.0**-24)
WORDS_PER_BLOCK = 1 << 18  # words made at a time, so that the intermediate arrays stay in the cache


def philox(
    counter: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    key: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The four output words of Philox4x32-10. All arrays are uint64, hold 32 bits and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first = c0 * MULTIPLIERS[0]
        second = c2 * MULTIPLIERS[1]
        c0, c1 = (second >> HALF) ^ (c1 ^ k0), second & WORD
        c2, c3 = (first >> HALF) ^ (c3 ^ k1), first & WORD
        k0 = (k0 + WEYL[0]) & WORD
        k1 = (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def philox_words(
    seeds: np.ndarray, positions: np.ndarray, counters: np.ndarray
) -> list[np.ndarray]:
    """Output words 0..3 for seeds (uint64), positions (int64) and id // 4, broadcast together."""
    seeds = seeds.astype(np.uint64)
    where = positions.astype(np.int64).view(np.uint64)
    zero = np.zeros_like(where)
    counter = (counters.astype(np.uint64), where & WORD, where >> HALF, zero)
    return list(philox(counter, (seeds & WORD, seeds >> HALF)))


def gumbel_noise(
    seeds: np.ndarray, positions: np.ndarray, vocab: int, start: int = 0
) -> np.ndarray:
    """float32 [R, vocab] standard Gumbel noise of rows with `seeds` uint64 and `positions` int64,
    for ids start .. start + vocab - 1.

    Costs about 6 ns a value on one core; `gumbel_noise_at` is cheaper for less than a sixth of the
    ids.
    """
    skipped = start % 4  # a counter makes the noise of four ids
    if skipped:
        return gumbel_noise(seeds, positions, vocab + skipped, start - skipped)[:, skipped:]
    counters = np.arange(start // 4, -(-(start + vocab) // 4))[None, :]
    out = np.empty((len(seeds), vocab), dtype=np.float32)
    rows = max(WORDS_PER_BLOCK // max(vocab, 1), 1)
    for begin in range(0, len(seeds), rows):
        block = slice(begin, begin + rows)
        words = philox_words(seeds[block, None], positions[block, None], counters)
        for index, word in enumerate(words):
            part = out[block, index::4]
            part[...] = word[:, : part.shape[1]]  # uint64 to float32 rounds once, to nearest even
        _to_gumbel(out[block])
    return out


def gumbel_noise_at(seeds: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """float32 [N]: the same noise as `gumbel_noise`, for single (seed, position, id) triples."""
    out = np.empty(len(ids), dtype=np.float32)
    for begin in range(0, len(ids), WORDS_PER_BLOCK // 4):
        block = slice(begin, begin + WORDS_PER_BLOCK // 4)
        words = philox_words(seeds[block], positions[block], ids[block] // 4)
        out[block] = np.choose(ids[block] % 4, words)
        _to_gumbel(out[block])
    return out


def _to_gumbel(word: np.ndarray) -> None:
    """In place: float32 of 32-bit words to Gumbel variates."""
    word *= np.float32(2.0**-32)
    word += np.float32(2.0**-33)
    np.minimum(word, LARGEST_UNIFORM, out=word)
    np.negative(word, out=word)
    np.log1p(word, out=word)
    np.negative(word, out=word)
    np.log(word, out=word)
    np.negative(word, out=word)
