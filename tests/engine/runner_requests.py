"""A few requests for any runner, more than slots: each asks something else of sampling."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from grammars.vocabulary import KNOWN, SETUP
from pipeinfer.engine.masks import GrammarMasks
from pipeinfer.grammars.compiling import GrammarStore
from pipeinfer.params import RequestParams, StructuredOutputs
from pipeinfer.wire import unpack_logprobs

LENGTHS = (3, 40, 9, 17, 12)
WANTED = 5


BIASES = {250: 2.0, 9: 3.0, 17: 0.01, 5: -100.0}  # 250 is a stop id of a request with min_tokens
ALLOWED = tuple(range(0, 250, 2))
BANNED = tuple((a, b) for a in range(0, 250, 3) for b in (9, 17, 200))  # of a third of the ids
LOGPROBS = {0: 3, 3: 1}  # log-probs, of which requests and with how many alternatives
POISON = 261  # of a checkpoint made so: logits of whoever has this token are NaN
BAD = [POISON], [*range(20), POISON, 5], [7] * 25 + [POISON]


FORMS = {4: StructuredOutputs(regex="[a-e]{2}-[0-9]+")}  # of which requests


def masks_for(folder: Path) -> GrammarMasks:
    """For a checkpoint with any weights: the demo model's tokenizer will do."""
    width = json.loads((folder / "config.json").read_text())["vocab_size"]
    known = [i for i in KNOWN if i < width]
    return GrammarMasks(
        GrammarStore(lambda: replace(SETUP, width=width, known_ids=tuple(known))), 1
    )


def submit_all(cores, bad: bool = False) -> None:
    """The same ones each time; `bad`: between them some whose logits are NaN."""
    random = np.random.default_rng(0)
    for index, length in enumerate(LENGTHS):
        params = RequestParams(
            temperature=0.8 * (index % 2), top_k=20 * (index == 3), max_tokens=WANTED,
            min_tokens=2 * (index == 1), stop_token_ids=(250,) * (index == 1),
            repetition_penalty=1.5 if index > 1 else 1.0, presence_penalty=0.5 * (index == 2),
            frequency_penalty=-0.3 * (index == 3), logit_bias=BIASES if index % 3 else {},
            logprobs=LOGPROBS.get(index), allowed_token_ids=ALLOWED if index == 0 else None,
            structured_outputs=FORMS.get(index),
        )  # fmt: skip
        prompt, banned = random.integers(0, 250, length).tolist(), BANNED if index == 2 else ()
        cores.submit(f"r{index}", prompt, params, seed=index, bad_word_ids=banned)
        if bad and index < len(BAD):
            knobs = {}, {"top_k": 5, "temperature": 0.8}, {"presence_penalty": 1.0}
            cores.submit(f"bad{index}", BAD[index], RequestParams(max_tokens=4, **knobs[index]))


def run_alike(cores) -> dict[str, list[int]]:
    """Requests that begin with the same 40 tokens; the first leaves them in the prefix cache, the
    others run together. Their tokens."""
    random = np.random.default_rng(1)
    head = random.integers(0, 250, 40).tolist()
    for round_, tails in enumerate(((1,), (3, 9, 1))):
        for index, length in enumerate(tails):
            prompt = head + random.integers(0, 250, length).tolist()
            params = RequestParams(temperature=0.8 * (index % 2), max_tokens=4)
            cores.submit(f"a{round_}{index}", prompt, params, seed=index)
        cores.run()
    return dict(cores.outputs)


def good_ones(cores) -> dict[str, list[int]]:
    """Tokens of the others, once all are served; the bad ones got none, and failed."""
    bad = [f"bad{index}" for index in range(len(BAD))]
    assert [cores.outputs[name] for name in bad] == [[]] * len(bad)
    assert [cores.finished[name] for name in bad] == ["error"] * len(bad)
    return {name: ids for name, ids in cores.outputs.items() if name not in bad}


def logprobs_of(cores) -> dict[str, list]:
    """Log-probs of those that ask: [log-prob, rank, ids, their log-probs] of each token."""
    return {
        f"r{index}": [list(entry) for entry in unpack_logprobs(cores.logprobs[f"r{index}"], most)]
        for index, most in LOGPROBS.items()
    }
