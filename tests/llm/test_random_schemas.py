"""Answers to schemas drawn at random, by a model that knows nothing, at a high temperature: what
ends is as its schema says. As a program: `python tests/llm/test_random_schemas.py 1000`."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from random import Random

if __name__ == "__main__":  # as pytest has it
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jsonschema

from grammars.schemas_drawn import HARD, drawn
from pipeinfer import LLM, SamplingParams, StructuredOutputsParams

MOST = 512


def check(llm: LLM, count: int) -> collections.Counter[str]:
    """How requests with so many drawn schemas, and the hard ones, ended; those that came to their
    end are valid."""
    random = Random(0)
    schemas = [*HARD, *(drawn(random) for _ in range(count))]
    params = [
        SamplingParams(
            temperature=1.5, max_tokens=MOST, seed=seed,
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
        )
        for seed, schema in enumerate(schemas)
    ]  # fmt: skip
    results = llm.generate(["Answer in JSON."] * len(schemas), params, use_tqdm=False)
    ends: collections.Counter[str] = collections.Counter()
    for schema, result in zip(schemas, results, strict=True):
        output = result.outputs[0]
        ends[str(output.finish_reason)] += 1
        if output.finish_reason == "stop":
            said = json.loads(output.text)
            jsonschema.validate(said, schema, jsonschema.Draft202012Validator)
    return ends


def test_whatever_ends_is_valid(llm: LLM) -> None:
    ends = check(llm, 25)
    assert ends["stop"] >= 34, ends
    assert set(ends) <= {"stop", "length"}


if __name__ == "__main__":
    with LLM(max_running=64) as model:
        print(dict(check(model, int(sys.argv[1]))))
