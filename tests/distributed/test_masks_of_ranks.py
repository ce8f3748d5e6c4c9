"""What rows with a grammar may sample is decided by rank 0, whatever other ranks remember."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import pipeinfer.demo
from grammars.costly_grammars import AMBIGUOUS, growing
from parity.cores import Cores
from pipeinfer.engine.loading import LoadedEngine, load_engine
from pipeinfer.engine.masks import GrammarMasks, ReceivedMasks
from pipeinfer.grammars.compiling import GrammarStore
from pipeinfer.params import RequestParams, StructuredOutputs
from pipeinfer.settings import Settings
from pipeinfer.text import grammar_setup
from rank_threads import ThreadGroup

FOLDER = Path(pipeinfer.demo.__file__).parent
SETUP = grammar_setup(FOLDER)
PROMPT = list(b"Tell me something about yourself.")
# It compiles, and its lexer comes to a limit of states, which all of its users share.
WEARING = StructuredOutputs(regex="(" * 30 + "a" + "{1,30})" * 30)
FORMS = {
    "wearing": WEARING,
    "ambiguous": StructuredOutputs(grammar=AMBIGUOUS),
    "growing": StructuredOutputs(grammar=growing("a")),
    "again": StructuredOutputs(grammar=growing("b")),
    "object": StructuredOutputs(
        json=json.dumps(
            {
                "type": "object",
                "properties": {"the name of the customer": {"type": "string", "maxLength": 8}},
                "required": ["the name of the customer"],
                "additionalProperties": False,
            }
        )
    ),
    "choice": StructuredOutputs(choice=("apples", "apricots", "pears")),
}


class Flights:
    """A step that both ranks have launched. Rank 1's buffer for masks holds what it held before."""

    def __init__(self, flights, step, received) -> None:
        self.flights, self.step, self._received = flights, step, received
        self._taken = None

    def take(self):
        if self._taken is None:
            self._taken, other = (flight.take() for flight in self.flights)
            given = [one.num_sampled.tolist() for one in (self._taken, other)]
            assert given[0] == given[1]
            assert self._taken.ids.tolist() == other.ids.tolist()
            self._received.take(self.step, other)
        return self._taken

    @property
    def logits(self):
        return None


class BothRanks:
    """In place of one runner: those of two ranks, and the masks of rank 1."""

    keep_logits = False

    def __init__(self, runners, received) -> None:
        self._runners, self._received = runners, received
        self.shares = runners[0].shares

    def launch(self, step):
        return Flights([runner.launch(step) for runner in self._runners], step, self._received)

    def sample_masked(self, launched, fill):
        fills = fill, partial(self._received.fill, launched.step)
        for runner, flight, its_fill in zip(self._runners, launched.flights, fills, strict=True):
            runner.sample_masked(flight, its_fill)


@pytest.fixture(scope="module")
def ranks() -> list[LoadedEngine]:
    settings = Settings(model=str(FOLDER), device="cpu", dtype="float32", tp=2, max_running=8)

    def load(collectives):
        return load_engine(settings, FOLDER, rank=collectives.rank, collectives=collectives)

    return ThreadGroup(2).run(load)


def outputs(loaded: LoadedEngine, masks: GrammarMasks) -> tuple[dict, dict]:
    """Of one request of each form, and one without, at the same time: ids, and how they ended."""
    settings = Settings(max_running=8, device="cpu")
    made = Cores(FOLDER, settings, loaded=loaded, masks=masks)
    for seed, name in enumerate([*FORMS, "free"]):
        params = RequestParams(
            temperature=0.8 * (seed % 2), max_tokens=20, structured_outputs=FORMS.get(name)
        )
        made.submit(name, [*PROMPT, *name.encode()], params, seed=seed, eos_ids=SETUP.end_ids)
    made.run()
    return made.outputs, made.finished


@pytest.mark.parametrize("most_bytes", [8 << 20, 512 << 20])
def test_ranks_sample_alike_beside_grammars_that_wear_out_and_a_small_cache(ranks, most_bytes):
    """Twice, so that caches differ from those of a new engine."""
    masks = GrammarMasks(GrammarStore(lambda: SETUP, most_bytes), threads=2)
    both = replace(ranks[0], runner=BothRanks([one.runner for one in ranks], ReceivedMasks()))
    runs = [outputs(both, masks) for _ in range(2)]
    masks.close()
    for ids, finished in runs:
        assert ids["free"] == runs[0][0]["free"] and ids["choice"] == runs[0][0]["choice"]
        assert finished["object"] in ("stop", "length")
        assert finished["wearing"] == "error"
        assert bytes(ids["choice"][:-1]).decode() in FORMS["choice"].choice
