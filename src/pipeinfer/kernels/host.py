"""The Kernels of the host in NumPy, whose vectorised loops need no thread pool; see interface.py.

The definition of sampling: greedy, or Gumbel-max over what top-k, top-p and min-p leave, on one
rank or from the candidates of ranks that each have a shard of the vocabulary. A row's token
depends on its own logits, parameters, seed and position only: never on what else is in the batch.

Noise is a function of (seed, position, vocabulary index) and nothing else; a kernel for another
device must give the same 32-bit words. Generator: Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3"). Knows rows, slots, ids and pages as arrays; no request. Needs no
triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import torch

from pipeinfer.kernels.interface import (
    BAD_WORDS_HEADER,
    GREEDY_BELOW,
    MAX_NGRAM,
    NO_KV_LOCATION,
    NO_LOGIT_KEY,
    NO_LOGITS,
    DeviceStep,
    SamplingTensors,
    SlotBadWords,
    SlotLogitEdits,
    SlotTables,
)
from pipeinfer.wire import DRAFT_TOKEN, NO_ID, REJECTED

# Noise. Key: (low, high) word of the seed. Counter: (id // 4, low word of the position, high
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
    """Returns float32 [R, vocab] standard Gumbel noise of rows with `seeds` uint64 and `positions`
    int64, for ids start .. start + vocab - 1.

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
    """Returns float32 [N], the same noise as `gumbel_noise`, for single (seed, position, id)
    triples.
    """
    out = np.empty(len(ids), dtype=np.float32)
    for begin in range(0, len(ids), WORDS_PER_BLOCK // 4):
        block = slice(begin, begin + WORDS_PER_BLOCK // 4)
        words = philox_words(seeds[block], positions[block], ids[block] // 4)
        out[block] = np.choose(ids[block] % 4, words)
        _to_gumbel(out[block])
    return out


def _to_gumbel(word: np.ndarray) -> None:
    """Turns float32 values of 32-bit words into Gumbel variates, in place."""
    word *= np.float32(2.0**-32)
    word += np.float32(2.0**-33)
    np.minimum(word, LARGEST_UNIFORM, out=word)
    np.negative(word, out=word)
    np.log1p(word, out=word)
    np.negative(word, out=word)
    np.log(word, out=word)
    np.negative(word, out=word)


SORTED_WIDTHS = (512, 4096)  # values that are sorted before a top-p row sorts its whole vocabulary
LOGITS_PER_BLOCK = 1 << 18  # logits handled at a time, so that the passes over them stay in cache
SPARSE_NOISE_COST = 6  # noise for single ids costs so many times more than for a whole row
NO_CANDIDATE = 2**52  # the id of a rank without ids, which loses every tie
HIGHEST_ID = 2**31 - 1  # in a packed logit key
TOPK_BLOCK = 128  # ids whose greatest logit is looked at first, for the best log-probs


def truncation_thresholds(
    x: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> np.ndarray:
    """Returns float32 [N, 1]: top-k, top-p and min-p leave the ids of row r with x >= threshold.

    - x: float32 [N, vocab], logits after temperature, shifted so that each row's maximum is 0
    - top_k: int32 [N], applied first; 0 is off
    - top_p: float32 [N], applied to the rest of the probability, renormalised; 1 is off
    - min_p: float32 [N], relative to the largest probability; 0 is off

    The maximum always stays. Equal logits stand or fall together, so that neither ids nor the order
    of a sort decide; a threshold depends on its own row only.
    """
    with np.errstate(divide="ignore"):
        floor = np.log(min_p.astype(np.float32))[:, None]
    by_k = (top_k > 0) & (top_k < x.shape[1])
    by_p = top_p < 1
    ranked = np.flatnonzero(by_k | by_p)
    if len(ranked):
        top_k = np.where(by_k, top_k, 0)[ranked, None]
        top_p = np.where(by_p, top_p, np.inf)[ranked, None]
        floor[ranked] = np.maximum(floor[ranked], _top_k_top_p(x[ranked], top_k, top_p))
    return floor


def _top_k_top_p(x: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """The thresholds of top_k (0 is off), then top_p (infinity is off), all [N, 1].

    Looks at the best few values, and at more of them for rows where the few do not reach top_p.
    """
    result = np.empty((len(x), 1), dtype=np.float32)
    todo = np.arange(len(x))
    first = int(top_k.max()) if top_k.all() else max(int(top_k.max()), SORTED_WIDTHS[0])
    for width in (first, *(wide for wide in (*SORTED_WIDTHS, x.shape[1]) if wide > first)):
        values = _largest(x[todo], width)
        kth = np.take_along_axis(values, np.maximum(top_k[todo], 1) - 1, axis=-1)
        kth[top_k[todo] == 0] = -np.inf
        result[todo] = np.maximum(kth, _nucleus(x[todo], values, kth, top_p[todo]))
        # A row is settled when its threshold lies above the smallest value that was looked at.
        unsettled = (result[todo] <= values[:, -1:]) & (top_k[todo] == 0)
        todo = todo[unsettled[:, 0]]
        if len(todo) == 0 or width >= x.shape[1]:
            break
    return result


def _nucleus(x: np.ndarray, values: np.ndarray, kth: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """The smallest of `values` (falling) needed to reach top_p of the weight of all x >= kth."""
    if not np.isfinite(top_p).any():
        return np.full_like(kth, -np.inf)
    weights = np.exp(x)
    weights[x < kth] = 0
    need = weights.sum(axis=-1, dtype=np.float64)[:, None] * top_p
    weights = np.exp(values).astype(np.float64)
    weights[values < kth] = 0
    before = np.cumsum(weights, axis=-1) - weights
    inside = ((before < need) & (weights > 0)).sum(axis=-1)
    inside = np.maximum(inside, 1)  # a top_p that is 0 in float32 needs none; the best one stays
    limit = np.take_along_axis(values, inside[:, None] - 1, axis=-1)
    return np.where(np.isfinite(top_p), limit, -np.inf).astype(np.float32)


def _largest(x: np.ndarray, width: int) -> np.ndarray:
    """The `width` largest values of each row, falling, [N, min(width, vocab)]."""
    width = min(width, x.shape[1])
    if width < x.shape[1]:
        x = np.partition(x, x.shape[1] - width, axis=-1)[:, x.shape[1] - width :]
    return np.ascontiguousarray(np.sort(x, axis=-1)[:, ::-1])


def is_truncated(
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    vocab: float = inf,
) -> np.ndarray:
    """Returns bool [L]: rows that sample at random and leave out some of `vocab` ids. By default
    any top-k counts.
    """
    leaves_out = (top_k > 0) & (top_k < vocab) | (top_p < 1) | (min_p > 0)
    return leaves_out & (temperature >= GREEDY_BELOW)


@dataclass(frozen=True)
class SamplingRows:
    """SamplingTensors of L rows as arrays, seeds as uint64."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, sampling: SamplingTensors) -> SamplingRows:
        """Views of the same memory."""
        names = "temperature", "top_k", "top_p", "min_p", "seed", "sample_positions"
        temperature, top_k, top_p, min_p, seeds, positions = (
            sampling[name].numpy() for name in names
        )
        return cls(temperature, top_k, top_p, min_p, seeds.view(np.uint64), positions)


def sample(
    logits: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor, truncate: bool = True
) -> torch.Tensor:
    """Samples, see Kernels.sample. For equal best candidates the lowest id wins. The public
    functions below without a docstring are those of Kernels, too.
    """
    values, rows = logits.float().numpy(), SamplingRows.of(sampling)
    ids = values.argmax(axis=-1)
    peaks = np.take_along_axis(values, ids[:, None], axis=-1)
    finite = np.isfinite(peaks[:, 0])  # a row with a NaN has it at its argmax
    random = (rows.temperature >= GREEDY_BELOW) & finite
    if random.any():
        vocab = values.shape[1]
        truncated = np.zeros(len(ids), dtype=bool)
        if truncate:
            truncated = is_truncated(rows.temperature, rows.top_k, rows.top_p, rows.min_p, vocab)
        for block in _blocks(random & ~truncated, vocab):
            ids[block] = _sample_from_row(_scaled(values, peaks, rows, block), rows, block)
        for block in _blocks(random & truncated, vocab):
            ids[block] = _sample_from_kept(_scaled(values, peaks, rows, block), rows, block)
    return _sampled(ids, finite, sampling, last_token)


def local_argmax(logits: torch.Tensor, sampling: SamplingTensors, first_id: int) -> torch.Tensor:
    """Returns float64 [L, 3]: | score of the best candidate | its id | the greatest logit |"""
    values, rows = logits.float().numpy(), SamplingRows.of(sampling)
    count, width = values.shape
    mine = np.full((count, 3), -np.inf)
    mine[:, 1] = NO_CANDIDATE
    if width:
        mine[:, 2] = values.max(axis=-1)
        scores, random = values, rows.temperature >= GREEDY_BELOW
        if random.any():
            scores = values.astype(np.float64)
            scores[random] /= rows.temperature[random, None]
            hot = rows.seeds[random], rows.positions[random]
            scores[random] += gumbel_noise(*hot, width, first_id)
        local = scores.argmax(axis=-1)
        mine[:, 0] = np.take_along_axis(scores, local[:, None], axis=-1)[:, 0]
        mine[:, 1] = local + first_id
    return torch.from_numpy(mine)


def global_argmax(
    candidates: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor
) -> torch.Tensor:
    scores, candidate_ids, greatest = np.moveaxis(candidates.numpy(), -1, 0)
    good = np.isfinite(greatest.max(axis=0, initial=-np.inf))
    ids = np.where(scores == scores.max(axis=0), candidate_ids, np.inf).min(axis=0)
    return _sampled(np.where(good, ids, 0).astype(np.int64), good, sampling, last_token)


def _sampled(
    ids: np.ndarray, good: np.ndarray, sampling: SamplingTensors, last_token: torch.Tensor
) -> torch.Tensor:
    """Returns int64 [L, 2], one token, of `ids` [L], for the rows in `good` bool [L]; 0 tokens for
    others.
    """
    made = np.empty((len(ids), 2), dtype=np.int64)
    made[:, 0] = good
    # A bad row may be part of one more step: it goes on from an id that exists.
    made[:, 1] = ids * good
    last_token.numpy()[sampling["write_slots"].numpy()] = made[:, 1]
    return torch.from_numpy(made)


def _blocks(chosen: np.ndarray, vocab: int) -> list[np.ndarray]:
    """Indices of the chosen rows, a few at a time."""
    indices = np.flatnonzero(chosen)
    size = max(LOGITS_PER_BLOCK // vocab, 1)
    return [indices[begin : begin + size] for begin in range(0, len(indices), size)]


def _scaled(
    values: np.ndarray, peaks: np.ndarray, rows: SamplingRows, block: np.ndarray
) -> np.ndarray:
    """Logits of the block's rows over temperature, shifted so that each maximum is 0.

    The peak goes first: differences are exact where they matter, and nothing overflows upwards.
    """
    x = values[block]
    with np.errstate(over="ignore"):  # values that far below the peak are never sampled
        x -= peaks[block]
        x /= rows.temperature[block, None]
    return x


def _sample_from_row(x: np.ndarray, rows: SamplingRows, block: np.ndarray) -> np.ndarray:
    x += gumbel_noise(rows.seeds[block], rows.positions[block], x.shape[1])
    return x.argmax(axis=-1)


def _sample_from_kept(x: np.ndarray, rows: SamplingRows, block: np.ndarray) -> np.ndarray:
    """Samples by Gumbel-max over the ids that truncation leaves; noise is made only for these ids,
    if they are few.
    """
    keep = x >= truncation_thresholds(x, rows.top_k[block], rows.top_p[block], rows.min_p[block])
    flat = np.flatnonzero(keep)
    if len(flat) * SPARSE_NOISE_COST > x.size:
        x[~keep] = -np.inf
        return _sample_from_row(x, rows, block)
    row, ids = np.divmod(flat, x.shape[1])
    value = gumbel_noise_at(rows.seeds[block][row], rows.positions[block][row], ids)
    value += x.reshape(-1)[flat]
    # Candidates lie row after row, lowest id first, and every row has one.
    best = np.maximum.reduceat(value, np.searchsorted(row, np.arange(len(x))))
    winners = np.flatnonzero(value == best[row])
    return ids[winners[np.searchsorted(row[winners], np.arange(len(x)))]]


def logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Returns log-prob records, see Kernels.logprobs. The public functions below without a
    docstring are those of Kernels, too.
    """
    token_keys = logit_keys(logits, ids, 0)
    return merge_topk(local_topk(logits, token_keys, num_top, 0)[None], token_keys)


def logit_keys(logits: torch.Tensor, ids: torch.Tensor, first_id: int) -> torch.Tensor:
    columns = ids - first_id
    if not logits.shape[1]:
        return torch.full_like(columns, NO_LOGIT_KEY)
    on_rank = (columns >= 0) & (columns < logits.shape[1])
    mine = logits.gather(1, torch.where(on_rank, columns, 0)[:, None])[:, 0]
    return torch.where(on_rank, _pack_keys(mine.float(), ids), NO_LOGIT_KEY)


def local_topk(
    logits: torch.Tensor, token_keys: torch.Tensor, num_top: int, first_id: int
) -> torch.Tensor:
    records = np.full((len(logits), 2 + num_top), NO_LOGIT_KEY)
    scratch = np.empty(logits.shape[1], dtype=np.float32)
    for record, one, key in zip(records, logits, token_keys.tolist(), strict=True):
        row = one.float().numpy()
        record[0] = _logsumexp(row, scratch).view(np.int32)
        record[1] = _num_above(row, key, first_id)
        best = _greatest_keys(row, num_top, first_id)
        record[2 : 2 + len(best)] = best
    return torch.from_numpy(records)


def merge_topk(records: torch.Tensor, token_keys: torch.Tensor) -> torch.Tensor:
    total = records[:, :, 0].int().view(torch.float32).logsumexp(0)
    above = records[:, :, 1].sum(0)
    every = records[:, :, 2:]
    best = every.movedim(0, 1).flatten(1).topk(every.shape[2], dim=1).values
    ids, values = _unpack_keys(torch.cat((token_keys[:, None], best), dim=1))
    values = (values - total[:, None]).view(torch.int32)
    return torch.cat((values[:, :1], above[:, None].int() + 1, ids[:, 1:], values[:, 1:]), dim=1)


def _logsumexp(row: np.ndarray, scratch: np.ndarray) -> np.float32:
    """log(sum(exp(row))) of float32 [n]; `scratch` is as large."""
    peak = row.max(initial=np.float32(-np.inf))
    if not np.isfinite(peak):
        return np.float32(peak)
    np.exp(np.subtract(row, peak, out=scratch), out=scratch)
    return peak + np.log(scratch.sum())


def _num_above(row: np.ndarray, key: int, first_id: int) -> int:
    """The number of ids of the row, from `first_id` on, with greater keys."""
    ids, values = _unpack_keys(torch.tensor([key]))
    column = min(max(int(ids) - first_id, 0), len(row))
    value = np.float32(values.item())
    return int(np.count_nonzero(row > value) + np.count_nonzero(row[:column] == value))


def _greatest_keys(row: np.ndarray, num_top: int, first_id: int) -> np.ndarray:
    """Returns int64 [num_top], or as many as there are: the greatest keys, falling.

    At least num_top blocks have a maximum from the num_top-th greatest maximum on: only ids with
    such logits can be among the best. That takes one pass.
    """
    blocks = len(row) // TOPK_BLOCK
    if not num_top:
        return np.empty(0, dtype=np.int64)
    if blocks <= num_top:
        columns = np.arange(len(row))
    else:
        maxima = row[: blocks * TOPK_BLOCK].reshape(blocks, TOPK_BLOCK).max(axis=1)
        columns = np.flatnonzero(row >= np.partition(maxima, blocks - num_top)[blocks - num_top])
    keys = _pack_keys(torch.from_numpy(row[columns]), torch.from_numpy(columns + first_id)).numpy()
    if len(keys) > num_top:
        keys = np.partition(keys, len(keys) - num_top)[len(keys) - num_top :]
    return np.sort(keys)[::-1]


def _pack_keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64, as many, packed logit keys of float32 logits; no two are equal. For few ids: a whole
    vocabulary's would take longer than all else here.

    A float's bits, read as an integer, sort positive floats; of negative ones the bits below the
    sign are inverted.
    """
    bits = (logits + 0.0).view(torch.int32)  # there is one zero
    ordered = torch.where(bits < 0, bits ^ HIGHEST_ID, bits).long()
    return (ordered << 32) | (HIGHEST_ID - ids)


def _unpack_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids int32, logits float32) of keys; NO_ID and -inf for absent ones."""
    ids = HIGHEST_ID - (keys & 0xFFFFFFFF)
    ordered = (keys >> 32).int()
    logits = torch.where(ordered < 0, ordered ^ HIGHEST_ID, ordered).view(torch.float32)
    there = keys != NO_LOGIT_KEY
    return torch.where(there, ids, NO_ID).int(), torch.where(there, logits, float("-inf"))


def apply_bad_words(
    logits: torch.Tensor,
    slot: int,
    position: int,
    bad_words: SlotBadWords,
    first_id: int,
    record_token: bool,
) -> None:
    """Sets the logit of each id to -inf that would complete a bad word at `position`.

    - logits: [ids] of one row, those from `first_id` on
    - record_token: the last token joins the history before, if it was sampled in this slot
    """
    words = bad_words.words.numpy()[slot]
    count, begin, known, _ = words[:BAD_WORDS_HEADER].tolist()
    history = words[BAD_WORDS_HEADER:][: bad_words.history]
    if record_token and position > known:
        history[(position - 1) % bad_words.history] = int(bad_words.last_token[slot])
    ends = words[BAD_WORDS_HEADER + bad_words.history :][: count + 1]
    ids = words[BAD_WORDS_HEADER + bad_words.history + bad_words.max_sequences + 1 :]
    for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        before, last = ids[first : end - 1], int(ids[end - 1]) - first_id
        places = np.arange(position - len(before), position)
        applies = 0 <= last < len(logits) and len(before) <= position - begin
        if applies and np.array_equal(history[places % bad_words.history], before):
            logits[last] = float("-inf")


def scatter_words(pairs: torch.Tensor, count: torch.Tensor, words: torch.Tensor) -> None:
    """Writes changed words, see Kernels.scatter_words."""
    num_pairs = int(count)
    if num_pairs:
        changes = pairs.numpy()[: 2 * num_pairs]
        words.numpy()[changes[0::2]] = changes[1::2]


def prepare_inputs(step: DeviceStep, slot_tables: SlotTables, page_size: int) -> None:
    counts, slots = step.counts.numpy(), step.slots.numpy()
    starts, sizes = _starts(step, slot_tables), counts
    if not counts.all():
        starts, sizes = (
            np.where(counts, starts, 0),
            np.where(counts, counts, step.padding_row_tokens),
        )
    lengths = starts + sizes
    firsts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(sizes, out=firsts[1:])
    _token_inputs(step, slot_tables, page_size, (slots, starts, counts, sizes, firsts))
    _row_inputs(step, slot_tables, page_size, slots, lengths, firsts)
    _sampling_inputs(step, slot_tables, slots, lengths, firsts)


def _starts(step: DeviceStep, slot_tables: SlotTables) -> np.ndarray:
    """Returns int32 [R], the starts of rows, also those that only the device knows."""
    starts = step.starts.numpy()
    if slot_tables.drafts is None or starts.min(initial=0) >= 0:
        return starts
    return np.where(starts < 0, slot_tables.drafts.lengths.numpy()[step.slots.numpy()], starts)


def _token_inputs(
    step: DeviceStep, slot_tables: SlotTables, page_size: int, by_row: tuple[np.ndarray, ...]
) -> None:
    """Writes the inputs by token. Tokens after the last row's, and padding, have no KV slot."""
    slots, starts, counts, sizes, firsts = by_row
    num_tokens, row, index = int(firsts[-1]), None, None
    slot, position = slots, starts  # rows of one token each
    if num_tokens != len(slots) or sizes is not counts:
        row = np.repeat(np.arange(len(slots)), sizes)
        index = np.arange(num_tokens) - firsts[row]
        slot, position = slots[row], starts[row] + index
    page = slot_tables.page_table.numpy()[slot, position // page_size].astype(np.int64)
    kv_slot = page * page_size + position % page_size
    ids = step.tokens.numpy()[:num_tokens].astype(np.int64)
    unknown = np.flatnonzero(ids < 0)
    is_draft = ids[unknown] == DRAFT_TOKEN
    ids[unknown] = slot_tables.last_token.numpy()[slot[unknown]]
    if is_draft.any() and index is not None and slot_tables.drafts is not None:
        drafted = unknown[is_draft]
        ids[drafted] = slot_tables.drafts.drafts.numpy()[slot[drafted], index[drafted] - 1]
    if sizes is not counts and index is not None:
        padding = index >= counts[row]
        position[padding], kv_slot[padding], ids[padding] = 0, NO_KV_LOCATION, 0
    for target, values, filler in (
        (step.positions, position, 0),
        (step.slot_mapping, kv_slot, NO_KV_LOCATION),
        (step.input_ids, ids, 0),
    ):
        target = target.numpy()
        target[:num_tokens], target[num_tokens:] = values, filler


def _row_inputs(
    step: DeviceStep, slot_tables: SlotTables, page_size: int, slots: np.ndarray,
    lengths: np.ndarray, firsts: np.ndarray,
) -> None:  # fmt: skip
    """Inputs by row, and the pages of rows."""
    width, used = slot_tables.page_table.shape[1], -(-lengths // page_size)
    step.qo_indptr.numpy()[:] = firsts
    step.prefill_qo_indptr.numpy()[:] = firsts[step.shape.num_decodes :] - step.prefill_query_base
    step.seq_lens.numpy()[:] = lengths
    step.last_page_len.numpy()[:] = lengths - (used - 1) * page_size
    kv_indptr, table = step.kv_indptr.numpy(), slot_tables.page_table.numpy()
    if step.lists_pages:
        kv_indptr[0] = 0
        np.cumsum(used, out=kv_indptr[1:])
        row = np.repeat(np.arange(len(slots)), used)
        pages = table[slots[row], np.arange(len(row)) - kv_indptr[row]]
        shown = min(len(pages), len(step.kv_indices))
        step.kv_indices.numpy()[:shown] = pages[:shown]
    else:
        kv_indptr[:-1], kv_indptr[-1] = slots * width, 0
    if len(step.row_page_table):
        some = slice(len(slots) - len(step.row_page_table), None)
        shown = np.arange(width) < used[some, None]
        np.copyto(step.row_page_table.numpy(), table[slots[some]], where=shown)


def _sampling_inputs(
    step: DeviceStep,
    slot_tables: SlotTables,
    slots: np.ndarray,
    lengths: np.ndarray,
    firsts: np.ndarray,
) -> None:
    """Inputs by row of logits."""
    logits_rows = step.logits_rows.numpy()
    rows = np.flatnonzero(logits_rows != NO_LOGITS)
    several = _verifying(step)
    entry = logits_rows[rows]
    if several is not None:
        sizes = np.where(several[rows], step.counts.numpy()[rows], 1)
        rows, entry = np.repeat(rows, sizes), np.repeat(entry, sizes)
        entry = entry + np.arange(len(entry)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    of = np.empty(len(rows), dtype=np.int64)  # the row of each row of logits
    of[np.where(entry >= 0, entry, -1 - entry)] = rows
    slot, token, position = slots[of], firsts[of + 1] - 1, lengths[of]
    if several is not None:  # a row of logits for each token of these rows
        behind = firsts[of + 1] - firsts[of] - 1 - (np.arange(len(of)) - logits_rows[of])
        behind = np.where(several[of], behind, 0)
        token, position = token - behind, position - behind
    if entry.min(initial=0) < 0:
        padding = logits_rows[of] < 0
        slot = np.where(padding, len(slot_tables.page_table) - 1, slot)
        position = np.where(padding, 0, position)
        token[padding] = 0
    if step.shape.verifies:  # rows of padding tokens, which no row names
        more = np.zeros(step.num_logits - len(of), dtype=np.int64)
        token, position = np.append(token, more), np.append(position, more)
        slot = np.append(slot, more + len(slot_tables.page_table) - 1)
    step.logits_indices.numpy()[:] = token
    step.write_slots.numpy()[:] = slot
    step.sample_positions.numpy()[:] = position
    theirs, mine, wide = (
        slot_tables.sampling_words.numpy(),
        step.sampling_words.numpy(),
        2 * slot_tables.num_wide,
    )
    from_here, to_here = wide * len(slot_tables.page_table), wide * len(slot)
    for source, target, shape in (
        (theirs[:from_here], mine[:to_here], (slot_tables.num_wide, -1, 2)),
        (theirs[from_here:], mine[to_here:], (slot_tables.num_narrow, -1)),
    ):
        target.reshape(shape)[:] = source.reshape(shape)[:, slot]


def _verifying(step: DeviceStep) -> np.ndarray | None:
    """Returns bool [R], rows with draft tokens; None if there are none."""
    found = (step.starts.numpy() < 0) & (step.counts.numpy() > 1)
    return found if found.any() else None


def propose_ngrams(step: DeviceStep, slot_tables: SlotTables) -> None:
    """Writes draft tokens, see Kernels.propose_ngrams. The public functions below without a
    docstring are those of Kernels, too.
    """
    state, verifying = slot_tables.drafts, _verifying(step)
    if state is None or verifying is None:
        return
    for row in np.flatnonzero(verifying).tolist():
        slot, count = int(step.slots[row]), int(step.counts[row]) - 1
        known = state.token_ids.numpy()[slot, : int(state.lengths[slot]) + 1]
        state.drafts.numpy()[slot, :count] = next_of_ngram(known, count)


def next_of_ngram(known: np.ndarray, count: int) -> np.ndarray:
    """Returns int32 [count], the tokens that followed an earlier occurrence of the last tokens of
    `known` int32 [n]; see Kernels.propose_ngrams.
    """
    drafts = np.full(count, known[-1], dtype=np.int32)
    found = np.flatnonzero(known[:-1] == known[-1])  # ends of occurrences
    for size in range(1, min(MAX_NGRAM, len(known))):
        longer = found[found >= size]
        longer = longer[known[longer - size] == known[-1 - size]]
        if not len(longer):
            break
        found = longer
    if len(found):
        following = known[found[-1] + 1 :][:count]
        drafts[: len(following)] = following
    return drafts


def accept_drafts(step: DeviceStep, drawn: torch.Tensor, slot_tables: SlotTables) -> None:
    state = slot_tables.drafts
    if state is None:
        return
    token_ids, lengths = state.token_ids.numpy(), state.lengths.numpy()
    counts, ids = drawn.numpy().T
    slots, positions = step.write_slots.numpy(), step.sample_positions.numpy()
    confirmed = counts > 0
    logits_rows, sizes = step.logits_rows.numpy(), step.counts.numpy()
    for row in np.flatnonzero((step.starts.numpy() < 0) & (logits_rows >= 0)).tolist():
        first, size, slot = int(logits_rows[row]), int(sizes[row]), int(step.slots[row])
        drafts = state.drafts.numpy()[slot, : size - 1]
        those = slice(first, first + size)
        good, sampled = counts[those] > 0, ids[those]
        correct = sampled[:-1] == drafts
        if state.acceptance >= 0:
            position = int(lengths[slot]) + 1 + np.arange(size - 1, dtype=np.int64)
            hashed = ((position * 40503 + slot) * 2654435761) & 0xFFFFFFFF
            hashed = ((hashed ^ (hashed >> 16)) * 73244475) & 0xFFFFFFFF
            hashed ^= hashed >> 16
            correct = hashed >> 8 < np.float32(state.acceptance) * (1 << 24)
        right = np.append(good[:-1] & correct, False)
        accepted = int(right.argmin())
        given = accepted + int(good[accepted])
        counts[first + max(given, 1) : first + size] = REJECTED
        confirmed[first + given : first + size] = False
        lengths[slot] += given
        if given:
            slot_tables.last_token.numpy()[slot] = sampled[given - 1]
    inside = confirmed & (positions < token_ids.shape[1])
    token_ids[slots[inside], positions[inside]] = ids[inside]


def apply_logit_edits(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, edits: SlotLogitEdits,
    first_id: int = 0, add_bias: bool = False,
) -> None:  # fmt: skip
    slot = slots.numpy()
    counts, words = edits.counts.numpy()[slot], edits.words.numpy()
    for row in np.flatnonzero(counts).tolist():
        ids, bits, until = words[:, slot[row], : abs(counts[row])]
        column = ids.astype(np.int64) - first_id
        on_rank, never = (column >= 0) & (column < logits.shape[1]), until > int(positions[row])
        there = torch.from_numpy(column[on_rank])
        left = logits[row, there]
        if add_bias:
            left += torch.from_numpy(bits.view(np.float32)[on_rank])
        if counts[row] < 0:
            logits[row] = float("-inf")
        logits[row, there] = left
        logits[row, torch.from_numpy(column[on_rank & never])] = float("-inf")
    bad_words = edits.bad_words
    for row in np.flatnonzero(bad_words.words.numpy()[slot, 0]).tolist():
        apply_bad_words(
            logits[row], int(slot[row]), int(positions[row]), bad_words, first_id, not add_bias
        )


def apply_token_bitmask(
    logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first_id: int = 0
) -> None:
    width = logits.shape[1]
    for row, own in zip(rows.tolist(), words.numpy(), strict=True):
        bits = np.unpackbits(own.view(np.uint8), bitorder="little")[first_id : first_id + width]
        forbidden = torch.from_numpy(bits == 0)
        logits[row, : len(bits)].masked_fill_(forbidden, float("-inf"))
        logits[row, len(bits) :] = float("-inf")
