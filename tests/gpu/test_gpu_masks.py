"""Rows with a grammar on a GPU, behind CUDA graphs and two steps deep: each takes the likeliest
token that its grammar allows of the model's own logits, and whoever is free notices nothing.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from llguidance import LLExecutor
from test_cuda_parity import NEAR_TIE, cores, first_differences, generate, prompts

from engine.runner_requests import masks_for
from grammars.vocabulary import ENDS, SETUP
from pipeinfer.grammars.compiling import Grammar, GrammarVocabulary
from pipeinfer.grammars.masks import fill_masks, make_source
from pipeinfer.params import RequestParams, StructuredOutputs

pytestmark = pytest.mark.gpu

WIDTH, WANTED = 1024, 40
FREE = range(3, len(prompts()), 4)
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
SPECS = (
    StructuredOutputs(json=json.dumps(OBJECT)),
    StructuredOutputs(choice=("apples", "apricots", "pears")),
    StructuredOutputs(regex="[a-f]{3,30}-[0-9]{2,9}"),
)


@pytest.fixture(scope="module")
def folder(gpu_checkpoints):
    return gpu_checkpoints("Qwen3ForCausalLM", vocab_size=WIDTH)


@pytest.fixture(scope="module")
def masks(folder):
    made = masks_for(folder)
    yield made
    made.close()


def told(folder, masks, **changes):
    """Greedy requests, more than slots; of four in a row one is free."""
    made = cores(folder, masks=masks, max_running=8, **changes)
    for index, prompt in enumerate(prompts()):
        spec = SPECS[index % 4] if index not in FREE else None
        params = RequestParams(
            temperature=0.0, max_tokens=WANTED, structured_outputs=spec, ignore_eos=not spec
        )
        made.submit(f"r{index}", prompt, params, seed=index, eos_ids=() if not spec else ENDS)
    made.run()
    assert made.loaded.runner._graphs.decodes
    return made


@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_rows_take_the_likeliest_token_that_is_allowed(folder, masks, depth):
    made = told(folder, masks, overlap_depth=depth)
    vocabulary = GrammarVocabulary(SETUP.tokenizer, WIDTH, ENDS, SETUP.known_ids)
    checked = jumped = 0
    for index, prompt in enumerate(prompts()):
        name, ids = f"r{index}", made.outputs[f"r{index}"]
        if index in FREE:
            assert len(ids) == WANTED
            continue
        grammar = Grammar(vocabulary, SPECS[index % 4])
        for n, token in enumerate(ids):
            words = np.zeros((1, vocabulary.words), dtype=np.int32)
            assert fill_masks(LLExecutor(1), [make_source(grammar, ids[:n], None)], words) == [""]
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:WIDTH] > 0
            logits = made.logits.get((name, len(prompt) + n))
            if logits is None:  # it was forced, and nobody had to sample it
                assert np.flatnonzero(allowed).tolist() == [token]
                jumped += 1
                continue
            assert allowed[token] and logits[token] == logits[allowed].max()
            checked += int(logits.argmax()) != token
    assert checked > 100, "the grammars have hardly changed anything"
    assert jumped > 20, "hardly anything was forced"


def test_whoever_is_free_samples_what_he_would_without_them(folder, masks):
    """Up to near ties: with others the batches have other sizes, and logits are rounded apart."""
    plain = cores(folder, max_running=8)
    expected = generate(plain, wanted=WANTED)
    made = told(folder, masks)
    free = {f"r{index}": expected[f"r{index}"] for index in FREE}
    found = {name: made.outputs[name] for name in free}
    assert all(margin < NEAR_TIE for margin in first_differences(plain, free, found))
