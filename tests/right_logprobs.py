"""Log-probs held against the log-probs that a model in float64 or float32 gives.

Knows the form of log-probs (pipeinfer/wire.py) and arrays; nothing of who computed either.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.wire import unpack_logprobs

TOLERANCE = 1e-4


def check_logprobs(raw: bytes, most: int, expected: np.ndarray, tokens: list[int]) -> None:
    """`raw` has a log-prob record of each of `tokens`, with `most` alternatives.

    expected: float64 [n, vocab], log-probs at each of their positions.
    """
    found = list(unpack_logprobs(raw, most))
    assert len(found) == len(tokens) == len(expected)
    own, ranks = np.array([(s.logprob, s.rank) for s in found]).reshape(-1, 2).T
    ids = np.array([s.ids for s in found], dtype=np.int64).reshape(len(found), most)
    values = np.array([s.logprobs for s in found]).reshape(len(found), most)
    theirs = np.take_along_axis(expected, np.array(tokens, dtype=np.int64)[:, None], 1)
    assert np.abs(own - theirs[:, 0]).max(initial=0) < TOLERANCE
    above = (expected > theirs + 2 * TOLERANCE).sum(1)
    near = (expected > theirs - 2 * TOLERANCE).sum(1)
    assert ((above < ranks) & (ranks <= near)).all()
    best = -np.sort(-expected, axis=1)[:, :most]
    assert np.abs(values - best).max(initial=0) < TOLERANCE
    assert np.abs(np.take_along_axis(expected, ids, 1) - values).max(initial=0) < TOLERANCE
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all(), "an id is there twice"


def check_prompt_logprobs(raw: bytes, most: int, expected: np.ndarray, prompt: list[int]) -> None:
    """The same of a prompt, whose first token has an empty record.

    expected: [n, vocab], log-probs of what follows each of its tokens.
    """
    size = len(raw) // len(prompt)
    assert not any(raw[:size])
    check_logprobs(raw[size:], most, expected[:-1], prompt[1:])
