"""What requests get of one engine in steps of different kinds: tokens, and their logits.

Import it as `from company import ask`, with tests/parity on the path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cores import Cores

from pipeinfer.params import RequestParams

WANTED = 40  # tokens of each answer


class Answers(NamedTuple):
    """tokens: of each request, by its number. logits: that a token was sampled from, by the number
    of its request and its position."""

    tokens: dict[int, list[int]]
    logits: dict[tuple[int, int], np.ndarray]

    def other_tokens(self, others: Answers) -> int:
        """Tokens that are others there."""
        return sum(
            one != two
            for index, ids in self.tokens.items()
            for one, two in zip(ids, others.tokens[index], strict=True)
        )

    def other_logits(self, others: Answers) -> int:
        """Tokens that come from other logits there, by a bit."""
        assert self.logits.keys() == others.logits.keys()
        return sum(
            not np.array_equal(logits, others.logits[place])
            for place, logits in self.logits.items()
        )


def ask(
    made: Cores, asked: list[list[int]], order=None, alone=False, tag="", wanted=WANTED
) -> Answers:
    """A third of the requests are greedy, a third have top-p, so that steps are of both kinds.

    order: in which they are submitted. alone: each when the one before is over. tag: keeps apart
    what one engine is asked twice. wanted: tokens of each answer.
    """
    names = [f"r{index}{tag}" for index in range(len(asked))]
    for index in order or range(len(asked)):
        params = RequestParams(
            temperature=0.8 if index % 3 else 0.0,
            top_p=0.9 if index % 3 == 2 else 1.0,
            max_tokens=wanted,
        )
        made.submit(names[index], asked[index], params, seed=index)
        if alone:
            made.run()
    made.run()
    number = {name: index for index, name in enumerate(names)}
    return Answers(
        {index: made.outputs[name] for name, index in number.items()},
        {(number[n], at): logits for (n, at), logits in made.logits.items() if n in number},
    )
